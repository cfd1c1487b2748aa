"""From runs to a Document: which views a report shows, and in which order. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count

from alpha.profile.kernels import PERTURBED
from alpha.registry.status import Registry
from alpha.report import charts, data, reading, tables_of, views
from alpha.report.document import Block, Document, Plot, Section, Text, provenance_lines
from alpha.report.extra import pandas as pd
from alpha.report.runs import Run
from alpha.report.series import POINTS, View


def build(
    runs: Sequence[Run], *, registry: Registry | None = None, compare: bool = False, anyway: bool = False, mixed: bool = False,
    targets: Mapping[str, float] | None = None, top: int = 15, points: int = POINTS,
) -> Document:  # fmt: skip
    """The report on these runs. `compare`: the second of two against the first. `targets`: key of a figure -> line, for all runs."""
    use, lost = views.utilisation(runs, points, mixed=mixed), views.loss(runs, points)
    hands, width = views.launches(runs, points), views.bandwidth(runs)
    sections = [_figures(runs, targets)]
    if compare:
        sections.append(_comparison(runs, anyway, mixed))
    sections.append(Section("MFU and HFU over time", _plot(
        "utilisation", "Utilisation over steps", use, charts.utilisation, data.series("mfu", "hfu", "tokens_per_second"))))
    if len(runs) > 1:
        sections.append(_scaling(runs))
    sections += [
        Section("Loss", [*_plot("loss", "Loss and validation", lost, charts.loss, data.losses), *_refused(lost)]),
        Section("Launches", _plot("launches", f"Launch counts{_first_of(*runs)}", hands, charts.launches, data.launches)),
        Section("Bandwidth", _plot("bandwidth", "Achieved bandwidth", width, charts.bandwidth, data.bandwidth)),
    ]
    for run, tail in zip(runs, _tails(runs)):
        head = f"{run.label}: " if len(runs) > 1 else ""
        sections += [Section(run.label)] if len(runs) > 1 else []
        sections += [Section(head + title, blocks(run, tail), 3 if len(runs) > 1 else 2) for title, blocks in (
            ("Step waterfall", lambda r, t: _waterfall(r, t, points)),
            ("Ranks", _ranks),
            ("Data", lambda r, t: _data(r, t, points)),
            ("Profiled steps", _profiled),
            ("Slowest ops", lambda r, t: _top(r, t, top)),
            ("FLOPs by part", _flops),
            ("Memory", lambda r, t: _memory(r, t, points)),
            ("Samples", _samples),
            ("Gates", lambda r, t: _gates(r, registry, t)),
        )]  # fmt: skip
    names = ", ".join(r.shown for r in runs)
    notes = [f"{r.label}: {n}" for r in runs for n in r.notes]
    return Document(f"Report on {names}" if len(runs) < 4 else f"Report on {len(runs)} runs", notes, sections,
                    [r.shown for r in runs if r.ungated])  # fmt: skip


def _tails(runs: Sequence[Run]) -> list[str]:
    """What the names of each run's plots and tables end in; nothing where there is one run. No two files of a report have one name: runs
    `a.b` and `a-b` are one slug, and the table ops-rows of `x` would be the plot ops of `rows-x`."""

    def ends(slug: str) -> set[str]:
        return {slug, f"rows-{slug}", f"launches-{slug}"}

    if len(runs) == 1:
        return [""]
    taken: set[str] = set()
    made = []
    for run in runs:
        slug = _slug(run)
        own = next(one for one in chain([slug], (f"{slug}-{n}" for n in count(2))) if not ends(one) & taken)
        taken |= ends(own)
        made.append(f"-{own}")
    return made


def _slug(run: Run) -> str:
    """A name that is safe in a file's."""
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in run.shown).strip("-")


def _first_of(*runs: Run, what: str = "") -> str:
    """What the title of a series over steps says where it shows one rank of several."""
    return f"{what}, rank 0" if any(len(set(r.tables["sessions"]["rank"])) > 1 for r in runs if r.version > 1) else ""


