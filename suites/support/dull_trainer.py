"""A second trainer, dull and slow: what docs/definition.md says, in plain NumPy. It imports nothing of Alpha.

It reads a run file in which every key stands, and says what a run of it has to do. Reals have the type of the parameters that are handed
in: float64 for what is right, float32 for what rounding costs.
Legend: B sequences, T tokens of a sequence, C width, H query heads, G key heads, D width of a head, V ids.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from hashlib import sha256
from itertools import chain, pairwise
from os.path import lexists
from pathlib import Path

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Tensors = dict[str, np.ndarray]
Stream = tuple[np.ndarray, np.ndarray]
"""Ids, and the document of each."""
Back = Callable[[np.ndarray], np.ndarray]
"""The cotangent of a part's result -> that of its input; gradients of parameters are added up on the way."""

END = 256
ENDINGS = (b".txt", b".md", b".py")
"""Those of the texts in a folder that are drawn; the definition has more."""
WORDS = re.compile(
    rb"[^\r\n0-9A-Za-z\x80-\xff]?[A-Za-z\x80-\xff]{1,32}"
    rb"|[0-9]{1,3}"
    rb"| ?[\x00-\x08\x0e-\x1f!-/:-@\[-`{-\x7f]{1,32}(?:[\r\n]{1,8}[ \t]{0,64})?"
    rb"|[\r\n]{1,8}[ \t]{0,64}"
    rb"|[ \t\n\r\x0b\x0c]{1,32}")


