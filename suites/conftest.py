"""All suites run under the gates' plugin: it finds the components, keeps evidence and counts what was executed."""

pytest_plugins = ["alpha.gates.plugin"]
