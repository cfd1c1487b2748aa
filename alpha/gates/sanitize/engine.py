"""The sanitizer gate: kernels of the GPU under compute-sanitizer, and again with an error planted that its tool must report. Floor 7.

A tool that says nothing has shown nothing where it cannot look: racecheck knows little of what the copy engine and the tensor cores read
and write. So a tool's silence on a component counts only if the same tool, over the same calls, reported every error planted for it:

    memcheck   the largest output lies in an allocation of half its length
    initcheck  the start of an input was never written
    racecheck  a barrier of the device code is gone, or a wait (sanitize.toml)
    synccheck  a lane of each warp stays away from a barrier (sanitize.toml)

Every operand has an allocation of its own, so that the tools see where it ends. Sound code is compiled with line numbers, which change
no instruction (suites/unit/test_cuda_sanitize.py), so that a report leads to its line; code with an error planted is not, so that a
report names the kernel and not a function that was inlined into it. What comes of it is kept raw in
`<root>/<machine class>.jsonl`, a line per component and tool; `verdict` alone turns a line into PASS, FAIL or NOT_RUN.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import alpha
from alpha.backends.cuda import kernels as binders
from alpha.backends.cuda import launches
from alpha.backends.cuda.cubins_of import ANYWHERE, NullGpu
from alpha.backends.cuda.lib import Gpu, Operand
from alpha.backends.cuda.values import to_device
from alpha.component import Component
from alpha.cuda_runtime import _bindings
from alpha.cuda_runtime import compile as nvcc
from alpha.cuda_runtime.compile import Source
from alpha.cuda_runtime.device import Device
from alpha.cuda_runtime.memory import Arena, Span, aligned, fill
from alpha.errors import CorruptError, InputError
from alpha.gates.adversarial.cuda_plant import overlay
from alpha.gates.cuda.calls import calls_of
from alpha.gates.processes import threads
from alpha.gates.sanitize.tool import TOOLS, Seen, run, version
from alpha.gates.subjects import Case, cases, fresh_nonce, generator, spec_of
from alpha.graph.plan import MULTIPROCESSORS
from alpha.ops.numerics import round_to
from alpha.registry.digest import component_digests
from alpha.registry.evidence import write_atomic
from alpha.registry.faults import Fault, broken, text_of
from alpha.registry.gpu import class_of_key
from alpha.registry.judge import FAIL, NOT_RUN, PASS
from alpha.registry.package import Package, symbol_digest
from alpha.registry.record import canonical, content_hash
from alpha.tomlfile import read_toml
from alpha.types import Attrs, TensorType

PACKAGE = Path(alpha.__file__).parent

LINE_NUMBERS = ("-lineinfo",)
"""Flag of the compiler for sound code: the tools print file and line."""
PLANTS = Path(__file__).with_name("sanitize.toml")
FORMAT = 1
TIMEOUT, PLANTED_TIMEOUT = 120.0, 60.0
"""Seconds of one process under a tool, and of one with an error planted: some of those hang."""

CALLS = 4
ELEMENTS = 300_000
"""A component is called on the largest sample of at most so many elements, then on those that launch something new, CALLS in all, and on
those that it carries for paths which the samples leave out."""

SHORT, UNSET = "short-output", "unset-input"
"""The errors that are planted around a kernel, not in it."""

UNSET_BYTES = 16384
"""Of the start of an input that is left unset: each read of it is reported by itself, which takes minutes for a whole one."""


# Calls ------------------------------------------------------------------------------------------------------------------------------


def candidates(component: Component, nonce: str) -> dict[str, Case]:
    """name -> every call that this gate may make."""
    made = {}
    for call in calls_of(component).paths:
        name = f"further:{call.name}"
        rng = generator(nonce, component.id, name)
        inputs = tuple(round_to(rng.standard_normal(t.shape), t.dtype) if t.is_float else np.zeros(t.shape, np.int32) for t in call.types)
        made[name] = Case(name, component.envelope.dtypes[0], False, inputs, call.types, call.attrs)
    return {**made, **{c.name: c for c in cases(component, nonce)}}


def _binders() -> list[ModuleType]:
    """The files of kernels."""
    return [importlib.import_module(f"{binders.__name__}.{m.name}") for m in pkgutil.iter_modules(binders.__path__)]


@contextmanager
def _noting() -> Iterator[set[tuple[Source, str]]]:
    """Within it wrappers of kernels only note what they would load, as (source, kernel): no GPU, no compiler. Not for threads."""
    noted: set[tuple[Source, str]] = set()

    class Noted:
        def __init__(self, source: Source, name: str, **more: Any) -> None:
            noted.add((source, name))

        def prepare(self, *args: Any, **more: Any) -> Any:
            return lambda stream: None

    device = SimpleNamespace(open=lambda: SimpleNamespace(properties=SimpleNamespace(multiprocessors=MULTIPROCESSORS)))
    stand_ins = {"Kernel": Noted, "compile_kernel": lambda source: source, "compile_all": list, "TensorMap": lambda *a: None,
                 "Device": device}
    kept = [(m, n, getattr(m, n)) for m in (launches, *_binders()) for n in stand_ins if hasattr(m, n)]
    try:
        for module, name, _ in kept:
            setattr(module, name, stand_ins[name])
        yield noted
    finally:
        for module, name, sound in kept:
            setattr(module, name, sound)


def loads(component: Component, case: Case) -> set[tuple[Source, str]]:
    """(source, kernel) of every launch of one call."""
    def operands(types: Iterable[TensorType]) -> list[Operand]:
        return [Operand(ANYWHERE, t) for t in types]

    with _noting() as noted:
        component.implementation(NullGpu(), operands(case.types), operands(case.out_types(spec_of(component))), case.attrs)
    return noted


def chosen(component: Component, nonce: str) -> tuple[list[str], list[tuple[Source, str]]]:
    """(names of the calls that are made, what they launch: source and kernel)."""
    every = candidates(component, nonce)
    names = [n for n in every if n.startswith("further:")]
    known: set[tuple[Source, str]] = set()
    for name in names:
        known |= loads(component, every[name])
    drawn = 0
    for name in sorted((n for n in every if n not in names), key=lambda n: -sum(x.size for x in every[n].inputs)):
        if drawn < CALLS and sum(x.size for x in every[name].inputs) <= ELEMENTS:
            new = loads(component, every[name]) - known
            if new or not drawn:
                names.append(name)
                known |= new
                drawn += 1
    return names, sorted(known, key=str)


# One process ------------------------------------------------------------------------------------------------------------------------


def call_once(component: Component, case: Case, planted: str = "") -> None:
    """One call over buffers of its own, each an allocation that ends where the operand ends. `planted`: SHORT, UNSET or none."""
    device = Device.open()
    stream, outs = device.stream(), case.out_types(spec_of(component))
    largest = max(range(len(outs)), key=lambda i: outs[i].nbytes)
    unset = next((i for i, t in enumerate(case.types) if t.is_float), 0) if planted == UNSET else -1
    same = {o: i for o, i in component.inplace if o < len(outs) and i < len(case.types) and outs[o] == case.types[i]}
    cut = [-1, largest] if planted == SHORT else [-1, -1]
    if cut[1] in same:
        cut = [same[largest], -1]
    cuda = _bindings.pycuda_driver()

    def allocate(nbytes: int, short: bool) -> tuple[Any, int]:
        size = max(1, nbytes // (1 + short))
        return cuda.mem_alloc(size), min(size, nbytes)

    ins = [allocate(t.nbytes, i == cut[0]) for i, t in enumerate(case.types)]
    results = [ins[same[o]] if o in same else allocate(t.nbytes, o == cut[1]) for o, t in enumerate(outs)]
    nbytes = component.scratch(case.types, case.attrs, 1) if component.scratch is not None else 0
    work = cuda.mem_alloc(aligned(max(1, nbytes)))
    for i, (t, x) in enumerate(zip(case.types, case.inputs)):
        first = UNSET_BYTES if i == unset else 0
        raw = to_device(np.asarray(x), t).reshape(-1).view(np.uint8)[first : ins[i][1]]
        if raw.size:
            cuda.memcpy_htod(int(ins[i][0]) + first, np.ascontiguousarray(raw))
    constants: dict[Any, Arena] = {}
    gpu = Gpu(device, Span(int(work), aligned(nbytes)), constants=constants)
    call = component.implementation(gpu, [Operand(int(a), t) for (a, _), t in zip(ins, case.types)],
                                    [Operand(int(a), t) for (a, _), t in zip(results, outs)], case.attrs)
    call(int(stream.handle))
    stream.synchronize()


KEYS = {"plant": {"id", "components", "source", "kernels", "why", "find", "racecheck", "synccheck"}, "unseen": {"components", "why"}}
"""What each table of sanitize.toml has."""


@cache
def _tables(kind: str) -> tuple[dict[str, Any], ...]:
    """The tables of one kind in sanitize.toml. InputError for one that is not as the file's head says."""
    found = read_toml(PLANTS)[kind]
    for table in found:
        if set(table) != KEYS[kind]:
            raise InputError(f"a table of {PLANTS.name} has an unknown or a missing key",
                             came=f"{kind} {table.get('id', '')}: {', '.join(sorted(table))}", expected=", ".join(sorted(KEYS[kind])))
    return tuple(found)


