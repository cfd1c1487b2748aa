"""The pytest plugin of suites/: discovers components, writes evidence, counts what ran. Floor 7.

A suite asks for the fixture `measured` with the marker `gate("parity")`; it is run once per component that owes the gate. By default
what is stale runs, and a random tenth of the rest; `--all` runs every gate, `--stale` what is stale only. Where the whole suite passed on
this very tree, a random tenth of all other tests runs (whole_pass.py). All draws have one seed: that of the commit's files, so that a
commit has one verdict, or `--seed`. It is printed. Records go to the local evidence (`--evidence local`), to that of the repository
(`ship`) or nowhere (`none`).

On a GPU, `sampled` reruns one gate of every component of the GPU, drawn from the seed, and holds it against the evidence.

Executed cases are counted against those asked for: what `-m`, `-k` and paths leave. A gate that was asked for and of which nothing ran is
red. Tests marked h100 on a machine without a Hopper GPU are NOT_RUN, with the reason, and never count as passed. Where no test that was
asked for could run, the exit code is 3.

Several workers (pytest-xdist, `-n 2`) share one seed and choose the same; what each ran is told to the session that started them, which
counts. A test marked `alone`, and on a GPU each marked h100, runs while the other workers wait: it times something, or asks for all of
the machine. Such tests come last. The session ends with its slowest tests.
"""

from __future__ import annotations

import fcntl
import json
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alpha.backends.cuda.binaries import sources_of
from alpha.component import Component
from alpha.cuda_runtime.compile import REPOSITORY, compile_all
from alpha.errors import AlphaError
from alpha.gates import audit, run, whole_pass
from alpha.gates.contracts.engine import child_environment
from alpha.registry import policy
from alpha.registry.evidence import local_root, reference_classes, save, shipped_root, write_atomic
from alpha.registry.gpu import AnyClass, family, gpu_class, why_not_here
from alpha.registry.history import History
from alpha.registry.judge import BASELINE, NOT_RUN, Judgement
from alpha.registry.record import Record
from alpha.registry.status import Registry
from alpha.train import forbidden
from alpha.train.catalogue import catalogue

TENTH = 10
SLOWEST = 10
"""How many tests the closing lines name, with their seconds."""
NOTHING_RAN = 3
"""Exit code of a session in which nothing that was asked for could run, as everywhere in Alpha. pytest's own use of 3 is an internal error,
which it prints."""
_PLAN = pytest.StashKey["Plan"]()
_CLOCK = pytest.StashKey["Clock"]()


@dataclass
class Tally:
    """What came of a session, or of one of its workers: gates by name, tests by id."""

    declared: dict[str, int] = field(default_factory=dict)
    executed: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    unseen: dict[str, int] = field(default_factory=dict)
    noisy: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    selected: set[str] = field(default_factory=set)
    needs_gpu: set[str] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    drawn: bool = False
    tests: int = 0
    """How many of no gate were collected."""
    left_out: int = 0
    """How many of them the draw left out."""

    def plain(self) -> dict[str, Any]:
        """As a worker tells it: sets as lists."""
        values = {f.name: getattr(self, f.name) for f in fields(Tally)}
        return {name: sorted(value) if isinstance(value, set) else value for name, value in values.items()}

    def add(self, told: Mapping[str, Any]) -> None:
        """What another worker tells. All of them collect the same, so that is taken once; what they ran is added."""
        for gate, count in told["declared"].items():
            self.declared[gate] = max(count, self.declared.get(gate, 0))
        for name in ("executed", "first", "unseen", "noisy"):
            counts = getattr(self, name)
            for gate, count in told[name].items():
                counts[gate] = counts.get(gate, 0) + count
        for name in ("not_run", "selected", "needs_gpu", "ran"):
            getattr(self, name).update(told[name])
        self.drawn |= told["drawn"]
        for name in ("tests", "left_out"):
            setattr(self, name, max(told[name], getattr(self, name)))


def seed_of_files() -> int:
    """The seed of a session that was given none: the same wherever the same commit is tested; without history a random one."""
    tree = History().tree
    return int(tree[:8], 16) if tree else random.SystemRandom().randrange(2**32)


