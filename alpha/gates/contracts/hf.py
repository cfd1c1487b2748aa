"""Cases of `checkpoint.hf`: what transformers computed and wrote (baselines/hf), round trips of drawn models, and every way in which a
folder can be wrong. Floor 7.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import permutations
from math import inf, ldexp, nan, prod
from pathlib import Path
from typing import Any

import numpy as np

from alpha.checkpoint import hf, safetensors
from alpha.component import Measured
from alpha.errors import AlphaError, CorruptError, InputError, MachineError
from alpha.gates.contracts import saves
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.data.support import Cases
from alpha.gates.contracts.disks import Failing, Killed, full
from alpha.graph.evaluate import evaluate
from alpha.graph.ir import prune
from alpha.graph.state import StateLayout
from alpha.graph.trace import Tracer
from alpha.models.family import family
from alpha.train.hub import run_file

FIXTURES = Path(__file__).parents[3] / "baselines" / "hf"
"""Models that transformers saved, each with the logits that it computed; suites/support/hf_fixtures.py makes them."""

BOUND = 1e-5
"""Of logits, relative to the largest: what float32 leaves of some thousand sums, as transformers computes them."""


@contextmanager
def scratch() -> Iterator[Path]:
    """An empty folder for as long as it is used."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def fixtures() -> list[Path]:
    """The folders of baselines/hf."""
    return sorted(path.parent for path in FIXTURES.glob("*/logits.json"))


def expected(path: Path) -> tuple[list[int], np.ndarray]:
    """(tokens, logits [tokens, vocabulary] in float32) of a fixture, as transformers computed them."""
    found = json.loads((path / "logits.json").read_text())
    return found["tokens"], np.array(found["logits"], np.float32)


def layout_of(sizes: hf.Sizes, sequence: int) -> tuple[StateLayout, Any, Any]:
    """(parameters, family, its sizes) of a model."""
    cfg = run_file(sizes, "model", Path("runs"), sequence, {})
    own = family(cfg.model.family)
    c, t = own.sizes(cfg, sizes["vocab_size"]), Tracer("shapes")
    own.loss(t, c, 1, sequence, False)
    return StateLayout(t.tensors.values()), own, c


def opened(path: Path, sequence: int) -> tuple[hf.Hub, StateLayout, np.ndarray]:
    """(model, parameters, the flat array of them)."""
    hub = hf.open_hub(path)
    layout = layout_of(hub.sizes, sequence)[0]
    flat = np.full(layout.size, nan, np.float32)
    hub.fill(flat, layout)
    return hub, layout, flat


def _logits(rng: np.random.Generator) -> Measured:
    """Each fixture through the float64 oracles, at every position, against what transformers computed in float32."""
    worst = 0.0
    for path in fixtures():
        tokens, want = expected(path)
        hub, layout, flat = opened(path, len(tokens))
        _, own, c = layout_of(hub.sizes, len(tokens))
        t = Tracer("decode", layout)
        t.output("logits", own.decode(t, c, 1, len(tokens)))
        graph = prune(t.graph)
        for i in range(len(tokens)):
            inputs = {"tokens": np.array([tokens], np.int32), "positions": np.arange(len(tokens), dtype=np.int32)[None],
                      "index": np.array([i], np.int32)}
            got = evaluate(graph, {k: inputs[k] for k in graph.inputs}, {"param": flat})[0]["logits"][0]
            worst = max(worst, float(np.abs(got - want[i]).max() / np.abs(want).max()))
    return Measured(error=worst, bound=BOUND, cases=len(fixtures()))


def _written(rng: np.random.Generator) -> Measured:
    """A fixture that is read and written again has transformers' names and shapes, and the same numbers to the bit; its config.json says
    what transformers' says, key by key."""
    count = Checks()
    for path in fixtures():
        hub, layout, flat = opened(path, 4)
        with scratch() as at:
            hf.export(at / "m", hub.sizes, flat, layout, eod=0, files={"x.txt": b"x"})
            count.that((at / "m" / "x.txt").read_bytes() == b"x", "a file beside it is missing")
            theirs, ours = safetensors.folder(path), safetensors.folder(at / "m")
            count.that(set(theirs) == set(ours), f"{path.name}: names {sorted(set(theirs) ^ set(ours))[:3]}")
            for name in set(theirs) & set(ours):
                one, two = safetensors.read(theirs[name]), safetensors.read(ours[name])
                count.that(one.shape == two.shape and one.tobytes() == two.tobytes(), f"{path.name}: {name}")
            said, says = (json.loads((p / "config.json").read_text()) for p in (path, at / "m"))
            for key in (says.keys() & said.keys()) - {"dtype", "torch_dtype", *(k for k in says if k.endswith("_pdrop"))}:
                count.that(says[key] == said[key], f"{path.name}: {key} = {says[key]}")
            count.that(hf.open_hub(at / "m").sizes == hub.sizes, f"{path.name}: other sizes")
    return count.measured()


