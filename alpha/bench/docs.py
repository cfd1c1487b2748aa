"""Regions of README and docs that are filled from benchmark records, and nothing else: `<!-- bench:NAME -->` to `<!-- /bench -->`. Floor 8.

`alpha bench docs` writes them; `--check` says which differ. README states no speed outside such a region (`claims`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from alpha.backends.cuda.kernels.attention import COMPARED as HEADS
from alpha.backends.cuda.kernels.matmul import COMPARED as PRODUCTS
from alpha.bench import floor, record, simulated
from alpha.bench.comm_device import bus
from alpha.bench.peer import ROOT
from alpha.bench.sizes import size_text
from alpha.bench.step import OURS, REFERENCE, UNCAPTURED
from alpha.bench.step_ranks import EACH
from alpha.errors import InputError
from alpha.registry.evidence import reference_classes, shipped_root
from alpha.registry.gpu import class_of_key

REGION = re.compile(r"(<!-- bench:(\S+) -->\n)(.*?)(<!-- /bench -->)", re.S)
OPENING = re.compile(r"^<!-- bench:", re.M)
SPEED = re.compile(r"\d[\d,.]*\s*[km]?\s*(?:tokens/s|tokens (?:per|a) second|tok/s|[TGP]FLOP/s|[TGP]FLOPS\b|[TGM]B/s)"
                   r"|\bMFU(?: of| is)?:? \d|\d\s*% (?:of )?MFU\b|\btimes (?:the|its|their) speed|\btimes (?:as fast|faster)"
                   r"|\d\s*x (?:as fast|the speed)|\d\s*(?:us|µs|ms|milliseconds|microseconds)\b"
                   r"|\bstep\b[^.]*?\b(?:takes?|took|in|of|is) (?:only |about )?\d[\d.,]*\s*(?:s|seconds?)\b"
                   r"|\d\s*(?:%|percent|per cent|times|x) (?:faster|slower)", re.I)
CEILING = "ceiling"
FIRST = "step-gpt2-124m"
"""The step that readers know best, for the top of README."""
Record = Mapping[str, Any]


def pages(root: Path = ROOT) -> list[Path]:
    """README and the docs."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def fill(records: Sequence[Record], root: Path = ROOT, *, write: bool) -> list[str]:
    """Where a region is not what the records say: 'file: region'. `write`: it is made so."""
    found = []
    for path in pages(root):
        text = path.read_text(encoding="utf-8")
        if len(OPENING.findall(text)) != len(REGION.findall(text)):
            raise InputError("a region has no end", came=path.name, expected="<!-- bench:NAME --> and a line end, then <!-- /bench -->")

        def made(match: re.Match[str], path: Path = path) -> str:
            if match[2] not in REGIONS:
                raise InputError("no such region", came=f"{path.name}: bench:{match[2]}", expected=", ".join(sorted(REGIONS)))
            new = REGIONS[match[2]](records)
            if new != match[3]:
                found.append(f"{path.name}: {match[2]}")
            return match[1] + new + match[4]

        new = REGION.sub(made, text)
        if write and new != text:
            path.write_text(new, encoding="utf-8")
    return found


def claims(text: str) -> list[str]:
    """Lines with a speed figure outside every region and every fenced block."""
    bare = re.sub(r"```.*?```", "", REGION.sub("", text), flags=re.S)
    return [line.strip() for line in bare.splitlines() if SPEED.search(line)]


def problems(root: Path = ROOT) -> list[str]:
    """What is wrong with the pages: regions that differ from the records, claims of README outside them. CorruptError for a record that was
    edited."""
    records = record.records(root / "baselines" / "bench")
    found = [f"{place} is not what the records say" for place in fill(records, root, write=False)]
    text = (root / "README.md").read_text(encoding="utf-8")
    return found + [f"README.md claims a speed outside a filled region: {line}" for line in claims(text)]


def unknown_commits(root: Path = ROOT) -> list[str]:
    """Records whose commit is none of this history. MachineError where there are records and the history is not here."""
    return [f"{r['machine']}/{r['subject']}: {why}" for r in record.records(root / "baselines" / "bench")
            if (why := record.unknown_commit(r["commit"], root))]


# -- what the regions say ------------------------------------------------------------------------------------------------------


def _named(records: Sequence[Record], start: str) -> list[Record]:
    return [r for r in records if r["subject"].startswith(start)]


