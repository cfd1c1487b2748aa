"""Models of Hugging Face: what transformers and `tokenizers` say of what we write, where they are installed; and the parser, fuzzed.

Their Python is a second one, named by ALPHA_HF_PYTHON, for no process of Alpha holds torch. Without it these tests are NOT_RUN, and parity
rests on what transformers computed for baselines/hf, which a gate of `checkpoint.hf` holds the models against.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import textwrap
from dataclasses import replace
from pathlib import Path

import hf_round_trips
import numpy as np
import pytest
from hf_round_trips import logits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from alpha import cli
from alpha.checkpoint import folders, hf, safetensors
from alpha.data.tokenizer import PATTERNS, BPETokenizer, ByteTokenizer, Tokenizer
from alpha.errors import InputError, MachineError
from alpha.gates.contracts import hf as contract
from alpha.gates.contracts.data import tokenizer_hf
from alpha.gates.contracts.data.support import text_like
from alpha.graph.state import StateLayout
from alpha.train import hf_tokenizer, hub, rundir
from alpha.train.assemble import program_for, threads_for
from alpha.train.catalogue import catalogue

ROOT = Path(__file__).resolve().parents[2]
THEIRS = os.environ.get("ALPHA_HF_PYTHON")
with_theirs = pytest.mark.skipif(THEIRS is None, reason="NOT_RUN: ALPHA_HF_PYTHON names no Python with transformers and torch")


def theirs(*args: str) -> str:
    """Standard output of their Python."""
    return hf_round_trips.theirs(str(THEIRS), *args)


@pytest.mark.parametrize("path", contract.fixtures(), ids=lambda p: p.name)
def test_kernels_give_the_logits_of_transformers(path: Path) -> None:
    tokens, want = contract.expected(path)
    model, layout, flat = contract.opened(path, len(tokens))
    cfg = hub.run_file(model.sizes, "x", Path("runs"), len(tokens), {})
    got = logits_of(cfg, model.sizes, layout, flat, tokens)
    assert not np.abs(got - want).max() > contract.BOUND * np.abs(want).max()


def test_no_mutant_is_read_wrongly(seed: int) -> None:
    count = contract.fuzzed(np.random.default_rng(seed), 5_000)
    assert count.cases == 5_000 and not count.wrong, count.first


# -- runs ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint at step 3 of drawn parameters."""
    out = tmp_path_factory.mktemp("runs")
    sizes = contract.drawn(np.random.default_rng(3), "llama", False)[0] | {"vocab_size": 0}
    cfg = hub.run_file(sizes, "small", out, 5, {"tokenizer": "bytes"})
    with rundir.create(cfg, ByteTokenizer()) as held:
        program = program_for(cfg, 257, catalogue(), threads_for(cfg))
        states = hub.empty_states(program)
        layout, flat = states["param"]
        for start, size in layout.ranges():
            flat[start : start + size] = np.random.default_rng(size).standard_normal(size)
        folders.save(held.checkpoints, 3, states, {})
        return held.path


def test_a_run_is_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert cli.main(["checkpoint", "export", f"{run}@3", "--out", str(out)]) == 0
    assert "step 3" in capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    model, _, flat = contract.opened(out, 5)
    states = hub.empty_states(program_for(rundir.read_config(run), 257, catalogue(), 1))
    folders.load(folders.at(run / "checkpoints"), states)
    assert flat.tobytes() == states["param"][1].tobytes() and model.sizes["vocab_size"] == 257
    assert cli.main(["checkpoint", "export", str(run), "--out", str(tmp_path / "small"), "--max-shard-size", "1e-5"]) == 0
    assert "step 3" in capsys.readouterr().out and len(list(tmp_path.glob("small/model-*-of-*.safetensors"))) > 2
    assert contract.opened(tmp_path / "small", 5)[2].tobytes() == flat.tobytes()
    for args, words in (([str(run)], "already"), ([f"{run}@4", "--out", str(tmp_path / "n")], "no such checkpoint"),
                        ([str(tmp_path), "--out", str(tmp_path / "n")], "not a run directory")):
        assert cli.main(["checkpoint", "export", *args, *(["--out", str(out)] if len(args) == 1 else [])]) == 2
        assert words in capsys.readouterr().err


