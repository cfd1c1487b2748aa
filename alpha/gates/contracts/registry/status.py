"""What the registry promises: usable means current, passing evidence of this class for every gate owed, and nothing less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from alpha.component import Component, Measured
from alpha.errors import GraphError, InputError, UngatedError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry import admitted, sorts
from alpha.gates.contracts.registry.common import (
    BASE,
    HERE,
    KERNEL,
    ONE,
    OTHER,
    PAIR,
    SAME_ISA,
    SINGLE,
    TOP,
    TWO,
    Case,
    catalogue,
    folder,
    make,
    parity_case,
    passing,
    pin_of,
    with_gpus,
)
from alpha.registry import policy
from alpha.registry.evidence import save, write_reference
from alpha.registry.gates import GATES, TABLE
from alpha.registry.gpu import class_here, why_not_here
from alpha.registry.judge import FAIL, NOT_RUN
from alpha.registry.machine import MachineClass, machine_class
from alpha.registry.package import Package
from alpha.registry.pins import Pins, binding, folder_of, key_of_record
from alpha.registry.record import canonical
from alpha.registry.status import Registry
from alpha.types import TensorType


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b


BLAS = replace(KERNEL, id="gelu.f32.blas", implementation=_product)

def _registry(root: Path, package: Package, *components: Component, machine: MachineClass = HERE) -> Registry:
    return Registry(catalogue(*components), (root,), machine, package)


def _usable(rng: np.random.Generator) -> Measured:
    """All gates: usable. One gate fewer, in turn: not, and the missing command is named."""
    checks, package = Checks(), Package()
    everything = (BASE, TOP, KERNEL)
    records = passing(everything, package)
    with folder() as root:
        save(records, root)
        r = _registry(root, package, *everything)
        for c in everything:
            checks.that(r.status(c.id).usable and r.why_not(c.id) == [], f"{c.id} is not usable: {r.why_not(c.id)}")
            checks.that(set(r.status(c.id).gates) == set(policy.owed(c)), f"{c.id}: other gates than the policy's")
        checks.that(not r.status(KERNEL.id).claimable and "no pinned share" in r.status(KERNEL.id).no_claim, "claimable without a pin")
        r.require(c.id for c in everything)
    for gone in records:
        if gone.component != KERNEL.id:
            continue
        with folder() as root:
            save([x for x in records if x is not gone], root)
            r = _registry(root, package, *everything)
            checks.that(r.status(KERNEL.id).missing == (gone.gate,) and not r.status(KERNEL.id).usable, f"usable without {gone.gate}")
            checks.that(any(f"alpha gate run {KERNEL.id} --gate {gone.gate}" in line for line in r.why_not(KERNEL.id)), "no command")
    (perf,) = [x for x in records if (x.component, x.gate) == (KERNEL.id, "perf")]
    older = {"implementation": "older"}
    case = {"name": "a", "kind": "relative", "low": -0.01, "estimate": 0.0}
    good = replace(perf, cases=[{**case, "high": 0.01}], digests=binding(older, perf.digests))
    for what, pin, compared, claimable in (
        ("the pinned code", pin_of(KERNEL.id, digests=perf.digests), None, True),
        ("other code, never compared", pin_of(KERNEL.id, digests=older), None, False),
        ("other code, compared", pin_of(KERNEL.id, digests=older), good, True),
        ("other code, compared, wide", pin_of(KERNEL.id, digests=older), replace(good, cases=[{**case, "high": 0.03}]), False),
        ("a noisy pin", pin_of(KERNEL.id, spread=0.2, digests=perf.digests), None, False),
        ("a lowered pin", pin_of(KERNEL.id, 0.4, digests=perf.digests), None, False),
        ("a slower record", pin_of(KERNEL.id, 0.9, digests=perf.digests), None, False),
    ):
        with folder() as at:
            save(records, at / "evidence")
            pins = Pins(folder_of(at / "evidence"))
            pins.save(key_of_record(perf), {KERNEL.id: pin})
            if compared is not None:
                pins.save_relative(compared)
            status = _registry(at / "evidence", package, KERNEL).status(KERNEL.id)
            checks.that(status.claimable == claimable, f"{what}: {status.no_claim or 'claimable'}")
            checks.that(status.usable == (what != "a slower record"), f"{what}: usable is {status.usable}")
            checks.that((status.no_claim == "") == claimable, f"{what}: {status.no_claim!r} is said of a claim")
    with folder() as at:  # as fast as it must be, and no gate but that
        save([perf], at / "evidence")
        Pins(folder_of(at / "evidence")).save(key_of_record(perf), {KERNEL.id: pin_of(KERNEL.id, digests=perf.digests)})
        status = _registry(at / "evidence", package, KERNEL).status(KERNEL.id)
        checks.that((status.claimable, status.no_claim) == (False, "it is not usable"), f"perf alone: {status.no_claim!r}")
        checks.that(_registry(at / "evidence", package, BASE).status(BASE.id).no_claim == "it owes no perf gate", "what owes no perf gate")
    both = replace(perf, cases=[*perf.cases, {**perf.cases[0], "name": "b"}], declared=2)
    for what, names in (("one case", "a"), ("the other case", "b"), ("all cases", "ab")):
        with folder() as at:
            save([*(x for x in records if x is not perf), both], at / "evidence")
            pins = Pins(folder_of(at / "evidence"))
            pins.save(key_of_record(perf), {KERNEL.id: pin_of(KERNEL.id, cases=("a", "b"), digests=older)})
            pins.save_relative(replace(good, cases=[{**case, "name": n, "high": 0.01} for n in names], declared=len(names)))
            status = _registry(at / "evidence", package, KERNEL).status(KERNEL.id)
            sound = status.usable and status.claimable == (what == "all cases")
            checks.that(sound, f"compared in {what}: {status.no_claim or 'claimable'}")
    with folder() as root:  # what owes nothing is never usable, nor what presupposes it
        r = _registry(root, package, replace(BASE, profile="of nobody"), TOP)
        save(passing((TOP,), package), root)
        for c in (BASE, TOP):
            told = "owes no gate" in " ".join(r.why_not(c.id))
            checks.that(told and not r.status(c.id).usable, f"{c.id} is usable though one owes nothing")
            checks.raises(UngatedError, f"{c.id} is required", lambda c=c, r=r: r.require([c.id]))  # type: ignore[misc]
    with folder() as root:
        r = _registry(root, package, *everything)
        checks.that(r.status(KERNEL.id).gates["parity"].verdict == NOT_RUN, "no evidence is not NOT_RUN")
    return checks.measured()


def _refused(rng: np.random.Generator) -> Measured:
    """Stale evidence, failing evidence, evidence of another class: not usable."""
    checks, package = Checks(), Package()
    records = passing((KERNEL,), package)
    for gate in policy.owed(KERNEL):
        (sound,) = [x for x in records if x.gate == gate]
        for name in sound.digests:
            stale = replace(sound, digests={**sound.digests, name: f"{rng.integers(1 << 40):010x}"})
            with folder() as root:
                save([*(x for x in records if x is not sound), stale], root)
                r = _registry(root, package, KERNEL)
                checks.that(not r.status(KERNEL.id).usable, f"usable with {gate} evidence of another {name}")
                checks.that(any(name in line for line in r.why_not(KERNEL.id)), f"{name} is not named")
    for bad in (make("parity", [parity_case(ratio=9.0)]), make("parity", [parity_case(ratio=float("nan"))]),
                make("parity", declared=5), make("determinism", [{"name": "a", "runs": 2, "distinct": 1, "digest": "ab"}])):
        (sound,) = [x for x in records if x.gate == bad.gate]
        with folder() as root:
            save([*(x for x in records if x is not sound), replace(bad, component=KERNEL.id, digests=sound.digests)], root)
            r = _registry(root, package, KERNEL)
            checks.that(not r.status(KERNEL.id).usable, f"usable with {bad}")
            checks.that(r.status(KERNEL.id).gates[bad.gate].verdict in (FAIL, NOT_RUN), "a failing record has another verdict")
    with folder() as root:
        save(passing((KERNEL,), package, OTHER), root)
        r = _registry(root, package, KERNEL)
        checks.that(r.status(KERNEL.id).missing == policy.owed(KERNEL), "evidence of another instruction set is accepted")
        checks.raises(UngatedError, "require", lambda: r.require([KERNEL.id]), naming=f"alpha gate run {KERNEL.id} --gate parity")
        checks.raises(InputError, "an unknown component", lambda: r.require(["made.nothing"]), naming="made.nothing")
    return checks.measured()


def _carried(rng: np.random.Generator) -> Measured:
    """What carries over between classes: parity and gradient, where the numbers cannot differ; determinism, faults and perf never."""
    checks, package = Checks(), Package()
    everything = (KERNEL, BLAS, TOP, BASE)
    rerun = {"determinism", "faults", "perf"}
    with folder() as root:
        save(passing(everything, package, SAME_ISA), root)
        r = _registry(root, package, *everything)
        checks.that(set(r.status(KERNEL.id).missing) == rerun, f"same instruction set, no BLAS: {r.status(KERNEL.id).missing}")
        checks.that(r.status(KERNEL.id).gates["parity"].machine == SAME_ISA.key, "where it was measured is not said")
        checks.that(set(r.status(BLAS.id).missing) == rerun | {"parity", "gradient"}, "another BLAS's products are accepted")
        checks.that(r.status(TOP.id).missing == ("determinism", "faults"), f"host component: {r.status(TOP.id).missing}")
        checks.that(r.status(BASE.id).usable, "host arithmetic does not carry over")
    more = replace(SAME_ISA, threads=SAME_ISA.threads + 1)
    with folder() as root:
        save(passing(everything, package, more), root)
        r = _registry(root, package, *everything)
        checks.that(r.status(KERNEL.id).missing == policy.owed(KERNEL), f"another number of threads: {r.status(KERNEL.id).missing}")
    newer = replace(SAME_ISA, numpy="9.9")
    with folder() as root:
        save(passing(everything, package, newer), root)
        r = _registry(root, package, *everything)
        checks.that(all(r.status(c.id).missing == policy.owed(c) for c in everything), "another NumPy's evidence is accepted")
    with folder() as root:
        save([replace(x, digests={**x.digests, "implementation": "other"}) for x in passing((KERNEL,), package, SAME_ISA)], root)
        checks.that(_registry(root, package, KERNEL).status(KERNEL.id).missing == policy.owed(KERNEL), "stale evidence carries over")
    return checks.measured()


def _devices(rng: np.random.Generator) -> Measured:
    """A component is measured on as many GPUs as it asks for; where there are fewer it is NOT_RUN, with the reason."""
    checks, package = Checks(), Package()
    several = {"gpus": PAIR, "ranks": replace(PAIR, id="gelu.f32.ranks", requires=("sm_90a", "ranks>=2"))}
    for what, c in several.items():
        with with_gpus():
            checks.that("no nvidia-smi" in why_not_here(c), f"{what}, no GPU: {why_not_here(c)}")
        with with_gpus("H200"):
            checks.that(f"{what}>=2: this machine has 1" in why_not_here(c), f"{what}, one GPU: {why_not_here(c)!r}")
            checks.that(class_here(c) is None and class_here(SINGLE) == ONE, f"{what}, one GPU: {class_here(c)}")
            with folder() as root:
                verdicts = {g.verdict: g.why for g in _registry(root, package, c).status(c.id).gates.values()}
                checks.that(list(verdicts) == [NOT_RUN] and "this machine has 1" in verdicts[NOT_RUN], f"{what}, one GPU: {verdicts}")
        with with_gpus("H200", "H100"):
            checks.that("different models" in why_not_here(c), f"{what}, two models: {why_not_here(c)!r}")
        with with_gpus("H200", "H200", why_unknown="nvidia-smi does not say"):
            checks.that("does not say" in why_not_here(c), f"{what}, unknown links: {why_not_here(c)!r}")
        with with_gpus("H200", "H200", "H200"):
            checks.that(why_not_here(c) == "" and class_here(c) == TWO, f"{what}, three GPUs: {why_not_here(c) or class_here(c)}")
    for need in ("gpus>=0", "gpus>=two", "gpus>2", "ranks>=", "sm_90a sm_80"):
        odd = why_not_here(replace(PAIR, requires=(need,)))
        checks.that("nothing here knows" in odd, f"{need}: {odd!r}")
    on_cpus = replace(KERNEL, requires=("ranks>=8",))
    with with_gpus():
        checks.that(why_not_here(on_cpus) == "" and class_here(on_cpus) == machine_class(), "ranks on CPUs ask for GPUs")
        checks.that("gpus>=1" in why_not_here(replace(KERNEL, requires=("gpus>=1",))), "a host component that asks for a GPU runs without")
    return checks.measured()


def _of_devices(rng: np.random.Generator) -> Measured:
    """Evidence of one GPU says nothing of two, and other links are another class; parity of another model carries over."""
    checks, package = Checks(), Package()
    everything = set(policy.owed(PAIR))
    for what, machine, missing in (
        ("two GPUs", TWO, set()), ("one GPU", ONE, everything), ("other links", replace(TWO, link="pcie"), everything),
        ("another model", replace(TWO, model="H100"), {"determinism", "faults", "perf"}),
        ("four GPUs", replace(TWO, devices=4), everything),
    ):
        with folder() as root, with_gpus("H200", "H200"):
            save(passing((PAIR,), package, machine), root)
            found = _registry(root, package, PAIR, SINGLE).status(PAIR.id)
            checks.that(set(found.missing) == missing, f"evidence of {what}: {found.missing}")
    with folder() as root, with_gpus():
        save(passing((PAIR,), package, TWO), root)
        checks.that(not _registry(root, package, PAIR).status(PAIR.id).usable, "judged by a class that no reference names")
        write_reference(root, TWO)
        write_reference(root, ONE)
        r = _registry(root, package, PAIR, SINGLE)
        checks.that(r.status(PAIR.id).usable and not r.status(SINGLE.id).usable, "the reference class of two GPUs is not asked")
        checks.that((r.machine_of(PAIR), r.machine_of(SINGLE)) == (TWO, ONE), f"{r.machine_of(PAIR)}, {r.machine_of(SINGLE)}")
    return checks.measured()


def _presupposed(rng: np.random.Generator) -> Measured:
    """What a component presupposes must be usable, to any depth; a circle is an error."""
    checks, package = Checks(), Package()
    third = replace(TOP, id="made.third", presupposes=("made.top",))
    with folder() as root:
        save(passing((TOP, third), package), root)
        r = _registry(root, package, BASE, TOP, third)
        checks.that(not r.status(TOP.id).usable and not r.status(third.id).usable, "usable though what it presupposes is not")
        checks.that(any(f"alpha gate run {BASE.id}" in line for line in r.why_not(third.id)), "the missing gate far below is not named")
        save(passing((BASE,), package), root)
        checks.that(_registry(root, package, BASE, TOP, third).status(third.id).usable, "not usable though everything below is")
        looped = replace(BASE, presupposes=("made.third",))
        checks.raises(GraphError, "a circle", lambda: _registry(root, package, looped, TOP, third).status(TOP.id), naming="made.top -> ")
        checks.raises(InputError, "something that does not exist", lambda: _registry(root, package, TOP).status(TOP.id), naming=BASE.id)
    return checks.measured()


def _calls(rng: np.random.Generator) -> Measured:
    """Calls outside the envelope that the evidence covers are refused, with the limit named."""
    checks, package = Checks(), Package()
    rows = int(rng.integers(5, 99))
    with folder() as root:
        save(passing((KERNEL,), package), root)
        r = _registry(root, package, KERNEL)

        def asked(shape: tuple[int, ...], dtype: str = "f32") -> Callable[[], None]:
            return lambda: r.require((), [(KERNEL.id, [TensorType(shape, dtype)], {})])

        asked((4, rows))()
        checks.raises(UngatedError, "too many rows", asked((rows, 4)), naming="at most 4 rows")
        checks.raises(UngatedError, "another dtype", asked((4, 4), "bf16"), naming="bf16")
        checks.raises(UngatedError, "one bad call among good ones",
                      lambda: r.require((), [(KERNEL.id, [TensorType((n, 2), "f32")], {}) for n in (1, 2, rows, 3)]),
                      naming="at most 4 rows")
    with folder() as root:
        r = _registry(root, package, KERNEL)
        checks.raises(UngatedError, "a call of a component without evidence",
                      lambda: r.require((), [(KERNEL.id, [TensorType((1, 1), "f32")], {})]), naming="alpha gate run")
    return checks.measured()


def _policy(rng: np.random.Generator) -> Measured:
    """Exemptions are a closed list: each exists, is needed and has a reason; what stands on it is owed no more, all else is."""
    checks = Checks()
    checks.that(policy.problems() == [], f"the list as it stands: {policy.problems()}")
    checks.that(len(set(GATES)) == len(GATES) == len(TABLE), "two gates share a name")
    checks.that(all(gate.owed_by and gate.seconds > 0 for gate in TABLE), "a gate that nobody owes, or without a time")
    checks.that(set(policy.owed(KERNEL)) == {"parity", "gradient", "determinism", "faults", "perf"}, "a kernel owes fewer than five gates")
    checks.that(policy.owed(BASE) == ("parity",) and policy.owed(replace(BASE, profile="nobody's")) == (), "a profile owes other gates")
    wrong: Sequence[tuple[tuple[str, str], str]] = (
        (("no_such_op", "gradient"), "a good reason"), (("gelu", "speed"), "a good reason"), (("gelu", "perf"), "  "),
        (("gelu", "gradient"), "a row with a vjp"), (("gelu_bwd", "gradient"), "a backward row"),
    )
    for pair, reason in wrong:
        with mock.patch.object(policy, "EXEMPT", {pair: reason}):
            checks.that(len(policy.problems()) == 1, f"the exemption {pair} stands")
    with mock.patch.object(policy, "EXEMPT", {("gelu", "perf"): "a good reason"}):
        checks.that(policy.problems() == [] and "perf" not in policy.owed(KERNEL), "an exemption has no effect")
        checks.that(policy.exemption(KERNEL, "perf") == "a good reason" and policy.exemption(TOP, "faults") is None, "reasons are lost")
    elsewhere = replace(KERNEL, backend="cuda")
    with mock.patch.object(policy, "EXEMPT_ON", {("cuda", "gelu", "perf"): "a good reason"}):
        checks.that("perf" in policy.owed(KERNEL) and "perf" not in policy.owed(elsewhere), "an exemption of one back end")
        checks.that(policy.exempt(elsewhere)["perf"] == "a good reason", "a back end's reason is lost")
    with mock.patch.object(policy, "EXEMPT_ON", {("cuda", "gelu", "gradient"): "a row with a vjp"}):
        checks.that(len(policy.problems()) == 1, "a back end's exemption is not looked at")
    return checks.measured()


def _order(rng: np.random.Generator) -> Measured:
    """What is missing is listed in the same order in every process."""
    checks, package = Checks(), Package()
    with folder() as root:
        r = _registry(root, package, BASE, TOP, KERNEL)
        lines = [line for c in r.catalogue for line in r.why_not(c.id)]
    checks.that(len(lines) == 11, f"{len(lines)} lines")
    return checks.measured(canonical(lines).encode().hex()[:64])


CASES: dict[str, dict[str, list[Case]]] = {
    "registry.status": {
        "parity": [("usable", _usable), ("carried over", _carried), ("presupposed", _presupposed), ("policy", _policy),
                   ("several devices", _devices), ("evidence of several devices", _of_devices), ("what a run asks about", admitted.walked),
                   ("a registry alone", admitted.alone), ("what is owed and carried", sorts.owed)],
        "determinism": [("order", _order)],
        "faults": [("refused", _refused), ("calls outside the envelope", _calls), ("what a run is refused for", admitted.fated)],
    },
}
