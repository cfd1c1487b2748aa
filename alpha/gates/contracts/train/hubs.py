"""Cases of models that come from Hugging Face and go there, of their tokenizers, and of text that is sampled. Floor 7."""

# mypy: disable-error-code="arg-type,assignment"
# ruff: noqa: B023  (what a case makes in a round is called in that round)

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from alpha import config
from alpha.checkpoint import folders
from alpha.component import Measured
from alpha.config import Config
from alpha.data.tokenizer import PATTERNS, BPETokenizer, ByteTokenizer
from alpha.data.tokenizer_hf import read_hugging_face
from alpha.gates.contracts.checks import all_hold
from alpha.gates.contracts.data.tokenizer_hf import Reference
from alpha.gates.contracts.train.apart import Named, error_text, instead, said, same
from alpha.graph.plan import Program
from alpha.train import assemble, engine, hf_tokenizer, hub, rundir, sample
from alpha.train.catalogue import catalogue

RUN = """
[run]
name = "model"
out = "{root}"
[model]
family = "{family}"
layers = 1
width = 16
heads = 2
positions = 6
{more}
[data]
corpus = "x"
tokenizer = "bytes"
sequence = 6
[train]
steps = 1
batch = 1
[optim]
lr = 1e-5
[machine]
threads = 1
"""
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("norm_eps = 1e-4", {"norm_eps": 1e-4}),
    "llama": ("head_dim = 4\nkv_heads = 1\nhidden = 24\nrope_base = 300.0\nattention_bias = 'qkv'\ntied = false\nnorm_eps = 1e-3", {
        "norm_eps": 1e-3, "head_dim": 4, "kv_heads": 1, "hidden": 24, "rope_base": 300.0, "attention_bias": "qkv", "rope_scaling": ()}),
}


class _Models:
    """Runs with drawn parameters, and the Programs of their models, built once."""

    def __init__(self, root: Path, rng: np.random.Generator) -> None:
        self.root, self.rng, self.asked = root, rng, list[Any]()
        self.programs: dict[str, Program] = {}

    def config(self, family: str, *overrides: str) -> Config:
        """Of a run."""
        return config.parse(RUN.format(root=self.root.as_posix(), family=family, more=SIZES[family][0]), overrides)

    def program(self, cfg: Config, vocab: int, catalogue: object, threads: int) -> Program:
        """The Program of a model of a family."""
        self.asked.append((cfg, vocab, catalogue, threads))
        if cfg.model.family not in self.programs:
            self.programs[cfg.model.family] = assemble.program_for(cfg, vocab, _CATALOGUE, 1)
        return self.programs[cfg.model.family]

    def run(self, family: str, step: int = 7) -> tuple[Path, np.ndarray]:
        """A run directory with a checkpoint, and its parameters."""
        program = self.program(self.config(family), 257, _CATALOGUE, 1)
        states = hub.empty_states(program)
        layout, flat = states["param"]
        for offset, n in layout.ranges():
            flat[offset : offset + n] = self.rng.standard_normal(n).astype(np.float32)
        with rundir.create(self.config(family), ByteTokenizer()) as held:
            folders.save(held.checkpoints, step, states, {"tokenizer": ByteTokenizer().hash})
            return held.path, flat


_CATALOGUE = catalogue()


@contextmanager
def _models(rng: np.random.Generator) -> Iterator[_Models]:
    with tempfile.TemporaryDirectory(prefix="alpha-hub-") as root:
        made = _Models(Path(root), rng)
        with instead(hub, program_for=made.program), instead(sample, program_for=made.program):
            yield made


