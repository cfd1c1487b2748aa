"""`alpha bench step`: a training step beside a peer that is made up, on an emulated GPU, and beside PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from emulated_gpu import emulated
from made_bench import MADE, MadeClocks, calm, first_steps, gpu_of_small_calls, made, pytorch, tiny
from rich.console import Console

from alpha import cli
from alpha.bench import agreement, command, floor, kernel, step, step_ranks
from alpha.bench.peer import Peer
from alpha.bench.variants import AUTOCAST, MASTER, Variant, variants
from alpha.cli.arguments import parser
from alpha.config import Data
from alpha.cuda_runtime.nvml import Reading
from alpha.data.tokenizer import ByteTokenizer
from alpha.errors import InputError, MachineError
from alpha.flops.v1 import VERSION
from alpha.optim.init import fill_initial
from alpha.train import loop
from alpha.train.assemble import flops_for, program_for
from alpha.train.catalogue import catalogue
from alpha.train.planned import plan_run
from alpha.train.spots import Spots

pytestmark = pytest.mark.usefixtures("warm_peers")


@pytest.fixture
def gpu() -> Iterator[pytest.MonkeyPatch]:
    with gpu_of_small_calls() as patch:
        yield patch


@pytest.fixture(scope="module")
def torch() -> Iterator[Peer]:
    with pytorch() as peer:
        yield peer


NAMES = [v.name for v in variants(False, "f32")]
HOT, LEAST = floor.Hot(1.0, 1.0, 1.0, 1), floor.Floor(1.0, 1.0, 1.0)


def test_a_step_beside_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm(monkeypatch)
    cfg = tiny(tmp_path)
    known = first_steps(cfg, tmp_path)
    result = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, command=made(**known, ns={"default": 1e9, "": 1e6}))
    rows = {r.name: r for r in result.rows}
    assert [r.name for r in result.rows] == ["ours", *reversed(NAMES)] and not result.why  # the fastest first
    assert result.quoted == NAMES[1] and "made" in result.peer
    for name, ns in zip(NAMES, (1e9, 1e6)):
        assert rows[name].ns == ns and rows[name].tokens_per_second == pytest.approx(4 * 32 * 1e9 / ns) and rows[name].memory == 123
        assert rows[name].difference == 0 and rows[name].ratio[1] == pytest.approx(ns / rows[name].ours, rel=0.8) and rows[name].together
        assert [b[0] for b in rows[name].blocks] == [ns] * 3 and len(rows[name].beside) == 3
    assert rows["ours"].ns == rows[NAMES[1]].ours and rows["ours"].blocks == rows[NAMES[1]].beside  # as it was beside the one quoted
    assert rows["ours"].memory > 0 and 0 < rows["ours"].mfu < 1 and VERSION in result.mark

    for bad in ({"loss": [x * 1.001 for x in known["loss"]]}, {"norm": [x * 1.001 for x in known["norm"]]},
                {"loss": [*known["loss"][:2], math.nan]}, {"norm": [known["norm"][0], known["norm"][1] * 0.999, known["norm"][2]]}):
        refused = step.bench(cfg, catalogue(), "made", rounds=1, steps=1, command=made(**{**known, **bad}))
        assert not refused.quoted and {r.name for r in refused.rows} == {"ours", *NAMES}
        assert all("not ours" in r.why and math.isnan(r.ns) for r in refused.rows if r.name in NAMES), bad

    alone = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, command=made(**known, flag=str(tmp_path / "flag")))
    assert {r.name: r.together for r in alone.rows if r.name != "ours"} == dict.fromkeys(NAMES, False)
    for r in alone.rows:
        assert not r.why and (r.name == "ours" or (r.ns == 1e6 and r.ratio[1] > 0 and len(r.blocks) == 3))
        assert r.name == "ours" or r.ratio[::2] == pytest.approx((math.nan, math.nan), nan_ok=True)


def test_a_peer_must_change_its_parameters_as_ours_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On random tokens losses and norms say nothing of updates: a peer that takes none has the same to 1e-4."""
    calm(monkeypatch)
    cfg = tiny(tmp_path)
    known = first_steps(cfg, tmp_path)
    decay = cfg.optim.weight_decay * sum(known.pop("rates"))

    def beside(updates: dict[str, object]) -> step.Row:
        found = step.bench(cfg, catalogue(), "made", rounds=1, steps=1, chosen=lambda name: name == NAMES[0],
                           command=made(**known, updates=updates))
        return next(r for r in found.rows if r.name == NAMES[0])

    right = beside({})
    assert not right.why and right.change is not None and right.change.tensors >= 12 and right.change.decay is not None
    assert max(x.difference for x in (right.change.size, right.change.direction, right.change.decay)) < 1e-6
    assert right.change.decay.allowed == agreement.TOLD
    for updates, word in (({"times": 0}, "size of"), ({"times": 0.5}, "size of"), ({"times": 2}, "size of"),
                          ({"times": -1}, "direction of"),
                          ({"only": "mlp.up.weight", "times": 0}, "size of block.0.mlp.up.weight"),
                          ({"only": "block.0.norm1.gain", "times": 0}, "size of block.0.norm1.gain"),
                          ({"only": "token.weight", "times": 0.5}, "size of embedding.token.weight"),
                          ({"only": "position", "times": math.nan}, "size of embedding.position.weight off by nan"),
                          ({"decay": decay}, "with decay"), ({"decay": -decay}, "with decay"),
                          ({"decay": -decay, "decayed": False}, "otherwise than ours: size of head.norm.gain"),
                          ({"stale": True}, "not the optimizer's, rounded")):
        refused = beside(updates)
        assert word in refused.why and math.isnan(refused.ns) and not refused.blocks, (updates, refused.why)
    assert not beside({"times": 1.0001}).why, "a rate this near is not told"