def _plot(name: str, title: str, view: View, draw: Callable[..., str], numbers: Callable[[View], pd.DataFrame]) -> list[Block]:
    """A plot of a view, or the reason why there is none; a run that it cannot show is named below it."""
    if view["why"]:
        return [Text(f"{title}: not shown. {view['why']}.")]
    warned: Iterable[Block] = (Text(n, strong=True) for n in view["notes"] if n.startswith("MIXED"))
    missing: Iterable[Block] = (Text(f"{r['label']}: not shown. {r['why']}.") for r in view.get("runs", []) if r.get("why"))
    plot = Plot(name, title, draw(view, name), numbers(view), provenance_lines(view["provenance"]), charts.marks_of(view))
    return [*warned, plot, *missing]


# -- over all runs -------------------------------------------------------------------------------------------------------------


def _figures(runs: Sequence[Run], targets: Mapping[str, float] | None) -> Section:
    made = [views.figures(run, targets) for run in runs]
    if len(runs) == 1:
        return Section("Figures", [tables_of.figures(runs[0], made[0])])
    remarks: dict[str, list[str]] = {}
    for run, view in zip(runs, made):
        for f in view["figures"]:
            if f["reason"] and f["reason"] != "no target":
                remarks.setdefault(f"{f['title']}: {f['reason']}", []).append(run.label)
    texts: Iterable[Block] = (Text(f"{text} ({', '.join(where)}).") for text, where in remarks.items())
    return Section("Figures", [tables_of.figures_of_all(runs, made), *texts, tables_of.definitions(made)])


def _comparison(runs: Sequence[Run], anyway: bool, mixed: bool) -> Section:
    a, b = runs
    view = views.comparison(a, b, anyway=anyway, mixed=mixed)
    if view["why"]:
        return Section("Comparison", [Text(f"Comparison: not possible. {view['why']}.")])
    own, common = {f"{r.shown}: {n}" for r in runs for n in r.notes}, view["common"]
    notes: Iterable[Block] = (Text(n) for n in view["notes"] if n not in own and not n.startswith("MIXED"))
    basis = (f"In common: {common['shift']:+.2%} {common['verdict']} ({common['reason']}). Steady steps: {view['steps'][0]:,} and "
             f"{view['steps'][1]:,}; stalls: {view['stalls'][0]} and {view['stalls'][1]}.")
    return Section("Comparison", [
        Text(view["sentence"], strong=True), Text(basis), *notes,
        *_plot("comparison", f"{b.label} against {a.label}", view, charts.comparison, data.comparison), tables_of.comparison(a, b, view),
    ])  # fmt: skip


def _scaling(runs: Sequence[Run]) -> Section:
    view = views.scaling(runs)
    plot = _plot("scaling", f"Throughput against {view['axis']}", view, charts.scaling, lambda v: pd.DataFrame(v["rows"]))
    return Section("Scaling", plot if view["why"] else [*plot, tables_of.scaling(view)])


def _refused(view: View) -> list[Block]:
    return [Text(f"{r['label']}: {len(r['refused'])} steps were refused as not finite, first step {r['refused'][0]}.", strong=True)
            for r in view["runs"] if r.get("refused")]  # fmt: skip


# -- of one run ----------------------------------------------------------------------------------------------------------------


def _waterfall(run: Run, tail: str, points: int) -> list[Block]:
    view, trend = views.waterfall(run), views.phases_over_time(run, points)
    plot = _plot(f"waterfall{tail}", "Mean step interval", view, charts.waterfall, lambda v: pd.DataFrame(v["phases"]))
    if view["why"]:
        return plot
    title = f"Phases of the step over the run{_first_of(run)}"
    return [*plot, tables_of.waterfall(view, tail), *_plot(f"phases{tail}", title, trend, charts.phases_over_time, data.phases)]


