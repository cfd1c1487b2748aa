"""Cases of the graph passes: what goes in and what comes out compute the same, to the bit where it is promised. Floor 7."""

from __future__ import annotations

from alpha.gates.contracts.mixed import merged
from alpha.gates.contracts.passes import differentiate, layouts, memory, rewrites, verified
from alpha.gates.contracts.passes.support import Cases

CASES: Cases = merged({**differentiate.CASES, **rewrites.CASES, **memory.CASES, **verified.CASES, **layouts.CASES})
