"""Every branch of the CPU's binders is taken by a sample of their own gates, or exempted with a reason; and the count itself can fail."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from alpha.backends.cpu.calls import Calls
from alpha.component import Component
from alpha.errors import InputError
from alpha.gates.cpu import coverage
from alpha.ops.spec import Sample
from alpha.train.catalogue import catalogue


def without(component: str, *names: str) -> list[Component]:
    """One kernel alone, some of whose further samples are gone."""
    own = catalogue()[component]
    assert own.calls is not None

    def fewer(rng: np.random.Generator) -> Iterable[Sample]:
        found = list(own.calls.further(rng))  # type: ignore[union-attr]
        assert set(names) <= {s.name for s in found}
        return [s for s in found if s.name not in names]
    return [replace(own, calls=Calls(further=fewer, refused=own.calls.refused))]


@pytest.fixture(scope="module")
def left() -> list[coverage.Branch]:
    return coverage.untaken(coverage.kernels(catalogue()))


def test_every_branch_is_taken(left: list[coverage.Branch]) -> None:
    found = coverage.problems(left)
    assert not found, "do: add a sample (Calls, alpha/backends/cpu/calls.py)\n" + "\n".join(found)


@pytest.mark.parametrize(("component", "names", "line"), [
    ("rope.f32.cpu", ["swapped"], "bool((at[1:] - at[:-1] == 1).all())"),
    ("attention_bwd.f32.cpu", ["block-without-keys"], "if not keys:"),
    ("transpose.f32.cpu", ["aliased"], "% _ALIASED == 0 else"),
    ("matmul.f32.cpu", ["batch-of-panels"], "for i in range(lead)"),
])
def test_without_its_sample_a_branch_is_named(component: str, names: list[str], line: str) -> None:
    found = coverage.problems(coverage.untaken(without(component, *names)), whole=False)
    assert any(line in problem for problem in found), found


def test_a_needless_exemption_is_an_error(left: list[coverage.Branch], monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**coverage.exemptions(), ("gelu", "jumps", "if True:"): "planted"}
    monkeypatch.setattr(coverage, "exemptions", lambda: more)
    assert any("gelu, jumps, if True:" in problem for problem in coverage.problems(left))


def test_an_exemption_without_a_reason_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"function": "gelu", "side": "jumps", "line": "x", "why": " "}
    monkeypatch.setattr(coverage, "read_toml", lambda path: {"branch": [entry]})
    with pytest.raises(InputError, match="a reason"):
        coverage.exemptions()