def test_taking_turns_keeps_to_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One turn each where no time is left for more; the peer is built once, and ours gets the parameters that it drew first. What goes on
    is told as it begins, so that a measurement that was cut off says where."""
    calm(monkeypatch)
    cfg, left, drawn, told = tiny(tmp_path), iter([100.0] * 4), list[str](), list[str]()
    monkeypatch.setattr(step.Session, "left", lambda self: next(left, 0.0))
    monkeypatch.setattr(loop, "fill_initial", lambda *args, **more: drawn.append("drawn") or fill_initial(*args, **more))
    known = first_steps(cfg, tmp_path)
    drawn.clear()
    found = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, budget=1.0, chosen=lambda name: name == NAMES[0],
                       command=made(**known, flag=str(tmp_path / "flag")), report=told.append)
    row = next(r for r in found.rows if r.name == NAMES[0])
    assert not row.why and not row.together and len(row.blocks) == len(row.beside) == 1 and drawn == ["drawn"]
    assert told == ["ours: opening", "ours: opened; parameters and tokens to files",
                    "ours: 3 steps, the first one looked at launch by launch", f"{NAMES[0]}: building and checking",
                    "ours: turn 1 of 3", f"{NAMES[0]}: timing, in turn with ours"]


def test_what_waits_on_the_host_has_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The made peer refuses blocks between park and back; turns that forget one of them have no figure."""
    calm(monkeypatch)
    cfg = tiny(tmp_path)
    known = first_steps(cfg, tmp_path)
    monkeypatch.setattr(step.Theirs, "back", lambda self: None)
    found = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, chosen=lambda name: name == NAMES[0],
                       command=made(**known, flag=str(tmp_path / "flag")))
    assert "does not have the device" in next(r for r in found.rows if r.name == NAMES[0]).why


def test_a_peer_that_keeps_too_much_costs_its_own_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits on the host may leave the peer's own context and buffers: where ours finds no room beside them, the others go on."""
    calm(monkeypatch)
    cfg, kept = tiny(tmp_path), list[str]()
    known = first_steps(cfg, tmp_path)
    parked, opened, park, leave = list[str](), step.Ours.__init__, step.Theirs.park, step.Theirs.__exit__

    def full(self: step.Ours, *arguments: object, **more: object) -> None:
        if kept:
            raise MachineError("the run does not fit into the GPU's memory")
        opened(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(step.Ours, "__init__", full)
    monkeypatch.setattr(step.Theirs, "park", lambda self: kept.append("kept") if not parked else park(self))
    monkeypatch.setattr(step.Theirs, "__exit__", lambda self, *error: (parked.extend(kept), kept.clear(), leave(self, *error)) and None)
    found = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, command=made(**known, flag=str(tmp_path / "flag")))
    rows = {r.name: r for r in found.rows}
    assert "ours finds no room beside what the peer keeps" in rows[NAMES[0]].why
    assert not rows[NAMES[1]].why and len(rows[NAMES[1]].blocks) == step.APART and found.quoted == NAMES[1]