class DullTrainer:
    """What a run file asks for. `file`: its path; paths in it are taken from the folder that the process works in."""

    def __init__(self, file: Path) -> None:
        self.tables = tomllib.loads(file.read_text(encoding="utf-8"))
        t = self.tables["train"]
        self.sequence: int = self.tables["data"]["sequence"]
        self.steps, self.batch, self.shards = t["steps"], t["batch"], t["shards"]
        self.rows = t["micro_batch"] or self.batch // self.shards
        self.micros = self.batch // self.shards // self.rows

    # -- the text --------------------------------------------------------------------------------------------------------------

    @cached_property
    def sources(self) -> list[tuple[str, Fraction]]:
        """What is read, and its share of the samples."""
        mixed = [part.strip().rpartition(":") for part in self.tables["data"]["mixture"].split(",") if part]
        weights = [Fraction(number.strip()) for _, _, number in mixed]
        return [(name, w / sum(weights)) for (name, _, _), w in zip(mixed, weights)] or [(self.tables["data"]["corpus"], Fraction(1))]

    def files(self, name: str) -> dict[bytes, bytes]:
        """Relative path -> text of a source, in the order of the paths' bytes."""
        where = Path(name)
        parts = where.parts
        globbed = next((i for i, part in enumerate(parts) if set(part) & set("*?[") and not lexists(Path(*parts[: i + 1]))), None)
        root, pattern = (where, "**/*") if globbed is None else (Path(*parts[:globbed]), "/".join(parts[globbed:]))
        found = {p.relative_to(root).as_posix().encode(): p.read_bytes() for p in root.glob(pattern) if p.is_file()}
        if where.is_file():
            found = {where.name.encode(): where.read_bytes()}
        elif globbed is None:
            found = {path: text for path, text in found.items() if path.endswith(ENDINGS) and b"/." not in b"/" + path}
        return {path: text for path, text in sorted(found.items()) if text}

    def split(self, files: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
        """Texts of a source to train on and texts held out, by path."""
        def place(path: bytes) -> float:
            return (int.from_bytes(sha256(b"alpha.split.v1\x000\x00" + path).digest()[:8], "big") >> 11) / 2**53

        share, texts = self.tables["data"]["validation"], set(files.values())
        if len(texts) == 1:
            path, text = min(files.items())
            wanted = round(len(text) * (1 - share))
            at = text.find(b"\n", wanted) + 1
            if at in (0, len(text)):
                at = text[:wanted].rfind(b"\n") + 1
            if at == 0:
                at = max(i for i in range(wanted + 1) if i == 0 or not 0x80 <= text[i] < 0xC0)
            return {path: text[:at]}, {path: text[at:]}
        farthest = {text: max(place(path) for path, other in files.items() if other == text) for text in texts}
        held = {text for text in texts if farthest[text] < share} or {min(texts, key=farthest.__getitem__)}
        return {p: t for p, t in files.items() if t not in held}, {p: t for p, t in files.items() if t in held}

    @cached_property
    def sides(self) -> list[tuple[dict[bytes, bytes], dict[bytes, bytes]]]:
        """Of each source: texts to train on, which no source holds out, and texts held out."""
        sides = [self.split(self.files(name)) for name, _ in self.sources]
        held = {text for _, out in sides for text in out.values()}
        return [({p: t for p, t in train.items() if t not in held}, out) for train, out in sides]

    @cached_property
    def merges(self) -> list[tuple[int, int]]:
        """Pairs of ids, in the order in which they were learned."""
        if self.tables["data"]["tokenizer"] == "bytes":
            return []
        taken = list[bytes]()
        for (_, share), (texts, _) in zip(self.sources, self.sides):
            room, first = int(self.tables["data"]["sample"] * share), len(taken)
            for _, text in sorted(texts.items(), key=lambda item: (sha256(item[0]).hexdigest(), item[0])):
                if len(text) > room:
                    if len(taken) == first:
                        places = range(1, room + 1)
                        ends = [i for i in places if text[i - 1] == 10] or [i for i in places if not 128 <= text[i] < 192]
                        taken.append(text[: max(ends, default=0)])
                    break
                room -= len(text)
                taken.append(text)
        counted = Counter(word for text in taken for word in WORDS.findall(text))
        words = {word: (list(word), n) for word, n in counted.items() if n >= 2}
        merges: list[tuple[int, int]] = []
        while len(merges) < self.tables["data"]["vocab"] - 257:
            pairs: Counter[tuple[int, int]] = Counter()
            for ids, n in words.values():
                for pair in pairwise(ids):
                    pairs[pair] += n
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            words = {word: (_join(ids, best, 257 + len(merges)), n) for word, (ids, n) in words.items()}
            merges.append(best)
        return merges

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes that each id stands for."""
        made = [*(bytes([i]) for i in range(256)), b""]
        for left, right in self.merges:
            made.append(made[left] + made[right])
        return made

    def encode(self, text: bytes) -> list[int]:
        """Ids of a text."""
        out: list[int] = []
        for word in WORDS.findall(text):
            ids = list(word)
            for rank, pair in enumerate(self.merges):
                ids = _join(ids, pair, 257 + rank)
            out += ids
        return out

    def _streams(self, validation: bool) -> list[Stream]:
        made = []
        for sides in self.sides:
            texts = [[*self.encode(text), END] for text in sides[validation].values()]
            made.append((np.array([*chain(*texts)]), np.repeat(np.arange(len(texts)), [len(t) for t in texts])))
        return made

    @cached_property
    def train(self) -> list[Stream]:
        """Of each source ids of the train split and the document of each."""
        return self._streams(False)

    @cached_property
    def validation(self) -> list[Stream]:
        return self._streams(True)

    def windows(self, stream: Stream) -> int:
        return (len(stream[0]) - 1) // self.sequence

    def cut(self, stream: Stream, windows: Sequence[int]) -> Tensors:
        """Inputs, targets and documents of these windows, [B, T] each."""
        ids, documents = stream
        at = np.asarray(windows)[:, None] * self.sequence + np.arange(self.sequence)
        return {"tokens": ids[at], "targets": ids[at + 1], "documents": documents[at]}

    @cached_property
    def turns(self) -> list[tuple[int, int]]:
        """Samples until the turns begin anew: (source, which of its samples)."""
        k, shares = len(self.sources), [share for _, share in self.sources]
        had, made, least = [0] * k, list[tuple[int, int]](), Fraction(1, max(2 * k - 2, 1))
        while k > 1 and (not made or any(len(made) * share != n for share, n in zip(shares, had))):
            owed = [(len(made) + 1) * share - n for share, n in zip(shares, had)]
            source = min((i for i in range(k) if owed[i] >= least), key=lambda i: (1 - least - owed[i]) / shares[i])
            made.append((source, had[source]))
            had[source] += 1
        return made or [(0, 0)]

    def place_of(self, sample: int) -> tuple[int, int]:
        """(source, sequence of it) that a sample of the run reads."""
        rounds, at = divmod(sample, len(self.turns))
        source, number = self.turns[at]
        return source, self.window_of(source, rounds * [s for s, _ in self.turns].count(source) + number)

    @cached_property
    def packed(self) -> list[list[list[range]]]:
        """Of each source the sequences of packed documents: the places of their targets, piece by piece."""
        made = []
        for _, documents in self.train:
            pieces = list[range]()
            for d in range(documents[-1] + 1):
                where = np.flatnonzero(documents == d)
                first, end = int(where[0]), int(where[-1]) + 1
                pieces += [range(at, min(at + self.sequence, end)) for at in range(first, end, self.sequence)]
            sequences = list[list[range]]()
            for group in range(0, len(pieces), 4096):
                begun = list[list[range]]()
                for piece in sorted(pieces[group : group + 4096], key=lambda p: (-len(p), p.start)):
                    fits = [s for s in begun if sum(map(len, s)) + len(piece) <= self.sequence]
                    if not fits:
                        begun.append([])
                    (max(fits, key=lambda s: sum(map(len, s))) if fits else begun[-1]).append(piece)
                sequences += [sorted(s, key=lambda p: p.start) for s in begun]
            made.append(sequences)
        return made

    def sequences(self, source: int) -> int:
        """Sequences of an epoch of a source."""
        return len(self.packed[source]) if self.tables["data"]["packing"] == "documents" else self.windows(self.train[source])

    def sequence_of(self, source: int, place: int) -> Tensors:
        """Inputs, targets and documents of a training sequence, [1, T] each."""
        if self.tables["data"]["packing"] == "windows":
            return self.cut(self.train[source], [place])
        ids, documents = self.train[source]
        at = [i for piece in self.packed[source][place] for i in piece]
        rest = self.sequence - len(at)
        return {"tokens": np.array([[ids[i - 1] for i in at] + [END] * rest]), "targets": np.array([[ids[i] for i in at] + [-1] * rest]),
                "documents": np.array([[documents[i] for i in at] + [-1] * rest])}

    def cost(self, source: int, place: int) -> int:
        """Pairs of a query and a key that attention computes in a training sequence."""
        cost, seen, before = 0, 0, None
        for document in self.sequence_of(source, place)["documents"][0]:
            seen, before = (seen + 1 if document == before else 1), document
            cost += min(seen, self.tables["model"]["window"] or seen)
        return cost

    def window_of(self, source: int, sample: int) -> int:
        """The sequence that a sample of a source reads."""
        size, buckets, step = self.sequences(source), self.tables["data"]["buckets"], sample // self.batch
        begin = sample // size * size
        whole = [s for s in range(begin // self.batch, (begin + size) // self.batch) if s * self.batch >= begin]  # of this epoch alone
        if not buckets or step not in whole:
            return self.permuted(source, *divmod(sample, size), size)
        pool = next(whole[i : i + buckets] for i in range(0, len(whole), buckets) if step in whole[i : i + buckets])
        samples = range(pool[0] * self.batch, (pool[-1] + 1) * self.batch)
        read = {s: self.permuted(source, *divmod(s, size), size) for s in samples}
        by_cost = sorted(samples, key=lambda s: self.cost(source, read[s]))
        turn = self.permuted(source, samples[0], step - pool[0], len(pool))
        return read[sorted(by_cost[turn * self.batch : (turn + 1) * self.batch])[sample % self.batch]]

    def permuted(self, source: int, epoch: int, value: int, size: int) -> int:
        """Where the order of an epoch of `size` places of a source sends one of them."""
        half = max(4, ((size - 1).bit_length() + 1) // 2)
        key = _mix(_mix(self.tables["run"]["seed"] + source + GOLDEN) + (epoch + 1) * GOLDEN)
        keys = [_mix(key + i * GOLDEN) for i in range(1, 9)]
        while True:
            left, right = value >> half, value & ((1 << half) - 1)
            for k in keys:
                left, right = right, left ^ (_mix(right + k) & ((1 << half) - 1))
            value = left << half | right
            if value < size:
                return value

    def microbatches(self, step: int) -> list[Tensors]:
        """What each microbatch of a step reads, in order of shards and microbatches."""
        made = []
        for first in range(step * self.batch, (step + 1) * self.batch, self.rows):
            samples = np.arange(first, first + self.rows)
            read = [self.sequence_of(*place) for place in map(self.place_of, samples.tolist())]
            made.append({**{name: np.concatenate([one[name] for one in read]) for name in read[0]}, "samples": samples})
        return made

    def validation_windows(self, stream: Stream, wanted: int) -> list[int]:
        """Windows of a validation split, spread evenly; 0 and too many: all."""
        total = self.windows(stream)
        n = min(wanted or total, total)
        return [i * total // n for i in range(n)]

    # -- the model -------------------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> dict[str, tuple[tuple[int, ...], float | str, bool]]:
        """Name -> shape, spread of the normal distribution or the word for a constant, whether it decays."""
        m, c = self.tables["model"], self.tables["model"]["width"]
        vocab = m["vocab_size"] or len(self.tokens)
        out, gpt = 0.02 / math.sqrt(2 * m["layers"]), m["family"] == "gpt"
        d, biased = self.head_dim, m.get("attention_bias")
        made: dict[str, tuple[tuple[int, ...], float | str, bool]] = {"embedding.token.weight": ((vocab, c), 0.02, True)}
        if gpt:
            made["embedding.position.weight"] = ((m["positions"] or self.sequence, c), 0.01, True)

        def norm(name: str) -> None:
            made[f"{name}.gain"] = ((c,), "one", False)
            if gpt:
                made[f"{name}.bias"] = ((c,), "zero", False)

        def linear(name: str, rows: int, columns: int, spread: float, bias: bool = False) -> None:
            made[f"{name}.weight"] = ((rows, columns), spread, True)
            if gpt or bias:
                made[f"{name}.bias"] = ((rows,), "zero", False)

        for i in range(m["layers"]):
            b = f"block.{i}"
            norm(f"{b}.norm1")
            linear(f"{b}.attention.qkv", (m["heads"] + 2 * self.kv_heads) * d, c, 0.02, biased in ("qkv", "all"))
            linear(f"{b}.attention.out", c, m["heads"] * d, out, biased == "all")
            norm(f"{b}.norm2")
            for name in ("up",) if gpt else ("gate", "up"):
                linear(f"{b}.mlp.{name}", self.hidden, c, 0.02)
            linear(f"{b}.mlp.down", c, self.hidden, out)
        norm("head.norm")
        if not m["tied"]:
            made["head.weight"] = ((vocab, c), 0.02, True)
        return made

    @property
    def kv_heads(self) -> int:
        return int(self.tables["model"].get("kv_heads") or self.tables["model"]["heads"])

    @property
    def head_dim(self) -> int:
        m = self.tables["model"]
        return int(m.get("head_dim") or m["width"] // m["heads"])

    @property
    def hidden(self) -> int:
        c = self.tables["model"]["width"]
        return 4 * c if self.tables["model"]["family"] == "gpt" else int(self.tables["model"]["hidden"] or -(-8 * c // 96) * 32)

    def initial(self) -> Tensors:
        """Parameters before the first step, float32."""
        made = {}
        for name, (shape, spread, _) in self.parameters.items():
            if isinstance(spread, str):
                made[name] = np.full(shape, {"one": 1.0, "zero": 0.0}[spread], np.float32)
                continue
            size = math.prod(shape)
            key = sha256(f"{self.tables['run']['seed']}:{name}".encode()).digest()[:16]
            words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(size + size % 2).tolist()
            drawn: list[float] = []
            for a, b in zip(words[::2], words[1::2]):
                radius, angle = math.sqrt(-2 * math.log1p(-(a >> 11) / 2**53)), 2 * math.pi * ((b >> 11) / 2**53)
                drawn += [radius * math.cos(angle), radius * math.sin(angle)]
            made[name] = (np.array(drawn[:size]) * spread).astype(np.float32).reshape(shape)
        return made

    def _dropout(self, x: np.ndarray, batch: Tensors, step: int | None, purpose: int) -> tuple[np.ndarray, Back]:
        rate = self.tables["model"].get("dropout", 0.0)
        if step is None or rate == 0:
            return x, lambda dy: dy
        n = x[0].size
        words = np.stack([_philox(self.tables["run"]["seed"], purpose, int(s) & 0x7FFFFFFF, step, n) for s in batch["samples"]])
        kept = (words >= round(rate * 2**32)).reshape(x.shape)
        return np.where(kept, x * (1 / (1 - rate)), 0 * x), lambda dy: np.where(kept, dy * (1 / (1 - rate)), 0 * dy)

    def _hidden(self, p: Tensors, batch: Tensors, step: int | None, grads: Tensors) -> tuple[np.ndarray, Back]:
        """What the head reads [B, T, C]. `step`: whose dropout; None outside training."""
        m, n = self.tables["model"], batch["tokens"].shape[1]
        gpt, c = m["family"] == "gpt", m["width"]
        backs: list[Back] = []

        def add(name: str, gradient: np.ndarray) -> None:
            grads[name] = grads.get(name, 0) + gradient

        def linear(name: str, x: np.ndarray) -> tuple[np.ndarray, Back]:
            w, bias = p[f"{name}.weight"], p.get(f"{name}.bias")
            y = x @ w.T if bias is None else x @ w.T + bias

            def back(dy: np.ndarray) -> np.ndarray:
                flat = dy.reshape(-1, dy.shape[-1])
                add(f"{name}.weight", flat.T @ x.reshape(-1, x.shape[-1]))
                if bias is not None:
                    add(f"{name}.bias", flat.sum(0))
                return dy @ w

            return y, back

        def norm(name: str, x: np.ndarray) -> tuple[np.ndarray, Back]:
            gain = p[f"{name}.gain"]
            centred = x - x.mean(-1, keepdims=True) if gpt else x
            scale = 1 / np.sqrt((centred * centred).mean(-1, keepdims=True) + m["norm_eps"])
            z = centred * scale

            def back(dy: np.ndarray) -> np.ndarray:
                add(f"{name}.gain", (dy * z).reshape(-1, c).sum(0))
                if gpt:
                    add(f"{name}.bias", dy.reshape(-1, c).sum(0))
                dz = dy * gain
                dx = scale * (dz - z * (dz * z).mean(-1, keepdims=True))
                return dx - dx.mean(-1, keepdims=True) if gpt else dx

            return z * gain + (p[f"{name}.bias"] if gpt else 0), back

        def embedding() -> np.ndarray:
            x = p["embedding.token.weight"][batch["tokens"]]
            if gpt:
                x = x + p["embedding.position.weight"][:n]
            x, dropped = self._dropout(x, batch, step, 0)

            def back(dx: np.ndarray) -> np.ndarray:
                dx = dropped(dx)
                table = np.zeros_like(p["embedding.token.weight"])
                np.add.at(table, batch["tokens"].ravel(), dx.reshape(-1, c))
                add("embedding.token.weight", table)
                if gpt:
                    table = np.zeros_like(p["embedding.position.weight"])
                    table[:n] = dx.sum(0)
                    add("embedding.position.weight", table)
                return dx

            backs.append(back)
            return x

        def branch(x: np.ndarray, purpose: int, *parts: Callable[[np.ndarray], tuple[np.ndarray, Back]]) -> np.ndarray:
            y, own = x, list[Back]()
            for part in parts:
                y, back = part(y)
                own.append(back)
            y, back = self._dropout(y, batch, step, purpose)
            own.append(back)

            def through(dy: np.ndarray) -> np.ndarray:
                inner = dy
                for back in reversed(own):
                    inner = back(inner)
                return dy + inner

            backs.append(through)
            return x + y

        x = embedding()
        for i in range(m["layers"]):
            def of(kind: Callable[..., tuple[np.ndarray, Back]], name: str, i: int = i) -> Callable[[np.ndarray], tuple[np.ndarray, Back]]:
                return lambda y: kind(f"block.{i}.{name}", y)

            x = branch(x, 2 * i + 1, of(norm, "norm1"), of(linear, "attention.qkv"), lambda y: self._attention(y, batch),
                       of(linear, "attention.out"))
            if gpt:
                x = branch(x, 2 * i + 2, of(norm, "norm2"), of(linear, "mlp.up"), _gelu, of(linear, "mlp.down"))
            else:
                def gated(y: np.ndarray, i: int = i) -> tuple[np.ndarray, Back]:
                    gate, back_gate = linear(f"block.{i}.mlp.gate", y)
                    up, back_up = linear(f"block.{i}.mlp.up", y)
                    s = 1 / (1 + np.exp(-gate))
                    return gate * s * up, lambda dy: back_gate(dy * up * s * (1 + gate * (1 - s))) + back_up(dy * gate * s)

                x = branch(x, 2 * i + 2, of(norm, "norm2"), gated, of(linear, "mlp.down"))
        x, last = norm("head.norm", x)

        def through(dx: np.ndarray) -> np.ndarray:
            dx = last(dx)
            for back in reversed(backs):
                dx = back(dx)
            return dx

        return x, through

    def _attention(self, qkv: np.ndarray, batch: Tensors) -> tuple[np.ndarray, Back]:
        """Packed queries, keys and values [B, T, (H + 2 G) D] -> [B, T, H D]."""
        m, (b, n, _) = self.tables["model"], qkv.shape
        h, g, d = m["heads"], self.kv_heads, self.head_dim
        turns = m["family"] == "llama"
        packed = qkv.reshape(b, n, h + 2 * g, d).transpose(0, 2, 1, 3)
        q, k, v = packed[:, :h], packed[:, h : h + g], packed[:, h + g :]
        if turns:
            q, k = self._turn(q, 1), self._turn(k, 1)
        keys, values = (np.repeat(x, h // g, axis=1) for x in (k, v))
        i, j = np.arange(n)[:, None], np.arange(n)[None, :]
        seen = j <= i
        if m["window"]:
            seen = seen & (i - j < m["window"])
        if self.tables["data"]["documents"]:
            seen = seen & (batch["documents"][:, None, :, None] == batch["documents"][:, None, None, :])
        scores = np.where(seen, q @ keys.swapaxes(-1, -2) / math.sqrt(d), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)

        def back(dy: np.ndarray) -> np.ndarray:
            do = dy.reshape(b, n, h, d).transpose(0, 2, 1, 3)
            dweights = do @ values.swapaxes(-1, -2)
            dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) / math.sqrt(d)
            dq = dscores @ keys
            dk, dv = (x.reshape(b, g, h // g, n, d).sum(2) for x in (dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ do))
            if turns:
                dq, dk = self._turn(dq, -1), self._turn(dk, -1)
            return np.concatenate([dq, dk, dv], axis=1).transpose(0, 2, 1, 3).reshape(qkv.shape)

        return (weights @ values).transpose(0, 2, 1, 3).reshape(b, n, h * d), back

    def _turn(self, x: np.ndarray, sign: int) -> np.ndarray:
        """Pairs (i, i + D/2) of [B, H, T, D] turned by their positions, or back."""
        d, n = x.shape[-1], x.shape[-2]
        angle = sign * np.arange(n)[:, None] * self._rates(d)
        cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
        a, c = x[..., : d // 2], x[..., d // 2 :]
        return np.concatenate([a * cos - c * sin, c * cos + a * sin], axis=-1)

    def _rates(self, d: int) -> np.ndarray:
        """Angle of each pair per position."""
        plain = self.tables["model"]["rope_base"] ** (-2 * np.arange(d // 2) / d)
        scaling = self.tables["model"]["rope_scaling"]
        if len(scaling) < 4:
            return plain / (scaling[0] if scaling else 1)
        factor, low, high, original = scaling
        turns = original / (2 * np.pi / plain)
        middle = (turns - low) / (high - low) * (plain - plain / factor) + plain / factor
        return np.where(turns < low, plain / factor, np.where(turns > high, plain, middle))

    def head(self, p: Tensors) -> str:
        return "embedding.token.weight" if self.tables["model"]["tied"] else "head.weight"

    def loss(self, p: Tensors, batch: Tensors, step: int | None) -> tuple[np.ndarray, Tensors]:
        """Loss of each token [B, T] and the gradients of their sum. `step` None: validation, which has no dropout and no z-loss."""
        grads: Tensors = {}
        x, back = self._hidden(p, batch, step, grads)
        z = self.tables["model"]["z_loss"] if step is not None else 0.0
        counts = batch["targets"] >= 0
        head, targets = p[self.head(p)], np.maximum(batch["targets"], 0)[..., None]
        logits = x @ head.T
        top = logits.max(-1, keepdims=True)
        total = np.exp(logits - top).sum(-1, keepdims=True)
        normaliser = top + np.log(total)
        losses = (normaliser - np.take_along_axis(logits, targets, -1) + z * normaliser * normaliser)[..., 0] * counts
        dlogits = np.exp(logits - normaliser) * (1 + 2 * z * normaliser)
        np.put_along_axis(dlogits, targets, np.take_along_axis(dlogits, targets, -1) - 1, -1)
        dlogits = dlogits * counts[..., None]
        back(dlogits @ head)
        own = dlogits.reshape(-1, len(head)).T @ x.reshape(-1, x.shape[-1])
        grads[self.head(p)] = grads.get(self.head(p), 0) + own
        return losses, grads

    def logits(self, p: Tensors, batch: Tensors, index: np.ndarray) -> np.ndarray:
        """Logits [B, V] of the token after place `index` [B]."""
        x, _ = self._hidden(p, batch, None, {})
        return x[np.arange(len(index)), index] @ p[self.head(p)].T

    # -- the update ------------------------------------------------------------------------------------------------------------

    def rate(self, step: int) -> np.float32:
        """Learning rate of a step."""
        o, total = self.tables["optim"], self.steps
        if step < o["warmup"]:
            return np.float32(o["lr"] * (step + 1) / o["warmup"])
        if o["schedule"] == "cosine":
            share = o["floor"] + (1 - o["floor"]) * 0.5 * (1 + math.cos(math.pi * ((step - o["warmup"]) / (total - o["warmup"]))))
        else:
            falling = o["decay"] or max(1, total // 10)
            share = 1 - (1 - o["floor"]) * max((step - (total - falling)) / falling, 0.0)
        return np.float32(o["lr"] * share)

    def clip(self, grads: Mapping[str, np.ndarray], count: int) -> tuple[float, float]:
        """(norm of the mean gradient, what gradients are multiplied by) of a step of `count` targets."""
        most = self.tables["optim"]["clip"]
        norm = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in grads.values())) / count
        return norm, (min(1.0, most / norm) if most and norm else 1.0) / count

    def update(self, before: Mapping[str, Tensors], grads: Tensors, step: int, rate: float, factor: float) -> tuple[
            dict[str, Tensors], dict[str, Tensors]]:
        """Kind of state -> name -> values after the update, float64; and how far float32 may be from each (see BOUNDS)."""
        o, u = self.tables["optim"], 2.0**-24
        after: dict[str, Tensors] = {kind: {} for kind in before}
        apart: dict[str, Tensors] = {kind: {} for kind in before}
        for name, (_, _, decays) in self.parameters.items():
            old = {kind: values[name].astype(np.float64) for kind, values in before.items()}
            p, g = old["param"], grads[name].astype(np.float64) * factor
            decay = o["weight_decay"] * p if decays else 0 * p
            if o["name"] == "adamw":
                b1, b2 = o["betas"]
                m, v = b1 * old["m"] + (1 - b1) * g, b2 * old["v"] + (1 - b2) * g * g
                terms = b1 * abs(old["m"]) + (1 - b1) * abs(g)
                root = np.sqrt(v / (1 - b2 ** (step + 1))) + o["eps"]
                move, size = m / (1 - b1 ** (step + 1)) / root, terms / (1 - b1 ** (step + 1)) / root
                new, off = {"m": m, "v": v}, {"m": 4 * u * terms, "v": 6 * u * v}
            else:
                move = o["momentum"] * old["velocity"] + g
                size = o["momentum"] * abs(old["velocity"]) + abs(g)
                new, off = {"velocity": move}, {"velocity": 3 * u * size}
            new["param"] = p - rate * (move + decay)
            off["param"] = 2 * u * (abs(p) + rate * (14 * size + 6 * abs(decay)))
            for kind in before:
                after[kind][name], apart[kind][name] = new[kind], off[kind] + np.finfo(np.float32).tiny
        return after, apart


BOUNDS = """Roundings of the update in float32, in units u = 2^-24 of the absolute terms: m has rounded factors, two products and a sum
(4 with g's own); v two products more; the root halves what v errs; corrections, quotient, eps and rate add to 14 of the move; the decay has
6. The first-order sum is doubled, which covers everything of second order. Numbers below the least normal one count as it."""

GOLDEN = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    """The finaliser of SplitMix64, on 64 bits."""
    full = 2**64 - 1
    z &= full
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & full
    z = (z ^ z >> 27) * 0x94D049BB133111EB & full
    return z ^ z >> 31


def _philox(seed: int, purpose: int, sample: int, step: int, n: int) -> np.ndarray:
    """Words of positions 0 to n - 1: Philox4x32-10 of key (seed, purpose), counter (position // 4, 0, sample, step)."""
    low, groups = 2**32 - 1, np.arange(-(-n // 4), dtype=object)
    a, b, c, d = groups, groups * 0, groups * 0 + sample, groups * 0 + step
    for i in range(10):
        k0, k1 = (seed + i * 0x9E3779B9) & low, (purpose + i * 0xBB67AE85) & low
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = y >> 32 ^ b ^ k0, y & low, x >> 32 ^ d ^ k1, x & low
    return np.stack([a, b, c, d], axis=1).ravel()[:n].astype(np.int64)


def _join(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """`ids` with `pair` replaced by `new`, from the left."""
    out: list[int] = []
    for x in ids:
        out.append(x)
        if tuple(out[-2:]) == pair:
            out[-2:] = [new]
    return out


def _gelu(x: np.ndarray) -> tuple[np.ndarray, Back]:
    root = math.sqrt(2 / math.pi)
    t = np.tanh(root * (x + 0.044715 * x * x * x))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * root * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + t), lambda dy: dy * slope