def _absent(command: str) -> str:
    return f"Not recorded. `{command}`, from a clean commit, writes the record that fills this place.\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; what ends a row or a cell in the words of another process ends none here."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(" ".join(x.split()).replace("|", "\\|") for x in row) + " |" for row in rows)]) + "\n"


def _ratio(ratio: Sequence[float | None]) -> str:
    low, middle, high = ratio
    return "-" if middle is None else f"{middle:.3f}" + (f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else "")


def _hardware(r: Record) -> str:
    return str(r.get("hardware") or class_of_key(r["machine"]).describe())


def _under(r: Record) -> str:
    """What every table says of where its figures come from."""
    driver = r["environment"].get("driver")
    return f"{_hardware(r)}, commit {r['commit'][:12]}{f', driver {driver}' if driver else ''}, {r['flops']['version']}"


def _row(r: Record, name: str) -> Mapping[str, Any] | None:
    return next((x for x in r["step"]["rows"] if x["name"] == name), None)


def training(records: Sequence[Record]) -> str:
    """README's figures: a step beside the fastest PyTorch, and whole runs beside steady state."""
    taken, runs = _named(records, "step-"), _named(records, "run-")
    lines = []
    for r in taken:
        ours, best = _row(r, OURS), _row(r, r["step"]["quoted"])
        if ours is None:
            continue
        beside = "not measured" if best is None else (
            f"{_ratio(best['ratio'])} ({best['name']}: {best['tokens_per_second']:,.0f} tokens/s; {_measured(r)}{_turns(best)})")
        lines.append((r["step"]["run"], _hardware(r), f"{ours['tokens_per_second']:,.0f}", f"{100 * ours['mfu']:.1f} %", beside))
    head = ("a training step", "on", "tokens/s", "MFU", "times the speed of the fastest PyTorch variant that was measured")
    text = _table(head, lines) if lines else _absent("alpha bench step configs/gpt2-124m.toml --peers --record")
    text += "\n" + (_runs(runs) if runs else _absent("alpha bench run RUN --record"))
    under = sorted({f"{r['flops']['version']}: {r['flops']['convention']}; peak {r['flops']['peak'] / 1e12:.1f} TFLOP/s "
                    f"({r['flops']['peak_source']})" for r in (*taken, *runs)})
    return text + "".join(f"\nMFU by {line}.\n" for line in under)


def headline(records: Sequence[Record]) -> str:
    """One sentence for the top of README: a step that was held against PyTorch, FIRST or another, on a class whose evidence ships."""
    proved = set(reference_classes(shipped_root()).values())
    taken = _named([r for r in records if r["machine"] in proved], "step-")
    for r in sorted(taken, key=lambda r: r["subject"] != FIRST):
        ours, best = _row(r, OURS), _row(r, r["step"]["quoted"])
        if ours is not None and best is not None and best["ratio"][1] is not None:
            return (f"**{r['step']['run']} on one {_hardware(r)}: {ours['tokens_per_second']:,.0f} tokens/s, "
                    f"MFU {100 * ours['mfu']:.1f} %, "
                    f"{best['ratio'][1]:.2f} times the speed of {best['name']}** ({_measured(r)}{_turns(best)}).\n")
    return _absent("alpha bench step configs/gpt2-124m.toml --peers --record")


def _measured(r: Record) -> str:
    """How many of PyTorch's variants the fastest was found among."""
    peers = [row for row in r["step"]["rows"] if row["name"] not in (OURS, UNCAPTURED, REFERENCE)]
    return f"{sum(bool(row['blocks']) for row in peers)} of {len(peers)} variants measured"


def _turns(x: Mapping[str, Any]) -> str:
    """That whole processes took turns, and how often: such a ratio has no interval, and one turn nothing that it can be held against."""
    n = len(x["blocks"]) - x["discarded"]
    return "" if x["together"] else f"; in turn, {n} block{'s' * (n > 1)} each"


def _runs(runs: Sequence[Record]) -> str:
    def of(r: Record, key: str, scale: float = 1.0, form: str = ",.0f", unit: str = "") -> str:
        value = r["figures"].get(key)
        return "-" if value is None else f"{scale * value:{form}}{unit}"

    return _table(("a whole run", "on", "steps", "tokens/s, steady", "MFU, steady", "tokens/s, whole workflow", "goodput"), (
        (r["run"], _hardware(r), f"{r['steps']:,}", of(r, "tokens_per_second"), of(r, "mfu", 100, ".1f", " %"),
         of(r, "workflow_tokens_per_second"), of(r, "goodput", 100, ".1f", " %")) for r in runs))


