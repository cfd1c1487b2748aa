"""The one-pass backward of attention (kernels/attention/one_pass.cu) without a GPU: its roles, stepped in orders that chance gives, also
where some CTAs start only after others have ended; what its first launch makes; where it is chosen."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import pytest
from one_pass_roles import KEYS, MIRRORED, Device, Shape, compiled, judge, prepare, run
from planted import planted

from alpha.backends.cuda.kernels import flash as wrapper
from alpha.backends.cuda.kernels.flash import AttentionBackward, AttentionProblem, Tensor4, choose, places
from alpha.cuda_runtime.compile import KERNELS
from alpha.cuda_runtime.memory import Span
from alpha.errors import ShapeError
from alpha.registry.faults import Fault


@pytest.fixture(scope="module")
def lib() -> ctypes.CDLL:
    return compiled()


def drawn(rng: random.Random) -> AttentionProblem:
    kv_heads, group = rng.randint(1, 4), rng.choice((1, 1, 2, 3))
    queries = rng.choice((1, 63, 64, 65, 128, 200, 300, 449, 512))
    keys = queries if rng.random() < 0.6 else rng.choice((1, 77, 128, 256, 333, 500))
    kind = rng.choice(("causal", "causal", "full", "window"))
    return AttentionProblem(batch=rng.randint(1, 2), queries=queries, keys=keys, heads=kv_heads * group, kv_heads=kv_heads, head_dim=64,
                            causal=kind != "full", left=rng.choice((0, 30, 100, 200)) if kind == "window" else None)


LONG = AttentionProblem(batch=2, queries=512, keys=512, heads=4, kv_heads=2, head_dim=64, causal=True)


def play(lib: ctypes.CDLL, seed: int, wrong: str = "", problem: AttentionProblem | None = None) -> None:
    """Two launches of a drawn problem, of a drawn number of CTAs with room for a drawn number at once."""
    rng = random.Random(seed)
    found = problem or drawn(rng)
    heads, blocks = found.batch * found.kv_heads, -(-found.keys // KEYS)
    made = prepare(found, section=rng.randint(1, heads), blocks=rng.randint(1, min(6, heads * blocks)))
    if wrong == "fewer places than a section":
        made.sums.ring, made.params.section = 1, heads
    shape = Shape(lib, made, seed)
    dev = Device(shape, wrong)
    for _ in range(2):
        dev.launch()
        run(shape, dev, rng, rng.randint(1, shape.grid))
        judge(shape, dev)


# ---------------------------------------------------------------- tests


def test_the_roles_stand_in_the_kernel(lib: ctypes.CDLL) -> None:
    text = (KERNELS / "attention/one_pass.cu").read_text(encoding="utf-8")
    for line in MIRRORED:
        assert text.count(line) == 1, f"one_pass.cu no longer does as this test: {line}"
    assert lib.sums_bytes() == ctypes.sizeof(wrapper._Sums)


@pytest.mark.parametrize("part", range(4))
def test_gradients_and_their_order(lib: ctypes.CDLL, part: int) -> None:
    for seed in range(12 * part, 12 * part + 12):
        play(lib, seed)
    play(lib, part, problem=LONG)


WRONG = ("first item by index", "fewer places than a section", "turns not awaited", "turns given before the sum", "the last gives no turn",
         "turns of the launch before", "K not kept for dQ", "skipped dS not zero", "dS written under dQ")  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_role_does_wrong_is_seen(lib: ctypes.CDLL, wrong: str) -> None:
    """Many of these only hang, or only show now and then, on a GPU."""
    with pytest.raises(AssertionError) as seen:
        for seed in range(30):
            play(lib, seed, wrong, LONG)
    hang = wrong in ("first item by index", "fewer places than a section", "the last gives no turn")
    assert ("nothing can move" in str(seen.value)) == hang, seen.value


FAULTS = [f for f in planted() if f.source == "attention/turns.cuh"]


TAKEN_EARLY = Fault(id="place-taken-early", component="", gate="parity", mirrors=0, file="", source="attention/turns.cuh",
                    why="a head takes a place before its sums have been read",
                    find="return it.generation * (o.last", replace="return 0 * (o.last")
"""No planted fault: on a GPU a head that comes that early is rare."""


def test_turns_have_faults_of_their_own() -> None:
    assert len(FAULTS) >= 3 and {f.gate for f in FAULTS} == {"parity", "determinism"}


@pytest.mark.parametrize("fault", [*FAULTS, TAKEN_EARLY], ids=[f.id for f in [*FAULTS, TAKEN_EARLY]])
def test_planted_faults_are_caught(fault: Fault) -> None:
    """On a GPU by the fault's gate; none of them may hang there."""
    broken_lib = compiled(fault)
    with pytest.raises(AssertionError) as seen:
        for seed in range(30):
            play(broken_lib, seed, problem=LONG)
    assert "nothing can move" not in str(seen.value)


