"""The merge gate over this repository: the registry's check (registry/check.py) with what lies above its floor. Floor 7."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from alpha import config
from alpha.component import Catalogue
from alpha.errors import AlphaError
from alpha.gates.recompute import beside
from alpha.registry import asked, consistency, policy
from alpha.registry import check as registry_check
from alpha.registry.check import ERROR, WARNING, Finding
from alpha.registry.evidence import shipped_root
from alpha.registry.faults import Fault, load_faults
from alpha.registry.gpu import gpu_classes
from alpha.registry.history import History, hash_of
from alpha.registry.machine import machine_class
from alpha.registry.package import Package
from alpha.train.assemble import program_for

PUBLISHED_RUNS = ("gpt2-124m", "gpt2-124m-scaling", "gpt2-124m-whole", "llama-1b", "llama-1b-whole", "llama-3b")
"""Run files whose speed README quotes."""


def check(catalogue: Catalogue, root: Path, reference: str | None = None) -> registry_check.Checked:
    """What the committed evidence under `root` says. `reference`: a machine class that every component must have current evidence on."""
    faults, history = load_faults(catalogue=catalogue), History(root.parents[1])
    past = {} if history.why_not else history.lines_by_nonce(root)
    base = {} if history.why_not else asked.read(history.was(asked.path(root)))
    checked = judged(catalogue, root, faults, past, base, reference=reference, published=published(catalogue))
    return replace(checked, findings=(*checked.findings, *_owed_audits(root, history)))


def judged(catalogue: Catalogue, root: Path, faults: Sequence[Fault], past: Mapping[str, set[str]], base: Mapping[str, str], *,
           reference: str | None = None, published: Iterable[str] = ()) -> registry_check.Checked:
    """The same with the history given: past: nonce -> hashes of lines that ever named it; base: what was asked where the branch began."""
    package = Package()
    with beside(package) as recompute:
        checked = registry_check.check(catalogue, root, recompute, package=package, faults=faults, reference=reference,
                                       published=published)
    try:
        found = [Finding(ERROR, line.path.relative_to(root.parents[1]).as_posix(), line.number, line.about, why,
                         "the line was forged: measure again with `alpha gate run` or `alpha gate catches`, and commit the line")
                 for line, why in consistency.problems(root, catalogue, past)]
        now = asked.today(catalogue, root, faults)
    except AlphaError:  # a file that cannot be read: the registry's check names it
        return checked
    where = asked.path(root).relative_to(root.parents[1]).as_posix()
    try:
        listed, reasons = asked.committed(root), asked.reasons(root)
    except AlphaError as error:
        found.append(Finding(ERROR, where, 0, "asked", f"{error.what}; came {error.came}", error.do or ""))
        return replace(checked, findings=(*checked.findings, *found))
    less = asked.problems(now, listed, base, reasons)
    found += [Finding(ERROR, where, 0, "asked", why, "restore it, or give the reason: `alpha gate asked --why TEXT`, and commit both files")
              for why in less]
    more = asked.fallen({k: v for k, v in now.items() if k != asked.POLICY_DIGEST}, listed)
    if more and not less:
        found.append(Finding(WARNING, where, 0, "asked", f"the list lags behind: {len(more)} items, such as {more[0]}",
                             "run `alpha gate asked` and commit the list"))
    return replace(checked, findings=(*checked.findings, *found))


def _owed_audits(root: Path, history: History) -> list[Finding]:
    """Changed lines of classes that this machine is not of: only such a machine can measure them again."""
    where = root.relative_to(root.parents[1]).as_posix()
    if history.why_not or not history.base:
        why = history.why_not or "the clone is shallow"
        return [Finding(WARNING, where, 0, "history", f"NOT_RUN: what was committed before: {why}",
                        "check in a clone with its history")]
    new = history.changed(root)
    here = {machine_class().key, *(gpu.key for gpu in gpu_classes())}
    counts = Counter(line.record.machine for line in consistency.lines(root) if hash_of(line.text.encode()) in new) if new else {}
    return [Finding(WARNING, f"{where}/{machine}", 0, "audit", f"NOT_RUN: {n} lines differ from {history.base[:12]}: an audit is owed",
                    "run `alpha gate audit --changed --all` on a machine of that class")
            for machine, n in sorted(counts.items()) if machine not in here]


def published(catalogue: Catalogue) -> set[str]:
    """Components that the speed figures of README rest on: what the runs behind them use."""
    found: set[str] = set()
    for name in PUBLISHED_RUNS:
        cfg = config.load(shipped_root().parents[1] / "configs" / f"{name}.toml")
        found |= set(program_for(cfg, cfg.data.vocab, catalogue, 1).components())
    return {i for i in found if "perf" in policy.owed(catalogue[i])}