def steps(records: Sequence[Record]) -> str:
    """The log's tables: every variant, with clock, power and temperature."""
    texts = []
    for r in _named(records, "step-"):
        s = r["step"]
        head = f"{s['run']}, {s['shape']} ({_under(r)}; {s['peer'] or 'no peer'}; {r['taken']}):\n\n"
        texts.append(head + _table(("", "step", "tokens/s", "MFU", "memory", "MHz, W, C", "blocks", "its time over ours", "remark"), (
            (x["name"], *_cells(x), _remark(x)) for x in s["rows"])))
    return "\n".join(texts) if texts else _absent("alpha bench step configs/gpt2-124m.toml --peers --record")


def _cells(x: Mapping[str, Any]) -> tuple[str, ...]:
    if x["ns"] is None:
        return ("-",) * 7
    blocks = [b for b in x["blocks"] if len(b) > 3 and None not in b]
    state = f"{median(b[1] for b in blocks):.0f}, {median(b[2] for b in blocks):.0f}, {max(b[3] for b in blocks):.0f}" if blocks else "-"
    memory = f"{x['memory'] / 2**30:.1f} GiB" if x["memory"] else "-"
    return (f"{x['ns'] / 1e6:.2f} ms", f"{x['tokens_per_second']:,.0f}", f"{x['mfu']:.3f}", memory, state,
            f"{len(x['blocks']) - x['discarded']} of {len(x['blocks'])}", "1" if x["name"] == OURS else _ratio(x["ratio"]))


def _remark(x: Mapping[str, Any]) -> str:
    if x["why"]:
        return str(x["why"])
    return "" if x["together"] else "whole processes in turn"


def runs(records: Sequence[Record]) -> str:
    """The log's table of whole runs."""
    found = _named(records, "run-")
    if not found:
        return _absent("alpha bench run RUN --record")
    return _runs(found) + "\n" + "".join(f"{r['run']}: {_under(r)}.\n" for r in found)


def _call(r: Record, component: str, case: str) -> Mapping[str, Any] | None:
    return next((k for k in r["kernels"] if (k["component"], k["case"]) == (component, case) and not k["why"]), None)


def _best(k: Mapping[str, Any]) -> float | None:
    """The least time of a peer over ours: what the fastest of them gives."""
    ratios = [x["ratio"][1] for x in k["rows"] if x["name"] not in (OURS, CEILING) and x["ratio"][1] is not None]
    return min(ratios) if ratios else None


def _rate(r: Record, component: str, case: str, flops: float) -> str:
    """TFLOP/s, and in brackets our speed over the fastest peer's."""
    k = _call(r, component, case)
    if k is None:
        return "-"
    ours, best = next(x for x in k["rows"] if x["name"] == OURS), _best(k)
    return f"{flops / ours['ns'] / 1e3:.0f} ({'-' if best is None else f'{best:.2f}'})"


def products(records: Sequence[Record]) -> str:
    """Products by shape: TFLOP/s, and our speed over the fastest peer's."""
    texts = [f"{_under(r)}:\n\n" + _table(("M x N x K", "forward", "input gradient", "weight gradient", "weight gradient, fp32"), (
        (f"{m} x {n} x {k}", *(_rate(r, "matmul.bf16.sm90", f"{kind}-{m}x{n}x{k}", 2.0 * m * n * k)
                               for kind in ("fwd", "dgrad", "wgrad", "wgrad-f32"))) for m, n, k in PRODUCTS))
        for r in _named(records, "products")]
    return "\n".join(texts) if texts else _absent("alpha bench products --peers --record")


def attention(records: Sequence[Record]) -> str:
    """Attention by shape, useful TFLOP/s: causal counted half, backward 2.5 times forward."""
    def cells(r: Record, b: int, h: int, t: int, d: int) -> list[str]:
        return [_rate(r, f"attention{way}.bf16.sm90", f"{mask}-{b}x{h}x{t}x{d}", 4.0 * b * h * t * t * d * times * half)
                for way, times in (("", 1.0), ("_bwd", 2.5)) for mask, half in (("causal", 0.5), ("full", 1.0))]

    texts = [f"{_under(r)}:\n\n" + _table(("B x H x T x D", "forward, causal", "forward, full", "backward, causal", "backward, full"), (
        (f"{b} x {h} x {t} x {d}", *cells(r, b, h, t, d)) for b, h, t, d in HEADS)) for r in _named(records, "attention")]
    return "\n".join(texts) if texts else _absent("alpha bench attention --peers --record")