def drawn(rng: np.random.Generator, kind: str, tied: bool) -> tuple[dict[str, Any], StateLayout, np.ndarray]:
    """(sizes, parameters, the flat array of them) of a small model."""
    d, groups, per = 2 * int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    sizes: dict[str, Any] = {"family": "gpt", "vocab_size": int(rng.integers(9, 40)), "positions": int(rng.integers(5, 9)),
                             "layers": int(rng.integers(1, 12)), "width": 16 * groups * per * d, "heads": groups * per, "tied": tied}
    sizes["norm_eps"] = float(10 ** rng.uniform(-7, -2))
    if kind != "gpt2":
        bias = "qkv" if kind == "qwen2" else str(rng.choice(["none", "all"]))
        sizes |= {"family": "llama", "kv_heads": groups, "hidden": 4 * int(rng.integers(1, 9)), "head_dim": 2 * int(rng.integers(1, 9)),
                  "attention_bias": bias, "rope_base": float(rng.integers(100, 10**6)),
                  "rope_scaling": (float(rng.uniform(1, 9)), 1.5, 4.0, float(rng.integers(3, 40)))[: int(rng.choice([0, 1, 4]))]}
    layout = layout_of(sizes, 5)[0]
    flat = np.zeros(layout.size, np.float32)
    for start, size in layout.ranges():
        flat[start : start + size] = rng.standard_normal(size)
    return sizes, layout, flat


def _round_trip(rng: np.random.Generator) -> Measured:
    """Drawn models of either kind, written and read: the same sizes, and the same bits. Dropout is written where a model has it: not on
    probabilities of attention."""
    count = Checks()
    for kind in hf.LAYOUTS:
        for tied in (True, False):
            sizes, layout, flat = drawn(rng, kind, tied)
            with scratch() as at:
                hf.export(at / "m", sizes, flat, layout, eod=0, files={})
                hub, _, again = opened(at / "m", 5)
                count.that(hub.sizes == sizes, f"{kind}: sizes {hub.sizes}")
                count.that(flat.tobytes() == again.tobytes(), f"{kind}: other bits")
    sizes, layout, flat = drawn(rng, "gpt2", tied=True)
    rate = float(rng.uniform(0.1, 0.9))
    with scratch() as at:
        hf.export(at / "m", {**sizes, "dropout": rate}, flat, layout, eod=0, files={})
        said = json.loads((at / "m" / "config.json").read_text())
        found = {key: said[key] for key in said if key.endswith("_pdrop")}
        count.that(found == {"attn_pdrop": 0.0, "embd_pdrop": rate, "resid_pdrop": rate}, f"of a dropout of {rate} it says {found}")
    return count.measured()


def _in_files(rng: np.random.Generator) -> Measured:
    """A drawn model under limits from one tensor a file to one file: no file holds more than the limit allows, none begins before the one
    before it is full, the index says what is where, and what is read has the same bits."""
    count, (sizes, layout, flat) = Checks(), drawn(rng, "gpt2", True)
    held = 4 * sum(t.size for t in layout.tensors)
    for most in (1, *(int(rng.integers(1, held)) for _ in range(4)), held - 1, held):
        with scratch() as at:
            hf.export(at / "m", sizes, flat, layout, eod=0, files={}, most=most)
            names = sorted(p.name for p in at.glob("m/*.safetensors"))
            files = [list(safetensors.header(at / "m" / name).values()) for name in names]
            first, full = [of[0].size for of in files], [sum(t.size for t in of) for of in files]
            expected = [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))]
            count.that(names == ([safetensors.ONE] if most >= held else expected), f"at most {most} of {held}: {names}")
            count.that(all(size <= most or len(of) == 1 for size, of in zip(full, files)), f"at most {most}: files of {full} bytes")
            count.that(all(one + two > most for one, two in zip(full, first[1:])), f"at most {most}: files of {full} bytes, not full")
            if most < held:
                index = json.loads((at / "m" / safetensors.INDEX).read_text())
                says = {t.name: name for name, of in zip(names, files) for t in of}
                count.that(index == {"metadata": {"total_size": held}, "weight_map": says}, "an index that is not what the files hold")
            count.that(all(of[0].start % 8 == 0 for of in files), f"at most {most}: files whose tensors begin off a multiple of 8")
            count.that(flat.tobytes() == opened(at / "m", 5)[2].tobytes(), f"at most {most}: other bits")
    return count.measured()


