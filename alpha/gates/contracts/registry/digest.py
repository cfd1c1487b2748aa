"""What digests promise: they change with everything that a symbol uses inside the package, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from alpha.backends.cuda.calls import Call, Calls
from alpha.component import Component, Envelope, Limit, Measured
from alpha.errors import InputError
from alpha.gates.contracts.checks import Checks
from alpha.gates.contracts.registry import held, named, reading, remembered, snapshot
from alpha.gates.contracts.registry.common import Case, digest_of, folder, write_package
from alpha.ops.spec import Sample
from alpha.ops.table import row, table
from alpha.registry.digest import calls_blas, component_digests, contract_targets, value_digest
from alpha.registry.package import Package, module_digest, symbol_digest

BASE: Mapping[str, str] = {
    "main.py": '''"""Doc."""
import math as m
from math import sqrt
import mini.deep.far
import mini.constants as consts
from mini import helpers, shapes
from mini.helpers import outer as renamed
from mini.reexport import *
from mini.deep import hidden

SCALE = 3.0
_TABLE = {"a": 1}
_TABLE["b"] = 2


def decorate(f):
    return f


def default():
    return 5


class Base:
    factor = 2

    def method(self):
        return helpers.only_by_class()


@decorate
def root(x, cpu: shapes.Shape, k=default()):
    """Doc of root."""
    from mini.late import late_function as late
    y = renamed(x) * SCALE * consts.PI + late() + starred() + mini.deep.far.away() + hidden.inside()
    helper = sqrt(m.pi)  # a local of the name of nothing else
    return Derived().method() + helper + _TABLE["a"] + even(3) + cpu.area()


class Derived(Base):
    pass


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def shadows(unrelated):
    return [consts for consts in unrelated]


def unrelated():
    return 1
''',
    "helpers.py": "def inner():\n    return 1\n\n\ndef outer(x):\n    return inner() + x\n\n\n"
                  "def only_by_class():\n    return 7\n\n\ndef spare():\n    return 0\n",
    "constants.py": "PI = 3.0\nOTHER = 4.0\n",
    "shapes.py": "class Shape:\n    def area(self):\n        return _side() ** 2\n\n\ndef _side():\n    return 2\n",
    "reexport.py": "from mini.stars import starred\n",
    "stars.py": "def starred():\n    return 11\n",
    "late.py": "def late_function():\n    return 13\n",
    "deep/far.py": "def away():\n    return 17\n",
    "deep/hidden.py": "def inside():\n    return 19\n",
}


def _with(file: str, old: str, new: str) -> dict[str, str]:
    assert BASE[file].count(old) >= 1, (file, old)
    return {**BASE, file: BASE[file].replace(old, new)}


def _unmoved(rng: np.random.Generator) -> Measured:
    """Edits that do not change what the program does."""
    checks, was = Checks(), digest_of(BASE)
    same = {
        "a comment": _with("main.py", "SCALE = 3.0", f"# note {rng.integers(1 << 30)}\nSCALE = 3.0  # here"),
        "a docstring": _with("main.py", '"""Doc of root."""', '"""Another text."""'),
        "a docstring removed": _with("main.py", '    """Doc of root."""\n', ""),
        "a module docstring": _with("main.py", '"""Doc."""', '"""Longer."""'),
        "a docstring in a callee": _with("helpers.py", "def inner():\n", 'def inner():\n    """Doc."""\n'),
        "blank lines": _with("main.py", "\n\ndef odd(n):", "\n\n\n\n\ndef odd(n):"),
        "an unrelated function": _with("main.py", "def unrelated():\n    return 1", f"def unrelated():\n    return {rng.integers(2, 99)}"),
        "an unused constant": _with("constants.py", "OTHER = 4.0", "OTHER = 5.0"),
        "an unused callee": _with("helpers.py", "def spare():\n    return 0", "def spare():\n    return 9"),
        "an added function": {**BASE, "helpers.py": BASE["helpers.py"] + "\n\ndef added():\n    return 3\n"},
        "a method that nobody calls": _with("shapes.py", "def area(self)", "def unsaid(self):\n        return 0\n\n    def area(self)"),
        "layout of an expression": _with("helpers.py", "return inner() + x", "return (inner()\n            + x)"),
    }
    tail = BASE["helpers.py"].split("\n\n\n")
    same["functions in another order"] = {**BASE, "helpers.py": "\n\n\n".join(reversed([t.strip("\n") for t in tail])) + "\n"}
    moved = {k: v.replace("mini.late", "mini.deep.later") for k, v in BASE.items() if k != "late.py"}
    same["a file that moved"] = {**moved, "deep/later.py": BASE["late.py"]}
    for what, files in same.items():
        checks.that(digest_of(files) == was, what)
    return checks.measured()


def _reached(rng: np.random.Generator) -> Measured:
    """Edits of everything that is used, near and far."""
    checks, was = Checks(), digest_of(BASE)
    n = str(int(rng.integers(100, 1 << 20)))
    different = {
        "the function itself": _with("main.py", "even(3)", "even(4)"),
        "a callee": _with("helpers.py", "return inner() + x", "return inner() - x"),
        "a callee of a callee": _with("helpers.py", "def inner():\n    return 1", f"def inner():\n    return {n}"),
        "a constant": _with("main.py", "SCALE = 3.0", f"SCALE = {n}"),
        "a constant of another module, through an alias": _with("constants.py", "PI = 3.0", f"PI = {n}"),
        "a base class": _with("main.py", "factor = 2", f"factor = {n}"),
        "a method's callee": _with("helpers.py", "return 7", f"return {n}"),
        "a decorator": _with("main.py", "def decorate(f):\n    return f", "def decorate(f):\n    return lambda *a: f(*a)"),
        "a default argument": _with("main.py", "return 5", f"return {n}"),
        "a class named by an annotation": _with("shapes.py", "return _side() ** 2", "return _side() ** 3"),
        "a callee of that class": _with("shapes.py", "return 2", f"return {n}"),
        "a function-level import": _with("late.py", "return 13", f"return {n}"),
        "a star import": _with("stars.py", "return 11", f"return {n}"),
        "an attribute of a dotted import": _with("deep/far.py", "return 17", f"return {n}"),
        "an attribute of an imported submodule": _with("deep/hidden.py", "return 19", f"return {n}"),
        "a table filled by assignment": _with("main.py", '_TABLE["b"] = 2', f'_TABLE["b"] = {n}'),
        "the other half of a recursion": _with("main.py", "return n != 0 and even(n - 1)", "return n != 1 and even(n - 1)"),
        "a function from outside the package": _with("main.py", "from math import sqrt", "from cmath import sqrt"),
        "the type of a constant": _with("main.py", "SCALE = 3.0", "SCALE = 3"),
        "the type of an equal constant": _with("main.py", "def even(n):\n    return n == 0", "def even(n):\n    return n == False"),
        "the order of two operands": _with("helpers.py", "inner() + x", "x + inner()"),
    }
    seen = {was}
    for what, files in different.items():
        now = digest_of(files)
        checks.that(now not in seen, what)
        seen.add(now)
    return checks.measured()


def _collisions(rng: np.random.Generator) -> Measured:
    """Two symbols of one name, names that are locals, names that are one letter apart."""
    checks = Checks()
    n = int(rng.integers(10, 1 << 20))
    two = {"a.py": f"def f():\n    return {n}\n", "b.py": f"def f():\n    return {n + 1}\n",
           "main.py": "from mini.a import f as g\nfrom mini.b import f as h\n\n\ndef both():\n    return g() + h()\n"}
    checks.that(digest_of(two, "mini.a:f") != digest_of(two, "mini.b:f"), "two functions of one name share a digest")
    alike = {**two, "b.py": two["a.py"]}
    checks.that(digest_of(two, "mini.main:both") != digest_of(alike, "mini.main:both"), "one of two callees of one name is lost")
    swapped = {**two, "a.py": two["b.py"], "b.py": two["a.py"]}
    checks.that(digest_of(two, "mini.main:both") != digest_of(swapped, "mini.main:both"), "callees of one name can be swapped")
    checks.that(digest_of(BASE, "mini.main:shadows") == digest_of(_with("constants.py", "PI = 3.0", "PI = 9.0"), "mini.main:shadows"),
                "a local name is followed as if it were the module's")
    thrice = {**two, "main.py": two["main.py"].replace("+ h()", "+ h() + k()") + "\n\nfrom mini.a import f as k\n"}
    other = {**thrice, "main.py": thrice["main.py"].replace("from mini.a import f as k", "from mini.b import f as k")}
    checks.that(digest_of(thrice, "mini.main:both") != digest_of(other, "mini.main:both"), "a third name may mean either of two callees")
    method = digest_of(BASE, "mini.shapes:Shape.area")
    callee = _with("shapes.py", "return 2", "return 8")
    checks.that(method != digest_of(callee, "mini.shapes:Shape.area"), "a method leaves out its callees")
    with folder() as at:
        package = Package(write_package(at / "p", BASE), "mini")
        checks.that(module_digest("mini.shapes", package=package) != module_digest("mini.helpers", package=package), "modules collide")
    with folder() as at:
        changed = Package(write_package(at / "p", _with("helpers.py", "return 0", "return 2")), "mini")
        checks.that(module_digest("mini.helpers", package=package) != module_digest("mini.helpers", package=changed),
                    "a module's digest leaves out a function")
    return checks.measured()


def _opaque(rng: np.random.Generator) -> Measured:
    """Judges and tolerances are not digested: a looser one makes no evidence stale, it is judged again instead."""
    files = {"gates/parity.py": "from mini.registry.judge import LIMIT\nfrom mini.registry.record import write\n\n\n"
                                "def measure(x):\n    return write(x), LIMIT, count()\n\n\ndef count():\n    return 1\n",
             "registry/judge.py": "LIMIT = 2\n", "registry/status.py": "from mini.registry import judge\n\n\n"
                                                                         "def status():\n    return judge.LIMIT\n",
             "registry/record.py": "def write(x):\n    return x\n"}
    checks, was = Checks(), digest_of(files, "mini.gates.parity:measure")
    looser = {**files, "registry/judge.py": f"LIMIT = {int(rng.integers(3, 99))}\n"}
    checks.that(digest_of(looser, "mini.gates.parity:measure") == was, "a tolerance is part of the measuring code's digest")
    checks.that(digest_of(looser, "mini.registry.status:status") == digest_of(files, "mini.registry.status:status"),
                "a tolerance is part of the status")
    fewer = {**files, "gates/parity.py": files["gates/parity.py"].replace("return 1", "return 0")}
    checks.that(digest_of(fewer, "mini.gates.parity:measure") != was, "measuring code is not digested")
    limit = "mini.registry.judge:LIMIT"
    checks.that(digest_of(files, limit) != digest_of(looser, limit), "the judge itself cannot be digested")
    return checks.measured()


def _closure(n: int) -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + n
    return add


def _defaulted(n: int) -> Callable[..., int]:
    def add(x: int, *, by: int = n) -> int:
        return x + by
    return add


def _drawn(n: int) -> Callable[[np.random.Generator], Iterable[Sample]]:
    def samples(rng: np.random.Generator) -> Iterable[Sample]:
        return [Sample(name=str(n), inputs=())]
    return samples


def _values(rng: np.random.Generator) -> Measured:
    """Functions and data that are held by a row or an envelope, not named by a module."""
    checks, package = Checks(), Package()
    n = int(rng.integers(1, 1 << 20))

    def of(value: object) -> str:
        return value_digest(value, package)

    checks.that(of(_closure(n)) == of(_closure(n)), "equal closures differ")
    checks.that(of(_closure(n)) != of(_closure(n + 1)), "what a closure holds is left out")
    checks.that(of(_closure(n)) != of(_values), "two functions collide")
    checks.that(of(_defaulted(n)) != of(_defaulted(n + 1)), "a default of a keyword is left out")
    checks.that(of(partial(_closure, n)) != of(partial(_closure, n + 1)), "arguments of a partial are left out")
    checks.that(of(lambda x: x + 1)
                != of(lambda x: x + 2), "lambdas collide")
    checks.that(of(np.array([n, 1.0])) != of(np.array([n, 2.0])), "contents of an array are left out")
    checks.that(of({"a": (1, 2)}) != of({"a": (2, 1)}), "order of a tuple is left out")
    checks.that(of(1) != of(1.0) and of("1") != of(1) and of(True) != of(1), "types of constants are left out")
    equal: Sequence[Any] = (1, 1.0, True, np.float32(1))
    for wrap in (lambda x: [_read, _Counted(x)], lambda x: {"k": x}, _closure, _defaulted, lambda x: partial(_closure, x)):
        checks.that(len({of(wrap(x)) for x in equal[:3]}) == 3, "values that are equal under two types share a digest")
    checks.that(len({of([_read, _Counted(x)]) for x in (0.0, -0.0, 0, False)}) == 4, "zeros of two kinds share a digest")
    checks.that(len({of(np.array([x])) for x in equal}) == 4 and of(np.array([0.0])) != of(np.array([-0.0])), "arrays of two types collide")
    words = bytes(rng.integers(0, 100, 16, np.uint8))  # the same bytes, read as many types and in many shapes
    kinds = ("<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<i8", "<u8", "<f8", "<c8", "|i1", "|u1", ">i4", ">f4")
    checks.that(len({of(np.frombuffer(words, t)) for t in kinds}) == len(kinds), "arrays of the same bytes and other types collide")
    shapes = [(4,), (1, 4), (4, 1), (2, 2), (2, 2, 1)]
    checks.that(len({of(np.frombuffer(words, "<f4").reshape(x)) for x in shapes}) == len(shapes), "arrays of other shapes collide")
    checks.that(calls_blas(_product, package) and not calls_blas(_closure, package), "a matrix product is not seen")
    return checks.measured()


@dataclass(frozen=True)
class _Counted:
    """A field whose default equals values of other types."""

    count: object = 1


def _read(held: _Counted) -> object:
    return held.count


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a @ b


def _another_oracle(x: np.ndarray, *, approximate: str) -> tuple[np.ndarray, ...]:
    return (x,)


def _program() -> None:
    """Stands for what runs a Program: it names a row."""
    row("gelu")


def _component(rng: np.random.Generator) -> Measured:
    """What the evidence of one gate of one component binds to."""
    checks, package = Checks(), Package()
    kernel = Component(id="gelu.f32.made-up", kind="kernel", op="gelu", implementation=_product)
    backward = replace(kernel, id="gelu_bwd.f32.made-up", op="gelu_bwd")
    fused = component_digests(replace(kernel, op="linear_gelu"), "parity", package=package)["row"]
    with mock.patch.dict(table(), gelu=replace(row("gelu"), oracle=_another_oracle)):
        parts = component_digests(replace(kernel, op="linear_gelu"), "parity", package=Package())["row"]
    checks.that(fused != parts, "the parts of a fused row are left out")
    whole = Component(id="made.program", kind="program", profile="program", implementation=_program,
                      contract="alpha.gates.contracts.registry.common",
                      launches=lambda: [kernel])
    run = component_digests(whole, "parity", package=package)
    checks.that(set(run) == {"implementation", "cases", "measure", "rows", "kernels"}, "a whole program's digests are not complete")
    for changed in (replace(kernel, implementation=_closure), replace(kernel, binaries=lambda: {"a.cu": "1"})):
        other_run = component_digests(replace(whole, launches=partial(list, [changed])), "parity", package=package)
        checks.that(other_run["kernels"] != run["kernels"], "kernels of a whole program are left out")
    host = Component(id="made.up", kind="flops", profile="count", implementation=_closure,
                     contract="alpha.gates.contracts.registry.common")
    digests = {g: component_digests(kernel, g, package=package) for g in ("parity", "gradient", "perf")}
    checks.that(set(digests["parity"]) == {"implementation", "row", "cases", "measure"}, "a kernel's digests are not complete")
    checks.that(set(component_digests(host, "parity", package=package)) == {"implementation", "cases", "measure"}, "another kind's are not")
    checks.that(len({d["measure"] for d in digests.values()}) == 3, "engines of different gates share a digest")
    checks.that(digests["parity"]["row"] != digests["perf"]["row"], "FLOPs of the row are left out of perf")
    checks.that(component_digests(backward, "gradient", package=package)["row"]
                != component_digests(backward, "parity", package=package)["row"], "the forward row is left out of the backward's gradient")
    for what, other in {
        "another implementation": replace(kernel, implementation=_closure),
        "a wider dtype envelope": replace(kernel, envelope=Envelope(dtypes=("f32", "bf16"))),
        "scratch": replace(kernel, scratch=lambda types, attrs, threads: 4),
        "a limit taken off": replace(kernel, envelope=Envelope(limits=(Limit(text="one input", holds=lambda t, a: len(t) == 1),))),
        "an in-place pair": replace(kernel, inplace=((0, 0),)),
    }.items():
        checks.that(component_digests(other, "parity", package=package)["implementation"] != digests["parity"]["implementation"], what)
    other_row = component_digests(replace(kernel, op="silu"), "parity", package=package)
    checks.that(other_row["row"] != digests["parity"]["row"] and other_row["cases"] != digests["parity"]["cases"], "rows collide")
    gpu, n = replace(kernel, backend="cuda", calls=Calls(timed=(Call("a", (), {}),))), int(rng.integers(2, 99))
    for gate, calls in (("parity", Calls(timed=(Call("a", (), {"k": n}),))), ("perf", Calls(timed=gpu.calls.timed, further=_drawn(n)))):
        checks.that(component_digests(replace(gpu, calls=calls), gate, package=package) == component_digests(gpu, gate, package=package),
                    f"calls that {gate} does not read are part of its digest")
    for gate, calls in (("perf", Calls(timed=(Call("a", (), {"k": n}),))), ("parity", Calls(timed=gpu.calls.timed, further=_drawn(n)))):
        checks.that(component_digests(replace(gpu, calls=calls), gate, package=package)["cases"]
                    != component_digests(gpu, gate, package=package)["cases"], f"calls that {gate} reads are left out")
    held = replace(host, id="made.held", contract="mini.contract")
    with folder() as at:
        cases = "def a():\n    return 1\n\n\ndef b():\n    return 2\n\n\n" \
                "CASES = {'made.held': {'parity': [('a', a)]}, 'other': {'parity': [('b', b)]}}\n"
        was = _contract_of(at / "a", cases, held)
        checks.that(was == _contract_of(at / "b", cases.replace("return 2", "return 3"), held), "another component's case is digested")
        checks.that(was != _contract_of(at / "c", cases.replace("return 1", "return 3"), held), "a component's own case is not digested")
        checks.that(was != _contract_of(at / "d", cases.replace("[('a', a)]", "[]"), held), "a case can be left out")
        late = cases + "CASES['made.held']['parity'] = []\n"
        checks.that(_contract_of(at / "e", cases, held) != _contract_of(at / "f", late, held), "cases can be emptied later")
    text = f"{rng.integers(1 << 30):08x}"
    extra = component_digests(host, "parity", package=package, extra={"plans": lambda: text})
    checks.that(extra["plans"] == text, "an extra digest is dropped")
    return checks.measured()


def _contract_of(at: Path, cases: str, component: Component) -> str:
    """Digest of the cases of a component whose contract module is this text."""
    package = Package(write_package(at, {"contract.py": cases}), "mini")
    return package.hash(contract_targets(component, "parity", package))


GOLDEN = "cf3f4495c8387e18bc64025abb5449add7a6d8d9b8b98fc5f78a7e4e48a49429"
"""Digest of the made-up package: the same under every Python version that the package supports."""


def _stable(rng: np.random.Generator) -> Measured:
    """The same in every process and under every supported Python."""
    checks = Checks()
    fixture = {"main.py": "class A:\n    x: int = -1\n\n\ndef f(a, /, b=(1, 2.5, None, ...), *c, d=b'\\x00', **e):\n"
                          "    match a:\n        case {'k': [1, *rest], **more}:\n            return f'{a!r:>{b}} {A.x=} {{}}' f'{rest}'\n"
                          "    with open(a) as g, g:\n        return {**e, 'x': [*c], 1j: not more}\n"}
    digest = digest_of(fixture, "mini.main:f")
    checks.that(digest == GOLDEN, f"the digest of the fixture is {digest}")
    return checks.measured(symbol_digest("alpha.registry.record:Record"))


def _bad_input(rng: np.random.Generator) -> Measured:
    """Each wrong question gets one error that names it."""
    checks = Checks()
    with folder() as at:
        package = Package(write_package(at / "p", {"main.py": "def f():\n    return 1\n", "torn.py": "def f(:\n"}), "mini")
        checks.raises(InputError, "no such module", lambda: symbol_digest("mini.nowhere:f", package=package), naming="mini.nowhere")
        checks.raises(InputError, "no such symbol", lambda: symbol_digest("mini.main:ff", package=package), naming="f")
        checks.raises(InputError, "no symbol at all", lambda: symbol_digest("mini.main", package=package), naming="mini.main")
        checks.raises(InputError, "a file that does not parse", lambda: symbol_digest("mini.torn:f", package=package),
                      naming="mini.torn: line 1")
        checks.raises(InputError, "no such package", lambda: Package(Path(at) / "nothing"), naming="nothing")
        checks.raises(InputError, "a function without a file", lambda: value_digest(eval("lambda: 1", {"__name__": "x"}), package))
        checks.raises(InputError, "an unknown gate", lambda: component_digests(
            Component(id="made.up", kind="flops", profile="count", implementation=_closure, contract="alpha.types"), "speed"),
                      naming="speed")
    return checks.measured()


PARITY: tuple[Case, ...] = (
    ("harmless edits change nothing", _unmoved), ("everything reached changes it", _reached), ("names do not collide", _collisions),
    ("judges are not digested", _opaque), ("members by name", named.by_name), ("held values", _values), ("component digests", _component),
    ("references", reading.references), ("bindings", reading.bindings), ("entries of tables", reading.entries),
    ("classes read", reading.classes), ("what counts of a function", reading.counts), ("parts of a file", reading.parts),
    ("names resolved", snapshot.resolved), ("members of classes", snapshot.members), ("values by content", held.values),
    ("what gates bind to", held.bound), ("methods of objects", held.made), ("fields of rows", held.rows),
    ("what is kept", remembered.kept), ("answers that are kept", remembered.answered),
)

CASES: dict[str, dict[str, list[Case]]] = {
    "registry.digest": {"parity": list(PARITY), "determinism": [("stable", _stable)],
                        "faults": [("bad input", _bad_input), ("what is damaged is read anew", remembered.damaged)]},
}
