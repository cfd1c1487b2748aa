"""Alpha: a gated validation and benchmark harness that also ships the trainer. Importing it needs the base packages only."""

__version__ = "0.1.0"