def there_and_back(rng: np.random.Generator) -> Measured:
    """A run's parameters, written as a model and read back as a run, or into an executor, are the same to the bit, with the sizes of the
    model and its tokenizer; what is there already, what is no model and what has no place there is refused."""
    checks: Named = []
    with _models(rng) as made:
        for family, (_, own) in SIZES.items():
            path, flat = made.run(family)
            out, cfg = made.root / f"out-{family}", made.config(family)
            same(checks, "exported", hub.export_run(path, None, out, 900), (7, ""))
            checks.append(("files of so many bytes", len(list(out.glob("*.safetensors"))) > 2))
            sizes = hub.sizes_of(cfg, 257)
            same(checks, "sizes", sizes, {"family": family, "vocab_size": 257, "positions": 6, "layers": 1, "width": 16, "heads": 2,
                                          "tied": family == "gpt", **own})
            made.asked.clear()
            new = hub.import_model(f"hf:{out}", made.root / "more" / family, "a catalogue")
            saved = folders.inspect(folders.at(new / "checkpoints", 0))
            layout, again = folders.read(saved.path, "param")["param"]
            same(checks, "back", [again[o : o + n].tobytes() for o, n in layout.ranges()],
                 [flat[o : o + n].tobytes() for o, n in layout.ranges()])
            same(checks, "nothing else", [int(np.abs(folders.read(saved.path, k)[k][1]).max()) for k in ("m", "v", "counter")], [0, 0, 0])
            mine = rundir.read_config(new)
            same(checks, "run file", ((mine.run.name, mine.run.out, mine.data.sequence, mine.train.steps, mine.train.batch, mine.optim.lr),
                                      hub.sizes_of(mine, 257)), ((family, str(made.root / "more"), 6, 1, 1, 1e-5), sizes))
            same(checks, "facts", saved.facts, {"tokenizer": ByteTokenizer().hash, "config": mine.identity(),
                                                "program": made.programs[family].hash(),
                                                "from": str(out.resolve())})
            same(checks, "asked", made.asked, [(mine, 257, "a catalogue", assemble.threads_for(mine))])
            same(checks, "ungated", rundir.read_manifest(new)["status"], "UNGATED")
            same(checks, "tokenizer", rundir.read_tokenizer(new).hash, ByteTokenizer().hash)
            same(checks, "there already", said(lambda: hub.import_model(f"hf:{out}", new, _CATALOGUE)), error_text(
                "InputError", "there is something already", new, "a folder that is not there yet", "name another with --out"))
            for prompt, tokens, length in ((b"abc", 9, 6), (b"", 1, 2), (b"ab", 2, 5), (b"", 0, 2)):
                made.asked.clear()
                opened, tokenizer = hub.open_model(f"hf:{out}", _CATALOGUE, prompt, tokens)
                with opened:
                    got = opened.state("param")
                    same(checks, "opened", ([got[o : o + n].tobytes() for o, n in layout.ranges()], tokenizer.hash),
                         ([flat[o : o + n].tobytes() for o, n in layout.ranges()], ByteTokenizer().hash))
                same(checks, "as long", [(x[0].data.sequence, x[0].run.name) for x in made.asked], [(length, "sample")])
        (path / "config.toml").write_text(made.config("llama", "model.window=3").resolved())
        same(checks, "a window", said(lambda: hub.export_run(path, 7, made.root / "no")), error_text(
            "InputError", "this model has no place among Hugging Face's", "model.window = 3", "0"))
        with instead(hub, _KEYS={"gpt": ()}):
            same(checks, "a family", said(lambda: hub.sizes_of(made.config("llama"), 1)), error_text(
                "InputError", "this family has no place among Hugging Face's", "llama", "gpt"))
        same(checks, "no source", said(lambda: hub.open_source("runs/x")), error_text(
            "InputError", "no model to begin from", "runs/x", "hf:FOLDER, the folder of a model of Hugging Face"))
    return all_hold(checks)