def check_delta(lib: ctypes.CDLL, problem: AttentionProblem) -> None:
    """attn_bwd_delta_d64 of one problem, each lane a thread, in tensors with gaps."""
    p, made = problem, prepare(problem)
    rng, blocks = np.random.default_rng(p.queries), -(-p.queries // 64)
    o, g = ((rng.integers(-30, 31, (p.batch, p.heads + 1, p.queries, 72)) / 8).astype(np.float32) for _ in range(2))
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (o, g)]  # exact
    dq = np.full(o.shape, 0x7B7B, np.uint16)
    lse = rng.standard_normal((p.batch, p.heads, p.queries)).astype(np.float32)
    lse[:, :, ::7] = -np.inf
    lse2, delta = (np.full((p.batch, p.heads, p.padded), np.nan, np.float32) for _ in range(2))
    turn = np.full(made.sums.ring * p.heads // p.kv_heads * blocks + 64, 0x7B7B7B7B, np.int32)
    params, sums = made.params, made.sums
    params.lse, params.lse2, params.delta, sums.turn = (x.ctypes.data for x in (lse, lse2, delta, turn))
    strides = (ctypes.c_long * 3)(*(x // 2 for x in (dq.strides[0], dq.strides[2], dq.strides[1])))
    addresses = [ctypes.c_void_p(x.ctypes.data) for x in (*bits, dq)]
    lib.delta_rows(addresses[0], strides, addresses[1], strides, addresses[2], strides, ctypes.byref(params), ctypes.byref(sums),
                   -(-p.batch * p.heads * 64 * blocks // 128))
    assert (turn[:-64] == 0).all() and (turn[-64:] == 0x7B7B7B7B).all(), "turns"
    rows, inside = slice(0, 64 * blocks), slice(0, p.queries)
    want = (o[:, : p.heads, :, :64].astype(float) * g[:, : p.heads, :, :64]).sum(-1)
    np.testing.assert_allclose(delta[:, :, inside], want, rtol=1e-5, atol=1e-4)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(lse2[:, :, inside], np.where(np.isneginf(lse), np.inf, lse * np.log2(np.e)), rtol=1e-6)
    beyond = slice(p.queries, rows.stop)
    assert np.isposinf(lse2[:, :, beyond]).all() and (delta[:, :, beyond] == 0).all(), "rows beyond the queries"
    assert np.isnan(lse2[:, :, rows.stop :]).all()
    for i in range(blocks):
        left, right = p.window
        at = np.arange(64 * i, min(64 * i + 64, p.queries))[:, None] + p.keys - p.queries
        key = np.arange(p.keys)
        none = not ((key >= at - left) & (key <= at + right)).any()
        block = dq[:, : p.heads, 64 * i : 64 * i + 64, :64]
        assert (block == (0 if none else 0x7B7B)).all(), f"dQ of block {i}"
    assert (dq[:, p.heads] == 0x7B7B).all() and (dq[..., 64:] == 0x7B7B).all()


RAGGED = AttentionProblem(batch=2, queries=333, keys=90, heads=6, kv_heads=2, head_dim=64, causal=True)


def test_what_a_query_contributes(lib: ctypes.CDLL) -> None:
    for problem in (RAGGED, of(1, 1, 1, 1, causal=True), of(1, 3, 3, 130), of(2, 2, 1, 64, causal=True), of(1, 48, 48, 65, causal=True)):
        check_delta(lib, problem)


OF_DELTA = [f for f in planted() if f.source == "attention/one_pass.cu" and f.id.split("one-pass-")[1] in
            ("turns-left", "lse-base", "unseen-block")]  # fmt: skip


@pytest.mark.parametrize("fault", OF_DELTA, ids=[f.id for f in OF_DELTA])
def test_planted_faults_of_the_first_launch_are_caught(fault: Fault) -> None:
    assert len(OF_DELTA) == 3
    with pytest.raises(AssertionError):
        check_delta(compiled(fault), RAGGED)


def of(b: int, h: int, g: int, t: int, d: int = 64, **more: Any) -> AttentionProblem:
    return AttentionProblem(batch=b, queries=t, keys=t, heads=h, kv_heads=g, head_dim=d, **more)


@pytest.mark.parametrize(("problem", "one"), [
    (of(64, 12, 12, 1024, causal=True), True), (of(8, 32, 8, 4096, causal=True), True), (of(1, 1, 1, 1, causal=True), True),
    (of(16, 12, 12, 1024), True), (of(8, 32, 8, 4096), False), (of(2, 4, 4, 2049), False),
    (of(4, 24, 8, 4096, 128, causal=True), False), (of(4, 4, 4, 64, 96, causal=True), False),
    (of(2, 4, 4, 1024, causal=True, left=255), False), (of(2, 4, 4, 1024, right=100), False),
    (of(2, 4, 4, 1024, causal=True, packed=True), False),
    (of(1, 8, 1, 12288, causal=True), True), (of(1, 8, 1, 12352, causal=True), False),
])  # fmt: skip
def test_where_one_pass_is_chosen(problem: AttentionProblem, one: bool) -> None:
    choice = choose(problem)
    assert choice.one is one
    assert choice.workspace_bytes(problem) == 2 * problem.statistics_bytes + (places(problem, choice).nbytes if one else 0)


@pytest.mark.parametrize(("problem", "section", "ring"), [
    (of(64, 12, 12, 1024, causal=True), 32, 40), (of(16, 12, 12, 1024, causal=True), 32, 40), (of(8, 32, 8, 4096, causal=True), 4, 5),
    (of(1, 37, 37, 1024, causal=True), 19, 23), (of(3, 24, 12, 1100, causal=True), 18, 22),
    (of(3, 22, 22, 390, causal=True), 33, 41), (of(1, 8, 1, 12288, causal=True), 1, 1),
    (of(2, 8, 1, 12288, causal=True), 1, 2), (of(9, 12, 12, 200, causal=True), 108, 108), (of(1, 1, 1, 1, causal=True), 1, 1),
])  # fmt: skip
def test_places(problem: AttentionProblem, section: int, ring: int) -> None:
    place = places(problem, choose(problem))
    assert (place.section, place.ring) == (section, ring)
    assert section <= ring <= problem.batch * problem.kv_heads and place.partial_bytes <= 2 * wrapper.L2_SHARE


def test_what_is_refused() -> None:
    for problem in (of(1, 1, 1, 64, 128), of(1, 1, 1, 64, packed=True)):
        with pytest.raises(ShapeError, match=r"exactly for packed|does not know"):
            prepare(problem)
    with pytest.raises(ShapeError, match="workspace too small"):
        tensor, rows = Tensor4.contiguous(1 << 20, 64, 1, 64), Span(1 << 25, 256)
        AttentionBackward(of(1, 1, 1, 64, causal=True), *[tensor] * 4, rows, *[tensor] * 4, Span(256, 2048), Span(256, 256))
