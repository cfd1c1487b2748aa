"""Memory that the GPUs of one host share: each rank's arenas, mapped by its peers through CUDA's IPC handles and proved to be there.

A rank is a process with a device of its own. What ranks already share (alpha/comm) carries the handles: it is handed in as `exchange`,
which gives every rank's bytes in the order of the ranks. Every method whose docstring says so is called by all ranks, in one order.

A handle names a whole allocation of the driver, so its base is exported and the arena's offset told beside it. Whether two devices can
see each other is not asked of the driver, whose answer is known to be wrong on some machines: each rank writes into each peer's memory and
reads from it, and the peer looks at what came. Written for any number of ranks of one host.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.memory import Arena, Span, download, fill, upload
from alpha.errors import GraphError, MachineError

Exchange = Callable[[bytes], list[bytes]]
"""Hands over this rank's bytes and returns those of all ranks, in order; called by all ranks."""

WHOLE = 2 << 20
"""Bytes to which a shared arena is rounded up. The driver cuts smaller allocations out of one of its own, which a handle exports whole."""

_PROOF = 4096
"""Bytes that each rank writes into each other one."""


def devices_of(rank: int, count: int) -> str:
    """What CUDA_VISIBLE_DEVICES must be in the process of a rank before the driver starts: its own device first, so that it is device 0
    there, and the others behind it."""
    return ",".join(str((rank + i) % count) for i in range(count))


@dataclass(frozen=True)
class Window:
    """An arena of this rank that its peers see, and theirs. `bases`: where the arena of each rank begins in this process's addresses;
    `sizes`: of each, in bytes."""

    bases: tuple[int, ...]
    sizes: tuple[int, ...]


