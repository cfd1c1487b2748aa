"""What a row is called with: only attributes that it knows, and an error that shows the rest."""

from __future__ import annotations

from inspect import Parameter, signature

import numpy as np
import pytest

from alpha.errors import ShapeError
from alpha.graph.trace import Tracer
from alpha.ops.compose import FusedSpec
from alpha.ops.table import row, table


def test_an_unknown_attribute_is_refused_and_shown() -> None:
    t = Tracer("x")
    x = t.input("x", (4, 8), "f32")
    with pytest.raises(ShapeError) as told:
        t.silu(x, approximate="tanh")
    text = str(told.value)
    assert "silu at test_attributes.py:" in text and "approximate='tanh'" in text and "silu has none" in text
    with pytest.raises(ShapeError) as told:
        t.gelu(x, aproximate="tanh")
    text = str(told.value)
    assert "aproximate='tanh'" in text and "expected: approximate" in text and "did you mean `approximate`?" in text
    with pytest.raises(ShapeError, match="wide=True"):
        t("rmsnorm", x, t.input("gain", (8,), "f32"), eps=1e-5, wide=True)
    assert not t.graph.nodes


@pytest.mark.parametrize("name", sorted(table()))
def test_every_row_names_its_attributes(name: str) -> None:
    """Samples give known attributes only; each attribute that no sample gives has a default in a composition."""
    spec = row(name)
    given = {key for s in spec.samples(np.random.default_rng(0)) for key in s.attrs}
    assert given <= set(spec.known_attributes)
    defaults = {p.name for p in signature(spec.compose).parameters.values() if p.default is not Parameter.empty} if isinstance(
        spec, FusedSpec) else set()
    assert set(spec.known_attributes) - given <= defaults
