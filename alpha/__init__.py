"""Alpha: a gated validation and benchmark harness that also ships the trainer. Importing it needs the base packages only."""

import os
import platform
import warnings

__version__ = "0.1.0"


_WIDE = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4"
"""NumPy's names for AVX-512, those before 2.4 and those since."""


def _choose_vectors() -> None:
    """Before NumPy is imported: which vector instructions it and its BLAS use, that is, which machine class this process is.

    By themselves they take the widest that the CPU has; a left-over OPENBLAS_CORETYPE changes nothing. `ALPHA_CPU=avx2` makes every x86-64
    machine with AVX2 one of that class, whose evidence ships and whose bits are then the same on all of them; AVX-512 stays unused. No
    other environment variable changes numerics. Where NumPy was imported earlier the choice is made; the class key names what is in use.
    """
    os.environ.pop("OPENBLAS_CORETYPE", None)
    if os.environ.get("ALPHA_CPU") == "avx2" and platform.machine().lower() in ("x86_64", "amd64"):
        os.environ.update(OPENBLAS_CORETYPE="Haswell", NPY_DISABLE_CPU_FEATURES=_WIDE)
        warnings.filterwarnings("ignore", "During parsing environment variable", ImportWarning)  # NumPy knows one half of the names


_choose_vectors()