class Peers:
    """This rank's windows. `rank`, `size`: among the ranks of this host that share memory; `exchange`: see the module."""

    def __init__(self, rank: int, size: int, exchange: Exchange) -> None:
        if not 0 <= rank < size:
            raise GraphError("a rank is one of those that share memory", came=f"rank {rank} of {size}", expected=f"0 to {size - 1}")
        self.rank, self.size, self.exchange = rank, size, exchange
        self.windows: list[Window] = []
        self._opened: list[int] = []
        self._arenas: list[Arena] = []

    def arena(self, nbytes: int, *, name: str = "shared arena") -> Arena:
        """A new arena of this rank, zeroed and shared with all peers. Called by all ranks; sizes may differ.

        MachineError where a peer's memory cannot be mapped, or what is written there does not arrive.
        """
        arena = Arena(-(-max(nbytes, 1) // WHOLE) * WHOLE, name=name)
        fill(Span(arena.address, arena.nbytes), 0)
        _synchronize()
        self._arenas.append(arena)
        self.share(arena)
        return arena

    def share(self, arena: Arena) -> Window:
        """Lets all peers see an arena, and maps theirs. Called by all ranks. The arena's first bytes are written and put back."""
        driver = _bindings.driver()
        base, _ = _bindings.check("cuMemGetAddressRange", driver.cuMemGetAddressRange(arena.address))
        handle = _bindings.check("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(arena.address))
        told = self._all((bytes(handle.reserved), arena.address - int(base), arena.nbytes, os.getpid()))
        if len({pid for *_, pid in told}) != self.size:
            raise GraphError("each rank is a process of its own", came=[pid for *_, pid in told], expected="as many processes as ranks",
                             do="CUDA's handles cannot be opened where they were made")
        bases = []
        for rank, (raw, offset, _, _) in enumerate(told):
            bases.append(arena.address if rank == self.rank else self._open(raw, rank) + offset)
        window = Window(tuple(bases), tuple(nbytes for _, _, nbytes, _ in told))
        self._prove(window)
        self.windows.append(window)
        return window

    def everywhere(self, *addresses: int) -> list[tuple[int, ...]]:
        """Of each address of this rank, where its peers' addresses of the same place in the list lie in this process. Called by all ranks
        with as many addresses. GraphError for one in no window."""
        placed = []
        for address in addresses:
            found = [(i, address - w.bases[self.rank]) for i, w in enumerate(self.windows)
                     if 0 <= address - w.bases[self.rank] < w.sizes[self.rank]]
            if not found:
                raise GraphError("peers see shared arenas alone", came=hex(address), expected="an address of an arena that was shared",
                                 do="take the operand from an arena of `Peers.arena`, or share its arena")
            placed.append(found[0])
        told: Sequence[list[tuple[int, int]]] = self._all(placed)
        if len({len(x) for x in told}) > 1:
            raise GraphError("all ranks ask for as many addresses", came=[len(x) for x in told], expected="equal numbers")
        return [tuple(self.windows[window].bases[rank] + offset for rank, (window, offset) in enumerate(each))
                for each in zip(*told, strict=True)]

    def close(self) -> None:
        """Unmaps the peers' memory, then frees this rank's shared arenas. Called by all ranks, when nothing runs that uses them: memory
        that a peer has still mapped must not be freed."""
        driver = _bindings.driver()
        for address in self._opened:
            _bindings.check("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(address))
        self._opened.clear()
        self.windows.clear()
        self.exchange(b"unmapped")
        for arena in self._arenas:
            arena.free()
        self._arenas.clear()

    def _all(self, what: object) -> list:
        return [pickle.loads(x) for x in self.exchange(pickle.dumps(what))]

    def _open(self, raw: bytes, rank: int) -> int:
        driver = _bindings.driver()
        handle = driver.CUipcMemHandle()
        handle.reserved = raw
        try:
            address = int(_bindings.check("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(
                handle, driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value)))
        except _bindings.CudaError as error:
            raise MachineError(f"the memory of rank {rank} cannot be mapped by rank {self.rank}", came=str(error).splitlines()[0],
                               expected="devices of one host that reach each other over NVLink or PCIe",
                               do="`nvidia-smi topo -p2p n` says which do; run ranks that do not without `--device`") from error
        self._opened.append(address)
        return address

    def _prove(self, window: Window) -> None:
        """Each rank writes a pattern into each peer's window and reads it back; then each looks at its own window from its own side."""
        places = [Span(window.bases[self.rank] + i * _PROOF, _PROOF) for i in range(self.size)]
        if self.size * _PROOF > min(window.sizes):
            raise GraphError("a shared arena is too small to be proved", came=min(window.sizes), expected=f"{self.size * _PROOF} bytes")
        kept = [download(p, (_PROOF,), np.uint8) for p in places]
        nonces = self.exchange(os.urandom(16))
        wrong = []
        for rank, base in enumerate(window.bases):
            theirs = Span(base + self.rank * _PROOF, _PROOF)
            upload(theirs, _pattern(nonces, self.rank, rank))
            _synchronize()
            if not np.array_equal(download(theirs, (_PROOF,), np.uint8), _pattern(nonces, self.rank, rank)):
                wrong.append(f"what rank {self.rank} wrote to rank {rank} is not read back")
        self.exchange(b"written")
        for rank, place in enumerate(places):
            if not np.array_equal(download(place, (_PROOF,), np.uint8), _pattern(nonces, rank, self.rank)):
                wrong.append(f"what rank {rank} wrote does not arrive at rank {self.rank}")
        found = [w for each in self._all(wrong) for w in each]
        for place, before in zip(places, kept, strict=True):
            upload(place, before)
        _synchronize()
        self.exchange(b"proved")
        if found:
            raise MachineError("GPUs do not share memory, whatever the driver says", came="; ".join(found),
                               expected="each rank to read what every other one wrote",
                               do="switch off the IOMMU's translation between GPUs (ACS), or run these ranks without `--device`")


def _pattern(nonces: Sequence[bytes], writer: int, owner: int) -> np.ndarray:
    """Bytes that only this writer leaves at this owner, other ones each time."""
    seed = hashlib.sha256(b"".join(nonces) + bytes([writer, owner])).digest()
    return np.frombuffer(hashlib.shake_256(seed).digest(_PROOF), np.uint8)


def _synchronize() -> None:
    _bindings.check("cuCtxSynchronize", _bindings.driver().cuCtxSynchronize())