def _top(run: Run, tail: str, top: int) -> list[Block]:
    view = views.top_ops(run, top)
    plot = _plot(f"ops{tail}", "Device time by op", view, charts.top_ops, lambda v: pd.DataFrame(v["ops"]))
    if view["why"]:
        return plot
    rest = view["rest"]
    more = ""
    if rest["ops"]:
        more = f" {rest['ops']} more rows take {tables_of.ms(rest['device_ns'])}, {tables_of.percent(rest['share'], 1)} of it."
    caption = (f"A step's mean over {view['steps']} profiled steps; device time {tables_of.ms(view['device_ns'])}.{more} Distance: device "
            "time over the least time that the roofline allows, max(FLOPs / peak, fewest bytes / peak bandwidth).")  # fmt: skip
    return [Text(caption), *plot, tables_of.ops(view, tail)]


def _ranks(run: Run, tail: str) -> list[Block]:
    view = views.ranks(run)
    if view["why"]:
        return [Text(f"Ranks: not shown. {view['why']}.")]
    return [Text(view["sentence"], strong="they wait for it" in view["sentence"]), tables_of.ranks(view, tail)]


def _data(run: Run, tail: str, points: int) -> list[Block]:
    made, waited = views.sources(run), views.waits(run, points)
    blocks: list[Block] = [Text(f"Sources: not shown. {made['why']}.") if made["why"] else tables_of.sources(made, tail)]
    if made["runs"]:
        blocks += _plot(f"sources{tail}", "Validation by source", made, charts.sources, reading.sources_data)
    blocks += _plot(f"waits{tail}", f"Time that a step waits for its batches{_first_of(run)}", waited, charts.waits, reading.waits_data)
    return blocks if waited["why"] else [*blocks, tables_of.waits(waited, tail)]


def _profiled(run: Run, tail: str) -> list[Block]:
    view = views.profiled(run)
    if view["why"]:
        return [Text(f"Profiled steps: not shown. {view['why']}.")]
    return [Text(f"Times of kernels: {view['measured']}. A step is slower by what its time is above the median of its steady neighbours; "
                 f"above {tables_of.percent(PERTURBED, 0)} its gaps are not judged."), tables_of.profiled(view, tail)]  # fmt: skip


def _flops(run: Run, tail: str) -> list[Block]:
    view = views.flops(run)
    if view["why"]:
        return [Text(f"FLOPs by part: not shown. {view['why']}.")]
    return [Text(f"GFLOP of one step by {view['version']} ({view['convention']}), and as its launches execute them."),
            tables_of.flops(view, tail)]  # fmt: skip


def _samples(run: Run, tail: str) -> list[Block]:
    view = views.samples(run)
    return [Text(f"Samples: not shown. {view['why']}.")] if view["why"] else [tables_of.samples(view, tail)]


def _memory(run: Run, tail: str, points: int) -> list[Block]:
    view, plan = views.memory(run, points), views.memory_launches(run)
    blocks = _plot(f"memory{tail}", f"Planned and actual memory{_first_of(run, what='; over the run')}", view, charts.memory, data.memory)
    if not view["why"]:
        blocks.append(tables_of.memory(view, tail))
    title = f"Live activation bytes over the launches of {plan['plan']}" if plan["plan"] else "Live activation bytes"
    return blocks + _plot(f"memory-launches{tail}", title, plan, charts.memory_launches, data.memory_launches)


def _gates(run: Run, registry: Registry | None, tail: str) -> list[Block]:
    view = views.gates(run, registry)
    if view["why"]:
        return [Text(f"Gates: not shown. {view['why']}.")]
    n, backed = len(view["components"]), sum(bool(c["evidence"]) for c in view["components"])
    summary = f"The run used {n} components, {backed} of them on evidence (machine class {view['then']})."
    if view["machine"] is not None:
        summary += f" Today {sum(bool(c.get('usable')) for c in view['components'])} of them are usable on {view['machine']}."
    return [Text(summary), tables_of.gates(view, tail)]
