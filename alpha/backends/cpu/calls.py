"""The calls at which gates look at one kernel of the CPU, beside the samples of its row. Floor 4.

They stand in the file of the kernel, and its component carries them. Evidence binds them to the gates that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from alpha.ops.spec import Sample

Make = Callable[[np.random.Generator], Iterable[Sample]]


@dataclass(frozen=True, kw_only=True)
class Calls:
    """What one kernel is called on. `further`: samples of what this kernel promises beyond its row; `refused`: samples whose contents it
    refuses with an InputError when it is called, before it writes an output. `repeated`: what determinism calls it on beside what
    it chooses: work that is shared among workers, where large operands do not make it so."""

    further: Make = lambda rng: ()
    refused: Make = lambda rng: ()
    repeated: Make = lambda rng: ()