def beginnings(rng: np.random.Generator) -> Measured:
    """What a run begins from: nothing, another run's checkpoint, or a model, whose parameters are written as they are; one with another
    tokenizer, or another size, is refused by the first that differs."""
    checks: Named = []
    with _models(rng) as made:
        path, flat = made.run("gpt")
        hub.export_run(path, None, made.root / "out")
        layout, bytes_ = made.programs["gpt"].states["param"], ByteTokenizer()
        same(checks, "nothing", hub.beginning(made.config("gpt"), bytes_), None)
        for source in (f"{path}", f"{path}@7", f"hf:{made.root / 'out'}"):
            cfg = made.config("gpt", f"train.start_from='{source}'")
            fill, got = hub.beginning(cfg, bytes_), np.zeros_like(flat)
            assert fill is not None
            fill(got, layout, 5)
            same(checks, source, [got[o : o + n].tobytes() for o, n in layout.ranges()],
                 [flat[o : o + n].tobytes() for o, n in layout.ranges()])
            where = path if source.startswith(str(path)) else made.root / "out"
            for override, key, came, expected in (("model.layers=2", "layers", 2, 1), ("model.positions=7", "positions", 7, 6), (
                    "model.vocab_size=300", "vocab_size", 300, 257), ("model.norm_eps=0.5", "norm_eps", 0.5, 1e-4)):
                other = made.config("gpt", f"train.start_from='{source}'", override)
                same(checks, override, said(lambda: hub.beginning(other, bytes_)), error_text(
                    "InputError", f"the run's model is not that of {where}", f"model.{key} = {came}", expected,
                    f"take model.{key} = {expected}"))
            bpe = BPETokenizer([(97, 98)])
            same(checks, "another tokenizer", said(lambda: hub.beginning(cfg, bpe)), error_text(
                "InputError", f"the run's tokenizer is not that of {where}", f"bpe {bpe.hash[:16]}", f"bytes {bytes_.hash[:16]}",
                "take the model's own in [data]"))
        same(checks, "no such step", said(lambda: hub.beginning(made.config("gpt", f"train.start_from='{path}@8'"), bytes_)).split(":")[0],
             "InputError")
        (made.root / "out" / "tokenizer.json").unlink()
        cfg = made.config("gpt", f"train.start_from='hf:{made.root / 'out'}'")
        checks.append(("without a tokenizer the run's own is taken", hub.beginning(cfg, bytes_) is not None))
    for text, found in (("a/b@12", (Path("a/b"), 12)), ("a@b", (Path("a@b"), None)), ("a", (Path("a"), None)), ("@3", (Path(), 3)),
                        ("a@1@2", (Path("a@1"), 2)),
                        ("a@", (Path("a@"), None)), ("a@-1", (Path("a@-1"), None))):
        same(checks, text, hub.at_step(text), found)
    long = f"a@{10**18 - 1}", f"a@{10**18}"
    same(checks, "digits", [hub.at_step(text) for text in long], [(Path("a"), 10**18 - 1), (Path(long[1]), None)])
    with tempfile.TemporaryDirectory(prefix="alpha-at-") as root:
        named = Path(root) / "a@12"  # a run may be called so
        same(checks, "no such folder", hub.at_step(str(named)), (Path(root) / "a", 12))
        named.mkdir()
        same(checks, "a folder of that name", hub.at_step(str(named)), (named, None))
    return all_hold(checks)


