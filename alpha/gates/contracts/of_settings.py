"""Cases that draw the settings of parts which whole runs use with few: what saves add, copies that come late, which hosts add together,
connections between frames, frequencies, sizes of a run file, prompt nodes. Floor 7.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import groupby, pairwise
from math import pi
from pathlib import Path
from statistics import median

import numpy as np

from alpha import config
from alpha.checkpoint import folders, ranges
from alpha.checkpoint.disk import Disk
from alpha.comm import handshake, line
from alpha.comm.rule import Rule
from alpha.component import Measured
from alpha.errors import ConfigError, CorruptError
from alpha.gates.contracts.reference import refuses
from alpha.graph.state import Init, StateLayout, TensorSpec
from alpha.graph.trace import Tracer
from alpha.models import llama
from alpha.models.parts import next_logits
from alpha.models.rotary import scaled_frequencies
from alpha.passes.schedule import schedule
from alpha.train.ranks import Ranks
from alpha.train.saving import Saver
from alpha.train.stalls import Stalls


def _told(checks: list[tuple[str, bool]]) -> Measured:
    wrong = [name for name, holds in checks if not holds]
    return Measured(float(len(wrong)), 0.0, len(checks), note="; ".join(wrong)[:200])


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, unit="a", init=Init("zeros"), decay=True)


# -- saving --------------------------------------------------------------------------------------------------------------------


def stalls(rng: np.random.Generator) -> Measured:
    """What saves add, of drawn times, computed again from the lists alone: foretold, measured, and the spread of its mean."""
    checks = []
    for trial in range(60):
        beside = bool(trial % 3)
        clock = [int(rng.integers(1, 99))]
        acts, begins, waits = (int(x) for x in rng.integers(1, 9000, 3))
        told = Stalls(lambda clock=clock: clock[0], beside=beside)  # type: ignore[misc]

        def spend(ns: int, clock: list[int] = clock) -> None:
            clock[0] += ns

        def copied(spend: Callable[[int], None] = spend, ns: int = begins) -> int:
            spend(ns)
            return 64

        told.rehearse(partial(spend, acts), copied, partial(spend, waits))
        quiet: dict[bool, list[int]] = {True: [], False: []}
        micros: list[int] = []
        saves: list[tuple[int, list[tuple[bool, int]]]] = []
        saving = False
        for step in range(int(rng.integers(0, 40))):
            ns, micro = int(rng.integers(1, 9000)), int(rng.integers(1, 9000))
            ahead, usual = (bool(x) for x in rng.random(2) < (0.6, 0.8))
            told.stepped(ns, micro, ahead=ahead, saving=saving, usual=usual)
            if beside and usual and step >= 3:  # those of the warm-up are left out
                if not saving:
                    quiet[ahead].append(ns)
                    micros.append(micro)
                elif saves:
                    saves[-1][1].append((ahead, ns))
            if rng.random() < 0.2:
                told.save()
                saves.append((0, []))
            with told.adding():
                spend(waited := int(rng.integers(0, 50)))
            if saves:
                saves[-1] = saves[-1][0] + waited, saves[-1][1]
            saving = bool(saves) and bool(rng.random() < 0.5)
        host = acts + begins
        foretold: int | None = host
        if beside:
            beside_ns = 0.0
            if micros:
                m = round(median(micros))
                beside_ns = round(median(quiet[True])) + m if quiet[True] else round(median(quiet[False]))
                late = max(begins + waits - m, host - beside_ns, 0)
            foretold = int(late) if micros else None
        checks.append((f"foretold {told.foretold_ns} for {foretold}", told.foretold_ns == foretold))
        mean = {a: sum(x) / len(x) for a, x in quiet.items() if x}
        measured = [w for w, _ in saves] if not beside else [
            w + round(sum(ns - mean[a] for a, ns in steps)) for w, steps in saves if all(a in mean for a, _ in steps)]
        checks.append((f"measured {told.measured_ns} for {measured}", np.allclose(told.measured_ns, measured, rtol=0, atol=1.0)
                       if len(told.measured_ns) == len(measured) else False))
        if len(measured) > 1:  # the variance of a mean of saves, each less as many means of quiet steps as it had steps beside it
            square = np.var(measured, ddof=1) / len(measured)
            for a, x in quiet.items():
                share = sum(b == a for _, steps in saves for b, _ in steps) / len(saves)
                if beside and len(x) > 1:
                    square += np.var(share * np.array(x), ddof=1) / len(x)
            checks.append((f"spread {told.spread_ns} for {2 * square**0.5}", 
                           bool(np.isclose(told.spread_ns or 0, 2 * square**0.5, rtol=1e-3, atol=2))))
        else:
            checks.append(("a spread of one", told.spread_ns is None))
    return _told(checks)


class Late:
    """Copies that are there when they have been waited for, as those from a device: of what the state was when they began. Before, their
    memory holds rubbish."""

    def __init__(self) -> None:
        self._under_way: list[tuple[np.ndarray, np.ndarray]] = []
        self.done = True

    def room(self, nbytes: int) -> np.ndarray:
        """As ranges.Copies says."""
        return np.zeros(nbytes, np.uint8)

    def begin(self) -> None:
        """As ranges.Copies says."""
        self.done = False

    def copy(self, source: np.ndarray, start: int, target: np.ndarray) -> None:
        """Rubbish first, what was there then when it is waited for."""
        self._under_way.append((source[start : start + target.size].copy(), target))
        target.view(np.uint8)[...] = 0x5A

    def end(self) -> None:
        """As ranges.Copies says."""

    def wait(self) -> None:
        """All of it is there."""
        for source, target in self._under_way:
            target[...] = source
        self._under_way.clear()
        self.done = True


def late_copies(rng: np.random.Generator) -> Measured:
    """A save whose copy comes while steps go on holds what the state was when it began, whether it is polled or waited for; none stands
    before, and the next one may begin once it does."""
    checks = []
    layout = StateLayout([_spec(f"t{i}", (int(rng.integers(1, 9)), int(rng.integers(1, 40)))) for i in range(3)])
    with tempfile.TemporaryDirectory(prefix="alpha-late-") as root:
        copies = Late()
        saver = Saver(Path(root), Ranks(), keep=9, late=copies)
        for step in range(6):
            flat = rng.standard_normal(layout.size).astype(np.float32)
            for i in range(layout.size):
                if not any(o <= i < o + n for o, n in layout.ranges()):
                    flat[i] = 0
            want = flat.copy()
            saver.begin(step, {"param": (layout, flat)}, {"step": step})
            flat += 1.0  # training goes on
            checks.append((f"step {step}: begun", saver.begun and saver.writing and not folders.steps(Path(root))[step:]))
            made = None
            if step % 3 == 0:
                made = saver.finish()
            else:
                saver.open()
                flat += 1.0
                for _ in range(int(rng.integers(1, 4))):
                    made = made or saver.poll()
                made = made or saver.finish()
            checks.append((f"step {step}: {made}", made is not None and made[0] == step and copies.done))
            found = {"param": (layout, np.zeros(layout.size, np.float32))}
            folders.load(folders.at(Path(root), step), found)
            checks.append((f"step {step}: other bits", found["param"][1].tobytes() == want.tobytes()))
        saver.rest()
        checks.append(("it still writes", not saver.writing))
    return _told(checks)


# -- ranks ---------------------------------------------------------------------------------------------------------------------


def _subtrees(members: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Of the tree of these members, whose left half is the largest power of two below their number."""
    if len(members) == 1:
        return {members}
    half = 1
    while half * 2 < len(members):
        half *= 2
    return {members} | _subtrees(members[:half]) | _subtrees(members[half:])