def _names(table: dict[str, Any], component: Component) -> bool:
    return any(fnmatchcase(component.id, i) for i in table["components"])


def unseen(component: Component, tool: str) -> bool:
    """Whether a tool does not see what writes the component's scratch memory, so that it is set before each call (sanitize.toml)."""
    return tool == "initcheck" and any(_names(table, component) for table in _tables("unseen"))


def _with_scratch_set(component: Component) -> Component:
    """Each call begins by filling its scratch memory with NaN."""
    def implementation(gpu: Gpu, ins: Sequence[Operand], outs: Sequence[Operand], attrs: Attrs) -> Callable[[int], None]:
        run, region = component.implementation(gpu, ins, outs, attrs), gpu._region
        assert region is not None, "a call under a tool has scratch memory"

        def call(stream: int) -> None:
            fill(region, 0xFF, stream)
            run(stream)

        return call
    return replace(component, implementation=implementation)


def child(component_id: str, planted: str, kernels: str, lines: str, nonce: str, names: str, finished: str, scratch: str) -> None:
    """What a process under a tool does: the calls of one component, one after another; how many are done stands in a file. `lines`: of
    which kind the code is, with line numbers or ''; `scratch`: whether it is set before each call, 'set' or ''."""
    from alpha.train.catalogue import catalogue

    component = catalogue()[component_id]
    every = candidates(component, nonce)
    if scratch:
        component = _with_scratch_set(component)
    with nvcc.compiling(kernels=Path(kernels), more=LINE_NUMBERS if lines else ()):
        for i, name in enumerate(json.loads(names), 1):
            call_once(component, every[name], planted)
            Path(finished).write_text(str(i), encoding="utf-8")