def _widened(rng: np.random.Generator) -> Measured:
    """Each of the 65,536 numbers of bfloat16 and float16, and drawn ones of float32: what its sign, exponent and fraction say."""
    count, every = Checks(), range(1 << 16)

    def brain(bits: int) -> float:
        sign, exponent, fraction = -1.0 if bits >> 15 else 1.0, bits >> 7 & 0xFF, bits & 0x7F
        if exponent == 0xFF:
            return nan if fraction else sign * inf
        return sign * ldexp((fraction | 0x80 if exponent else fraction), max(exponent, 1) - 127 - 7)

    halves = [struct.unpack("<e", bits.to_bytes(2, "little"))[0] for bits in every]
    singles = rng.integers(0, 1 << 32, 999, np.uint32)
    for dtype, raw, want in (("BF16", np.arange(1 << 16, dtype="<u2").tobytes(), [brain(bits) for bits in every]),
                             ("F16", np.arange(1 << 16, dtype="<u2").tobytes(), halves),
                             ("F32", singles.astype("<u4").tobytes(), singles.view(np.float32).tolist())):
        with scratch() as at:
            (at / "x").write_bytes(made({"x": {"dtype": dtype, "shape": [len(want)], "data_offsets": [0, len(raw)]}}, raw))
            got = safetensors.read(safetensors.header(at / "x")["x"])
        with np.errstate(invalid="ignore"):  # signalling NaN
            got, wanted = got.astype(np.float64), np.array(want, np.float64)
        count.that(((got == wanted) & (np.signbit(got) == np.signbit(wanted)) | (np.isnan(got) & np.isnan(wanted))).all(), dtype)
    return count.measured()


def _same_bytes(rng: np.random.Generator) -> Measured:
    """Two exports of one state are the same files, whatever lies between its tensors."""
    count = Checks()
    for kind in hf.LAYOUTS:
        sizes, layout, flat = drawn(rng, kind, True)
        dirty = np.full_like(flat, 7)
        for start, size in layout.ranges():
            dirty[start : start + size] = flat[start : start + size]
        with scratch() as at:
            for name, of in (("a", flat), ("b", dirty)):
                hf.export(at / name, sizes, of, layout, eod=1, files={})
            for file in sorted(p.name for p in (at / "a").iterdir()):
                data = (at / "a" / file).read_bytes()
                count.that(data == (at / "b" / file).read_bytes(), f"{file} differs")
                count.add(data)
    return count.measured()


# -- what is wrong -------------------------------------------------------------------------------------------------------------