def together(rng: np.random.Generator) -> Measured:
    """How many members of each host may be added first: as many as each host has, where those of each host are a subtree of all."""
    checks = []
    for trial in range(200):
        per_host = [int(rng.integers(1, 6))] * int(rng.integers(1, 6))
        if trial % 3 == 0:
            per_host[int(rng.integers(len(per_host)))] = int(rng.integers(1, 6))
        hosts = [host for host, n in enumerate(per_host) for _ in range(n)]
        if trial % 5 == 0:
            rng.shuffle(hosts)
        if trial % 4 == 1:  # every host once more, behind all others
            hosts = hosts * 2
        some = rng.permutation(len(hosts))[: int(rng.integers(1, len(hosts) + 1))]
        members = sorted(some.tolist()) if trial % 2 else [*range(len(hosts))]
        runs = [len([*found]) for _, found in groupby(hosts[r] for r in members)]
        cuts = np.cumsum([0, *runs])
        trees = _subtrees(tuple(range(len(members))))
        alike = len(runs) == len({hosts[r] for r in members}) and len(set(runs)) == 1
        whole = all(tuple(range(a, b)) in trees for a, b in pairwise(cuts))
        want = runs[0] if alike and whole else 1
        got = Rule(hosts=tuple(hosts)).together(members)
        checks.append((f"{got} for {want}: {[hosts[r] for r in members]}", got == want))
    return _told(checks)


