"""What is wrong with a checkpoint or a model is one clear error on the command line; what the disk refuses leaves the rest whole."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from nobody import as_nobody

from alpha import cli
from alpha.checkpoint import folders, safetensors
from alpha.checkpoint.disk import Disk
from alpha.data.tokenizer import ByteTokenizer
from alpha.errors import MachineError
from alpha.gates.contracts import hf as contract
from alpha.gates.contracts.disks import Failing
from alpha.gates.contracts.made_state import States, copied, reseal, same, saved_by
from alpha.graph.state import StateLayout, TensorSpec
from alpha.train import hf_tokenizer

RUN = """
[run]
name = "{name}"
out = "{out}"
[model]
family = "gpt"
layers = 1
width = {width}
heads = 2
[data]
corpus = "{corpus}"
tokenizer = "bytes"
validation = 0.3
sequence = 16
cache = "{cache}"
baseline = false
[train]
steps = 2
batch = 4
final_windows = 2
profile = 0
checkpoint_every = 1
[optim]
lr = 1e-3
[machine]
threads = 1
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_corpus: Callable[[Path], None]) -> Path:
    """Runs `one` and `wide` of two steps each, and the model of `one` in the folder `hub`."""
    path = tmp_path_factory.mktemp("refusals")
    small_corpus(path / "text")
    for name, width in (("one", 16), ("wide", 32)):
        text = RUN.format(name=name, width=width, out=path / "runs", corpus=path / "text", cache=path / "cache")
        (path / f"{name}.toml").write_text(text)
        assert cli.main(["lab", str(path / f"{name}.toml")]) == 0
    assert cli.main(["checkpoint", "export", str(path / "runs" / "one"), "--out", str(path / "hub")]) == 0
    return path


def test_a_checkpoint_leads_to_commit_and_kernels(root: Path) -> None:
    """Its seal names the run, whose manifest says of each session which code ran, and which components it had."""
    run = root / "runs" / "one"
    manifest = json.loads((run / "manifest.json").read_text())
    for path in steps(run):
        found = json.loads((path / folders.MANIFEST).read_text())["facts"]
        assert found["seal"]["run"] == manifest["run"] and found["program"] == manifest["program"]
    assert {"adamw.f32.cpu", "accumulate.f32.cpu"} <= manifest["components"].keys()
    assert all({"commit", "dirty", "version"} <= session["source"].keys() for session in manifest["sessions"])


