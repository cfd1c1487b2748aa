"""What a run file or an option may say: whatever it is, the command answers with one message, quickly and in little memory."""

from __future__ import annotations

import os
import resource
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alpha import cli, config
from alpha.backends.cpu import catalogue as cpu_catalogue
from alpha.backends.cpu import lib
from alpha.backends.cpu.catalogue import scratch_bytes
from alpha.errors import AlphaError, ConfigError, InputError, MachineError, ShapeError, shown
from alpha.files import json_of, open_regular, read_regular
from alpha.tomlfile import parse_toml, read_toml
from alpha.train.catalogue import catalogue
from alpha.train.planned import plan_run
from alpha.types import TensorType

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
TEXT = TINY.read_text()
Command = Callable[..., tuple[int, str, str]]


@contextmanager
def bounded(seconds: float = 60.0, megabytes: float = 400.0) -> Iterator[None]:
    """The block ends in time, of this process's CPUs, and the process has not grown beyond what it had at its largest."""
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    took, grown = time.process_time() - began, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    assert took < seconds and grown < megabytes, f"{took:.1f} s, {grown:.0f} MB"


@pytest.fixture
def alpha(capsys: pytest.CaptureFixture[str]) -> Command:
    """One command in this process: (exit code, standard output, standard error). An exception fails the test."""

    def run(*args: object) -> tuple[int, str, str]:
        try:
            code = cli.main([str(a) for a in args])
        except SystemExit as end:  # argparse
            code = int(str(end.code))
        return (code, *capsys.readouterr())

    return run


def sets(*overrides: str) -> list[str]:
    return [x for one in overrides for x in ("--set", one)]


HUGE = [
    ("model.width=65536", "model.heads=1024", "model.layers=100"),
    ("train.batch=2147483648",),
    ("train.batch=2147483648", "train.micro_batch=1"),
    ("model.positions=9007199254740992",),
    ("data.sequence=9007199254740992",),
    ("model.layers=2147483648",),
    ("model.width=4611686018427387904",),
    ("train.shards=1073741824", "train.batch=1073741824"),
    ("train.steps=9223372036854775807",),
    ("train.eval_windows=9223372036854775808",),
    ("optim.lr=1" + "0" * 400,),
    ("optim.lr=1e300",),
    ("optim.eps=1e-300",),
    ("model.layers=" + "9" * 5000,),
    ("model.rope_base=" + "9" * 5000, "model.family=llama"),
]


@pytest.mark.parametrize("overrides", HUGE, ids=lambda o: o[0][:32])
def test_impossible_sizes_are_refused_at_once(alpha: Command, overrides: tuple[str, ...]) -> None:
    with bounded():
        code, _, err = alpha("plan", TINY, *sets(*overrides))
    assert code == 2 and "came:" in err and "expected:" in err and len(err) < 3000, err
    assert all(len(line) < 500 for line in err.splitlines())


@pytest.mark.parametrize("overrides", [
    ("train.batch=1048576", "train.micro_batch=1", "train.shards=1024"),
    ("train.steps=16777216", "train.profile=9223372036854775807", "train.keep=9223372036854775807"),
    ("data.sequence=16384", "train.micro_batch=1"),
], ids=lambda o: o[0])  # fmt: skip
def test_the_largest_that_is_allowed_is_planned(overrides: tuple[str, ...]) -> None:
    with bounded(120, 800):
        assert plan_run(config.load(TINY, overrides), catalogue()).peak_bytes > 0


def test_operands_of_the_cpu_are_bounded() -> None:
    """Planted: without the bound on the state the leaves of its norm are listed; without that on any other operand a bind lists tens of
    millions of blocks, tens of GiB."""
    wide = ["model.width=65536", "model.heads=1024", "model.layers=4"]
    with bounded(), pytest.raises(ShapeError, match="the parameters are too large for a kernel of the CPU"):
        plan_run(config.load(TINY, wide), catalogue())
    wide_activation = TensorType((1 << 22, 40_960), "f32")
    with bounded(), pytest.raises(ShapeError, match="a tensor is too large for a kernel of the CPU"):
        scratch_bytes(catalogue()["silu.f32.cpu"], [wide_activation], {}, 2)
    with bounded(), pytest.raises(InputError, match="no cpu kernel covers attention"):
        plan_run(config.load(TINY, ["data.sequence=65536", "train.micro_batch=1"]), catalogue())