def made(table: Any, data: bytes) -> bytes:
    """A safetensors file of this header and these bytes."""
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def _entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def _headers(rng: np.random.Generator) -> Measured:
    """Headers that are torn, lie about ranges, or say what the format does not: refused, each with its own kind of error. Sound ones are
    taken, with tensors without elements too."""
    count, table = Checks(), {"a": _entry(0, 8), "b": _entry(8, 12)}
    data = rng.bytes(12)
    whole = made(table, data)
    one = json.dumps(_entry(0, 8))
    damaged: dict[str, bytes] = {
        "empty": b"", "seven bytes": whole[:7], "no header": whole[:8], "half a header": whole[:20], "one byte short": whole[:-1],
        "one byte long": whole + b"\0", "a huge header": (1 << 62).to_bytes(8, "little") + whole[8:],
        "above the limit": (safetensors.MOST_HEADER + 1).to_bytes(8, "little") + whole[8:],
        "a list": made(b"[]", b""), "text": made(b'"a"', b""), "blanks before": made(b" " + json.dumps(table).encode(), data),
        "no JSON": made(b"{" * 9, b""), "deep": made(b'{"a":' + b"[" * 100_000, b""), "not UTF-8": made(b'{"\xff":1}', b""),
        "NaN": made(b'{"a":NaN}', b""), "a name twice": made(f'{{"a":{one},"a":{one}}}'.encode(), data[:8]),
        "a field twice": made(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', data[:8]),
        "overlapping": made({"a": _entry(0, 8), "b": _entry(4, 12)}, data),
        "the same range": made({"a": _entry(0, 8), "b": _entry(0, 8)}, data[:8]),
        "a hole": made({"a": _entry(0, 4), "b": _entry(8, 12)}, data), "a hole before": made({"a": _entry(4, 12)}, data),
        "behind the end": made({"a": _entry(0, 16)}, data), "unnamed bytes": made({"a": _entry(0, 8)}, data),
        "nothing named": made({}, data),
        "backwards": made({"a": {**_entry(0, 8), "data_offsets": [8, 0]}}, data[:8]),
        "negative": made({"a": _entry(-4, 4)}, data[:8]),
        "too few bytes": made({"a": _entry(0, 8, [3])}, data[:8]), "too many bytes": made({"a": _entry(0, 8, [1])}, data[:8]),
        "a negative axis": made({"a": _entry(0, 8, [-1, -2])}, data[:8]), "a fraction": made({"a": _entry(0, 8, [2.0])}, data[:8]),
        "true": made({"a": _entry(0, 4, [True])}, data[:4]), "a huge axis": made({"a": _entry(0, 8, [1 << 64, 0, 2])}, data[:8]),
        "many axes": made({"a": _entry(0, 8, [2] + [1] * 99)}, data[:8]),
        "three offsets": made({"a": {**_entry(0, 8), "data_offsets": [0, 8, 8]}}, data[:8]),
        "no dtype": made({"a": {"shape": [2], "data_offsets": [0, 8]}}, data[:8]),
        "a field more": made({"a": {**_entry(0, 8), "x": 1}}, data[:8]),
        "metadata of numbers": made({"__metadata__": {"x": 1}, "a": _entry(0, 8)}, data[:8]), "no table": made({"a": 3}, b""),
    }
    with scratch() as at:
        path = at / safetensors.ONE
        path.write_bytes(whole)
        found = safetensors.folder(at)
        good = [(x.shape, x.size) for x in found.values()] == [((2,), 8), ((1,), 4)]
        count.that(good and path.read_bytes()[found["b"].start :] == data[8:], "a sound file is read wrongly")
        apart = {"none": _entry(0, 0), "two": _entry(0, 8), "no more": _entry(8, 8, [0, 3]), "one": _entry(8, 12)}
        for order in permutations(apart):  # a tensor without elements begins where another one does, and a header names them in any order
            path.write_bytes(made({name: apart[name] for name in order}, data))
            count.that({name: x.size for name, x in safetensors.header(path).items()} == {"none": 0, "two": 8, "no more": 0, "one": 4},
                       f"in the order {order}")
        for what, raw in damaged.items():
            path.write_bytes(raw)
            count.refuses(CorruptError, safetensors.header, what, path)
        for what, most in (("empty", 0), ("seven bytes", 0), ("no header", 0), ("half a header", 12), ("above the limit", len(whole) - 8)):
            path.write_bytes(damaged[what])
            count.says(CorruptError, lambda: safetensors.header(path), what, "its header does not fit", f"at most {most:,}")
        path.write_bytes(damaged["above the limit"])
        os.truncate(path, safetensors.MOST_HEADER + 99)
        count.says(CorruptError, lambda: safetensors.header(path), "a longer file", "does not fit", f"at most {safetensors.MOST_HEADER:,}")
        for dtype in ("F4", "f32", "", "BF16 "):
            path.write_bytes(made({"a": _entry(0, 8, dtype=dtype)}, data[:8]))
            count.refuses(InputError, safetensors.header, f"dtype {dtype!r}", path)
        path.write_bytes(whole)
        x = safetensors.header(path)["b"]
        path.write_bytes(whole[:-2])
        count.refuses(CorruptError, safetensors.read, "shorter since", x)
        path.unlink()
        path.mkdir()
        count.refuses(InputError, safetensors.header, "a folder", path)
    return count.measured()


def _copied(of: str, at: Path) -> Path:
    """A copy of a fixture that may be spoilt."""
    target = at / of
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(FIXTURES / of, target)
    return target


def _indices(rng: np.random.Generator) -> Measured:
    """Models in several files whose index names what is not there, leaves out what is, or leads out of the folder."""
    count = Checks()

    def spoilt(what: str, kind: type[Exception], spoil: Callable[[Path, dict[str, Any]], object]) -> None:
        with scratch() as at:
            path = _copied("llama", at)
            content = json.loads((path / safetensors.INDEX).read_text())
            left = spoil(path, content)
            (path / safetensors.INDEX).write_text(left if isinstance(left, str) else json.dumps(content))
            count.refuses(kind, safetensors.folder, what, path)

    name, file = "model.norm.weight", "model-00001-of-00003.safetensors"
    spoilt("a tensor of another file", CorruptError, lambda p, c: c["weight_map"].update({name: file}))
    spoilt("a tensor that is nowhere", CorruptError, lambda p, c: c["weight_map"].update({"x": file}))
    spoilt("a tensor left out", CorruptError, lambda p, c: c["weight_map"].pop(name) and None)
    spoilt("a file that is missing", InputError, lambda p, c: (p / file).unlink())
    spoilt("a file that is torn", CorruptError, lambda p, c: (p / file).write_bytes((p / file).read_bytes()[:-1]))
    def elsewhere(out: object, p: Path, c: dict[str, Any]) -> None:
        c["weight_map"][name] = out

    for out in ("../x.safetensors", "/etc/passwd", "a/b.safetensors", ".safetensors", "x.bin", "", 3):
        spoilt(f"the file {out!r}", CorruptError, partial(elsewhere, out))
    spoilt("no weight_map", CorruptError, lambda p, c: c.pop("weight_map") and None)
    spoilt("no JSON", CorruptError, lambda p, c: "{")
    spoilt("a list", CorruptError, lambda p, c: "[]")
    with scratch() as at:
        (at / "pytorch_model.bin").write_bytes(b"x")
        count.refuses(InputError, safetensors.folder, "another format", at)
        count.refuses(InputError, safetensors.folder, "nothing", at / "none")
    return count.measured()


OTHERS: dict[str, tuple[tuple[str, Any], ...]] = {
    "gpt2": (("activation_function", "gelu"), ("activation_function", "relu"), ("layer_norm_epsilon", 0), ("layer_norm_epsilon", "1e-5"),
             ("n_inner", 24), ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True),
             ("n_layer", 0), ("n_embd", "12"), ("n_positions", True), ("vocab_size", 1.5), ("n_head", -3), ("tie_word_embeddings", 1),
             ("quantization_config", {"bits": 4}), ("model_type", "bert"), ("model_type", None), ("model_type", ["gpt2"])),
    "llama": (("hidden_act", "gelu"), ("rms_norm_eps", -1e-6), ("head_dim", 0), ("head_dim", "8"), ("attention_bias", 1),
              ("mlp_bias", True), ("num_key_value_heads", 0),
              ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
              ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
              ("rope_scaling", {"type": "dynamic", "factor": 2.0}), ("rope_scaling", {"type": ["linear"], "factor": 2.0}),
              ("rope_parameters", {"rope_type": "linear"}), ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}),
              ("rope_parameters", "default"), ("intermediate_size", -1), ("quantization_config", {"bits": 4})),
    "qwen2": (("use_sliding_window", True), ("layer_types", ["full_attention", "sliding_attention"]), ("layer_types", ["full_attention"])),
}
"""Fixture -> (key of config.json, a value that no model here can have)."""