# Planted errors ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Plant:
    """An error for one tool. `fault`: what is broken in device code, None where it is planted around the kernel; `kernels`: how the names
    of those begin that it is in."""

    id: str
    kernels: tuple[str, ...] = ("",)
    fault: Fault | None = None


@cache
def _declared() -> tuple[tuple[str, dict[str, Any], Plant], ...]:
    """(tool, table, error) of the planted errors in sanitize.toml. InputError for one that is not as the file's head says."""
    found = []
    for table in _tables("plant"):
        for tool in ("racecheck", "synccheck"):
            fault = Fault(id=table["id"], component="", gate=tool, mirrors=36, why=table["why"], file=PLANTS.name, find=table["find"],
                          replace=table[tool], source=table["source"])
            broken(fault, text_of(fault, PACKAGE))
            found.append((tool, table, Plant(id=table["id"], kernels=tuple(table["kernels"]), fault=fault)))
    return tuple(found)


def plants_of(component: Component, tool: str) -> list[Plant]:
    """The errors that a tool must report in a component; none where nothing is shared and nobody waits."""
    around = {"memcheck": SHORT, "initcheck": UNSET}.get(tool)
    if around is not None:
        return [Plant(id=around)]
    return [plant for t, table, plant in _declared() if t == tool and _names(table, component)]


def prepare(component: Component, launched: Sequence[tuple[Source, str]], plant: Plant | None) -> list[str]:
    """Compile what the calls load; returns the kernels that the error is in (all of them where it is around them).
    InputError for an error that is in nothing that is launched: a tool could not see it."""
    sources = list(dict.fromkeys(source for source, _ in launched))

    def compiled() -> dict[Source, str]:
        return {c.source: c.binary_digest for c in nvcc.compile_all(sources)}

    if plant is None:
        with nvcc.compiling(more=LINE_NUMBERS):
            compiled()
    sound = compiled()
    if plant is None or plant.fault is None:
        return sorted({name for _, name in launched})
    with overlay(plant.fault) as folder, nvcc.compiling(kernels=folder):
        now = compiled()
    names = sorted({name for source, name in launched if now[source] != sound[source] and name.startswith(plant.kernels)})
    if not names:
        raise InputError("a planted error is in nothing that the component's calls launch", came=f"{plant.id}: {component.id}",
                         expected=" or ".join(plant.kernels),
                         do="mend `components` or `kernels` in alpha/gates/sanitize/sanitize.toml, or add a call")
    return names