def written_of(seed: int, kind: str, tied: bool) -> tuple[hf.Sizes, StateLayout, np.ndarray]:
    """(sizes, parameters, the flat array of them) of a drawn model with the fixtures' vocabulary and positions or more."""
    sizes = contract.drawn(np.random.default_rng(seed), kind, tied)[0] | {"vocab_size": 23, "positions": 16}
    layout, _, _ = contract.layout_of(sizes, 12)
    return sizes, layout, hf_round_trips.drawn(layout)


@with_theirs
def test_transformers_computes_our_logits(run: Path, tmp_path: Path) -> None:
    """Of drawn models of both families that we wrote, and of a run."""
    script, folders, ours = ROOT / "suites" / "support" / "hf_fixtures.py", [], []
    for number, (kind, tied) in enumerate((k, tied) for k in hf.LAYOUTS for tied in (True, False)):
        sizes, layout, flat = written_of(number, kind, tied)
        hf.export(tmp_path / str(number), sizes, flat, layout, eod=0, files={})
        folders.append(str(tmp_path / str(number)))
        tokens = contract.expected(contract.fixtures()[0])[0]
        ours.append(logits_of(hub.run_file(sizes, "x", tmp_path, 12, {}), sizes, layout, flat, tokens))
    for got, want in zip(ours, json.loads(theirs(str(script), "logits", *folders))):
        assert not np.abs(got - want).max() > contract.BOUND * np.abs(want).max()