ROTARY: dict[str, tuple[str, Any]] = {
    "hidden_size": ("width", 4096), "num_hidden_layers": ("layers", 32), "num_attention_heads": ("heads", 32),
    "rms_norm_eps": ("norm_eps", 1e-6), "rope_theta": ("rope_base", 10000.0), "tie_word_embeddings": ("tied", False)}
ABSENT: dict[str, dict[str, tuple[str, Any]]] = {
    "gpt2": {"vocab_size": ("vocab_size", 50257), "n_positions": ("positions", 1024), "n_layer": ("layers", 12), "n_embd": ("width", 768),
             "n_head": ("heads", 12), "layer_norm_epsilon": ("norm_eps", 1e-5), "tie_word_embeddings": ("tied", True)},
    "llama": {**ROTARY, "vocab_size": ("vocab_size", 32000), "max_position_embeddings": ("positions", 2048),
              "intermediate_size": ("hidden", 11008), "attention_bias": ("attention_bias", False)},
    "qwen2": {**ROTARY, "vocab_size": ("vocab_size", 151936), "max_position_embeddings": ("positions", 32768),
              "intermediate_size": ("hidden", 22016), "num_key_value_heads": ("kv_heads", 32)},
}
"""Type of a model -> key of its config.json -> (our size, what GPT2Config, LlamaConfig and Qwen2Config of transformers take without it)."""
NEEDLESS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation_function": "gelu_new", "n_inner": None, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
             "add_cross_attention": False, "quantization_config": None},
    "llama": {"hidden_act": "silu", "mlp_bias": False, "quantization_config": None},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False, "layer_types": None, "quantization_config": None},
}
"""Keys that say what is so without them."""