def _letters() -> list[str]:
    """GPT-2's bytes_to_unicode, as its authors describe it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    found, n = list[str](), 0
    for byte in range(256):
        found.append(chr(byte) if byte in plain else chr(256 + n))
        n += byte not in plain
    return found


def tokenizer_files(rng: np.random.Generator) -> Measured:
    """Tokenizers of ours as tokenizer.json, whole and by hand: every token under the characters of its bytes, merges by rank, words cut
    where ours cuts them. Read back it is the same one; one that was read from such a file comes out as it came; what has none says why."""
    checks: Named = []
    letters = _letters()
    same(checks, "letters", list(hf_tokenizer.alphabet()), letters)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    merges = [(97, 98), (257, 99), (32, 258)]
    with tempfile.TemporaryDirectory(prefix="alpha-tokens-") as root:
        file = Path(root) / "tokenizer.json"
        for ours, pairs in ((ByteTokenizer(), []), (BPETokenizer([]), []),
                            (BPETokenizer(merges), [["a", "b"], ["ab", "c"], [letters[32], "abc"]])):
            spelled = ["".join(letters[b] for b in token) for token in ours.tokens]
            spelled[256] = "<|endoftext|>"
            split = {"type": "Split", "pattern": {"Regex": hf_tokenizer.word_pattern("code-v1")}, "behavior": "Isolated", "invert": False}
            content = {
                "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None, "decoder": level,
                "added_tokens": [{"id": 256, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
                                  "normalized": False, "special": True}],
                "pre_tokenizer": {"type": "Sequence", "pretokenizers": [level, split] if isinstance(ours, BPETokenizer) else [level]},
                "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                          "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "merges": pairs,
                          "vocab": {name: i for i, name in enumerate(spelled)}}}
            found, why = hf_tokenizer.files(ours)
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
                        "clean_up_tokenization_spaces": False}
            same(checks, "files", (sorted(found), why), (["tokenizer.json", "tokenizer_config.json"], ""))
            same(checks, "content", json.loads(found["tokenizer.json"]), content)
            same(checks, "order of ids", list(json.loads(found["tokenizer.json"])["model"]["vocab"].values()), list(range(len(spelled))))
            same(checks, "settings", json.loads(found["tokenizer_config.json"]), settings)
            file.write_bytes(found["tokenizer.json"])
            same(checks, "read back", hf_tokenizer.read(file).hash, ours.hash)
            file.write_bytes(found["tokenizer.json"] + b"\n")
            same(checks, "as theirs where a byte is another", said(lambda: hf_tokenizer.read(file)).split("\n")[0],
                 f"InputError: {file}: the pre-tokenizer of this tokenizer is not supported")
        raw = rng.choice(np.frombuffer("ab1 9\t\n\r.ü€".encode(), np.uint8), 4000).tobytes()
        text = "".join(letters[b] for b in raw)
        same(checks, "words", re.findall(hf_tokenizer.word_pattern("code-v1"), text), [
            "".join(letters[b] for b in word) for word in re.findall(PATTERNS["code-v1"], raw)])
        same(checks, "every byte is a letter", re.search(r"\\x|\\[tnvfr]| ", hf_tokenizer.word_pattern("code-v1")), None)
        for shape in ("gpt2", "llama3", "qwen"):
            theirs = Reference(rng, shape, 6)
            theirs.content["added_tokens"].reverse()
            file.write_text(json.dumps(theirs.content), encoding="utf-8")
            first = hf_tokenizer.read(file)
            form = first.form()
            found, why = hf_tokenizer.files(first)
            own = json.loads(found["tokenizer.json"])
            splits = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in form["patterns"]]
            vocab, added = theirs.content["model"]["vocab"], theirs.content["added_tokens"]
            pairs = [x.split(" ") if isinstance(x, str) else x for x in theirs.content["model"]["merges"]]
            model, before = own["model"], own["pre_tokenizer"]["pretokenizers"]
            for name, got, wanted in (("vocabulary", model["vocab"], vocab), ("merges", model["merges"], pairs),
                                      ("added", own["added_tokens"], added),
                                      ("form C", own["normalizer"], theirs.content["normalizer"]), ("words", before, [*splits, level]),
                                      ("whole words", model["ignore_merges"], shape == "llama3"), ("why", why, "")):
                same(checks, f"{shape}: {name}", got, wanted)
            end = next(x["content"] for x in added if x["id"] == theirs.eod)
            same(checks, f"{shape}: end", json.loads(found["tokenizer_config.json"])["eos_token"], end)
            file.write_bytes(found["tokenizer.json"])
            same(checks, f"{shape}: again", read_hugging_face(file).hash, first.hash)
    twice = BPETokenizer([(97, 98), (98, 99), (257, 99), (97, 258)])
    same(checks, "two of the same bytes", hf_tokenizer.files(twice), ({}, "ids 259 and 260 stand for the same bytes, b'abc'"))
    same(checks, "another kind", hf_tokenizer.files(SimpleNamespace(kind="words")), ({}, "a tokenizer of kind words has none"))
    for raw in (b"[]", b"{", b"{}", b'{"model": 3}', b'{"model": {"vocab": {}, "merges": [["a", "b"]]}}',
                b'{"model": {"vocab": {"a": "x"}, "merges": [["a", "a"]]}}',
                b'{"model": {"vocab": {"a": 999}, "merges": [["a", "a"]]}}', b'{"model": {"vocab": {}, "merges": [[1]]}}',
                hf_tokenizer.files(twice)[1].encode()):
        same(checks, f"{raw[:40]!r}", hf_tokenizer._ours(raw), None)
    repeated = {"model": {"vocab": {"a": 97, "b": 98, "c": 99, "ab": 257, "bc": 258}, "merges": [["a", "b"], ["b", "c"], ["ab", "c"],
                                                                                                 ["a", "bc"]]}}
    same(checks, "one that has no file", hf_tokenizer._ours(json.dumps(repeated).encode()), None)
    return all_hold(checks)


def _chosen(logits: Sequence[float], temperature: float, top_k: int, u: float) -> int:
    """The dullest way: sorted pairs, and a running sum."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    if temperature == 0:
        return order[0]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    passed, goal = 0.0, u * sum(weights)
    for i, weight in zip(order, weights):
        passed += weight
        if passed > goal:
            return i
    return order[-1]