def bandwidth(records: Sequence[Record]) -> str:
    """Kernels that memory bounds, call by call."""
    texts = []
    for r in _named(records, "bandwidth"):
        rows = []
        for k in r["kernels"]:
            ours = next((x for x in k["rows"] if x["name"] == OURS), None)
            best = _best(k)
            figures = (k["why"], "-") if ours is None else (f"{ours['ns'] / 1e3:.1f}", f"{100 * ours['share']:.0f} %")
            rows.append((k["component"], k["case"], *figures, "-" if best is None else f"{best:.2f}"))
        texts.append(f"{_under(r)}:\n\n" + _table(("kernel", "call", "us", "of the ceiling", "fastest peer's time over ours"), rows))
    return "\n".join(texts) if texts else _absent("alpha bench bandwidth --peers --record")


_SHOWN = (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30)


def devices(records: Sequence[Record]) -> str:
    """Collectives among GPUs: our time, bus bandwidth, and times of the peers."""
    texts = []
    for r in _named(records, "comm-device"):
        rows = []
        for c in r["comm"]["cases"]:
            found = {x["name"]: x["ns"] / 1e3 for x in c["rows"]}
            if c["nbytes"] in _SHOWN and "nccl" in found:
                symmetric = [t for name, t in found.items() if name.startswith("symmetric")]
                rows.append((c["op"], size_text(c["nbytes"]), "graph" if c["graph"] else "alone", f"{found['ours']:,.1f}",
                             f"{found['nccl']:,.1f}", f"{min(symmetric):,.1f}" if symmetric else "-",
                             f"{found['ours'] / found['nccl']:.2f}",
                             f"{bus(c['op'], c['nbytes'], r['comm']['ranks'], found['ours']):,.0f}"))
        driver = r["environment"].get("driver")
        texts.append(_table(("op", "size", "launch", "ours, us", "NCCL, us", "symmetric memory, us", "ours of NCCL", "bus GB/s"), rows)
                     + f"\n{_hardware(r)}, commit {r['commit'][:12]}, driver {driver}, {r['peer']}"
                     + (f"; not measured: {', '.join(r['comm']['left'])}" if r["comm"].get("left") else "") + "\n")
    return "\n".join(texts) if texts else _absent("alpha bench comm --device --peers --record")


def ranks(records: Sequence[Record]) -> str:
    """A step on many GPUs beside the same on one, ours and PyTorch's."""
    texts = []
    for r in _named(records, "ranks-"):
        s = r["ranks"]
        head = f"{s['run']}, {s['shape']}, {s['gpus']} GPUs ({_under(r)}; {s['peer'] or 'no peer'}; {r['taken']}):\n\n"
        texts.append(head + _table(("", "GPUs", "step", "tokens/s", "MFU", "efficiency", "exposed communication", "blocks",
                                    "its time over ours", "remark"), (_ranked(x) for x in s["rows"])))
    return "\n".join(texts) if texts else _absent("alpha bench step configs/gpt2-124m.toml --nproc 2 --peers --record")


def many(records: Sequence[Record]) -> str:
    """A row for each step on many GPUs: how much of as many times one GPU it reaches, and the fastest peer on as many."""
    lines = []
    for r in _named(records, "ranks-"):
        s = r["ranks"]
        bound = (x for x in s["rows"] if x["library"] == OURS and x["name"] != EACH and x["gpus"] == s["gpus"])
        ours = next((x for x in bound if x["ns"] is not None), None)
        if ours is None:
            continue
        best = next((x for x in s["rows"] if x["name"] == s["quoted"]), None)
        peer = "no peer was measured" if best is None else f"{best['ratio'][1]:.2f} ({best['name']}{_turns(best)})"
        each = next((x for x in s["rows"] if x["name"] == EACH and x["ns"] is not None), None)
        lines.append((s["run"], _hardware(r).partition(",")[0], f"{ours['tokens_per_second']:,.0f}", _efficiency(ours), _efficiency(each),
                      "unknown" if ours["exposed"] is None else _exposed(ours), peer, _efficiency(best)))
    head = ("a step", "on", "tokens/s", "of N times one GPU", "a run on each at once", "exposed communication",
            "times the speed of the fastest peer", "the peer, of N times one")
    return _table(head, lines) if lines else _absent("alpha bench step configs/gpt2-124m.toml --nproc 2 --peers --record")


def _efficiency(x: Mapping[str, Any] | None) -> str:
    return "-" if x is None else _ratio((None, x["efficiency"][1], None))


