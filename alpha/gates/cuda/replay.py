"""What a call of a kernel of the GPU leaves behind: everything on the stream that it was given, and by kernels of its own. Floor 7.

A call is captured, all streams are waited for, outputs and scratch are poisoned, the operands get other contents, and the graph is
replayed. A graph holds what was enqueued on its stream and nothing else. So work left on another stream, outputs remembered by address,
content or number of calls, and whatever the host computes or decides do not come again: their outputs are missing or stale. The graph's
nodes also say which kernels run: those of the component's own compiled files and no library's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from alpha.backends.cuda.binaries import sources_of
from alpha.backends.cuda.lib import copy
from alpha.component import Component
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime.compile import compile_kernel
from alpha.cuda_runtime.memory import Arena
from alpha.gates.cuda.subjects import MOVED, REPLAYS, CudaBound, bind, opened, set_aside
from alpha.gates.subjects import Case, cases, crash, generator, spec_of
from alpha.registry.cases import CaseRecord, Contract

KINDS = ("KERNEL", "MEMSET", "MEMCPY", "EMPTY")
"""Nodes that a call may leave in a graph; a function of the host is none of them."""

MOST = 3
NEAR = 1 << 14
"""Pieces by which an operand is turned at most: a MiB, less than after what time.contents repeats itself."""


def entries(component: Component, nonce: str) -> list[CaseRecord]:
    """One entry per name in REPLAYS, over the largest case and others that the nonce chooses: how many replays give other bits than a call
    on fresh buffers, how many nodes are foreign, and whether a part of L2 is set aside after all that."""
    found = cases(component, nonce)
    largest = max(range(len(found)), key=lambda i: sum(np.size(x) for x in found[i].inputs), default=0)
    order = [largest, *(int(i) for i in generator(nonce, component.id, "replay").permutation(len(found)) if i != largest)]
    own = kernels_of(component)
    stale, foreign, notes = 0, 0, ["", ""]
    todo = [found[i] for i in order[:MOST] if found]
    for case in todo:
        try:
            differs, outside = _replayed(component, case, own)
        except Exception as error:  # what cannot be captured cannot be replayed
            differs, outside, notes[0] = True, [], f"{case.name}: {crash(error)}"
        stale += differs
        foreign += len(outside)
        notes[0] = notes[0] or (f"{case.name}: a replay gives other bits" if differs else "")
        notes[1] = notes[1] or (outside[0] if outside else "")
    aside = set_aside()
    counts = ((stale, notes[0]), (foreign, notes[1]), (aside, f"{aside} bytes of L2 are set aside" if aside else ""))
    return [Contract(name=name, error=float(n), bound=0.0, cases=len(todo), note=note)
            for name, (n, note) in zip(REPLAYS, counts)]


def kernels_of(component: Component) -> frozenset[str]:
    """Names of the kernels in the compiled files that a component may load."""
    return frozenset(name for source in sources_of([component]) for name in compile_kernel(source).resources)


def _replayed(component: Component, case: Case, own: frozenset[str]) -> tuple[bool, list[str]]:
    """(whether the replay gives other bits than a call on fresh buffers, nodes that are foreign)."""
    outs = case.out_types(spec_of(component))
    contents = case.arrays()
    other = [x * x.dtype.type(0.75) if x.dtype.kind == "f" else x for x in contents]
    bound = bind(component, case.types, outs, case.attrs)
    bound.fill(contents)
    bound.again(0xFF)
    got, outside = replay(bound, own, lambda: bound.fill(other))
    fresh = bind(component, case.types, outs, case.attrs, offset=1)
    fresh.fill(other)
    fresh.again(0x7B)
    return _differ(got, fresh.bits()), outside


def replay(bound: CudaBound, own: frozenset[str], move: Callable[[], None]) -> tuple[list[np.ndarray], list[str]]:
    """Outputs, in device form, of a captured call that is replayed after `move` has changed the inputs; what in its graph is none of
    `own` kernels, copies and fills. CudaError where the call cannot be captured."""
    driver = _bindings.driver()
    with _captured(bound) as graph:
        outside = foreign_nodes(graph, own)
        executable = _bindings.check("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        try:
            opened()[0].synchronize()  # what was left on other streams is over
            move()
            bound.poison(0xFF)
            _bindings.check("cuGraphLaunch", driver.cuGraphLaunch(executable, int(bound.stream.handle)))
            bound.stream.synchronize()
            return bound.bits(), outside
        finally:
            driver.cuGraphExecDestroy(executable)


@contextmanager
def _captured(bound: CudaBound) -> Iterator[Any]:
    """The graph of one call."""
    driver = _bindings.driver()
    handle = int(bound.stream.handle)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    _bindings.check("cuStreamBeginCapture", driver.cuStreamBeginCapture(handle, mode))
    try:
        bound.enqueue()
    except BaseException:
        driver.cuStreamEndCapture(handle)
        raise
    graph = _bindings.check("cuStreamEndCapture", driver.cuStreamEndCapture(handle))
    try:
        yield graph
    finally:
        driver.cuGraphDestroy(graph)


def foreign_nodes(graph: Any, own: frozenset[str]) -> list[str]:
    """What in a graph is neither a kernel of these names nor a copy or fill; a graph without any node is one too."""
    driver = _bindings.driver()
    _, count = _bindings.check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, 0))
    nodes: Sequence[Any] = _bindings.check("cuGraphGetNodes", driver.cuGraphGetNodes(graph, int(count)))[0] if int(count) else ()
    found = [] if nodes else ["nothing was left on the stream"]
    kinds = {getattr(driver.CUgraphNodeType, f"CU_GRAPH_NODE_TYPE_{kind}"): kind for kind in KINDS}
    for node in nodes:
        kind = _bindings.check("cuGraphNodeGetType", driver.cuGraphNodeGetType(node))
        if kind not in kinds:
            found.append(f"a node of type {kind}")
        elif kinds[kind] == "KERNEL":
            parameters = _bindings.check("cuGraphKernelNodeGetParams", driver.cuGraphKernelNodeGetParams(node))
            name = _bindings.check("cuFuncGetName", driver.cuFuncGetName(parameters.func)).decode()
            found += [] if name in own else [f"the kernel {name} is of no compiled file of the component"]
    return found


def why_not(component: Component, bound: CudaBound, rng: np.random.Generator) -> str:
    """What is wrong with the outputs that calls have left, for sizes at which no oracle looks: they are not those of a call on fresh
    buffers, or a replay after the inputs were turned is not, or foreign nodes ran; '' when nothing is."""
    if _differ(bound.bits(), _fresh(component, bound)):
        return "timed calls gave other outputs than a call on fresh buffers"
    got, outside = replay(bound, kernels_of(component), lambda: _turn(bound, rng))
    if _differ(got, _fresh(component, bound)):
        return "a replay of the call gives other outputs"
    return outside[0] if outside else f"{n} bytes of L2 are set aside" if (n := set_aside()) else ""


def _turn(bound: CudaBound, rng: np.random.Generator) -> None:
    """Let every operand of several pieces begin at another of them, in the order of the stream. So no place holds what it held, or outputs
    that are remembered by what stands at some place would serve the replay and the call on fresh buffers alike."""
    handle = int(bound.stream.handle)
    for span in bound._ins:
        pieces = min(span.nbytes // MOVED, NEAR)
        if pieces > 1:
            cut, held = MOVED * int(rng.integers(1, pieces)), Arena(span.nbytes, name="contents to turn")
            copy(held.address, span.address, span.nbytes, handle)
            copy(span.address, held.address + cut, span.nbytes - cut, handle)
            copy(span.address + span.nbytes - cut, held.address, cut, handle)
            bound.stream.synchronize()
            held.free()


def _fresh(component: Component, bound: CudaBound) -> list[np.ndarray]:
    """Outputs of one call on fresh buffers that hold the same contents."""
    other = CudaBound(component, bound.in_types, bound.out_types, bound.attrs, offset=1)
    other.take(bound)
    other.again(0x7B)
    return other.bits()


def _differ(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return any(x.tobytes() != y.tobytes() for x, y in zip(a, b, strict=True))