def test_a_budget_leaves_out_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not measured is a line that says so; a trial decides whether a variant is worth all rounds."""
    calm(monkeypatch)
    cfg = tiny(tmp_path)
    known = first_steps(cfg, tmp_path)
    spent = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, budget=1e-9, command=made(**known))
    assert {r.name: r.why for r in spent.rows if r.name != "ours"} == dict.fromkeys(NAMES, "not measured: the budget was spent")
    assert not spent.quoted and spent.rows[0].name == "ours" and spent.rows[0].ns > 0
    for ns, rounds in (({"default": 1e6, "": 1e9}, (5, step.TRIALS)), ({"default": 1e9, "": 1e6}, (5, 5))):
        found = step.bench(cfg, catalogue(), "made", rounds=5, steps=1, command=made(**known, ns=ns))
        assert tuple(len(next(r for r in found.rows if r.name == name).blocks) for name in NAMES) == rounds


def test_a_variant_that_would_outlast_the_budget_is_not_begun() -> None:
    session = step.Session(3, 1, None, 1, None, None, None, None, "", time.monotonic() + 60, print, built=90.0)  # type: ignore[arg-type]
    assert session.one(Variant(), 1).why == "not measured: the budget was spent"


class MadeModel:
    """A GPU that warms up: 10 degrees a block, until 60."""

    def __init__(self) -> None:
        self.celsius, self.blocks = 30.0, 0

    def block(self, steps: int) -> tuple[float, Reading]:
        self.blocks += 1
        self.celsius = min(60.0, self.celsius + 10)
        return 1e9, Reading(1500.0, 0)

    def sense(self, reading: Reading) -> Reading:
        return replace(reading, watts=690.0, celsius=self.celsius)


def test_a_cool_gpu_is_warmed_up_first() -> None:
    gpu = MadeModel()
    session = step.Session(3, None, gpu, 1, None, None, None, None, "", None, print)  # type: ignore[arg-type]
    session.warm(gpu)  # type: ignore[arg-type]
    assert gpu.celsius == 60 and 4 <= gpu.blocks <= 6
    session.warm(gpu)  # type: ignore[arg-type]
    assert gpu.blocks <= 10  # warm already: two blocks say so, and what finds out how long one is


def test_the_first_step_of_ours_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An Ours that comes again computes the same launches at the same sizes: what looked at them takes longer than its turn."""
    calm(monkeypatch)
    cfg, looked, parked = tiny(tmp_path), list[int](), list[str]()
    known = first_steps(cfg, tmp_path)
    draw, park = Spots._draw, step.Theirs.park
    monkeypatch.setattr(Spots, "_draw", lambda self: looked.append(self._step) or draw(self))
    monkeypatch.setattr(step.Theirs, "park", lambda self: parked.append("parked") or park(self))
    found = step.bench(cfg, catalogue(), "made", rounds=3, steps=1, chosen=lambda name: name == NAMES[0],
                       command=made(**known, flag=str(tmp_path / "flag")))
    row = next(r for r in found.rows if r.name == NAMES[0])
    assert not row.why and len(row.blocks) == step.APART and looked == [0] and len(parked) == step.APART - 1


WORDS = "RuntimeError: [/pytorch/third_party/gloo/pair.cc:544] Connection closed by peer [rank1]"


@pytest.mark.parametrize("show", [
    lambda out: command.show_step(step.Result("t", "s", "m", {}, "h", "m", "v", 2, rows=[step.Row("torch", why=WORDS)], why=WORDS), out),
    lambda out: command.show_ranks(step_ranks.Result("t", "s", "m", {}, "h", "m", "v", 2, 128, why=WORDS, rows=[
        step_ranks.Row("DDP", "torch", 2, why=WORDS), step_ranks.Row("ours", "ours", 2, unknown=WORDS)]), out),
    lambda out: command.show(kernel.Result("c", "k", "s", rows=[kernel.Row("torch", why=WORDS)]), out),
    lambda out: command.show(kernel.Result("c", "k", "s", why=WORDS), out),
    lambda out: floor.show(floor.Result("t", "s", "h", "m", WORDS, [[1e9, 1.0]], [
        floor.Row("matmul", "f32[]", floor.PRODUCT, 1, 1, 1, 1.0, HOT, why=WORDS)], HOT, HOT, 1e9, 1.0, LEAST, LEAST), out),
])  # fmt: skip
def test_words_of_another_process_are_shown_as_they_are(show: Callable[[Console], None]) -> None:
    """What looks like markup in them ends no command, behind which figures are still to be kept, and hides nothing."""
    out = StringIO()
    show(Console(file=out, width=400, highlight=False))
    lines = [line for line in out.getvalue().splitlines() if "RuntimeError" in line]
    assert lines and all(WORDS in line for line in lines)


