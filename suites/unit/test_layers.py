"""The floors: a module imports from lower floors or from its own package only; function-level imports count; no cycles."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "alpha"
FLOORS = {
    "errors": 0, "types": 0, "files": 0, "options": 0, "cores": 0, "resources": 0, "tomlfile": 0, "config": 0, "component": 0,
    "ops": 1, "graph": 2, "passes": 3, "flops": 3, "profile": 3, "registry": 3, "cuda_runtime": 3,
    "backends": 4, "comm": 4, "parallel": 5, "models": 5, "optim": 5, "data": 5, "checkpoint": 5,
    "train": 6, "gates": 7, "report": 7, "trackers": 7, "bench": 8, "dashboard": 8, "cli": 9, "__main__": 10,
}
WITHIN = {0: {"errors": 0, "files": 0, "options": 1, "cores": 0, "resources": 1, "types": 1, "tomlfile": 1, "config": 2, "component": 2},
          7: {"report": 0, "trackers": 0, "gates": 1}}
"""Floor -> package -> its place on that floor: gates look at figures of reports, not the other way round."""


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports, wherever in the file."""
    modules = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = path
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {a.name for a in node.names if a.name.split(".")[0] == "alpha"}
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "alpha":
                for a in node.names:
                    deeper = f"{node.module}.{a.name}"
                    found[name].add(deeper if deeper in modules else node.module)
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{name}: relative import, line {node.lineno}"
    return found


def package(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_floors() -> None:
    graph = imports()
    assert len(graph) > 60
    wrong = []
    for module, targets in graph.items():
        for target in targets:
            here, there = package(module), package(target)
            if not there or here == there:
                continue
            assert here in FLOORS and there in FLOORS, f"{module} -> {target}: a package without a floor"
            lower = FLOORS[there] < FLOORS[here] or (
                FLOORS[here] == FLOORS[there] and WITHIN.get(FLOORS[here], {}).get(there, 0) < WITHIN.get(FLOORS[here], {}).get(here, 0))
            if not lower:
                wrong.append(f"{module} (floor {FLOORS[here]}) imports {target} (floor {FLOORS[there]})")
    assert not wrong, "\n".join(wrong)


def test_no_cycles() -> None:
    graph = imports()
    state: dict[str, int] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != 1, f"cycle: {' -> '.join((*path, module))}"
        if state.get(module) == 2:
            return
        state[module] = 1
        for target in sorted(graph.get(module, ())):
            visit(target, (*path, module))
        state[module] = 2

    for module in graph:
        visit(module, ())


def test_base_import_is_light() -> None:
    """`import alpha` and the CPU catalogue need the base packages only: nothing at module level imports pandas, matplotlib or pycuda."""
    optional = {"pandas", "matplotlib", "pycuda", "cuda", "torch"}
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in ("report", "dashboard") or path in (
                ROOT / "bench" / "peer_model.py", ROOT / "bench" / "peer_model_ranks.py"):
            continue  # the last two are read by the peer's process alone
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
            assert not {n.split(".")[0] for n in names} & optional, f"{path} imports {names} at module level"


def test_no_text_names_a_higher_floor() -> None:
    """A dotted name in a text is an import that the floors do not see. Two are declared data, read as text for digests: the contract that a
    component carries, and the engines of the gate table."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            dotted = node.value.partition(":")[0].split(".")
            named = dotted[0] == "alpha" and len(dotted) > 1 and all(part.isidentifier() for part in dotted)
            if not named or FLOORS.get(dotted[1], 0) <= FLOORS.get(package(name), 10) or dotted[:3] == ["alpha", "gates", "contracts"]:
                continue
            if name != "alpha.registry.gates":
                wrong.append(f"{name}, line {node.lineno}: {node.value}")
    assert not wrong, "\n".join(wrong)
