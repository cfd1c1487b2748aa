"""What the machine code of a kernel must and must not hold: tensor-core products, no local memory, no floating-point atomics. Floor 7.

Sources can promise all of this and the compiler still decide otherwise, so the rules look at the opcodes of the cubin that runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from alpha.cuda_runtime.compile import Cubin, Source
from alpha.cuda_runtime.opcodes import Opcodes

TENSOR = {
    "gemm/gemm.cu": r"gemm",
    "attention/forward.cu": r"attn_fwd_.*",
    "attention/backward.cu": r"attn_bwd_d(q|kv)_.*",
    "attention/one_pass.cu": r"attn_bwd_one_.*",
    "probe/peak.cu": r"peak",
}
"""Which kernels of a file multiply matrices: they must do it on the tensor cores, adding in f32."""

_PRODUCT = re.compile(r"(HGMMA|HMMA|QGMMA|IGMMA|BGMMA|DMMA|IMMA)\.")
_F32_SUM = re.compile(r"[HQ]GMMA\.\d+x\d+x\d+\.F32\.")
_LOCAL = re.compile(r"(LDL|STL)(\.|$)")
_FLOAT_ATOMIC = re.compile(r"(?!REDG?\.E\.ADD\.F32x4\.)(RED|REDG|REDS|REDAS|ATOM|ATOMG|ATOMS|ATOMAS|SURED|SUATOM)\..*\b(B?F16|F32|F64)")
_FOUR_SUMS = re.compile(r"REDG?\.E\.ADD\.F32x4\.")
_SWAP = re.compile(r"ATOM\w*\..*\bCAS")
_BULK = re.compile(r"(UTMAREDG|UBLKRED)\b")

SYNCHRONISATION = {
    "waits": r"SYNCS\.PHASECHK",
    "arrivals": r"SYNCS\.ARRIVE",
    "barriers": r"BAR\.(SYNC|ARV)|UCGABAR_(ARV|WAIT)",
    "fences": r"FENCE\.|MEMBAR\.",
    "copies awaited": r"UTMACMDFLUSH|DEPBAR",
    "grids awaited": r"ACQBULK",
}
"""What threads, blocks and the copy engine wait for each other by. A kernel may not hold fewer of a kind than its baseline."""


@dataclass(frozen=True)
class Exemption:
    """`kernel` of every source whose text (path and defines) matches `source` may break `rule` (local, bulk, ordered), because of `why`."""

    rule: str
    source: str
    kernel: str
    why: str

    def covers(self, rule: str, source: Source, kernel: str) -> bool:
        """Whether it is about this."""
        return self.rule == rule and self.kernel == kernel and re.fullmatch(self.source, str(source)) is not None


EXEMPT = (
    Exemption("local", r"rope/rope\.cu .*", "rope_table",
              "writes the table of sines and cosines once, when a Plan is loaded; the exact reduction of large angles indexes an array"),
    Exemption("local", r"norm/forward\.cu NORM_ADD=1 .*NORM_LAYER=1 NORM_TEAMS=1 NORM_THREADS=160 NORM_VECTORS=4", "norm_forward",
              "12 bytes a thread: the cap on registers that lets five blocks share a multiprocessor"),
    Exemption("bulk", r"gemm/gemm\.cu .*GEMM_OUT=2 .*", "gemm",
              "adds to the gradient by the copy engine; one block adds once to each element, so there is no order to depend on"),
    Exemption("ordered", r"attention/one_pass\.cu", "attn_bwd_one_d64",
              "adds to dQ in turns: a block is alone on its addresses from the turn that it awaits to the turn that it gives on"),
)
"""Each with its reason; one that nothing needs is itself a finding of a whole audit."""


@dataclass(frozen=True)
class Finding:
    """`rule` broken by `kernel` of `source`."""

    source: Source
    kernel: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"kernels/{self.source}: {self.kernel}: {self.text}"


def products(opcodes: Opcodes, kernel: str) -> int:
    """How many tensor-core instructions that add in f32 a kernel holds. Others do not count: for a group of wgmmas that is closed empty
    the compiler writes an HGMMA of its own, in half precision."""
    return sum(n for op, n in opcodes.get(kernel, {}).items() if _F32_SUM.match(op))


def counts(opcodes: Opcodes, kernel: str) -> dict[str, int]:
    """What a kernel must not hold fewer of: its tensor-core products, and of each kind of synchronisation how many instructions."""
    ops = opcodes.get(kernel, {})
    return {"products": products(opcodes, kernel),
            **{name: sum(n for op, n in ops.items() if re.match(pattern, op)) for name, pattern in SYNCHRONISATION.items()}}


def _broken(cubin: Cubin, opcodes: Opcodes) -> Iterator[Finding]:
    """Every finding, exempt or not."""
    source = cubin.source
    wanted = TENSOR.get(source.path)
    if wanted is not None and not any(re.fullmatch(wanted, kernel) for kernel in cubin.resources):
        yield Finding(source, "(file)", "tensor", f"no kernel matches {wanted}: name those that multiply matrices")
    for kernel, ops in opcodes.items():
        if wanted is not None and re.fullmatch(wanted, kernel) and not products(opcodes, kernel):
            yield Finding(source, kernel, "tensor", "no tensor-core instruction that adds in f32: its products are not on the tensor cores")
        for rule, pattern, text in (
            ("local", _LOCAL, "local memory (spilled registers or an indexed array)"),
            ("atomic", _FLOAT_ATOMIC, "floating-point atomics: the order of additions is left to chance"),
            ("ordered", _FOUR_SUMS, "sums of four floats in memory: deterministic only where a protocol orders those who add"),
            ("atomic", _SWAP, "compare and swap, which is how atomics without an instruction of their own are made"),
            ("bulk", _BULK, "the copy engine adds: deterministic only where one block adds to an element"),
        ):
            hits = {op: n for op, n in ops.items() if pattern.match(op)}
            if hits:
                yield Finding(source, kernel, rule, f"{text}: " + ", ".join(f"{n} {op}" for op, n in sorted(hits.items())))
        narrow = sorted(op for op in ops if _PRODUCT.match(op) and not _F32_SUM.match(op))
        if narrow:
            yield Finding(source, kernel, "sum", f"products that do not add in f32: {', '.join(narrow)}")


def audit(cubin: Cubin, opcodes: Opcodes) -> list[Finding]:
    """What breaks a rule and is not exempt."""
    return [f for f in _broken(cubin, opcodes) if not any(e.covers(f.rule, f.source, f.kernel) for e in EXEMPT)]


def idle(looked_at: Iterable[tuple[Cubin, Opcodes]], exempt: Iterable[Exemption] = EXEMPT) -> list[str]:
    """Exemptions that nothing of what was looked at needs."""
    broken = [f for cubin, ops in looked_at for f in _broken(cubin, ops)]
    return [f"exemption of {e.kernel} in {e.source} from rule '{e.rule}': nothing needs it" for e in exempt
            if not any(e.covers(f.rule, f.source, f.kernel) for f in broken)]
