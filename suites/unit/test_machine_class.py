"""The machine class of a process: what the CPU offers, or the one class that `ALPHA_CPU` chooses."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_ASK = """
import alpha.registry.machine as m
from numpy._core._multiarray_umath import __cpu_features__ as features
print(m.machine_class().key, features["AVX512F"])
"""
_CHOOSERS = ("ALPHA_CPU", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES")


def _class(*flags: str, **more: str) -> list[str]:
    base = {k: v for k, v in os.environ.items() if k not in _CHOOSERS}
    done = subprocess.run([sys.executable, *flags, "-c", _ASK], env={**base, **more}, check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_a_left_over_core_type_changes_nothing() -> None:
    assert _class(OPENBLAS_CORETYPE="Prescott") == _class()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="NOT RUN: AVX2 is an instruction set of x86-64")
def test_avx2_can_be_chosen_on_wider_machines() -> None:
    """Also where warnings are errors, for NumPy 2.2 and 2.4 name their features differently."""
    for flags in ((), ("-W", "error")):
        key, wide = _class(*flags, ALPHA_CPU="avx2")
        assert wide == "False"
        if "avx2" in _class()[0] or "avx512" in _class()[0]:
            assert key.startswith("cpu_x86_64-avx2_") and "openblas-SkylakeX" not in key