def _absent(rng: np.random.Generator) -> Measured:
    """A config.json that says any of its keys, with drawn values, means transformers' own defaults for the others. One that names both
    keys of its frequencies means the scaling of either, and the newest base."""
    count = Checks()
    for kind in ("llama", "qwen2"):
        for scaled in range(2):
            factor, base = float(rng.uniform(1, 9)), float(rng.integers(100, 10**6))
            said: dict[str, dict[str, Any]] = {"rope_scaling": {"rope_type": "default"},
                                               "rope_parameters": {"rope_type": "default", "rope_theta": base}}
            said[("rope_scaling", "rope_parameters")[scaled]] |= {"rope_type": "linear", "factor": factor}
            got = hf.LAYOUTS[kind].sizes(hf._Reader("made/config.json", {**said, "rope_theta": 7.0}))
            count.that((got["rope_scaling"], got["rope_base"]) == ((factor,), base), f"a {kind} of {json.dumps(said)}: {got}")
    for kind, keys in ABSENT.items():
        for part in (0.0, 1.0, *rng.random(100)):
            given, want = {k: v for k, v in NEEDLESS[kind].items() if rng.random() < part}, dict[str, Any]()
            for key, (ours, default) in keys.items():
                value: Any = bool(rng.integers(2)) if isinstance(default, bool) else type(default)(rng.integers(1, 1 << 20))
                want[ours] = value if rng.random() < part else default
                given |= {key: value} if want[ours] is value else {}
            if kind != "gpt2":
                want |= {"head_dim": max(want["width"] // want["heads"], 1), "rope_scaling": ()}
                given |= {"head_dim": 1} if want["width"] < want["heads"] else {}
            if kind == "llama":
                want |= {"kv_heads": want["heads"], "attention_bias": "all" if want["attention_bias"] else "none"}
            if kind == "qwen2":
                want["attention_bias"] = "qkv"
            got = hf.LAYOUTS[kind].sizes(hf._Reader("made/config.json", given))
            count.that(got == want, f"a {kind} of {json.dumps(given)}: {sorted({*got.items()} ^ {*want.items()}, key=str)}")
    return count.measured()


def _configs(rng: np.random.Generator) -> Measured:
    """A model that needs what no model here has is refused by the key; so is a config.json that is none."""
    count = Checks()
    with scratch() as at:
        for name, changes in OTHERS.items():
            path = _copied(name, at)
            before = json.loads((path / "config.json").read_text())
            for key, value in changes:
                (path / "config.json").write_text(json.dumps({**before, key: value}))
                count.says(InputError, partial(hf.open_hub, path), f"{key} = {value}", key)
            if name in ("gpt2", "llama"):
                deep = {**before, "n_layer" if name == "gpt2" else "num_hidden_layers": 20_000}
                (path / "config.json").write_text(json.dumps(deep))
                count.says(InputError, partial(hf.open_hub, path), "more blocks than tensors", "20000 blocks")
            for raw in (b"", b"[]", b"{", b"\xff", b"null"):
                (path / "config.json").write_bytes(raw)
                count.refuses(CorruptError, hf.open_hub, repr(raw), path)
            for key, default in (("rms_norm_eps", 1e-6), ("layer_norm_epsilon", 1e-5)):  # transformers' own, where it is missing
                if key in before:
                    (path / "config.json").write_text(json.dumps({k: v for k, v in before.items() if k != key}))
                    count.that(hf.open_hub(path).sizes["norm_eps"] == default, f"without {key}")
            (path / "config.json").unlink()
            count.refuses(InputError, hf.open_hub, "no config.json", path)
        path = _copied("llama-tied", at)  # what older releases write is the same model
        new, sizes = json.loads((path / "config.json").read_text()), hf.open_hub(path).sizes
        old = {k: v for k, v in new.items() if k not in ("rope_parameters", "head_dim", "num_key_value_heads")}
        (path / "config.json").write_text(json.dumps({**old, "rope_theta": new["rope_parameters"]["rope_theta"], "rope_scaling": None}))
        count.that(hf.open_hub(path).sizes == sizes, "an older config.json means another model")
        path = _copied("gpt2", at)
        (path / "config.json").write_text(json.dumps({**json.loads((path / "config.json").read_text()), "n_inner": 48}))
        count.that(hf.open_hub(path), "the usual inner width, spelt out, is refused")
    return count.measured()


def rewritten(path: Path, change: Callable[[dict[str, np.ndarray]], object], dtypes: dict[str, str] | None = None) -> Path:
    """The model in `path` as one file, its tensors changed; `dtypes`: tensor -> the type that its header says."""
    tensors = {name: safetensors.read(x) for name, x in safetensors.folder(path).items()}
    change(tensors)
    table, at = {}, 0
    for name, x in tensors.items():
        table[name] = {**_entry(at, at + x.nbytes, list(x.shape)), "dtype": (dtypes or {}).get(name, "F32")}
        at += x.nbytes
    for file in path.glob("model*.safetensors*"):
        file.unlink()
    (path / safetensors.ONE).write_bytes(made(table, b"".join(x.astype("<f4").tobytes() for x in tensors.values())))
    return path


def _tensors(rng: np.random.Generator) -> Measured:
    """Tensors that are missing, too many, of another shape or type, twice there, not finite; a tied head that is another."""
    count = Checks()
    wte, head = "transformer.wte.weight", "lm_head.weight"

    def attempt(what: str, text: str, change: Callable[[dict[str, np.ndarray]], object], of: str = "gpt2",
                dtypes: dict[str, str] | None = None) -> None:
        with scratch() as at:
            path = rewritten(_copied(of, at), change, dtypes)
            count.says(InputError, lambda: opened(path, 4), what, text)

    def accepted(what: str, change: Callable[[dict[str, np.ndarray]], object], of: str = "gpt2") -> None:
        with scratch() as at:
            before = opened(FIXTURES / of, 4)[2]
            count.that(opened(rewritten(_copied(of, at), change), 4)[2].tobytes() == before.tobytes(), what)

    attempt("missing", "wte.weight", lambda x: x.pop(wte))
    attempt("a layer missing", "h.1.", lambda x: [x.pop(k) for k in list(x) if ".h.1." in k])
    attempt("a layer more", "h.2.ln_1.bias", lambda x: x.update({"transformer.h.2.ln_1.bias": x["transformer.h.0.ln_1.bias"]}))
    attempt("an unknown one", "lora", lambda x: x.update(lora=x[wte]))
    attempt("transposed", "another shape", lambda x: x.update({wte: x[wte].T.copy()}))
    attempt("flat", "another shape", lambda x: x.update({wte: x[wte].ravel()}))
    attempt("an axis more", "another shape", lambda x: x.update({wte: x[wte][None]}))
    attempt("integers", "rounding", lambda x: None, dtypes={wte: "I32"})
    attempt("twice", "twice", lambda x: x.update({"wte.weight": x[wte]}))
    attempt("not a number", "not finite", lambda x: x[wte].__setitem__((3, 2), nan))
    attempt("infinite", "not finite", lambda x: x[wte].__setitem__((3, 2), -inf))
    attempt("another head", "tied", lambda x: x.update({head: x[wte] + 1}))
    attempt("a head that ends otherwise", "tied", lambda x: x.update({head: np.concatenate((x[wte][:-1], x[wte][-1:] + 1))}))
    attempt("a head that is nearly its embedding", "tied", lambda x: x.update({head: np.nextafter(x[wte], np.float32(9))}))
    attempt("a head without its embedding", "wte.weight", lambda x: x.update({head: x.pop(wte)}))
    attempt("no head", head, lambda x: x.pop(head), of="gpt2-untied")
    attempt("a head of another shape", head, lambda x: x.update({head: x[wte][1:]}))
    accepted("a copy of the tied head", lambda x: x.update({head: x[wte]}))
    mask = {"transformer.h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}
    accepted("masks of old releases", lambda x: x.update(mask))
    accepted("masks before all else", lambda x: x.update({**mask, **{k: x.pop(k) for k in list(x)}}))
    accepted("frequencies of old releases", lambda x: x.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}),
             of="llama-tied")
    accepted("no prefix", lambda x: [x.update({k.removeprefix("transformer."): x.pop(k)}) for k in list(x)])
    hub = hf.open_hub(FIXTURES / "gpt2")
    other = layout_of({**hub.sizes, "layers": 3}, 4)[0]
    first = min(t.name for t in other.tensors if t.name.startswith("block.2"))  # of several the first by name
    count.says(InputError, lambda: hub.fill(np.zeros(other.size, np.float32), other), "a model of another depth", f"{first} missing")
    wider = layout_of({**hub.sizes, "width": 2 * hub.sizes["width"]}, 4)[0]
    count.says(InputError, lambda: hub.fill(np.zeros(wider.size, np.float32), wider), "a model of another width",
               f"{min(t.name for t in wider.tensors)} (")
    return count.measured()


def _disk(rng: np.random.Generator) -> Measured:
    """Whatever operation the disk refuses, or the process is killed before: the folder is whole or not there. A refusal is an error that
    says so, and leaves nothing beside it."""
    count, (sizes, layout, flat) = Checks(), drawn(rng, "gpt2", True)
    for failure in (full, Killed):
        for operation in range(1, 99):
            disk = Failing(operation, failure)
            with scratch() as at:
                try:
                    hf.export(at / "m", sizes, flat, layout, eod=0, files={"y": b"y"}, disk=disk)
                    count.that(disk.done < operation, f"operation {operation} was swallowed")
                    count.refuses(InputError, hf.export, "a folder that is there", at / "m", sizes, flat, layout, eod=0, files={})
                    break
                except (MachineError, Killed):
                    left = sorted(p.name for p in at.iterdir())
                    count.that(failure is Killed or left in ([], ["m"]), f"operation {operation} left {left}")
                    whole = "m" not in left or ((at / "m" / "y").exists() and opened(at / "m", 5)[2].tobytes() == flat.tobytes())
                    count.that(whole, f"operation {operation} left half a model")
    return count.measured()


def mutated(rng: np.random.Generator, whole: bytes) -> bytes:
    """`whole` with some bytes changed, put in, taken out or moved, or its header's length; half of the time inside the header alone."""
    data = bytearray(whole)
    inside = 8 + int.from_bytes(whole[:8], "little") if rng.integers(2) else len(data)
    for _ in range(int(rng.integers(1, 5))):
        i, j = sorted(int(x) for x in rng.integers(0, min(inside, len(data)) + 1, 2))
        match int(rng.integers(6)):
            case 0:
                data[i : i + 1] = rng.bytes(1)
            case 1:
                data[i:j] = b""
            case 2:
                data[i:i] = data[i:j]
            case 3:
                data[i : i + 1] = bytes([b'0123456789{}[],:"'[int(rng.integers(17))]])
            case 4:
                data[:8] = int(rng.integers(0, 2 * len(whole))).to_bytes(8, "little")
            case _:
                del data[j:]
    if rng.integers(2) and len(data) >= 8:  # the length fits, so that what it frames is reached
        data[:8] = max(0, len(data) - len(whole) + int.from_bytes(whole[:8], "little")).to_bytes(8, "little")
    return bytes(data)


def fuzzed(rng: np.random.Generator, times: int) -> Checks:
    """Mutants of a file: refused by an error of ours, or read, and then the ranges lie in the file, one behind the other."""
    count = Checks()
    table = {"__metadata__": {"format": "pt"}, "a.b": _entry(0, 24, [2, 3]), "c": _entry(24, 28, [2], "BF16"), "é": _entry(28, 28, [0, 5])}
    with scratch() as at:
        path = at / "x"
        for _ in range(times):
            data = mutated(rng, made(table, bytes(28)))
            path.write_bytes(data)
            try:
                found = sorted(safetensors.header(path).values(), key=lambda x: (x.start, x.size))
            except AlphaError:
                count.that(True)
                continue
            ends = [8 + int.from_bytes(data[:8], "little"), *(x.start + x.size for x in found)]
            tiled = all(x.start == end for x, end in zip(found, ends)) and ends[-1] == len(data)
            count.that(tiled and all(x.size == prod(x.shape) * safetensors.SIZES[x.dtype] for x in found), repr(data))
    return count


def _mutants(rng: np.random.Generator) -> Measured:
    return fuzzed(rng, 400).measured()


CASES: dict[str, Cases] = {
    "checkpoint.hf": {
        "parity": [("logits", _logits), ("as transformers writes", _written), ("round trip", _round_trip), ("in files", _in_files),
                   ("widened", _widened), ("tensors of files", saves.tensors_of_files)],
        "determinism": [("same bytes", _same_bytes)],
        "faults": [("headers", _headers), ("indices", _indices), ("configs", _configs), ("keys that are absent", _absent),
                   ("tensors", _tensors), ("disk", _disk),
                   ("a disk without a word", lambda rng: saves.exported_to_a_bad_disk(rng, *drawn(rng, "gpt2", True))),
                   ("mutants", _mutants)],
    }
}