def connection(rng: np.random.Generator) -> Measured:
    """What a connection says of itself, at every byte: whether a frame is on its way in, which memory it still sends from or reads to."""
    checks = []
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    room = memoryview(bytearray(1 << 17))
    out, back = (line.Line(handshake.Peer(end, 7), lambda frame: (room[: line.SPACE], room[line.SPACE : frame.length])) for end in ends)
    try:
        came: list[int] = []
        for trial in range(8):
            body = rng.bytes(int(rng.integers(1, 300)))
            whole = line.frame(7, line.RECORD, sequence=trial, body=body)
            for at in range(len(whole)):
                ends[0].send(whole[at : at + 1])
                back.read(lambda frame, _: came.append(frame.sequence))
                checks.append((f"byte {at} of {len(whole)}: between {back.between}", back.between == (at + 1 == len(whole))))
        checks.append((f"{came} came", came == [*range(8)]))
        own, other = (memoryview(bytearray(1 << 22)) for _ in range(2))
        start = int(rng.integers(1, 1 << 10))
        out.put_message(0, 0, 1, 0, 0, own[: line.SPACE], own[start : start + 60_000])
        said = out.holds(own[start + 9 :]), out.holds(other)
        checks.append((f"before it went out {said}", said == (True, False)))
        out.flush()
        for _ in range(1000):
            back.read(lambda frame, _: came.append(-1))
            if out.flush() and came[-1] == -1:
                break
            if not back.between and back._frame is not None:
                said = back.holds(room), back.holds(other)
                checks.append((f"on its way {said}", said == (True, False)))
        checks.append(("behind it", not out.holds(own) and not back.holds(room) and came[-1] == -1))
    finally:
        for end in ends:
            end.close()
    return _told(checks)


# -- checkpoints ---------------------------------------------------------------------------------------------------------------


