"""The numbers behind each plot in full precision, as frames for the CSV beside it. Floor 7."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alpha.report.extra import pandas as pd
from alpha.report.series import View

COLUMNS = ["run", "series", "step", "mean", "min", "max"]


def _long(run: str, name: str, s: Mapping[str, Any]) -> pd.DataFrame:
    """A bucketed series in long form."""
    return pd.DataFrame({"run": run, "series": name, "step": s["x"], "mean": s["mean"], "min": s["min"], "max": s["max"]})


def _join(parts: list[pd.DataFrame]) -> pd.DataFrame:
    typed = [p.astype({"mean": float, "min": float, "max": float}) for p in parts if len(p)]
    return pd.concat(typed, ignore_index=True) if typed else pd.DataFrame(columns=COLUMNS)


def series(*keys: str) -> Callable[[View], pd.DataFrame]:
    """The bucketed series `keys` of every run of a view."""
    return lambda view: _join([_long(r["label"], k, r[k]) for r in view["runs"] if not r.get("why") for k in keys])


def _exact(run: str, name: str, x: Any, values: Any) -> pd.DataFrame:
    return _long(run, name, {"x": x, "mean": values, "min": values, "max": values})


def losses(view: View) -> pd.DataFrame:
    """Loss, norm, learning rate and validation."""
    evals = [_exact(r["label"], "bits_per_byte", r["evaluations"]["x"], r["evaluations"]["bits_per_byte"]) for r in view["runs"]]
    return _join([*[_long(r["label"], k, r[k]) for r in view["runs"] for k in ("loss", "norm", "lr")], *evals])


def launches(view: View) -> pd.DataFrame:
    """Launches of all steps, dispatches of profiled ones."""
    there = [r for r in view["runs"] if not r.get("why")]
    counted = [_exact(r["label"], "dispatches", r["dispatches"]["x"], r["dispatches"]["value"]) for r in there]
    return _join([*[_long(r["label"], "launches", r["launches"]) for r in there], *counted])


def bandwidth(view: View) -> pd.DataFrame:
    """A row a profiled step."""
    rows = [(r["label"], x, a, b, s, r["peak_bandwidth"]) for r in view["runs"] if not r["why"]
            for x, a, b, s in zip(r["x"], r["all"], r["bound"], r["share"])]  # fmt: skip
    return pd.DataFrame(rows, columns=["run", "step", "all_bytes_per_s", "bound_bytes_per_s", "bound_share_of_peak", "peak_bytes_per_s"])


def comparison(view: View) -> pd.DataFrame:
    """A row a row."""
    return pd.DataFrame([{k: v for k, v in r.items() if k != "raw"} for r in view["rows"]])


def phases(view: View) -> pd.DataFrame:
    """A column a phase, ns a step."""
    return pd.DataFrame({"step": view["x"], **{f"{p}_ns": values for p, values in view["series"].items()}})


def memory(view: View) -> pd.DataFrame:
    """Bytes of each arena over steps."""
    return _join([_long(view["provenance"][0]["run"], arena, s) for arena, s in view["series"].items()])


def memory_launches(view: View) -> pd.DataFrame:
    """Live bytes of each launch."""
    return pd.DataFrame({k: view[k] for k in ("launch", "op", "layer", "phase", "live")})