# Findings ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What one tool came to on one component. `calls`: how many were to be made; `plants`: id -> (kernels that it is in, what was seen)."""

    component: str
    tool: str
    machine: str
    version: str
    digests: Mapping[str, str]
    nonce: str
    calls: int
    sound: Seen
    plants: Mapping[str, tuple[Sequence[str], Seen]] = field(default_factory=dict)

    def line(self) -> str:
        """Canonical JSON with its content hash, without newline."""
        body = {**asdict(self), "format": FORMAT}
        return canonical({**body, "content": content_hash(body)})


def verdict(found: Finding) -> tuple[str, str]:
    """(PASS, FAIL or NOT_RUN, why). What a tool reports of sound code is a FAIL whatever else happened; its silence needs every plant."""
    if found.sound.reported:
        return FAIL, f"{found.sound.reported} reported: {'; '.join(found.sound.words[:3])}"
    if not found.sound.clean(found.calls):
        return NOT_RUN, f"{found.tool} came to no result: {found.sound.open}"
    if not found.plants:
        return NOT_RUN, f"no error is planted for {found.tool}: nothing shows that it would see one"
    for name, (kernels, seen) in found.plants.items():
        if not seen.names(kernels):
            silent = "it was silent" if seen.clean(found.calls) else seen.open
            why = f"{seen.reported} reported, none of them there" if seen.reported else silent
            return NOT_RUN, f"{found.tool} does not see the error planted ({name} in {', '.join(kernels)}): {why}"
    return PASS, ""


def digests_of(component: Component, tool: str, package: Package | None = None) -> dict[str, str]:
    """What a finding binds to: the component's code, compiled files and samples, the errors planted, how calls are chosen and made."""
    package = package or Package()
    today = component_digests(component, "parity", package=package)
    here = "alpha.gates.sanitize.engine"
    planted = canonical([asdict(p) for p in plants_of(component, tool)])
    return {**{k: today[k] for k in ("implementation", "row", "cases", "binaries")},
            **({"scratch": "set"} if unseen(component, tool) else {}),
            "plants": hashlib.sha256(planted.encode()).hexdigest(),
            "measure": symbol_digest(f"{here}:chosen", package=package) + symbol_digest(f"{here}:call_once", package=package)}


def shipped_root() -> Path:
    """Findings that are part of the repository."""
    return PACKAGE.parent / "baselines" / "sanitize"


def local_root() -> Path:
    """Findings of this checkout."""
    return PACKAGE.parent / ".alpha" / "sanitize"


def path_of(root: Path, machine: str) -> Path:
    """The file of one machine class."""
    return root / f"{class_of_key(machine).key}.jsonl"


def load(root: Path, machine: str) -> dict[tuple[str, str], Finding]:
    """(component, tool) -> finding; {} where there is no file. CorruptError if a line is torn or was edited."""
    path = path_of(root, machine)
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.is_file() else (), 1):
        try:
            body = json.loads(line)
            claimed, form = body.pop("content"), body["format"]
            if claimed != content_hash(body) or form != FORMAT or body["machine"] != machine:
                raise ValueError("edited, of another format, or of another class")
            del body["format"]
            plants = {k: (tuple(names), _seen(seen)) for k, (names, seen) in body.pop("plants").items()}
            one = Finding(**{**body, "sound": _seen(body["sound"]), "plants": plants})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError("a line of the sanitizer's findings cannot be read", came=f"{path.name}:{number}: {error}",
                               expected="what `alpha gate sanitize` wrote", do="restore the file, or delete it and run it again") from error
        found[one.component, one.tool] = one
    return found


def _seen(body: Mapping[str, Any]) -> Seen:
    return Seen(**{**body, "words": tuple(body["words"])})


def save(found: Finding, root: Path) -> None:
    """Merge one finding into the file of its class, which is replaced in one step."""
    merged = {**load(root, found.machine), (found.component, found.tool): found}
    write_atomic(path_of(root, found.machine), "".join(merged[k].line() + "\n" for k in sorted(merged)))