def test_the_model_is_as_wide_as_the_one_that_would_be_trained(tmp_path: Path) -> None:
    """model.vocab_size, a tokenizer's own file, and prepared data all have other ids than data.vocab says."""
    cfg, file, text = tiny(tmp_path), tmp_path / "t.json", tmp_path / "text.txt"
    ByteTokenizer().save(file)
    text.write_text("".join(f"line {i} of a text\n" for i in range(400)))
    assert cli.main(["data", "prepare", str(text), "--part", "200", "--out", str(tmp_path / "made"), "--tokenizer", "bytes"]) == 0
    wide, own = tiny(tmp_path, more="vocab_size = 512"), replace(cfg.data, vocab=Data.vocab)
    filed = replace(cfg, data=replace(own, tokenizer_file=str(file)))
    made_before = replace(cfg, data=replace(own, corpus=str(tmp_path / "made")))
    for run, ids in ((cfg, 264), (wide, 512), (filed, 257), (made_before, 257)):
        assert step.ids_of(run) == plan_run(run, catalogue()).vocabulary == ids
    result = step.bench(wide, catalogue(), None, rounds=1, steps=1)
    assert result.shape.endswith("vocabulary 512") and result.flops["per_token"] == flops_for(wide, 512).per_token


def test_what_the_peer_does_not_do_is_said(tmp_path: Path) -> None:
    for more, word in (("dropout = 0.1", "model.dropout = 0.1"), ("z_loss = 0.001", "model.z_loss"), ("window = 8", "model.window")):
        result = step.bench(tiny(tmp_path, more=more), catalogue(), "made", rounds=1, steps=1, command=MADE)
        assert any(word in r.why for r in result.rows) or result.why
    for more in ("norm_eps = 0.001", "head_dim = 8", 'attention_bias = "qkv"'):
        assert step.unsupported(tiny(tmp_path, family="llama", more=more)) == "model." + more.replace('"', "")


def test_a_step_on_the_gpu_is_timed_captured_and_not(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    clocks = MadeClocks()
    gpu.setattr(step.Clocks, "open", staticmethod(lambda index=0: clocks))
    result = step.bench(tiny(tmp_path, "cuda"), emulated(catalogue()), None, rounds=3, steps=1)
    assert [r.name for r in result.rows] == [step.OURS, step.UNCAPTURED] and clocks.taken == 2 * 4
    assert all(r.ns > 0 and r.mfu > 0 for r in result.rows) and "data sheet" in result.mark
    assert all(b[1:] == [1980.0, 690.0, 60.0] for r in result.rows for b in r.blocks)


def test_pytorch_trains_the_same_model(torch: Peer, tmp_path: Path) -> None:
    python = torch.python
    for family, more in (("gpt", ""), ("llama", "kv_heads = 1\ntied = false")):
        cfg = tiny(tmp_path, family=family, more=more)
        tokens = [str(tmp_path / f"tokens{i}.npy") for i in range(step.CHECKED)]
        with step.Ours(cfg, program_for(cfg, 264, catalogue(), 1), catalogue(), step.RandomTokens(cfg, 264), None) as mine:
            files = step._written(str(tmp_path), mine.parameters())
            for i, path in enumerate(tokens):
                np.save(path, step.RandomTokens(cfg, 264).rows(i))
            sizes = step.sizes_of(cfg, mine.loop.program)
            places = agreement.places({t.name: t.shape for t in mine.loop.program.states["param"].tensors}, np.random.default_rng(0))
            before = mine.taken(places)
            first = mine.take(step.CHECKED)
            expected = agreement.Expected(places, before, mine.taken(places), sizes, [r.lr for r in first], {"f32"}, 4 * 32)
            job = step.Job("cpu", 1, sizes, files, tokens, (4, 32), first,
                           agreement.bound({"f32"}, 4 * 32), expected, None, None)
        with step.Theirs(python, Variant(), job) as theirs:
            assert theirs.difference <= job.allowed and not theirs.change.why
            assert theirs.block(2)[0] > 0
        for weights in (AUTOCAST, MASTER):  # in bf16 as near as bf16 is
            with step.Theirs(python, Variant("", weights), job) as theirs:
                assert job.allowed < theirs.difference <= agreement.bound({"bf16"}, 4 * 32), weights
                assert theirs.change.why and not replace(expected, dtypes={"bf16"}).change(theirs.parameters).why, weights
        for wrong in ({"weight_decay": 50.0}, {"decayed": []}, {"betas": [0.5, 0.95]},
                      {"heads": 1, "kv_heads": 1} if family == "gpt" else {"rope_base": 100.0}):
            with step.Theirs(python, Variant(), replace(job, sizes={**job.sizes, **wrong})) as theirs:
                assert theirs.difference > job.allowed or theirs.change.why, wrong


@pytest.mark.parametrize("part", ["--variant torch*", "--rounds 2", "--steps 1", "--case fwd"])
def test_a_part_is_not_recorded(part: str) -> None:
    """A table says of a record that its variants were all there were, and its blocks as many as elsewhere."""
    for what in ("step configs/tiny.toml", "products"):
        args = parser().parse_args(["bench", *what.split(), "--record", *part.split()])
        with pytest.raises(InputError, match="measured whole"):
            command._require_whole(args)
