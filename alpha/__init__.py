"""Alpha: a gated validation and benchmark harness that also ships the trainer. Importing it needs the base packages only."""

import os

__version__ = "0.1.0"

os.environ.pop("OPENBLAS_CORETYPE", None)
# No environment variable changes numerics: the BLAS kernel, which is part of the CPU's evidence class, is chosen by the CPU. (If NumPy was
# loaded before this package, the choice is made already; the class key names the kernel that is in use.)