def floors(records: Sequence[Record]) -> str:
    """A line for each step whose floor was measured: what the ceilings imply, and the most that any step could be ahead of PyTorch's: that
    ratio of one run, times the step's time over its floor of another."""
    lines, losses = [], []
    for r in _named(records, "floor-"):
        f, peer = r["floor"], None
        for s in _named([x for x in records if x["machine"] == r["machine"]], f"step-{f['run']}"):
            peer = _row(s, s["step"]["quoted"]) if s["step"]["run"] == f["run"] else peer
        behind = None if peer is None else peer["ratio"][1]
        ahead = ["-" if behind is None else f"{behind * f['step_ns'] / f[which]['least_ns']:.3f}" for which in ("known", "bare")]
        energy = f"{f['step_ns'] * 1e-9 * f['watts']:.1f} J, {f['watts']:.0f} W"
        lines.append((f["run"], _hardware(r), f"{f['step_ns'] / 1e6:.2f} ms", energy,
                      f"{f['known']['least_ns'] / 1e6:.2f} ms", ahead[0], f"{f['bare']['least_ns'] / 1e6:.2f} ms", ahead[1]))
        found = floor.losses(floor.from_plain(f))[:3]
        worst = [f"{row.op} `{' '.join(row.shape.split()[:2])}` {ns / 1e6:.2f} ms, {joules:.2f} J" for row, ns, joules in found]
        losses.append(f"- {f['run']} ({_under(r)}): {'; '.join(worst)}\n")
    head = ("a step", "on", "ours", "energy", "best known kernels", "PyTorch over it", "bare hardware", "PyTorch over it")
    text = _table(head, lines) + "\nThe largest losses against the best known kernels, by joules, with the first operands of the calls:\n\n"
    text += "".join(losses)
    return text if lines else _absent("alpha bench floor configs/gpt2-124m.toml --peers --record")


def simulations(records: Sequence[Record]) -> str:
    """A row for each recorded step on many GPUs: what a simulation gives for it, from its own step on one GPU, or
    blind, from other records alone."""
    rows = []
    for x in simulated.recorded(records):
        rests = "; ".join(x.blind.notes) or "records of this class"
        rows.append((x.run, str(x.given.gpus), x.machine.removeprefix("cuda_sm90_"), f"{x.efficiency:.3f}",
                     "-" if x.each is None else f"{x.each:.3f}", f"{x.given.efficiency:.3f}", f"{x.ns / 1e6:.2f} ms",
                     f"{x.given.many.ns / 1e6:.2f} ms", f"{100 * x.error(x.given):+.2f} %", f"{100 * x.error(x.blind):+.2f} %",
                     "unknown" if x.exposed is None else _exposed({"exposed": x.exposed, "least": x.least}),
                     f"{100 * x.given.exposed:.2f} %", rests))
    head = ("a step", "GPUs", "on", "measured, of N times one", "of a run on each", "predicted, of N times one", "step, measured",
            "predicted", "error", "error, blind", "exposed, measured", "predicted", "rests on")
    return _table(head, rows) if rows else _absent("alpha bench step configs/gpt2-124m.toml --nproc 2 --peers --record")


def _exposed(x: Mapping[str, Any]) -> str:
    """Of the rank that waits most, and of the one that waits least."""
    least = x.get("least")
    return f"{100 * x['exposed']:.2f} %" + (f" (least {100 * least:.2f} %)" if least is not None else "")


def _ranked(x: Mapping[str, Any]) -> tuple[str, ...]:
    remark = "; ".join(y for y in (_remark(x), x["unknown"]) if y)
    if x["ns"] is None:
        return (x["name"], str(x["gpus"]), *("-",) * 7, remark)
    exposed = "-" if x["exposed"] is None else _exposed(x)
    return (x["name"], str(x["gpus"]), f"{x['ns'] / 1e6:.2f} ms", f"{x['tokens_per_second']:,.0f}", f"{x['mfu']:.3f}",
            _ratio(x["efficiency"]), exposed, f"{len(x['blocks']) - x['discarded']} of {len(x['blocks'])}", _ratio(x["ratio"]), remark)


REGIONS: dict[str, Callable[[Sequence[Record]], str]] = {
    "headline": headline, "training": training, "steps": steps, "runs": runs,
    "products": products, "attention": attention, "bandwidth": bandwidth, "devices": devices, "ranks": ranks, "many": many,
    "floors": floors, "simulated": simulations}
