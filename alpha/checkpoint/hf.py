"""Models of Hugging Face's transformers as folders (config.json and safetensors), and the same as parameters of ours. Floor 5.

A family's tensors are a table of Parts: which of theirs, one above the other, are which of ours. GPT-2's projections are written
[in, out] there (Conv1D) and [out, in] here. Queries and keys of Llama lie as the half layout of `rope` wants them, so nothing is permuted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from alpha.checkpoint import safetensors
from alpha.checkpoint.disk import Disk
from alpha.checkpoint.safetensors import Stored
from alpha.errors import CorruptError, InputError, MachineError
from alpha.files import json_of, read_regular
from alpha.graph.state import StateLayout

CONFIG = "config.json"
MOST_CONFIG = 1 << 20

Sizes = Mapping[str, Any]
"""Keys of [model], `family`, `vocab_size` and `positions` among them, that decide about tensors and logits."""


@dataclass(frozen=True)
class Part:
    """One tensor of ours. `theirs`: (name without the base model's prefix, shape as stored); the rows of several follow each other."""

    ours: str
    theirs: tuple[tuple[str, tuple[int, ...]], ...]
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shapes = [shape[::-1] if self.transposed else shape for _, shape in self.theirs]
        return (sum(s[0] for s in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Layout:
    """A family there. `takes`: whether it is what a model of ours is written as; `prefix`: of the base model's tensors; `unused`: ends of
    names of tensors that hold no parameters (masks and frequencies that old releases saved)."""

    family: str
    takes: Callable[[Sizes], bool]
    prefix: str
    unused: tuple[str, ...]
    parts: Callable[[Sizes], list[Part]]
    sizes: Callable[[_Reader], dict[str, Any]]
    config: Callable[[Sizes], dict[str, Any]]


@dataclass(frozen=True)
class Hub:
    """A model's folder, looked through: every tensor that it needs is there, of the right shape, and no other."""

    path: Path
    sizes: Sizes
    parts: tuple[Part, ...]
    stored: Mapping[str, Stored]

    def part(self, part: Part) -> np.ndarray:
        """float32 of `part.shape`."""
        read = [safetensors.read(self.stored[name]) for name, _ in part.theirs]
        return np.concatenate([x.T for x in read] if part.transposed else read)

    def fill(self, flat: np.ndarray, layout: StateLayout) -> None:
        """Write all of it into the flat parameters of a model of these sizes; padding becomes zero. InputError where the model is another,
        or a number is not finite."""
        ours = {p.ours: p.shape for p in self.parts}
        model = {t.name: t.shape for t in layout.tensors}
        if ours != model:
            odd = sorted(name for name in {*ours, *model} if ours.get(name) != model.get(name))
            raise InputError(f"the model in {self.path} is not the run's", came=f"{odd[0]} {ours.get(odd[0], 'missing')}",
                             expected=f"{model.get(odd[0], 'no such tensor')}", do="take its sizes in [model]")
        flat[...] = 0
        for p in self.parts:
            made = self.part(p)
            if not np.isfinite(made).all():
                raise InputError(f"a tensor of {self.path} is not finite", came=", ".join(name for name, _ in p.theirs),
                                 expected="finite numbers")
            flat[layout.offsets[p.ours] : layout.offsets[p.ours] + made.size] = made.ravel()


def open_hub(path: Path) -> Hub:
    """Look through a model's folder. InputError for what no model here is, naming the key of config.json; for tensors that are missing, too
    many, or of another shape; CorruptError for a file that is damaged."""
    content = _config(path)
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in LAYOUTS:
        raise InputError("no model here is of this type", came=f"{path / CONFIG}: model_type = {kind!r}", expected=", ".join(LAYOUTS))
    layout = LAYOUTS[kind]
    sizes = {"family": layout.family, **layout.sizes(_Reader(path / CONFIG, content))}
    found = _without(layout, path, safetensors.folder(path))
    if sizes["layers"] > len(found):  # every block has tensors; a list of those of any number of blocks has no bound
        raise InputError(f"the model in {path} has other tensors than its {CONFIG} says", came=f"{len(found)} tensors",
                         expected=f"those of {sizes['layers']} blocks")
    parts = tuple(layout.parts(sizes))
    wanted = {name: shape for p in parts for name, shape in p.theirs}
    _tied_head(path, sizes, parts[0], found)
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        raise InputError(f"the model in {path} has other tensors than its {CONFIG} says",
                         came=f"{len(extra)} too many ({', '.join(extra[:3])})" if extra else f"{len(missing)} missing",
                         expected=f"also {', '.join(missing[:3])}" if missing else f"the {len(wanted)} of a {kind}")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise InputError(f"tensor {name} of {path} has another shape", came=list(found[name].shape), expected=list(shape))
        if found[name].dtype not in safetensors.WIDENED:
            raise InputError(f"tensor {name} of {path} is not read as float32 without rounding", came=found[name].dtype,
                             expected=", ".join(safetensors.WIDENED), do="save the model again in one of these")
    return Hub(path, sizes, parts, found)


def export(path: Path, sizes: Sizes, flat: np.ndarray, state: StateLayout, *, eod: int, files: Mapping[str, bytes],
           most: int = safetensors.MOST_SHARD, disk: Disk | None = None) -> None:  # fmt: skip
    """Make the folder `path` with config.json and safetensors in float32, in files of at most `most` bytes of tensors, and `files` beside
    them; whole or not at all.

    `sizes` as `open_hub` gives them, with the family's `dropout`; `flat`: parameters of `state`; `eod`: id of the token that
    ends a document. A tied head is written nowhere: its reader
    ties it again, as config.json says. InputError if `path` is there already, MachineError if the disk refuses.
    """
    disk, kind = disk or Disk(), next(k for k, x in LAYOUTS.items() if x.family == sizes["family"] and x.takes(sizes))
    layout, part = LAYOUTS[kind], path.with_name(f".alpha-making-{path.name}-{os.getpid()}")
    if path.exists():
        raise InputError("there is something already", came=path, expected="a folder that is not there yet", do="name another with --out")
    todo: list[safetensors.Given] = []
    for p in layout.parts(sizes):
        at = state.offsets[p.ours]
        for name, shape in p.theirs:  # rows that follow each other
            own, size = flat[at : at + prod(shape)], prod(shape)
            todo.append((name if name == HEAD else layout.prefix + name, shape, partial(_as_stored, own, shape, p.transposed)))
            at += size
    content = {"model_type": kind, **layout.config(sizes), "vocab_size": sizes["vocab_size"], "tie_word_embeddings": sizes["tied"],
               "dtype": "float32", "torch_dtype": "float32", "bos_token_id": eod, "eos_token_id": eod}
    try:
        disk.make(part)
        safetensors.write_folder(part, todo, most, disk)
        for name, data in {CONFIG: json.dumps(content, indent=2, sort_keys=True).encode() + b"\n", **files}.items():
            disk.write(part / name, [data])
        disk.sync_folder(part)
        disk.rename(part, path)
        disk.sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise MachineError("the model cannot be written", came=f"{path} ({error.strerror or error})", expected="room and permission there",
                           do="free some space, or name another folder with --out") from error


def _as_stored(flat: np.ndarray, shape: tuple[int, ...], transposed: bool) -> np.ndarray:
    return flat.reshape(shape[::-1]).T if transposed else flat.reshape(shape)


# -- config.json ---------------------------------------------------------------------------------------------------------------


class _Reader:
    """The keys of a config.json, each with its type. What this release cannot do is refused by the key's name."""

    def __init__(self, path: Path | str, content: Mapping[str, Any]) -> None:
        self.path, self.content = path, content

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number above 0; `default` stands for what is missing or null."""
        value = self.content.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            self.refuse(key, value, "a whole number above 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.content.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            self.refuse(key, value, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.content.get(key, default)
        if type(value) is not bool:
            self.refuse(key, value, "true or false")
        return value

    def only(self, key: str, *possible: Any, default: Any = None) -> None:
        """The key has one of these values; `default`: what transformers takes where it is missing."""
        value = self.content.get(key, default)
        if not any(type(value) is type(x) and value == x for x in possible):
            self.refuse(key, value, " or ".join(json.dumps(x) for x in possible))

    def refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        raise InputError("this model needs what no model here has", came=f"{self.path}: {key} = {json.dumps(value)}", expected=expected)


def _config(path: Path) -> dict[str, Any]:
    try:
        content = json_of(read_regular(path / CONFIG, MOST_CONFIG))
    except OSError as error:
        raise InputError("this folder holds no model of Hugging Face", came=f"{path / CONFIG} ({error.strerror})",
                         expected="a folder with config.json and safetensors", do="download it, for example with `hf download`") from error
    except ValueError as error:
        raise CorruptError(f"{path / CONFIG} is no JSON", came=str(error), expected="a JSON object", do="fetch it again") from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path / CONFIG} is no JSON object", came=type(content).__name__, expected="a JSON object", do="fetch it again")
    return content


# -- tensors -------------------------------------------------------------------------------------------------------------------

HEAD = "lm_head.weight"


def _without(layout: Layout, path: Path, stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """Their tensors by the name without the base model's prefix, which a model without a head is saved without."""
    found: dict[str, Stored] = {}
    for name, x in stored.items():
        if name.endswith(layout.unused):
            continue
        short = name.removeprefix(layout.prefix)
        if short in found:
            raise InputError(f"{path} holds a tensor twice", came=f"{name} and {found[short].name}", expected="one of them")
        found[short] = x
    return found


def _tied_head(path: Path, sizes: Sizes, embedding: Part, found: dict[str, Stored]) -> None:
    """Drop the copy that some save of a head that is tied. InputError if it is no copy."""
    (name, shape), = embedding.theirs
    if sizes["tied"] and HEAD in found and name in found and found[HEAD].shape == found[name].shape == shape:
        if not np.array_equal(safetensors.read(found[HEAD]), safetensors.read(found[name])):
            raise InputError(f"the head in {path} is not its embedding, with which it is tied", came=f"{HEAD} differs from {name}",
                             expected="equal, or tie_word_embeddings = false")
        del found[HEAD]


def _head(sizes: Sizes) -> list[Part]:
    return [] if sizes["tied"] else [Part("head.weight", ((HEAD, (sizes["vocab_size"], sizes["width"])),))]


def _gpt2_parts(s: Sizes) -> list[Part]:
    c = s["width"]
    parts = [Part("embedding.token.weight", (("wte.weight", (s["vocab_size"], c)),)),
             Part("embedding.position.weight", (("wpe.weight", (s["positions"], c)),))]

    def pair(ours: str, theirs: str, shape: tuple[int, ...], weight: str, *, transposed: bool) -> list[Part]:
        return [Part(f"{ours}.{weight}", ((f"{theirs}.weight", shape),), transposed),
                Part(f"{ours}.bias", ((f"{theirs}.bias", shape[-1:]),))]

    for i in range(s["layers"]):
        b, h = f"block.{i}", f"h.{i}"
        parts += pair(f"{b}.norm1", f"{h}.ln_1", (c,), "gain", transposed=False)
        parts += pair(f"{b}.attention.qkv", f"{h}.attn.c_attn", (c, 3 * c), "weight", transposed=True)
        parts += pair(f"{b}.attention.out", f"{h}.attn.c_proj", (c, c), "weight", transposed=True)
        parts += pair(f"{b}.norm2", f"{h}.ln_2", (c,), "gain", transposed=False)
        parts += pair(f"{b}.mlp.up", f"{h}.mlp.c_fc", (c, 4 * c), "weight", transposed=True)
        parts += pair(f"{b}.mlp.down", f"{h}.mlp.c_proj", (4 * c, c), "weight", transposed=True)
    return [*parts, *pair("head.norm", "ln_f", (c,), "gain", transposed=False), *_head(s)]


def _gpt2_sizes(r: _Reader) -> dict[str, Any]:
    width = r.integer("n_embd", 768)
    r.only("activation_function", "gelu_new", "gelu_pytorch_tanh", default="gelu_new")
    r.only("n_inner", None, 4 * width)
    r.only("scale_attn_weights", True, default=True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        r.only(key, False, default=False)
    r.only("quantization_config", None)
    return {"vocab_size": r.integer("vocab_size", 50257), "positions": r.integer("n_positions", 1024), "layers": r.integer("n_layer", 12),
            "width": width, "heads": r.integer("n_head", 12), "tied": r.boolean("tie_word_embeddings", True),
            "norm_eps": r.number("layer_norm_epsilon", 1e-5)}


def _gpt2_config(s: Sizes) -> dict[str, Any]:
    return {"architectures": ["GPT2LMHeadModel"], "n_positions": s["positions"], "n_embd": s["width"], "n_layer": s["layers"],
            "n_head": s["heads"], "activation_function": "gelu_new", "layer_norm_epsilon": s["norm_eps"], "attn_pdrop": 0.0,
            "embd_pdrop": s.get("dropout", 0.0), "resid_pdrop": s.get("dropout", 0.0)}


def _llama_parts(s: Sizes) -> list[Part]:
    c, hidden, d, biased = s["width"], s["hidden"], s["head_dim"], s["attention_bias"]
    parts = [Part("embedding.token.weight", (("embed_tokens.weight", (s["vocab_size"], c)),))]
    for i in range(s["layers"]):
        b, h = f"block.{i}", f"layers.{i}"
        attention, mlp = f"{h}.self_attn", f"{h}.mlp"
        qkv = (("q", s["heads"]), ("k", s["kv_heads"]), ("v", s["kv_heads"]))
        if biased != "none":
            parts.append(Part(f"{b}.attention.qkv.bias", tuple((f"{attention}.{x}_proj.bias", (n * d,)) for x, n in qkv)))
        if biased == "all":
            parts.append(Part(f"{b}.attention.out.bias", ((f"{attention}.o_proj.bias", (c,)),)))
        parts += [Part(f"{b}.norm1.gain", ((f"{h}.input_layernorm.weight", (c,)),)),
                  Part(f"{b}.attention.qkv.weight", tuple((f"{attention}.{x}_proj.weight", (n * d, c)) for x, n in qkv)),
                  Part(f"{b}.attention.out.weight", ((f"{attention}.o_proj.weight", (c, s["heads"] * d)),)),
                  Part(f"{b}.norm2.gain", ((f"{h}.post_attention_layernorm.weight", (c,)),)),
                  Part(f"{b}.mlp.gate.weight", ((f"{mlp}.gate_proj.weight", (hidden, c)),)),
                  Part(f"{b}.mlp.up.weight", ((f"{mlp}.up_proj.weight", (hidden, c)),)),
                  Part(f"{b}.mlp.down.weight", ((f"{mlp}.down_proj.weight", (c, hidden)),))]
    return [*parts, Part("head.norm.gain", (("norm.weight", (c,)),)), *_head(s)]


def _llama_sizes(r: _Reader) -> dict[str, Any]:
    r.only("mlp_bias", False, default=False)
    return {**_rotary_sizes(r, vocab_size=32000, hidden_size=4096, num_attention_heads=32, max_position_embeddings=2048,
                            num_hidden_layers=32, intermediate_size=11008),
            "attention_bias": "all" if r.boolean("attention_bias", False) else "none"}


def _qwen2_sizes(r: _Reader) -> dict[str, Any]:
    r.only("use_sliding_window", False, default=False)
    sizes = _rotary_sizes(r, vocab_size=151936, hidden_size=4096, num_attention_heads=32, num_key_value_heads=32,
                          max_position_embeddings=32768, num_hidden_layers=32, intermediate_size=22016)
    r.only("layer_types", None, ["full_attention"] * sizes["layers"])
    return {**sizes, "attention_bias": "qkv"}


def _rotary_sizes(r: _Reader, **defaults: int) -> dict[str, Any]:
    """What Llama and those after it have alike; `defaults`: what transformers takes for keys that are missing."""
    def size(key: str) -> int:
        return r.integer(key, defaults.get(key))

    width, heads = size("hidden_size"), size("num_attention_heads")
    r.only("hidden_act", "silu", default="silu")
    r.only("quantization_config", None)
    return {"vocab_size": size("vocab_size"), "positions": size("max_position_embeddings"), "layers": size("num_hidden_layers"),
            "width": width, "heads": heads, "kv_heads": r.integer("num_key_value_heads", defaults.get("num_key_value_heads", heads)),
            "hidden": size("intermediate_size"), "head_dim": r.integer("head_dim", width // heads),
            "norm_eps": r.number("rms_norm_eps", 1e-6), **_rope(r), "tied": r.boolean("tie_word_embeddings", False)}


def _rope(r: _Reader) -> dict[str, Any]:
    """Base and scaling of the rotary frequencies, which releases from 5 on keep in `rope_parameters`."""
    found = r
    scaling: tuple[float, ...] = ()
    for key in ("rope_scaling", "rope_parameters"):
        nested = r.content.get(key)
        if nested is None:
            continue
        kind = nested.get("rope_type", nested.get("type", "default")) if isinstance(nested, dict) else None
        if not isinstance(kind, str) or kind not in SCALED or nested.get("partial_rotary_factor", 1.0) != 1.0:
            r.refuse(key, nested, f"all channels turn, by rope_type {', '.join(SCALED)}")
        own = _Reader(f"{r.path}: {key}", nested)
        scaling = tuple(own.number(name) for name in SCALED[kind]) or scaling
        found = own if "rope_theta" in nested else found
    return {"rope_base": found.number("rope_theta", 10000.0), "rope_scaling": scaling}


SCALED: Mapping[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
"""Their type of rotary frequencies -> its keys, in the order of `model.rope_scaling`."""


def _llama_config(s: Sizes) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **_rotary_config(s), "attention_bias": s["attention_bias"] == "all", "mlp_bias": False}


def _qwen2_config(s: Sizes) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], **_rotary_config(s), "use_sliding_window": False}


def _rotary_config(s: Sizes) -> dict[str, Any]:
    return {"max_position_embeddings": s["positions"], "hidden_size": s["width"],
            "intermediate_size": s["hidden"], "num_hidden_layers": s["layers"], "num_attention_heads": s["heads"],
            "num_key_value_heads": s["kv_heads"], "head_dim": s["head_dim"], "hidden_act": "silu", "rms_norm_eps": s["norm_eps"],
            "rope_theta": s["rope_base"], **_scaling_config(s["rope_scaling"])}


def _scaling_config(scaling: tuple[float, ...]) -> dict[str, Any]:
    """`rope_scaling`, which every release of transformers reads; nothing where frequencies are not scaled."""
    kind, names = next((kind, names) for kind, names in SCALED.items() if len(names) == len(scaling))
    values = {name: int(x) if name.startswith("original") else x for name, x in zip(names, scaling)}
    return {"rope_scaling": {"rope_type": kind, **values}} if scaling else {}


LAYOUTS: Mapping[str, Layout] = {
    "gpt2": Layout("gpt", lambda s: True, "transformer.", (".attn.bias", ".attn.masked_bias"), _gpt2_parts, _gpt2_sizes, _gpt2_config),
    "llama": Layout("llama", lambda s: s["attention_bias"] != "qkv", "model.", (".rotary_emb.inv_freq",), _llama_parts, _llama_sizes,
                    _llama_config),
    "qwen2": Layout("llama", lambda s: s["attention_bias"] == "qkv", "model.", (), _llama_parts, _qwen2_sizes, _qwen2_config),
}
"""`model_type` of a config.json -> its layout."""