def test_no_memory_for_scratch_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a vocabulary of 2^31, whose logits of 64 rows want 512 GiB."""
    def refused(shape: tuple[int, ...], *_: object) -> None:
        raise MemoryError(f"Unable to allocate {shape}")

    monkeypatch.setattr(lib.np, "empty", refused)
    monkeypatch.setattr(cpu_catalogue, "_KNOWN", {})  # what earlier tests asked is kept
    with pytest.raises(MachineError, match="no memory to plan in") as caught:
        plan_run(config.load(TINY), catalogue())
    assert "Unable to allocate" in str(caught.value)


def test_no_address_space_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(cpu_catalogue.mmap, "mmap", refused)
    with pytest.raises(MachineError, match="address space"):
        cpu_catalogue._addresses(1 << 20)


NAMES = ["", ".", "..", "a/b", "a\\b", "a\nb", "a\x1b[2Jb", "a\x00b", "a'b", 'a"b', "a`b", "a<b", "a>b", "<script>", "-rf", "~", ".hidden",
         " a", "a ", "a|b", "a*b", "$HOME", "a;b", "a&b", "a\u202eb", "a\x7fb", "a\udce9b", "x" * 101, "9" * 5000, "ü" * 60]


@pytest.mark.parametrize("name", NAMES, ids=lambda n: ascii(n)[:20])
def test_names_that_break_something_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name") as caught:
        config.parse(TEXT.replace('"tiny"', config._toml(name)) if not name.isprintable() and "\udce9" not in name else TEXT,
                     [] if not name.isprintable() and "\udce9" not in name else [f"run.name={config._toml(name)}"])
    stated = str(caught.value)
    assert all(c.isprintable() or c == "\n" for c in stated) and len(stated) < 2000


@pytest.mark.parametrize("name", ["demo", "gpt2-124m", "v1.2_b", "Läufe 3", "a" * 100, "実験", "run+3=x,y@z#1"])
def test_names_that_break_nothing_are_taken(name: str) -> None:
    cfg = config.parse(TEXT, [f'run.name="{name}"'])
    assert cfg.run.name == name and config.parse(cfg.resolved()) == cfg


@pytest.mark.parametrize("key", ["run.out", "data.corpus", "data.cache"])
@pytest.mark.parametrize("path", ["", "a\nb", "x" * 256, "x/" * 3000, "caf\udce9", "a\x1bb"], ids=lambda p: ascii(p)[:12])
def test_paths_that_no_file_system_takes_are_refused(key: str, path: str) -> None:
    tables = parse_toml(TEXT)
    section, _, name = key.partition(".")
    tables.setdefault(section, {})[name] = path
    with pytest.raises(ConfigError, match=f"{key} is no path"):
        config.from_tables(tables)


def test_nested_brackets_and_torn_text() -> None:
    for text in ("x = " + "[" * 3000 + "]" * 3000, "x = " + "{a=" * 3000, "[a" + ".a" * 5000 + "]", "x = 1" + "0" * 5000, "x = 1979-99-99"):
        with bounded(), pytest.raises(ConfigError):
            config.parse(text)
        with bounded(), pytest.raises(ConfigError):
            config.parse(TEXT, [f"model.layers={text[4:]}"])
    with pytest.raises(ValueError, match="nested too deeply"):
        json_of("[" * 100_000)
    for text in ("NaN", "[Infinity]", "{", "", "\ud800", "1" + "0" * 5000):
        with pytest.raises(ValueError):
            json_of(text)


def special(folder: Path) -> dict[str, Path]:
    """Paths that are no regular files, and one that is too large."""
    os.mkfifo(folder / "fifo")
    (folder / "loop").symlink_to("loop")
    (folder / "gone").symlink_to("nowhere")
    (folder / "folder").mkdir()
    with open(folder / "large", "wb") as file:
        file.truncate(1 << 33)
    return {**{name: folder / name for name in ("fifo", "loop", "gone", "folder", "large")},
            "zero": Path("/dev/zero"), "null": Path("/dev/null"), "long": folder / ("x" * 300), "memory": Path("/proc/self/mem")}


@pytest.mark.parametrize("kind", ["fifo", "loop", "gone", "folder", "large", "zero", "null", "long"])
def test_special_files_as_run_file(alpha: Command, tmp_path: Path, kind: str) -> None:
    path = special(tmp_path)[kind]
    for command in ("plan", "train", "lab", "sample", "trace"):
        with bounded():
            code, _, err = alpha(command, path, *(["--prompt", "x"] if command == "sample" else []))
        assert code == 2 and ("came:" in err or "error:" in err), (command, err)


def test_special_files_are_not_read(tmp_path: Path) -> None:
    """Planted: `Path.read_bytes` in place of `read_regular` waits for ever on the FIFO."""
    for kind, path in special(tmp_path).items():
        if kind == "memory":
            continue
        with bounded(), pytest.raises(OSError):
            read_regular(path)
        with bounded(), pytest.raises(AlphaError):
            read_toml(path)
    waiting = threading.Thread(target=lambda: (tmp_path / "fifo").read_bytes(), daemon=True)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    (tmp_path / "fifo").write_bytes(b"")  # lets it end
    waiting.join(5)
    with open_regular(TINY) as file:
        assert file.read() == TINY.read_bytes()


@pytest.mark.parametrize("size", [0, 1, 70_000, 3 << 20])
def test_a_read_takes_memory_by_the_file(tmp_path: Path, size: int) -> None:
    """Not by the most that it may have: `file.read(most + 1)` sets a GiB aside for an empty file. A file without a size is read whole."""
    (tmp_path / "x").write_bytes(bytes(size))
    tracemalloc.start()
    try:
        assert len(read_regular(tmp_path / "x", 1 << 30)) == size
        assert tracemalloc.get_traced_memory()[1] < size + (1 << 20)
    finally:
        tracemalloc.stop()
    assert len(read_regular(tmp_path / "x", size)) == size
    if size:
        with pytest.raises(OSError, match="larger than"):
            read_regular(tmp_path / "x", size - 1)
    assert read_regular("/proc/self/maps").count(b"\n") > 20


def test_errors_are_fit_for_a_terminal() -> None:
    error = InputError("what\x1b[31m", came="x" * 100_000 + "\udcff", expected="a\tb\u202e", do="\r")
    stated = str(error)
    assert len(stated) < 2000 and "100,0" in stated and all(c.isprintable() or c in "\n\t" for c in stated)
    assert shown("plain ü\n  two") == "plain ü\n  two"
    stated.encode()


KEYS = [(name, f.name) for name, cls in config._sections().items() for f in config.fields(cls)]
VALUES = st.one_of(
    st.integers(), st.integers(-2, 70), st.sampled_from([2**31, 2**53, 2**63, 10**400, -1]), st.floats(), st.booleans(),
    st.text(max_size=40), st.lists(st.floats(), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(["none", "block", "ops:gelu", "ops:nothing", "cuda", "bf16", "llama", "wsd", "sgd", "bytes", "bpe"]),
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=4))
def test_any_run_file_is_planned_or_refused(changes: list[tuple[tuple[str, str], object]]) -> None:
    """The outcome is a plan or an AlphaError, for whatever values."""
    tables = parse_toml(TEXT)
    for (section, name), value in changes:
        tables.setdefault(section, {})[name] = value
    began = time.process_time()
    try:
        cfg = config.from_tables(tables)
        assert config.parse(cfg.resolved()) == cfg
        if cfg.model.layers <= 4 and cfg.train.shards <= 8:  # the others are as sound, and slower
            plan_run(cfg, catalogue())
    except AlphaError as error:
        assert error.exit_code in (1, 2, 3) and len(str(error)) < 4000
    assert time.process_time() - began < 60


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, len(TEXT)))
def test_any_bytes_in_a_run_file_are_read_or_refused(junk: bytes, at: int) -> None:
    raw = TEXT.encode()
    try:
        config.parse(raw[:at] + junk + raw[at:])
    except AlphaError as error:
        assert error.exit_code == 2
