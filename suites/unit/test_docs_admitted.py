"""README says on which GPUs the committed evidence admits GPT-2 124M: no more than `alpha train` would, and no less."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from alpha import config
from alpha.registry.admission import needed
from alpha.registry.evidence import shipped_root
from alpha.registry.gpu import GpuClass, family_of, sort_of
from alpha.registry.status import Registry
from alpha.train.assemble import components_of, program_for
from alpha.train.catalogue import catalogue

ROOT = Path(__file__).parents[2]
RUN = "configs/gpt2-124m.toml"


def classes() -> list[GpuClass]:
    """Of which evidence is committed."""
    return [GpuClass.from_key(path.name) for path in sorted(shipped_root().iterdir()) if family_of(path.name) == "cuda"]


@cache
def used(gpus: int) -> tuple[str, ...]:
    """What a run on so many GPUs presupposes."""
    over = [f"train.batch={64 * gpus}", f"train.shards={gpus}", f"train.zero={int(gpus > 1)}"]
    cfg = config.load(ROOT / RUN, over)
    return tuple(needed(catalogue(), components_of(cfg, program_for(cfg, cfg.data.vocab, catalogue(), 1, ranks=gpus))))


def missing(gpu: GpuClass, roots: list[Path]) -> list[str]:
    """What a run on all of these GPUs lacks; whoever computes on four has the first two and the first one too."""
    registry = Registry(catalogue(), roots)
    for count in (1, 2, 4):
        if count <= gpu.devices:
            own = replace(gpu, devices=count, link=gpu.link if count > 1 else "")
            registry._gpus[sort_of(own.key)] = own
    return [line for x in used(gpu.devices) for line in registry.why_not(x)]


def admitted(roots: list[Path]) -> str:
    """The sentence."""
    found: dict[str, list[str]] = {}
    for gpu in classes():
        if not missing(gpu, roots):
            found.setdefault(gpu.model, []).append(str(gpu.devices))
    where = "; ".join(f"{' and '.join(counts)} {model}" for model, counts in sorted(found.items()))
    return f"Committed evidence admits `{RUN}` on {where or 'no GPU'}."


def test_readme_says_where_the_committed_evidence_admits() -> None:
    said = re.findall(r"Committed evidence admits .*?\.(?=\s)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert said == [admitted([shipped_root()])]


def test_what_no_evidence_admits_is_not_said(tmp_path: Path) -> None:
    """Without a line of evidence no class is admitted; a machine of one class has none of another's speed."""
    (tmp_path / "REFERENCE").write_text((shipped_root() / "REFERENCE").read_text())
    assert admitted([tmp_path]).endswith("on no GPU.")
    other = missing(GpuClass.from_key("cuda_sm90_H300"), [shipped_root()])
    assert any(" perf: no evidence on cuda_sm90_H300" in line for line in other)