def blamed(rng: np.random.Generator) -> Measured:
    """Of a damaged block exactly the tensors are named that have a byte in it, also where one ends where it begins."""
    checks = []
    for _ in range(12):
        block = ranges.ALIGN * int(rng.integers(1, 4))
        held, at = [], 0
        for i in range(int(rng.integers(2, 5))):
            n = int(rng.integers(1, 5)) * ranges.ALIGN // 4 if rng.random() < 0.7 else int(rng.integers(1, 40))
            held.append(ranges.Held("param", f"t{i}", ((0, n),), at, 4))
            at = -(-held[-1].stop // ranges.ALIGN) * ranges.ALIGN
        data = rng.integers(0, 256, at, np.uint8)
        with tempfile.TemporaryDirectory(prefix="alpha-blamed-") as root:
            ranges.write(Path(root), 0, 1, ranges.cut(data, block), held, Disk(), block)
            name = Path(root) / ranges.stem(0, 1)
            index = name.with_suffix(ranges.INDEX)
            layouts = {"param": StateLayout([_spec(h.tensor, h.shape) for h in held])}
            of = ranges.read_index(index, ranges.digest_of(index), layouts)
            number = int(rng.integers(-(-at // block)))
            raw = bytearray(data.tobytes())
            raw[number * block] ^= 1
            of.path.write_bytes(raw)
            inside = [h.tensor for h in held if set(range(h.at, h.stop)) & set(range(number * block, min(at, (number + 1) * block)))]
            try:
                for _ in ranges.blocks(of, range(-(-at // block))):
                    pass
                checks.append(("a flipped bit is read", False))
            except CorruptError as error:
                said = [h.tensor for h in held if f"param {h.tensor}" in str(error)]
                checks.append((f"block {number} of {block}: {said} for {inside}", said == inside))
    return _told(checks)


# -- models --------------------------------------------------------------------------------------------------------------------


def frequencies(rng: np.random.Generator) -> Measured:
    """Of drawn bases, widths and scalings, pair by pair: what a pair turns over the original positions decides, and nothing leaves the
    range between its own frequency and the divided one."""
    worst, cases = 0.0, 0
    for trial in range(60):
        base, d = float(10.0 ** rng.uniform(1, 6)), 2 * int(rng.integers(1, 65))
        factor, low, gap, original = (float(x) for x in (
            rng.uniform(1, 40), rng.uniform(0.1, 4), rng.uniform(0.2, 9), 2.0 ** rng.uniform(2, 14)))
        scaling = (factor,) if trial % 4 == 0 else (factor, low, low + gap, original)
        got = scaled_frequencies(base, d, scaling)
        for i in range(d // 2):
            own = base ** (-2.0 * i / d)
            turns = original * own / (2 * pi)
            if len(scaling) == 1 or turns <= low:
                want = own / factor
            elif turns >= low + gap:
                want = own
            else:
                share = (turns - low) / gap
                want = (1 - share) * own / factor + share * own
            worst, cases = max(worst, abs(got[i] / want - 1)), cases + 1
        if len(got) != d // 2:
            worst = float("inf")
    return Measured(worst, 1e-12, cases, note="relative")


def run_file_sizes(rng: np.random.Generator) -> Measured:
    """The sizes that a run file of this family means, key by key; keys that are left out have the value that docs/config.md says."""
    checks = []
    for _ in range(20):
        heads = int(2 ** rng.integers(0, 4))
        width, hidden = heads * 2 * int(rng.integers(1, 9)) * 4, 64 * int(rng.integers(1, 9))
        kv = int(2 ** rng.integers(0, 1 + int(np.log2(heads))))
        text = f'[run]\nname="a"\n[model]\nfamily="llama"\nlayers=2\nwidth={width}\nheads={heads}\nhidden={hidden}\n'
        for given in (0, kv):
            more = f"kv_heads={given}\n" if given else ""
            cfg = config.parse(text + more + f"tied={'true' if given else 'false'}\nz_loss={0.5 if given else 0.0}\n"
                               "[data]\nsequence=8\n[train]\nsteps=9\nbatch=2\n[optim]\nlr=0.1\n")
            m = llama.FAMILY.sizes(cfg, 77)
            got = m.vocab, m.width, m.heads, m.kv_heads, m.hidden, m.layers, m.tied, m.z_loss
            want = 77, width, heads, given or heads, hidden, 2, bool(given), 0.5 if given else 0.0
            checks.append((f"{got} for {want}", got == want))
    return _told(checks)


def odd_heads(rng: np.random.Generator) -> Measured:
    """Heads of an odd width have no pairs to turn; nor may key-value heads not divide heads, or heads the width."""
    def refused(**sizes: int) -> bool:
        given = {"vocab": 11, "positions": 8, "layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 64, **sizes}
        return not refuses(ConfigError, lambda: llama.LlamaConfig(**given)).error  # type: ignore[arg-type]

    odd = 2 * int(rng.integers(1, 20)) + 1
    checks = [(f"head_dim {odd}", refused(head_dim=odd)), ("width 12 of 4 heads", refused(width=12, hidden=16)),
              ("kv_heads", refused(kv_heads=3)), ("width", refused(width=66)), ("gate and up", refused(width=8, heads=4, hidden=9)),
              ("a sound one", not refused(head_dim=odd + 1))]
    return _told(checks)


def logits_are_wide(rng: np.random.Generator) -> Measured:
    """Logits of the next token are f32 whatever the model computes in: a sampler compares them."""
    checks = []
    for dtype in ("f32", "bf16"):
        t = Tracer("decode")
        y = next_logits(t, t.input("x", (2, 5, 8), dtype), t.input("head", (11, 8), dtype), t.input("index", (2,), "i32"))
        checks.append((f"{y.type} of {dtype}", y.type.dtype == "f32" and y.type.shape == (2, 11)))
    return _told(checks)


# -- passes --------------------------------------------------------------------------------------------------------------------


def prompt_leaves(rng: np.random.Generator) -> Measured:
    """Gradients whose operands are all there before the graph begins go to their buffers behind its first node at the latest, wherever
    they stand in it."""
    checks = []
    for _ in range(8):
        t = Tracer("prompt")
        x = t.input("x", (4, 4), "f32")
        for _ in range(int(rng.integers(1, 6))):
            x = t.matmul(x, x)
        t.output("y", x)
        t.phase = "wgrad"
        t.output("g", t.accumulate(t.input("a", (16,), "f32"), t.input("b", (16,), "f32")))
        phases = [n.phase for n in schedule(t.graph).nodes]
        checks.append((f"{phases}", phases.index("wgrad") <= 1))
    return _told(checks)