class Plan(Tally):
    """What this session runs and what came of it."""

    def __init__(self, config: pytest.Config) -> None:
        super().__init__()
        self.everything = bool(config.getoption("--all"))
        self.only_stale = bool(config.getoption("--stale"))
        worker = getattr(config, "workerinput", None)
        given = config.getoption("--seed") if worker is None else worker["alpha_seed"]
        self.seed = int(given) if given is not None else seed_of_files()
        all_tests = self.everything or bool(config.getoption("--stamp"))
        self.suite = whole_pass.Suite.of(config, all_tests) if worker is None else whole_pass.Suite.told(worker["alpha_suite"])
        self.stamp: whole_pass.Stamp | None = None
        self.stamped = ""
        self.evidence: str = config.getoption("--evidence")
        self.registry = Registry(catalogue())
        self.chosen: dict[str, list[Component]] = {}
        self.locks: tempfile.TemporaryDirectory[str] | None = None

    def components(self, gate: str) -> list[Component]:
        """Components whose gate runs in this session."""
        if gate not in self.chosen:
            owing = [c for c in catalogue() if gate in policy.owed(c) and not why_not_here(c)]
            due = {c.id for c in owing if not self.registry.gate(c.id, gate).satisfied}
            rest = [c for c in owing if c.id not in due]
            tenth = set() if self.only_stale else {c.id for c in random.Random(f"{self.seed} {gate}").sample(rest, -(-len(rest) // TENTH))}
            self.chosen[gate] = [c for c in owing if self.everything or c.id in due or c.id in tenth]
        return self.chosen[gate]

    @property
    def root(self) -> Path | None:
        return {"local": local_root(), "ship": shipped_root(), "none": None}[self.evidence]


class Measured:
    """Runs one gate of one component and keeps its record."""

    def __init__(self, config: pytest.Config, component: Component, gate: str) -> None:
        self._config, self._plan, self.component, self.gate = config, config.stash[_PLAN], component, gate

    def __call__(self) -> tuple[Record, Judgement]:
        apart = self.gate == "perf" and family(self.component) != "cuda"
        record, judgement = _in_own_process(self.component.id) if apart else run.measure(self.component, self.gate)
        if self._plan.root is not None:
            with locked(self._config, "evidence"):  # a file holds all gates of a component, and each worker would write what it read
                save([record], self._plan.root)
        self._plan.executed[self.gate] = self._plan.executed.get(self.gate, 0) + (judgement.verdict != NOT_RUN or judgement.noisy)
        self._plan.noisy[self.gate] = self._plan.noisy.get(self.gate, 0) + judgement.noisy
        self._plan.first[self.gate] = self._plan.first.get(self.gate, 0) + (judgement.verdict == BASELINE)
        return record, judgement


_PERF = ("import pickle, sys; from alpha.gates import run; from alpha.train.catalogue import loadable_catalogue; "
         "sys.stdout.buffer.write(pickle.dumps(run.measure(loadable_catalogue()[sys.argv[1]], 'perf')))")


def _in_own_process(component: str) -> tuple[Record, Judgement]:
    """The perf gate of a component of the CPU as a command runs it, of which the pins are: in the process of a long session short calls
    are 6 % slower, and long operands lie in a memory that others have cut up."""
    done = subprocess.run([sys.executable, "-c", _PERF, component], capture_output=True, check=False, cwd=REPOSITORY,
                          env=child_environment())
    if done.returncode:
        raise AssertionError(f"perf of {component} did not end well: {done.stderr.decode(errors='replace')[-400:]}")
    found: tuple[Record, Judgement] = pickle.loads(done.stdout)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("alpha gates")
    group.addoption("--all", action="store_true", help="every component, whatever evidence there is")
    group.addoption("--stamp", action="store_true", help=f"run all tests; where all pass, {whole_pass.NAME} says so of this tree")
    group.addoption("--stale", action="store_true", help="components without current evidence only")
    group.addoption("--seed", default=None, help="seed of all that is drawn (default: of the commit's files; printed at the end of a run)")
    group.addoption("--evidence", choices=("local", "ship", "none"), default="local", help="where records go")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gate(name): runs one gate once per component that owes it")
    config.addinivalue_line("markers", "alone: times something or asks for all of the machine: the other workers wait, and it comes last")
    config.stash[_PLAN] = plan = Plan(config)
    if config.getoption("--stamp") and not hasattr(config, "workerinput"):
        try:
            plan.stamp = whole_pass.Stamp(config)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
    config.stash[_CLOCK] = Clock()
    config.pluginmanager.register(config.stash[_CLOCK], "alpha clock")
    forbidden.watch_tests([Path(tempfile.gettempdir()), REPOSITORY / ".alpha" / "emulated"])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("gate")
    if marker is None or "measured" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.stash[_PLAN].components(str(marker.args[0]))
    metafunc.parametrize("measured", chosen, ids=[c.id for c in chosen], indirect=True)


def alone(item: pytest.Item) -> bool:
    """Whether other workers wait while this test runs: it is marked so, measures speed, or runs on the GPU, of which there is one."""
    gate = item.get_closest_marker("gate")
    timed = gate is not None and str(gate.args[0]) == "perf"
    return timed or item.get_closest_marker("alone") is not None or (item.get_closest_marker("h100") is not None and not hopper())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where a tenth is drawn the others go, and what is left is put in order."""
    _draw(config, items)
    put_in_order(config, items)


def put_in_order(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Beside other workers: files that took long when they last ran come first, so that no worker is left alone with one; those that were
    never timed before them, for they may take longer still; and files of nothing but tests that run alone come last."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        return
    seconds, by_file = worker["alpha_seconds"], dict[str, list[pytest.Item]]()
    for item in items:
        by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
    last = {f for f, own in by_file.items() if all(alone(i) for i in own)}
    items[:] = [i for f in sorted(by_file, key=lambda f: (f in last, -seconds.get(f, float("inf")))) for i in by_file[f]]


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    plan = config.stash[_PLAN]
    tests = {i.nodeid: i for i in items if i.get_closest_marker("gate") is None}
    left_out = plan.suite.left_out(tests, [t for t, i in tests.items() if i.get_closest_marker("h100") is not None], plan.seed)
    plan.tests, plan.left_out = len(tests), len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=[tests[t] for t in left_out])
        items[:] = [i for i in items if i.nodeid not in left_out]


@contextmanager
def locked(config: pytest.Config, name: str, *, shared: bool = False) -> Iterator[None]:
    """Holds a lock of this session's workers, `shared` with others that share it; nothing where there are no workers."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        yield
        return
    with open(Path(worker["alpha_locks"]) / name, "w+") as file:  # closed, hence unlocked, however the process ends
        # a record lock: a process that a test forks and leaves behind does not inherit it, as it would the lock of an open file (flock)
        fcntl.lockf(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that runs alone waits until those of the other workers have ended, and they wait for it. Who waits holds the turn, so that
    nobody else begins."""
    with ExitStack() as held:
        with locked(item.config, "turn", shared=not alone(item)):
            held.enter_context(locked(item.config, "machine", shared=not alone(item)))
        return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count what was asked for: what is left after `-m`, `-k` and the rest have chosen."""
    plan = session.config.stash[_PLAN]
    for item in session.items:
        marker, call = item.get_closest_marker("gate"), getattr(item, "callspec", None)
        component = call.params.get("measured") if marker is not None and call is not None else None
        if marker is not None and component is not None:
            gate = str(marker.args[0])
            plan.declared[gate] = plan.declared.get(gate, 0) + isinstance(component, Component)
            if not isinstance(component, Component):
                continue  # pytest's stand-in where no component owes the gate: nothing to do
        plan.selected.add(item.nodeid)
        if item.get_closest_marker("h100") is not None:
            plan.needs_gpu.add(item.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A test has run when its own text did, or when what it stands on failed; a skipped one has not."""
    outcome: Any = yield
    report = outcome.get_result()
    if (report.when == "call" and not report.skipped) or report.failed or hasattr(report, "wasxfail"):
        item.config.stash[_PLAN].ran.add(item.nodeid)


class Clock:
    """Seconds of each test of a session, its fixtures included, wherever it ran; of each file from session to session."""

    PATH = REPOSITORY / ".alpha" / "seconds.json"

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Set-up, call and end of a test."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def before(self) -> dict[str, float]:
        """What each file took when it last ran; {} where that is not known. Only the order of the files depends on it."""
        try:
            return {str(file): float(seconds) for file, seconds in json.loads(self.PATH.read_text(encoding="utf-8")).items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def keep(self, *, parts: bool = False) -> None:
        """For the next session. `parts`: of many files only some tests ran; what is known of a whole file stays."""
        files: dict[str, float] = {}
        for test, seconds in self.seconds.items():
            file = test.split("::")[0]
            files[file] = round(files.get(file, 0.0) + seconds, 1)
        with suppress(AlphaError):  # a folder that cannot be written costs the next session its order, nothing more
            known = {**files, **self.before()} if parts else {**self.before(), **files}
            write_atomic(self.PATH, json.dumps(known, indent=0, sort_keys=True) + "\n")

    def lines(self) -> list[str]:
        """The seconds of all tests, then the slowest."""
        slowest = sorted(self.seconds.items(), key=lambda x: -x[1])[:SLOWEST]
        total = f"{sum(self.seconds.values()):.0f} s in {len(self.seconds)} tests; the slowest {len(slowest)}:"
        return [total, *(f"{seconds:7.1f} s  {test}" for test, seconds in slowest)]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist is about to start: it draws what all draw, and knows where their locks lie."""
    plan = node.config.stash[_PLAN]
    if plan.locks is None:
        plan.locks = tempfile.TemporaryDirectory(prefix="alpha-workers-")
    node.workerinput |= {"alpha_seed": plan.seed, "alpha_locks": plan.locks.name, "alpha_seconds": node.config.stash[_CLOCK].before(),
                         "alpha_suite": plan.suite.plain()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker has ended; one that broke down tells nothing, and its session is red for that."""
    told = getattr(node, "workeroutput", {}).get("alpha_tally")
    if told is not None:
        node.config.stash[_PLAN].add(told)


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Call it to run the gate of this test's marker on this test's component."""
    marker = request.node.get_closest_marker("gate")
    assert marker is not None
    return Measured(request.config, request.param, str(marker.args[0]))


@pytest.fixture
def unseen(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """What `sampled` tells of a gate without evidence on this class; the session's end says how many there were."""
    counts = request.config.stash[_PLAN].unseen

    def told(gate: str) -> None:
        counts[gate] = counts.get(gate, 0) + 1

    return told


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The session's seed, printed at its end."""
    request.config.stash[_PLAN].drawn = True
    return request.config.stash[_PLAN].seed


def drawn(component: Component, seed: int) -> str:
    """The gate of a component that this seed draws."""
    return random.Random(f"{seed} {component.id}").choice(policy.owed(component))


def sampled(component: Component, registry: Registry, seed: int, unseen: Callable[[str], None] = lambda gate: None) -> list[str]:
    """One gate of a component, drawn from the seed: where it disagrees with the evidence; [] where it agrees.

    It is measured twice: from a fresh nonce, which must be satisfied as the evidence says, and from the nonce of this machine's own
    record, where there is one, which must repeat (audit.py). Without current evidence there is nothing to agree with: a disagreement.
    Only where this class is none whose evidence ships, and has none of this gate, the fresh nonce decides; `unseen` is told the gate.
    """
    gate = drawn(component, seed)
    status = registry.status(component.id).gates[gate]
    if not status.machine and not _ships(registry.machine_of(component)):
        unseen(gate)
    elif not status.satisfied:
        return [f"{gate}: {status.why}; `alpha gate run {component.id} --stale` supplies it"]
    judgement = run.measure(component, gate)[1]
    found = [] if judgement.satisfied else [f"{gate} from a fresh nonce: {judgement.verdict}: {'; '.join(judgement.reasons[:2])}"]
    recorded = audit.records(registry, component).get(gate)
    if recorded is None:
        return found
    repeated = audit.again(component, recorded)
    return found + [f"{gate} from the record's nonce: {x}" for x in (*repeated.problems, repeated.not_run) if x]


def _ships(machine: AnyClass | None) -> bool:
    """Whether evidence of this class stands in the tree, all of it: it is one that REFERENCE names, or no class at all."""
    return machine is None or machine.key in reference_classes(shipped_root()).values()


def hopper() -> str:
    """Why tests marked h100 cannot run here; '' when they can. Starts no driver in this process."""
    here = gpu_class()
    return "" if here is not None and here.capability == "sm90" else "this machine has no Hopper GPU (H100 or H200)"


@cache
def compiled() -> None:
    """Every kernel of the GPU, many at a time, once a session: a test would compile those that it needs one by one."""
    compile_all(sources_of(c for c in catalogue() if family(c) == "cuda"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("h100") is None:
        return
    why = hopper()
    if why:
        item.config.stash[_PLAN].not_run[item.nodeid] = why
        pytest.skip(f"NOT_RUN: {why}")
    compiled()


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    plan = config.stash[_PLAN]
    if any(plan.declared.values()) or plan.needs_gpu or plan.drawn:
        terminalreporter.section("gates")
    for gate, declared in sorted(plan.declared.items()):
        owing = sum(gate in policy.owed(c) and not why_not_here(c) for c in catalogue())
        terminalreporter.write_line(f"{gate}: {plan.executed.get(gate, 0)} executed of {declared} declared, {owing} components owe it")
        if plan.first.get(gate):
            terminalreporter.write_line(f"{gate}: {plan.first[gate]} of them have no pin on this kind of machine to be judged by")
        if plan.noisy.get(gate):
            terminalreporter.write_line(f"{gate}: {plan.noisy[gate]} of them have cases that are too noisy to judge: NOT_RUN")
    if plan.declared or plan.drawn:
        terminalreporter.write_line(f"seed of what is drawn at random: {plan.seed}")
    if plan.needs_gpu:
        terminalreporter.write_line(f"h100: {len(plan.needs_gpu & plan.ran)} executed of {len(plan.needs_gpu)} selected")
    for gate, count in sorted(plan.unseen.items()):
        terminalreporter.write_line(f"{gate}: {count} components have no evidence on this class of GPU; a fresh one was judged")
    for why in sorted(set(plan.not_run.values())):
        count = sum(w == why for w in plan.not_run.values())
        terminalreporter.write_line(f"NOT_RUN: {count} tests: {why}")
    said = plan.suite.lines(plan.tests, plan.left_out, plan.seed) + [plan.stamped] * bool(plan.stamped)
    if said:
        terminalreporter.section("whole suite")
    for line in said:
        terminalreporter.write_line(line)
    clock = config.stash[_CLOCK]
    if len(clock.seconds) > SLOWEST:
        terminalreporter.section("time")
        for line in clock.lines():
            terminalreporter.write_line(line)
    if exitstatus == 0 and _nothing_ran(config):
        terminalreporter.write_line(f"NOT_RUN: none of the {len(plan.selected)} tests asked for could run; exit code {NOTHING_RAN}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session in which nothing that was asked for could run ends with 3. One in which nothing of a gate that was asked for ran is red."""
    plan = session.config.stash.get(_PLAN, None)
    if plan is not None and hasattr(session.config, "workeroutput"):
        session.config.workeroutput["alpha_tally"] = plan.plain()  # who started this worker decides
        return
    if plan is not None and plan.locks is not None:
        session.config.stash[_CLOCK].keep(parts=plan.left_out > 0)
        plan.locks.cleanup()
    _judge(session, exitstatus, plan)
    if plan is not None and plan.stamp is not None:
        why_not = plan.stamp.write(exitstatus=int(session.exitstatus), selected=plan.selected, ran=plan.ran, h100=plan.needs_gpu,
                                   tests=plan.tests, workers=session.config.getoption("numprocesses", None) or 1)
        plan.stamped = f"{whole_pass.NAME} was not written: {why_not}" if why_not else f"{whole_pass.NAME} says that this tree passed"
        if why_not and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _judge(session: pytest.Session, exitstatus: int, plan: Plan | None) -> None:
    if plan is None or exitstatus != 0 or session.config.getoption("collectonly"):
        return
    if _nothing_ran(session.config):
        session.exitstatus = NOTHING_RAN
    elif any(n > 0 and plan.executed.get(g, 0) == 0 for g, n in plan.declared.items()) or any(_owed_nothing(plan)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _nothing_ran(config: pytest.Config) -> bool:
    plan = config.stash[_PLAN]
    return bool(plan.selected) and not plan.ran and not config.getoption("collectonly")


def _owed_nothing(plan: Plan) -> Iterator[bool]:
    """Whether a gate was asked of no component at all, though some owe it and everything was to run."""
    for gate, declared in plan.declared.items():
        yield plan.everything and declared == 0 and any(gate in policy.owed(c) for c in catalogue())
