"""Tokenizers of Hugging Face: ids as the library `tokenizers` gives them, refusals, and a run that trains on one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import hf_fuzz
import pytest

from alpha import cli, config
from alpha.data.tokenizer import ByteTokenizer
from alpha.data.tokenizer_file import open_tokenizer
from alpha.data.tokenizer_hf import read_hugging_face
from alpha.errors import ConfigError, InputError
from alpha.train.assemble import tokenizer_file_of
from alpha.train.rundir import read_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def root(folder: Path, small_run: Callable[..., Path]) -> Path:
    """A folder with a small corpus and a run file."""
    return small_run(folder, {"data.tokenizer": "bpe", "model.width": 8, "model.heads": 1, "data.sequence": 8,
                              "train.steps": 1, "train.batch": 1, "train.final_windows": 1, "train.verify": 0, "train.profile": 0}).parent


@pytest.fixture(scope="module")
def llama3(folder: Path) -> Path:
    hf_fuzz.train("llama3").save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("shape", hf_fuzz.SHAPES)
def test_ids_are_those_of_the_library(shape: str, folder: Path) -> None:
    """`hf_fuzz.py --texts 1000000` draws more."""
    theirs, ours = hf_fuzz.pair(shape, folder)
    assert hf_fuzz.differences(theirs, ours, 1250, seed=1) == []
    assert ours.tokens[ours.eod] == b"" and theirs.id_to_token(ours.eod) == hf_fuzz.SPECIAL[0]


@pytest.mark.parametrize("shape", hf_fuzz.SHAPES)
def test_a_wrong_merge_is_seen(shape: str, folder: Path) -> None:
    """The yardstick can fail: two merges swapped give other ids."""
    theirs, _ = hf_fuzz.pair(shape, folder)
    content = json.loads(theirs.to_str())
    merges = content["model"]["merges"]
    merges[0], merges[9] = merges[9], merges[0]
    (folder / "swapped.json").write_text(json.dumps(content), encoding="utf-8")
    assert hf_fuzz.differences(theirs, read_hugging_face(folder / "swapped.json"), 100, seed=1)


def test_files_that_are_broken_anywhere_are_read_or_refused(llama3: Path, tmp_path: Path) -> None:
    """Drawn parts of a file removed, or of another type: an error of ours, or a tokenizer that encodes."""
    content = json.loads(llama3.read_text(encoding="utf-8"))
    model, split = content["model"], content["pre_tokenizer"]["pretokenizers"][0]
    model["merges"] = model["merges"][:20]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if len(token) == 1 or [*token] in model["merges"]}
    for i, token in enumerate((*model["vocab"], *content["added_tokens"])):
        token.update(id=i) if isinstance(token, dict) else model["vocab"].update({token: i})
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    split["pattern"]["Regex"] = r"[a-z]+|[^a-z]+"
    draw, path, counts = random.Random(5), tmp_path / "t.json", {"read": 0, "refused": 0}
    strange = (None, 3, -1, 1.5, True, "x", "", "\ud800", [], {}, [[]], {"type": "Split"}, 2**70)

    def places(value: object, way: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
        return [way, *(p for k, v in draw.sample(inner, min(len(inner), 12)) for p in places(v, (*way, k)))]

    for way in places(content)[1:]:
        for value in ("remove", *draw.sample(strange, 3)):
            broken = json.loads(json.dumps(content))
            inside = broken
            for step in way[:-1]:
                inside = inside[step]
            if value == "remove":
                del inside[way[-1]]
            else:
                inside[way[-1]] = value
            path.write_text(json.dumps(broken), encoding="utf-8")
            try:
                assert read_hugging_face(path).encode("any té".encode()).size
                counts["read"] += 1
            except InputError:
                counts["refused"] += 1
    assert counts["read"] > 20 and counts["refused"] > 100, counts


def test_a_run_with_more_ids_than_16_bits_hold(llama3: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of Llama 3, 128,256: planned, trained, sampled; the run keeps the tokenizer, and goes on without a change of it."""
    content = json.loads(llama3.read_text(encoding="utf-8"))
    most = max(token["id"] for token in content["added_tokens"])
    content["model"]["vocab"] |= {f"unused{i}": i for i in range(most + 1, 128_256)}
    large = root / "large.json"
    large.write_text(json.dumps(content), encoding="utf-8")
    sets = ["--set", f"data.tokenizer_file={large}"]
    assert cli.main(["plan", str(root / "run.toml"), *sets]) == 0 and "128,256" in capsys.readouterr().out
    assert cli.main(["lab", str(root / "run.toml"), *sets]) == 0
    run, ours = root / "runs" / "r", open_tokenizer(large)
    kept = read_tokenizer(run)
    assert kept.hash == ours.hash and kept.tokens == ours.tokens and kept.vocab_size == 128_256 and kept.dtype.itemsize == 4
    assert cli.main(["sample", str(run), "--prompt", "日 été", "--tokens", "3"]) == 0
    cfg = config.load(run / "config.toml")
    assert cfg.data.tokenizer_file == str(large) and tokenizer_file_of(cfg) == large
    assert cli.main(["lab", str(root / "run.toml"), *sets, "--resume", "--set", "data.tokenizer_end=<|im_end|>"]) == 2


@pytest.mark.parametrize(("sets", "words"), [
    (["data.tokenizer_file=\"FILE\"", "data.vocab=600"], "exclude each other"),
    (["data.tokenizer_file=\"FILE\"", "data.tokenizer=\"bytes\""], "exclude each other"),
    (["data.tokenizer_file=\"a\\u0000b\""], "no path"),
    (["data.tokenizer_end=\"</s>\""], "of no file"),
])  # fmt: skip
def test_keys_that_contradict_each_other(sets: list[str], words: str, llama3: Path, root: Path) -> None:
    cfg = config.load(root / "run.toml", [s.replace("FILE", str(llama3)) for s in sets])
    with pytest.raises(ConfigError, match=words):
        tokenizer_file_of(cfg)


def test_a_saved_tokenizer_is_a_file_too(folder: Path) -> None:
    ByteTokenizer().save(folder / "bytes.json")
    assert open_tokenizer(folder / "bytes.json").kind == "bytes"
    with pytest.raises(InputError, match="tokenizer_end"):
        open_tokenizer(folder / "bytes.json", "</s>")
    (folder / "none.json").write_bytes(b"{")
    with pytest.raises(InputError, match="no JSON"):
        open_tokenizer(folder / "none.json")