def _logits(tokens: np.ndarray) -> np.ndarray:
    return np.random.default_rng([int(x) for x in tokens.ravel()]).standard_normal((2, 300)).astype(np.float32)


class _Writer:
    """An executor whose logits are drawn by the text that it sees, and which keeps what it was given."""

    def __init__(self, length: int, documents: bool, end_after: int = 10**9) -> None:
        names = ["tokens", "index", "positions", *["documents"] * documents]
        self.program = SimpleNamespace(plans={"decode": SimpleNamespace(inputs={
            name: SimpleNamespace(type=SimpleNamespace(shape=(1, length))) for name in names})})
        self.given, self.end_after = list[dict[str, np.ndarray]](), end_after

    def run(self, plan: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The next token's logits, more of them than the tokenizer has ids."""
        assert plan == "decode"
        self.given.append({k: v.copy() for k, v in inputs.items()})
        logits = _logits(inputs["tokens"])
        logits[0, 257:] = 99.0
        logits[0, 256] = 99.0 if len(self.given) > self.end_after else -99.0
        return {"logits": logits}


def sampled_text(rng: np.random.Generator) -> Measured:
    """Each token is the one that a dull choice makes of the logits behind the last tokens, the number of its position and the seed; the end
    of a document ends it, and documents are told where the model asks. Impossible numbers are refused, and logits that are none."""
    checks: Named = []
    tokenizer = ByteTokenizer()
    for trial in range(6):
        length, documents, end = int(rng.integers(4, 8)), trial % 2 == 0, (4 if trial == 3 else 10**9)
        seed, prompt = int(rng.integers(1 << 62)), rng.integers(97, 123, trial and int(rng.integers(0, 9)), np.uint8).tobytes()
        temperature, top_k = ((0.0, 0), (0.8, 5), (2.0, 0), (1.0, 50), (100.0, 1), (0.5, 300))[trial]
        executor, looked = _Writer(length, documents, end), list[str]()
        with instead(sample.forbidden, check=looked.append):
            got = list(sample.generate(executor, tokenizer, prompt, tokens=9, temperature=temperature, top_k=top_k, seed=seed))
        ids, expected = [256, *prompt], list[bytes]()
        for step in range(9):
            seen = ids[-length:]
            tokens = np.array([[*seen, *[256] * (length - len(seen))]], np.int32)
            given = executor.given[step]
            before = np.array([[int((tokens[0, :i] == 256).sum()) for i in range(length)]], np.int32)
            wanted = {"tokens": tokens, "index": np.array([len(seen) - 1], np.int32), "positions": np.arange(length, dtype=np.int32)[None],
                      **({"documents": before} if documents else {})}
            same(checks, "inputs", {k: (v.dtype.name, v.tolist()) for k, v in given.items()}, {k: (v.dtype.name, v.tolist()) for k,
                                                                                               v in wanted.items()})
            logits = _logits(tokens)[0, :257].astype(float)
            logits[256] = 99.0 if step >= end else -99.0
            u = np.random.Generator(np.random.Philox(key=np.array([seed, len(ids)], np.uint64))).random()
            chosen = _chosen(logits.tolist(), temperature, top_k, float(u))
            if chosen == 256:
                break
            ids.append(chosen)
            expected.append(bytes([chosen]))
        same(checks, f"text {trial}", (got, looked), (expected, ["before sampling"]))
    for logits, temperature, top_k, u in (([1.0, 3.0, 3.0], 0.0, 0, 0.5), ([1.0, 3.0, 3.0], 1.0, 2, 0.999999), ([0.0] * 4, 1.0, 0, 0.25),
                                          ([0.0] * 4, 1.0, 0, 0.0),
                                          ([0.0] * 4, 1.0, 3, math.nextafter(1, 0))):
        same(checks, f"{logits} {u}", sample.pick(np.array(logits), temperature, top_k, u), _chosen(logits, temperature, top_k, u))
    same(checks, "no numbers", said(lambda: sample.pick(np.array([1.0, np.nan, np.inf]), 1.0, 0, 0.5)), error_text(
        "NonFiniteError", "the model gives non-finite logits", "2 of 3", "finite logits", "sample from an earlier checkpoint with --at"))
    plain: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "tokens": 1, "seed": 1}
    for wrong in ({"temperature": -0.1}, {"temperature": 100.1}, {"temperature": float("nan")}, {"top_k": -1}, {"tokens": 0}, {"seed": -1},
                  {"seed": 1 << 63}):
        own = {**plain, **wrong}
        same(checks, f"{wrong}", said(lambda: list(sample.generate(None, tokenizer, b"", **own))), error_text(
            "InputError", "impossible sampling",
            f"temperature {own['temperature']}, top-k {own['top_k']}, tokens {own['tokens']}, seed {own['seed']}",
            "temperature 0 to 100, top-k >= 0, tokens >= 1, seed >= 0"))
    for edge in ({"temperature": 0.0, "top_k": 0}, {"temperature": 100.0, "seed": (1 << 63) - 1}, {"seed": 0}):
        same(checks, f"{edge}", len(list(sample.generate(_Writer(4, False), tokenizer, b"", **{**plain, **edge}))), 1)
    same(checks, "for a terminal", sample.printable(b"a\tb\n\x1b[1m\xff\xc3\xbc"), "a\tb\n·[1m\ufffdü")
    with _models(rng) as made:
        path, flat = made.run("gpt", 3)
        made.run("llama")
        copied = list[bytes]()
        with instead(sample, refresh=lambda own: copied.append(own.state("param").tobytes())):
            opened, own_tokenizer, step = sample.open_run(path, _CATALOGUE)
        same(checks, "copies are made of what was read", copied, [flat.tobytes()])
        with opened:
            same(checks, "opened", (opened.state("param").tobytes(), own_tokenizer.hash, step), (flat.tobytes(), tokenizer.hash, 3))
        same(checks, "no such step", said(lambda: sample.open_run(path, _CATALOGUE, 4)).split(":")[0], "InputError")
        other, closed = BPETokenizer([(97, 98)]), list[object]()
        other.save(path / "tokenizer.json")
        with instead(engine.CpuExecutor, close=lambda own: closed.append(own)):
            same(checks, "another tokenizer", said(lambda: sample.open_run(path, _CATALOGUE, 3)), error_text(
                "InputError", "the run's tokenizer is not the one it was trained with", other.hash[:16], tokenizer.hash[:16],
                "restore tokenizer.json of the run"))
        same(checks, "closed", len(closed), 1)
        for one in closed:
            one.close()  # type: ignore[attr-defined]
    same(checks, "kept", replace(made.config("gpt").run, seed=2).seed, 2)
    return all_hold(checks)
