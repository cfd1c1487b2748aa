"""What spot checks ask of a device's memory: hashes, products with some vectors, drawn elements. Little of it comes to the host. Floor 4.

The kernels (kernels/profile/spot.cu) are made for this and share nothing with those they look at.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, cast

import numpy as np

from alpha.backends.cuda.values import device_bytes, from_device
from alpha.backends.digest import Digest
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.compile import Source, compile_kernel
from alpha.cuda_runtime.launch import Kernel
from alpha.cuda_runtime.memory import Arena, Span, aligned, download, fill, upload
from alpha.errors import GraphError
from alpha.graph.plan import Ref
from alpha.types import ITEMSIZE, TensorType

SOURCE = Source(path="profile/spot.cu")
THREADS, TILE, COLUMNS = 256, 16384, 32
"""As in the source: threads of a block, bytes of one of `hash`, columns of one of `columns`."""

VECTORS = 4
"""What one launch multiplies with."""

KERNELS = ("spot_hash", "spot_gather", "spot_rows_bf16", "spot_rows_f32", "spot_columns_bf16", "spot_columns_f32")

SLOTS = 1 << 18
"""64-bit numbers of hashes that may wait to be read."""


RUN = 1 << 19
"""Bytes of a state that one 64-bit number of its hash stands for."""


ROW, ROWS = 1024, 1 << 18
"""Elements of a flat tensor whose squares one warp sums, and how many such rows one launch takes: 10 MB of results."""


class DeviceMemory:
    """The arenas of an executor, seen by the kernels. It holds a ring of SLOTS hashes and room for what one launch makes."""

    piece, late = 1 << 28, True

    def __init__(self, arenas: Mapping[str, Arena], sizes: Mapping[str, int], stream: Any) -> None:
        self._arenas, self._sizes, self.stream = arenas, sizes, stream
        cubin = compile_kernel(SOURCE)
        self._kernels = {name: Kernel(cubin, name) for name in KERNELS}
        self._ring, self._scratch = Arena(8 * SLOTS, name="hashes of spot checks"), Arena(1 << 20, name="results of spot checks")
        self._next = 0
        self._unread: deque[Digest] = deque()

    def at(self, ref: Ref) -> OnDevice:
        """The tensor at a planned place."""
        return OnDevice(self, self._arenas[ref.arena].address + ref.offset, ref.type)

    def _room(self, *sizes: int) -> list[Span]:
        """Scratch for one launch; the stream is idle."""
        total = sum(aligned(n) for n in sizes)
        if total > self._scratch.nbytes:
            self._scratch.free()
            self._scratch = Arena(total, name="results of spot checks")
        self._scratch.used = 0
        return [self._scratch.take(n) for n in sizes]

    def _run(self, name: str, grid: tuple[int, int, int], *arguments: Any) -> None:
        given = [a if isinstance(a, Span) else ctypes.c_uint64(a) for a in arguments]
        self._kernels[name].prepare(grid, (THREADS, 1, 1), given)(self.stream)

    # -- hashes ----------------------------------------------------------------------------------------------------------------

    def nbytes(self, kind: str) -> int:
        """Of a kind of state."""
        return self._sizes[f"state.{kind}"]

    def of(self, ref: Ref) -> Digest:
        """Of the tensor at a planned place; one 64-bit number."""
        return self._hash(Span(self._arenas[ref.arena].address + ref.offset, ref.type.nbytes), ref.type.nbytes)

    def of_state(self, kind: str, start: int) -> Digest:
        """Of the piece of a kind of state that begins at byte `start`; a number for each RUN bytes."""
        nbytes = min(self.piece, self.nbytes(kind) - start)
        return self._hash(Span(self._arenas[f"state.{kind}"].address + start, nbytes), RUN)

    def _hash(self, span: Span, run: int) -> Digest:
        many, run = max(1, -(-span.nbytes // max(run, 1))), -(-max(run, 1) // TILE) * TILE
        if self._next % SLOTS + many > SLOTS:
            self._next += SLOTS - self._next % SLOTS
        if self._unread and self._next + many - self._unread[0].place > SLOTS:
            raise GraphError("more hashes wait to be read than there is room for", came=f"{self._next + many - self._unread[0].place}",
                             expected=f"at most {SLOTS}")
        made = Digest(self._next, many)
        slots = Span(self._ring.address + 8 * (made.place % SLOTS), 8 * many)
        fill(slots, 0, self.stream)
        if span.nbytes:
            self._run("spot_hash", (-(-span.nbytes // TILE), 1, 1), span, span.nbytes, run // 8, slots)
        self._next += many
        self._unread.append(made)
        return made

    def wait(self) -> None:
        """Until all that was enqueued is done; then every hash is read."""
        self.stream.synchronize()
        if self._unread:
            self._fetch(self._unread[-1])

    def behind(self) -> Callable[[], None]:
        """What waits until all that has been enqueued so far is done, and for nothing behind it."""
        made = _bindings.pycuda_driver().Event()
        made.record(self.stream)
        return cast(Callable[[], None], made.synchronize)

    def read(self, one: Digest) -> bytes:
        """The value of one that has been made, and so have those before it."""
        if one.value is None:
            self._fetch(one)
        assert one.value is not None
        return one.value

    def _fetch(self, last: Digest) -> None:
        first, end = self._unread[0].place, last.place + last.many
        pieces = [(first, end)] if first // SLOTS == (end - 1) // SLOTS else [(first, end // SLOTS * SLOTS), (end // SLOTS * SLOTS, end)]
        found = [download(Span(self._ring.address + 8 * (a % SLOTS), 8 * (b - a)), (b - a,), np.uint64) for a, b in pieces]
        values = np.concatenate(found)
        while last.value is None:
            one = self._unread.popleft()
            one.value = values[one.place - first : one.place - first + one.many].tobytes()

    def words(self, nbytes: int, at: int) -> np.ndarray:
        """Which 64-bit words of a piece of `nbytes` bytes byte `at` of its hash stands for."""
        return np.arange(at // 8 * RUN // 8, min(nbytes, (at // 8 + 1) * RUN) // 8)

    # -- tensors ---------------------------------------------------------------------------------------------------------------

    def gather(self, span: Span, t: TensorType, places: np.ndarray) -> np.ndarray:
        """Elements of a tensor by their flat index, as the host holds them, in the shape of `places`."""
        dtype = np.dtype(device_bytes(t)[1])
        if not places.size:
            return from_device(np.empty(places.shape, dtype), TensorType(places.shape, t.dtype))
        at, out = self._room(8 * places.size, dtype.itemsize * places.size)
        wanted = np.ascontiguousarray(places, np.int64)
        upload(at, wanted, self.stream)  # in its order: a launch there might not see a copy outside it
        self._run("spot_gather", (-(-places.size // THREADS), 1, 1), span, at, out, places.size, dtype.itemsize)
        self.stream.synchronize()
        return from_device(download(out, places.shape, dtype), TensorType(places.shape, t.dtype))

    def product(self, span: Span, dtype: str, shape: tuple[int, int], v: np.ndarray, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
        """(x v, or x^T v: float64 [m, k]; squared norms of the rows of that matrix) of a row-major matrix x of bf16 or f32; v [n, k]."""
        rows, columns = shape
        many = columns if transposed else rows
        made = list[np.ndarray]()
        squares: np.ndarray = np.zeros(many)
        for start in range(0, v.shape[1], VECTORS):
            padded = np.zeros((v.shape[0], VECTORS))
            chosen = v[:, start : start + VECTORS]
            padded[:, : chosen.shape[1]] = chosen
            given, out = self._room(padded.nbytes, 40 * many)
            upload(given, padded, self.stream)
            if transposed:
                self._run(f"spot_columns_{dtype}", (-(-columns // COLUMNS), 1, 1), span, given, out, rows, columns)
            else:
                self._run(f"spot_rows_{dtype}", (-(-rows * 32 // THREADS), 1, 1), span, given, out, rows, columns)
            self.stream.synchronize()
            found = download(out, (many, 5), np.float64)
            made.append(found[:, : chosen.shape[1]])
            squares = found[:, 4]
        return np.concatenate(made, 1), squares

    def squares(self, span: Span, t: TensorType, segments: Sequence[tuple[int, int]]) -> np.ndarray:
        """float64[segments]: the sum of squares of each (offset, length) of a flat tensor of f32. Whole rows of ROW elements are summed
        here, what stands before and behind them in a segment by the host."""
        size, each = ITEMSIZE[t.dtype], []
        rows = t.size // ROW
        for start in range(0, rows, ROWS):
            many = min(ROWS, rows - start)
            part = Span(span.address + start * ROW * size, many * ROW * size)
            each.append(self.product(part, t.dtype, (many, ROW), np.zeros((ROW, 1)), False)[1])
        summed = np.concatenate(each) if each else np.zeros(0)
        first = [-(-start // ROW) for start, _ in segments]
        last = [max((start + length) // ROW, a) for (start, length), a in zip(segments, first)]
        edges = list[np.ndarray]()
        for (start, length), a, b in zip(segments, first, last):
            stop = start + length
            edges.append(np.r_[start : a * ROW, b * ROW : stop] if b > a else np.arange(start, stop))
        ends = np.cumsum([0, *map(len, edges)])
        left = np.square(self.gather(span, t, np.concatenate([np.zeros(0, np.int64), *edges])), dtype=np.float64)
        return np.array([summed[a:b].sum() + left[i:j].sum() for a, b, i, j in zip(first, last, ends, ends[1:])])

    def free(self) -> None:
        """Give the memory back."""
        self._ring.free()
        self._scratch.free()


class OnDevice:
    """A tensor on the device that looks like a read-only array: what is asked for comes to the host, and no more. Leading integers and
    `reshape` give views, other indices and NumPy's functions arrays (bf16 as float32)."""

    def __init__(self, memory: DeviceMemory, address: int, t: TensorType) -> None:
        self._memory, self.address, self.type = memory, address, t
        self.shape, self.ndim, self.size = t.shape, len(t.shape), t.size
        self.dtype = from_device(np.empty(0, device_bytes(t)[1]), TensorType((0,), t.dtype)).dtype

    @property
    def span(self) -> Span:
        """Where it lies."""
        return Span(self.address, self.type.nbytes)

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> OnDevice:
        """The same elements in another shape."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        known = prod(n for n in wanted if n >= 0)
        made = tuple(n if n >= 0 else self.size // max(known, 1) for n in wanted)
        return OnDevice(self._memory, self.address, TensorType(made, self.type.dtype))

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if all(isinstance(k, int | np.integer) for k in keys):
            at = int(np.ravel_multi_index(keys, self.shape[: len(keys)])) if keys else 0
            t = TensorType(self.shape[len(keys) :], self.type.dtype)
            return OnDevice(self._memory, self.address + at * t.nbytes, t)
        axes = [_places(n, k) for n, k in zip(self.shape, (*keys, *[slice(None)] * (self.ndim - len(keys))), strict=True)]
        if sum(isinstance(k, np.ndarray) for k in keys) > 1:
            raise IndexError(f"one array of indices at most, not {key}")
        kept = tuple(len(a) for a in axes if a.ndim)
        places = np.zeros((), np.int64)
        for n, a in zip(self.shape, axes):
            places = places[..., None] * n + a if a.ndim else places * n + a
        return self._memory.gather(self.span, self.type, places.reshape(kept))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._memory.stream.synchronize()
        found = np.asarray(from_device(download(self.span, *device_bytes(self.type)), self.type)).reshape(self.shape)
        return found if dtype is None else found.astype(dtype)

    def squares(self, segments: Sequence[tuple[int, int]]) -> np.ndarray:
        """As alpha.graph.cuts.squares, made on the device."""
        return self._memory.squares(self.span, self.type, segments)

    def applied(self, transposed: bool, v: np.ndarray, columns: bool) -> tuple[np.ndarray, np.ndarray]:
        """As alpha.backends.spot.applied, made on the device."""
        shape = self.shape[0], self.shape[1]
        made, squares = self._memory.product(self.span, self.type.dtype, shape, v, transposed)
        if columns:
            nothing = np.zeros((shape[1 if transposed else 0], 1))
            _, squares = self._memory.product(self.span, self.type.dtype, shape, nothing, not transposed)
        return made, np.sqrt(squares)


def _places(n: int, key: Any) -> np.ndarray:
    """What np.arange(n)[key] is; that would take 24 GB for the few elements that are asked for of 3 billion."""
    if isinstance(key, slice):
        return np.arange(*key.indices(n))
    found = np.asarray(key)
    if found.dtype.kind not in "iu":
        raise IndexError(f"integers, slices and arrays of integers, not {found.dtype}")
    if found.size and not -n <= found.min() <= found.max() < n:
        raise IndexError(f"an index beyond an axis of {n}: from {found.min()} to {found.max()}")
    return np.where(found < 0, found + n, found)