def test_a_folder_that_somebody_named_is_no_checkpoint(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy beside the others whose name says a step, and not as a save writes it, stops neither who reads nor who saves."""
    run = shutil.copytree(root / "runs" / "one", tmp_path / "run")
    for name in ("step-1", "step-99", "step-000000777", "step-١١١١١١١١", "step-"):
        shutil.copytree(run / "checkpoints" / "step-00000002", run / "checkpoints" / name)
    assert folders.steps(run / "checkpoints") == [1, 2] and folders.at(run / "checkpoints").name == "step-00000002"
    assert cli.main(["lab", str(run), "--resume"]) == 0, capsys.readouterr().err
    saved_by(run / "checkpoints", 123456789, drawn(1), 1)
    assert folders.at(run / "checkpoints").name == "step-123456789"


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def edited(path: Path, change: Callable[[dict], object]) -> None:
    """A manifest of a checkpoint, changed and sealed again as a writer of it would."""
    change(content := json.loads((path / folders.MANIFEST).read_text()))
    reseal(path, content)


def of_the_wide_one(run: Path, root: Path) -> None:
    for own, other in zip(steps(run), steps(root / "runs" / "wide")):
        shutil.rmtree(own)
        shutil.copytree(other, own)


def facts(**of: object) -> Callable[[Path, Path], None]:
    return lambda run, _: [edited(x, lambda c: c["facts"].update(of)) for x in steps(run)] and None


def every(do: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    return lambda run, _: [do(x) for x in steps(run)] and None


def resumed(run: Path, root: Path) -> list[str]:
    file = run.parent.parent / "one.toml"
    file.write_text((root / "one.toml").read_text().replace(f'out = "{root / "runs"}"', f'out = "{run.parent}"'))
    return ["lab", str(file), "--resume"]


def sampled(run: Path, root: Path) -> list[str]:
    return ["sample", str(run), "--prompt", "a", "--tokens", "2"]


@pytest.mark.parametrize(("spoil", "command", "words"), [
    pytest.param(of_the_wide_one, sampled, ("checkpoint", "has another shape", "(32,)", "(16,)"), id="another model, sampled"),
    pytest.param(of_the_wide_one, resumed, ("made with another configuration", "the run's own config.toml"), id="another model, resumed"),
    pytest.param(facts(tokenizer="feed" * 16), resumed, ("made with another tokenizer", "feedfeed"), id="another tokenizer"),
    pytest.param(every(lambda x: edited(x, lambda c: c.update(version=9))), sampled, ("version 9", "version 1 or 2 or 3"),
                 id="another version"),
    pytest.param(every(lambda x: (x / "rank-00000-of-00001.state").unlink()), sampled, ("is damaged", "rank-00000-of-00001.state"),
                 id="a missing range file"),
    pytest.param(every(lambda x: (x / "rank-00000-of-00001.json").unlink()), sampled, ("is damaged", "rank-00000-of-00001.json"),
                 id="a missing index"),
    pytest.param(every(lambda x: edited(x, lambda c: c["indexes"].append(c["indexes"][0]))), sampled,
                 ("is damaged", "rank-00000-of-00002.json"), id="ranges of a rank that wrote none"),
])  # fmt: skip
def test_what_is_wrong_with_a_checkpoint_is_one_clear_error(spoil: Callable[[Path, Path], None], command: Callable[[Path, Path], list[str]],
                                                            words: tuple[str, ...], root: Path, tmp_path: Path,
                                                            capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs" / "one"
    shutil.copytree(root / "runs" / "one", run)
    spoil(run, root)
    one_error(command(run, root), words, capfd)


def one_error(command: list[str], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """The command ends with exit code 2 and one error of these words, and no traceback."""
    capfd.readouterr()
    code, said = cli.main(command), capfd.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith(f"alpha {command[0]}: ")]
    assert code == 2 and len(errors) == said.count("  came:") == said.count("  expected:") == 1 and "Traceback" not in said, said
    assert all(word in said for word in words), said


def configured(**keys: object) -> Callable[[Path], None]:
    def change(hub: Path) -> None:
        content = json.loads((hub / "config.json").read_text())
        (hub / "config.json").write_text(json.dumps({**content, **keys}))

    return change


def headed(change: Callable[[dict[str, dict[str, list[int]]]], object]) -> Callable[[Path], None]:
    """Another header of its tensors; `rest` bytes behind it as before."""
    def spoil(hub: Path) -> None:
        raw = (hub / safetensors.ONE).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        table = json.loads(raw[8 : 8 + length])
        change(table)
        header = json.dumps(table).encode()
        (hub / safetensors.ONE).write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])

    return spoil


BIAS = "transformer.ln_f.bias"


@pytest.mark.parametrize(("spoil", "words"), [
    pytest.param(configured(model_type="mistral"), ("no model here is of this type", "model_type = 'mistral'", "gpt2, llama"), id="layout"),
    pytest.param(configured(activation_function="relu"), ("needs what no model here has", 'activation_function = "relu"'), id="activation"),
    pytest.param(configured(add_cross_attention=True), ("needs what no model here has", "add_cross_attention = true"), id="cross"),
    pytest.param(configured(scale_attn_by_inverse_layer_idx=True), ("needs what no model here has", "scale_attn_by_inverse_layer_idx"),
                 id="scaled by layer"),
    pytest.param(configured(n_layer=2), ("other tensors than its config.json says", "missing", "h.1."), id="layers that are not there"),
    pytest.param(headed(lambda t: t[BIAS].update(data_offsets=[t[BIAS]["data_offsets"][0] - 4, t[BIAS]["data_offsets"][1] - 4])),
                 ("model.safetensors", BIAS), id="ranges that overlap"),
    pytest.param(headed(lambda t: t.pop(BIAS)), ("model.safetensors", "bytes"), id="bytes of no tensor"),
    pytest.param(headed(lambda t: t[BIAS].update(data_offsets=[t[BIAS]["data_offsets"][0], 10**12])), ("model.safetensors", BIAS),
                 id="a range larger than its tensor"),
    pytest.param(headed(lambda t: t[BIAS].update(shape=[10**9], data_offsets=[0, 4 * 10**9])), ("model.safetensors", BIAS), id="too large"),
    pytest.param(lambda hub: (hub / safetensors.ONE).unlink(), ("model.safetensors",), id="no file"),
    pytest.param(lambda hub: (hub / "config.json").unlink(), ("holds no model of Hugging Face", "config.json"), id="no config"),
    pytest.param(lambda hub: contract.rewritten(hub, lambda x: x.pop(BIAS)), ("other tensors than its config.json says", "ln_f.bias"),
                 id="a tensor missing"),
])  # fmt: skip
def test_what_is_wrong_with_a_hub_model_is_one_clear_error(spoil: Callable[[Path], object], words: tuple[str, ...], root: Path,
                                                           tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub = Path(shutil.copytree(root / "hub", tmp_path / "hub"))
    spoil(hub)
    for command in (["checkpoint", "import", f"hf:{hub}", "--out", str(tmp_path / "new")], ["sample", f"hf:{hub}", "--prompt", "a"]):
        one_error(command, words, capfd)
    assert not (tmp_path / "new").exists()


DONE = (0, "")
"""What nobody says who is not refused."""

# -- what the disk refuses -----------------------------------------------------------------------------------------------------


def drawn(seed: int) -> States:
    """Two kinds of state of 12,000 numbers each."""
    rng, layout = np.random.default_rng(seed), StateLayout([TensorSpec("a", (100, 60), "u0"), TensorSpec("b", (6000,), "u1")])
    return {kind: (layout, rng.standard_normal(layout.size).astype(np.float32)) for kind in ("m", "param")}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE])
def test_any_refusal_of_any_operation(number: int, tmp_path: Path) -> None:
    """Permission that is lost, a medium that fails or fills up, at each operation of a save: the error says which; the checkpoint before
    stands whole; the next save stands, and leaves nothing behind."""
    first, second = drawn(1), drawn(2)
    counting = Failing(0, lambda: OSError())
    folders.save(tmp_path / "counted", 1, first, {}, disk=Disk())
    folders.save(tmp_path / "counted", 2, second, {}, keep=1, disk=counting)
    assert counting.done > 7
    for at in range(1, counting.done + 1):
        place = tmp_path / str(at)
        folders.save(place, 1, first, {})
        with pytest.raises(MachineError) as caught:
            folders.save(place, 2, second, {}, keep=1, disk=Failing(at, lambda: OSError(number, os.strerror(number))))
        text = str(caught.value)
        assert os.strerror(number) in text and ("the disk is full" in text) == (number in (errno.ENOSPC, errno.EDQUOT)), text
        assert caught.value.exit_code == 3 and str(place) in text
        for step in folders.steps(place):
            assert same(folders.read(folders.at(place, step)), {1: first, 2: second}[step])
        assert folders.steps(place) in ([1], [1, 2], [2]) and (1 in folders.steps(place) or at > counting.done // 2)
        folders.save(place, 3, copied(first), {}, keep=1)
        assert [p.name for p in place.iterdir()] == ["step-00000003"] and same(folders.read(folders.at(place)), first)


@pytest.fixture
def opened(tmp_path: Path) -> Path:
    """A folder of checkpoints that anybody may write into, with one at step 1."""
    for path in (tmp_path, *tmp_path.parents[:-2]):  # pytest makes them for its user alone
        path.chmod(0o755)
    (place := tmp_path / "checkpoints").mkdir()
    place.chmod(0o777)
    assert as_nobody(lambda: folders.save(place, 1, drawn(1), {})) == DONE
    return place


def test_permission_that_is_lost(opened: Path) -> None:
    """Of the folder while a run saves, and of a file while it loads; what stood before stands when it is back."""
    opened.chmod(0o555)
    _, said = as_nobody(lambda: folders.save(opened, 2, drawn(2), {}))
    assert said.startswith("MachineError: the checkpoint cannot be written") and "Permission denied" in said and "check the folder" in said
    state = folders.at(opened) / "rank-00000-of-00001.state"
    state.chmod(0)
    _, said = as_nobody(lambda: folders.read(folders.at(opened)))
    assert re.match(r"(Corrupt|Machine)Error: ", said) and state.name in said and "Permission denied" in said
    state.chmod(0o644)
    opened.chmod(0o777)
    assert as_nobody(lambda: folders.save(opened, 2, drawn(2), {})) == DONE
    assert all(same(folders.read(folders.at(opened, step)), drawn(step)) for step in (1, 2))


def test_a_file_that_the_system_ends(opened: Path) -> None:
    """The kernel refuses what goes beyond a limit (RLIMIT_FSIZE), in the middle of a write: as on a disk that fills up."""

    def save() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        folders.save(opened, 2, drawn(2), {})

    _, said = as_nobody(save)
    assert said.startswith("MachineError: the checkpoint cannot be written") and os.strerror(errno.EFBIG) in said
    assert folders.steps(opened) == [1] and same(folders.read(folders.at(opened)), drawn(1))
    assert saved_by(opened, 2, drawn(2), 2).name == "step-00000002"
    assert not [p for p in opened.iterdir() if p.name.startswith(".")]


def test_a_run_model_needs_a_tokenizer_of_ours(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub = Path(shutil.copytree(root / "hub", tmp_path / "hub"))
    path = hub / hf_tokenizer.NAME
    assert hf_tokenizer.read(path).hash == ByteTokenizer().hash
    path.write_text(path.read_text().replace('"BPE"', '"WordPiece"'))
    one_error(["checkpoint", "import", f"hf:{hub}", "--out", str(tmp_path / "new")], ("tokenizer.json", "WordPiece"), capfd)