@with_theirs
def test_several_files_go_out_and_come_back(tmp_path: Path) -> None:
    """A model of each layout in several files: transformers computes the same logits as of one file, bit for bit, and they are ours; what
    it saves in several files holds the same parameters."""
    script, held, wholes, cuts, want = str(ROOT / "suites" / "support" / "hf_fixtures.py"), {}, [], [], []
    tokens = contract.expected(contract.fixtures()[0])[0]
    for number, kind in enumerate(hf.LAYOUTS):
        sizes, layout, flat = written_of(number, kind, tied=False)
        hf.export(tmp_path / f"whole-{kind}", sizes, flat, layout, eod=0, files={})
        hf.export(tmp_path / f"cut-{kind}", sizes, flat, layout, eod=0, files={}, most=flat.nbytes // 4)
        wholes.append(str(tmp_path / f"whole-{kind}"))
        cuts.append(str(tmp_path / f"cut-{kind}"))
        want.append(logits_of(hub.run_file(sizes, "x", tmp_path, 12, {}), sizes, layout, flat, tokens))
        held[kind] = flat
    found = json.loads(theirs(script, "logits", *wholes, *cuts))
    assert found[: len(wholes)] == found[len(wholes) :]
    for ours, got in zip(want, found):
        assert ours.shape == np.shape(got) and not np.abs(ours - got).max() > contract.BOUND * np.abs(got).max()
    theirs(script, "save", *(x for kind, flat in held.items()
                             for x in (f"{tmp_path}/cut-{kind}", f"{tmp_path}/back-{kind}", str(flat.nbytes // 4))))
    for kind, flat in held.items():
        for folder in (tmp_path / f"cut-{kind}", tmp_path / f"back-{kind}"):
            assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
            assert contract.opened(folder, 12)[2].tobytes() == flat.tobytes()


@with_theirs
def test_the_fixtures_are_what_transformers_makes(tmp_path: Path) -> None:
    script = str(ROOT / "suites" / "support" / "hf_fixtures.py")
    for path, found in zip(contract.fixtures(), json.loads(theirs(script, "logits", *map(str, contract.fixtures())))):
        want = contract.expected(path)[1]
        assert not np.abs(np.array(found) - want).max() > contract.BOUND * np.abs(want).max()


TABLE = re.compile(r"^\| (\S.*?) \| (\d+) \| (\S+e-\d+) \| (\d+) of (\d+) \| (\S+e-\d+) \| (\d+) of (\d+) \|$", re.M)
"""A row of the round trips of docs/hugging-face.md."""


def test_the_page_s_round_trips_are_within_the_bound() -> None:
    rows = TABLE.findall((ROOT / "docs" / "hugging-face.md").read_text())
    assert len(rows) == 12 and hf_round_trips.HEAD in (ROOT / "docs" / "hugging-face.md").read_text()
    for _, _, error_in, same_in, every_in, error_out, same_out, every_out in rows:
        assert same_in == every_in == same_out == every_out and max(float(error_in), float(error_out)) <= contract.BOUND


@with_theirs
def test_the_page_s_round_trips_are_what_is_measured(tmp_path: Path) -> None:
    """Counts alike; errors within the bound, and within four times of what the page says: the last bits are the machine's."""
    found = hf_round_trips.trips(str(THEIRS), tmp_path)
    rows = TABLE.findall((ROOT / "docs" / "hugging-face.md").read_text())
    assert [(t.model, str(t.files)) for t in found] == [row[:2] for row in rows]
    for trip, (_, _, error_in, same_in, _, error_out, same_out, _) in zip(found, rows):
        assert trip.again and (trip.same_in, trip.same_out) == (int(same_in), int(same_out)) == (trip.tensors, trip.tensors), trip
        for measured, said in ((trip.error_in, float(error_in)), (trip.error_out, float(error_out))):
            assert measured <= contract.BOUND and said / 4 <= measured <= 4 * said, trip


def test_a_round_trip_s_measures_see_what_is_wrong(tmp_path: Path) -> None:
    """A bit of one tensor, a tensor that is missing or too many, one that is renamed; logits of a model whose rotary base is another's."""
    path = next(p for p in contract.fixtures() if p.name == "llama-3.1")
    every = len(safetensors.folder(path))
    for number, (spoil, left) in enumerate((
            (lambda x: x["model.norm.weight"].view(np.uint32).__ixor__(1), every - 1), (lambda x: x.pop("model.norm.weight"), every - 1),
            (lambda x: x.update(more=np.zeros(2, np.float32)), -1), (lambda x: x.update(more=x.pop("model.norm.weight")), -1),
            (lambda x: None, every))):
        spoiled = shutil.copytree(path, tmp_path / str(number))
        contract.rewritten(spoiled, spoil)
        assert hf_round_trips.same(path, spoiled) == left
    tokens, want = contract.expected(path)
    model, layout, flat = contract.opened(path, len(tokens))
    for sizes, good in ((model.sizes, True), ({**model.sizes, "rope_base": 21.0}, False), ({**model.sizes, "rope_scaling": ()}, False)):
        ours = logits_of(hub.run_file(sizes, "x", Path("runs"), len(tokens), {}), sizes, layout, flat, tokens)
        assert (hf_round_trips.error(ours, want.tolist()) <= contract.BOUND) is good
        assert hf_round_trips.error(ours[:-1], want.tolist()) > contract.BOUND


# -- tokenizers ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    return BPETokenizer.train([text_like(np.random.default_rng(1), 60_000)], 420)


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None)
def test_words_are_cut_where_ours_are(data: bytes) -> None:
    """The word pattern over the characters that stand for bytes: the same words."""
    text = "".join(hf_tokenizer.alphabet()[byte] for byte in data)
    found = re.findall(hf_tokenizer.word_pattern("code-v1"), text)
    assert [len(word) for word in found] == [len(word) for word in re.findall(PATTERNS["code-v1"], data)]


def test_tokens_of_the_same_bytes_have_no_file() -> None:
    a, b, c = b"abc"
    files, why = hf_tokenizer.files(BPETokenizer([(a, b), (b, c), (257, c), (a, 258)]))
    assert files == {} and "ids 259 and 260" in why and "b'abc'" in why


_ENCODE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = json.load(open(sys.argv[2]))
print(json.dumps([tokenizer.encode(text, add_special_tokens=False).ids for text in texts]))
"""


@with_theirs
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizers_gives_our_ids(kind: str, bpe: BPETokenizer, tmp_path: Path) -> None:
    ours: Tokenizer = bpe if kind == "bpe" else ByteTokenizer()
    texts = [text_like(np.random.default_rng(i), 500).decode(errors="ignore") for i in range(20)]
    texts += ["日本語 текст émigré   x\n\n  y\t\t z 12345 \u00a0 \u2028 \x0b\x0c \r\n" * 5, "é" * 100, "a" * 100, "", "\U0001f600" * 9]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    (tmp_path / "tokenizer.json").write_bytes(hf_tokenizer.files(ours)[0][hf_tokenizer.NAME])
    found = json.loads(theirs("-c", _ENCODE, str(tmp_path / "tokenizer.json"), str(tmp_path / "texts.json")))
    assert found == [ours.encode(text.encode()).tolist() for text in texts]


_READS = """
import sys
from safetensors import safe_open
for path in sys.argv[1:]:
    try:
        with safe_open(path, "pt") as file:
            list(file.keys())
    except Exception as error:
        print(f"refused {type(error).__name__}")
    else:
        print("read")
"""


@with_theirs
def test_what_we_read_their_reader_reads(tmp_path: Path) -> None:
    """Of mutants, none is read by ours that the `safetensors` package refuses."""
    rng, paths, read = np.random.default_rng(5), [], []
    whole = contract.made({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}, bytes(24))
    for i in range(1500):
        path = tmp_path / f"{i}.safetensors"
        path.write_bytes(contract.mutated(rng, whole))
        try:
            safetensors.header(path)
        except Exception:
            continue
        paths.append(str(path))
        read.append(i)
    verdicts = theirs("-c", _READS, *paths).split("\n")[: len(paths)]
    assert len(paths) > 50 and set(verdicts) == {"read"}


# -- the way in ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, exported."""
    out = tmp_path_factory.mktemp("hub") / "model"
    hub.export_run(run, None, out)
    return out


def test_a_model_is_imported_and_sampled(run: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the run, from its export and from the import of that comes the same text; exported again, the same file."""
    new = tmp_path / "new"
    assert cli.main(["checkpoint", "import", f"hf:{published}", "--out", str(new)]) == 0
    assert cli.main(["checkpoint", "export", str(new), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (published / "model.safetensors").read_bytes()
    capsys.readouterr()
    texts = []
    for source in (f"hf:{published}", str(new)):
        assert cli.main(["sample", source, "--prompt", "a", "--tokens", "3", "--temperature", "0"]) == 0
        said = capsys.readouterr()
        assert "UNGATED" in said.err
        texts.append(said.out)
    assert texts[0] == texts[1] and len(texts[0]) > 2
    for args, words in ((["checkpoint", "import", f"hf:{published}", "--out", str(new)], "already"),
                        (["checkpoint", "import", str(published), "--out", str(tmp_path / "n")], "hf:FOLDER"),
                        (["checkpoint", "import", f"hf:{tmp_path}", "--out", str(tmp_path / "n")], "no model of Hugging Face"),
                        (["sample", f"hf:{published}", "--prompt", "a", "--at", "3"], "no steps"),
                        (["train", "configs/tiny.toml", "--resume", "--init", f"hf:{published}"], "leave out --init")):
        assert cli.main(args) == 2
        assert words in capsys.readouterr().err


def test_an_import_that_the_disk_refuses_leaves_no_run(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without its checkpoint would be drawn by the seed when it goes on, and keep the next import from its name."""
    def full(*args: object, **kwargs: object) -> None:
        raise MachineError("the disk is full: the checkpoint was not saved")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "save", full)
        with pytest.raises(MachineError, match="the disk is full"):
            hub.import_model(f"hf:{published}", tmp_path / "runs" / "new", catalogue())
    assert list((tmp_path / "runs").iterdir()) == []
    assert folders.steps(hub.import_model(f"hf:{published}", tmp_path / "runs" / "new", catalogue()) / "checkpoints") == [0]


def test_ids_behind_the_tokenizer_never_come_out(run: Path, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A padded vocabulary whose last row has the largest logit everywhere."""
    padded = shutil.copytree(published, tmp_path / "padded")

    def pad(tensors: dict[str, np.ndarray]) -> None:
        head = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = np.concatenate([head, 1e3 * np.sign(head[:1]), -1e3 * np.sign(head[:1])])
        tensors["model.embed_tokens.weight"] = np.pad(tensors["model.embed_tokens.weight"], ((0, 2), (0, 0)))

    contract.rewritten(padded, pad)
    config = json.loads((padded / "config.json").read_text())
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": 259}))
    texts = []
    for source in (published, padded):
        assert cli.main(["sample", f"hf:{source}", "--prompt", "a", "--tokens", "3", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    (padded / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    assert cli.main(["sample", f"hf:{padded}", "--prompt", "a"]) == 2
    assert "another shape" in capsys.readouterr().err


def test_a_tokenizer_comes_back(bpe: BPETokenizer, tmp_path: Path) -> None:
    for ours in (bpe, ByteTokenizer()):
        path = tmp_path / "tokenizer.json"
        path.write_bytes(hf_tokenizer.files(ours)[0][hf_tokenizer.NAME])
        assert hf_tokenizer.read(path).hash == ours.hash
    raw = path.read_text()
    for wrong in ("", "[]", "{", "3", raw.replace('"BPE"', '"WordPiece"'), raw.replace(hf_tokenizer.EOD, "<s>"),
                  raw.replace('"a": 97', '"a": 3')):
        path.write_text(wrong)
        with pytest.raises(InputError):
            hf_tokenizer.read(path)


@pytest.mark.parametrize("shape", tokenizer_hf.SHAPES)
def test_a_tokenizer_of_theirs_comes_back(shape: str, published: Path, tmp_path: Path) -> None:
    """Read, written and read again: the same form. A model that has it is imported with it."""
    content = tokenizer_hf.Reference(np.random.default_rng(2), shape, merges=40).content
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    first = hf_tokenizer.read(path)
    path.write_bytes(hf_tokenizer.files(first)[0][hf_tokenizer.NAME])
    assert first.kind == "hf" and hf_tokenizer.read(path).hash == first.hash
    model = shutil.copytree(published, tmp_path / "model")
    shutil.copy(path, model)

    def longer(tensors: dict[str, np.ndarray]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors[name] = np.resize(tensors[name], (first.vocab_size + 5, tensors[name].shape[1]))

    contract.rewritten(model, longer)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": first.vocab_size + 5}))
    new = hub.import_model(f"hf:{model}", tmp_path / "run", catalogue())
    hub.export_run(new, None, tmp_path / "again")
    assert rundir.read_tokenizer(new).hash == first.hash
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == path.read_bytes()
    before, after = (contract.opened(x, 5)[2].tobytes() for x in (model, tmp_path / "again"))
    assert before == after


def test_the_page_s_walkthrough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands of docs/hugging-face.md, in order, ungated: what is tuned began from what was published, and goes out again."""
    text = (ROOT / "docs" / "hugging-face.md").read_text()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "tune.toml").write_text(re.findall(r"^```toml\n(.*?)^```$", text, re.S | re.M)[0])
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ alpha (.*)$", text, re.M)
    assert len(commands) == 5
    for command in commands:
        args = shlex.split(command)
        short = ["--set", "train.final_windows=2", "--set", "data.baseline=false", "--set", "train.profile=0"]
        assert cli.main(["lab", *args[1:], *short] if args[0] == "train" else args) == 0, capsys.readouterr().err
    before, after = (contract.opened(tmp_path / name, 32)[2] for name in ("published", "tuned"))
    assert 0 < np.abs(after - before).max() <= 10 * 1e-4 * 10  # ten steps at 1e-4: AdamW moves each number by a few times the rate at most


TUNE = """
[run]
name = "tuned"
{model}
sequence = 32
validation = 0.2
baseline = false
[train]
steps = 10
batch = 8
final_windows = 2
profile = 0
[optim]
lr = 1e-3
warmup = 2
"""


@with_theirs
def test_a_model_of_theirs_is_tuned_and_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """A model that transformers saved, with a tokenizer that `tokenizers` learnt, is tuned on text of ours by the page's run file and
    exported. What came out is another model, and transformers has our ids of a prompt, our logits, and the text that we have behind it."""
    script, prompt = str(ROOT / "suites" / "support" / "hf_fixtures.py"), "def tokens of a run: "
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    (model,) = re.findall(r"^    \[model\]\n(?:    .*\n|\n)*    tokenizer_file = .*\n", page, re.M)
    (tmp_path / "tune.toml").write_text(TUNE.format(model=textwrap.dedent(model)))
    monkeypatch.chdir(tmp_path)
    theirs(script, "hub", "hub", str(ROOT / "docs" / "ranks.md"))
    assert len(list(Path("hub").glob("*.safetensors"))) > 2
    assert cli.main(["lab", "tune.toml", "--init", "hf:hub"]) == 0, capsys.readouterr().err
    assert cli.main(["checkpoint", "export", "runs/tuned", "--out", "tuned"]) == 0
    found, layout, flat = contract.opened(Path("tuned"), 32)
    before = contract.opened(Path("hub"), 32)[2]
    assert found.sizes == hf.open_hub(Path("hub")).sizes and 1e-4 < np.abs(flat - before).max() <= 10 * 1e-3 * 10
    tokens = contract.expected(contract.fixtures()[0])[0]
    ours = logits_of(hub.run_file(found.sizes, "x", tmp_path, len(tokens), {}), found.sizes, layout, flat, tokens)
    assert hf_round_trips.error(ours, json.loads(theirs(script, "logits", "tuned"))[0]) <= contract.BOUND
    capsys.readouterr()
    assert cli.main(["sample", "hf:tuned", "--prompt", prompt, "--tokens", "8", "--temperature", "0"]) == 0
    said = json.loads(theirs(script, "greedy", "tuned", prompt, "8"))
    assert said["ids"] == rundir.read_tokenizer(Path("runs/tuned")).encode(prompt.encode()).tolist() and len(said["text"]) >= 8
    assert capsys.readouterr().out.rstrip("\n") == (prompt + said["text"]).rstrip("\n")


def test_what_a_run_may_begin_from(run: Path, published: Path, tmp_path: Path) -> None:
    """A run's checkpoint and its export give the same parameters; another model, tokenizer or step is refused by name."""
    own = rundir.read_config(run)
    layout = program_for(own, 257, catalogue(), 1).states["param"]
    found = []
    for source in (str(run), f"{run}@3", f"hf:{published}"):
        flat = np.full(layout.size, np.nan, np.float32)
        hub.beginning(replace(own, train=replace(own.train, start_from=source)), ByteTokenizer())(flat, layout, 1)
        found.append(flat.tobytes())
    assert len(set(found)) == 1 and found[0] == folders.read(folders.at(run / "checkpoints"), "param")["param"][1].tobytes()
    for source in (str(run), f"hf:{published}"):
        for key, value in (("rope_base", 7.0), ("vocab_size", 264)):
            other = replace(own, train=replace(own.train, start_from=source), model=replace(own.model, **{key: value}))
            with pytest.raises(InputError, match=re.escape(f"model.{key} = {value}")):
                hub.beginning(other, ByteTokenizer())
        with pytest.raises(InputError, match="tokenizer is not that of"):
            hub.beginning(replace(own, train=replace(own.train, start_from=source)), BPETokenizer([(97, 98)]))
    for source, words in ((f"{run}@4", "no such checkpoint"), (str(tmp_path), "not a run directory"),
                          (f"hf:{tmp_path}", "no model of Hugging Face")):
        with pytest.raises(InputError, match=words):
            hub.beginning(replace(own, train=replace(own.train, start_from=source)), ByteTokenizer())