def recorded_verdicts(component: Component, machine: str, *, roots: Sequence[Path] | None = None,
             package: Package | None = None) -> dict[str, tuple[str, str]]:
    """tool -> (verdict, why) of what is recorded on a machine class; the last root is the strongest."""
    package = package or Package()
    result: dict[str, tuple[str, str]] = {}
    for tool in TOOLS:
        found = [f for root in _roots(roots) if (f := load(root, machine).get((component.id, tool))) is not None]
        if found and dict(found[-1].digests) == digests_of(component, tool, package):
            result[tool] = verdict(found[-1])
        else:
            why = "the finding is older than the code" if found else f"nothing is recorded on {machine}"
            result[tool] = NOT_RUN, f"{why}; run `alpha gate sanitize {component.id} --tool {tool}`"
    return result


def missing(component: Component, machine: str, tools: Sequence[str], *, roots: Sequence[Path] | None = None) -> list[str]:
    """The tools, of those named, without a finding about the code as it is today."""
    package = Package()

    def has(tool: str) -> bool:
        today = digests_of(component, tool, package)
        return any(f is not None and dict(f.digests) == today for f in (load(r, machine).get((component.id, tool)) for r in _roots(roots)))

    return [tool for tool in tools if not has(tool)]


def _roots(roots: Sequence[Path] | None) -> Sequence[Path]:
    return (shipped_root(), local_root()) if roots is None else roots


# The gate ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Job:
    """One tool on one component: the calls, what to plant and the kernels that each error is in."""

    component: Component
    tool: str
    nonce: str
    names: tuple[str, ...]
    plants: tuple[tuple[Plant, tuple[str, ...]], ...]
    digests: Mapping[str, str]


def jobs(wanted: Mapping[Component, Sequence[str]], *, nonce: str | None = None, report: Callable[[str], None] | None = None) -> list[Job]:
    """What is to run of component -> tools, everything that it loads compiled. Needs the compiler, no GPU; MachineError, CompileError."""
    nonce, package, found = nonce or fresh_nonce(), Package(), []
    for component, tools in wanted.items():
        names, launched = chosen(component, nonce)
        prepare(component, launched, None)
        if report is not None:
            report(f"{component.id}: {len(names)} calls of {len(launched)} kernels")
        for tool in tools:
            plants = tuple((p, tuple(prepare(component, launched, p))) for p in plants_of(component, tool))
            found.append(Job(component=component, tool=tool, nonce=nonce, names=tuple(names), plants=plants,
                             digests=digests_of(component, tool, package)))
    return found


def process(sanitizer: Path, job: Job, plant: Plant | None, timeout: float | None = None) -> Seen:
    """The calls of a job in a process of its own under its tool, on sound code or with one error."""
    inside = plant.fault if plant is not None else None
    around = plant.id if plant is not None and inside is None else ""
    with overlay(inside) as kernels, tempfile.TemporaryDirectory() as folder:
        finished = Path(folder) / "finished"
        text = "import sys; from alpha.gates.sanitize.engine import child; child(*sys.argv[1:])"
        command = [sys.executable, "-c", text, job.component.id, around, str(kernels), "lines" if plant is None else "", job.nonce,
                   json.dumps(job.names), str(finished), "set" if unseen(job.component, job.tool) else ""]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(PACKAGE.parent), *sys.path) if p)}
        if timeout is None:
            timeout = TIMEOUT if plant is None else PLANTED_TIMEOUT
        return run(sanitizer, job.tool, command, finished, timeout=timeout, environment=environment)


def measure(sanitizer: Path, todo: Sequence[Job], machine: str, *, workers: int = 8, root: Path | None = None,
            on_result: Callable[[Finding], None] | None = None) -> list[Finding]:
    """Findings in the order of the jobs, `workers` processes at a time; each is kept under `root` (default: the local one) as it comes."""
    done: dict[int, Finding] = {}
    with threads(workers) as pool:
        runs = [(pool.submit(process, sanitizer, job, None), [pool.submit(process, sanitizer, job, p) for p, _ in job.plants])
                for job in todo]
        for i, (job, (sound, planted)) in enumerate(zip(todo, runs)):
            plants = {p.id: (kernels, seen.result()) for (p, kernels), seen in zip(job.plants, planted)}
            done[i] = Finding(component=job.component.id, tool=job.tool, machine=machine, version=version(sanitizer),
                              digests=job.digests, nonce=job.nonce, calls=len(job.names), sound=sound.result(), plants=plants)
            save(done[i], root or local_root())
            if on_result is not None:
                on_result(done[i])
    return [done[i] for i in range(len(todo))]
