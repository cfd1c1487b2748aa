"""The benchmark of collectives among GPUs as far as a machine without a GPU sees it: ranks' answers, its record, and the table of docs."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_bench import tiny
from rich.console import Console

from alpha import cli
from alpha.backends.cuda.kernels.collectives import KERNELS, OPS, SUMS, TABLE, How, choose, groups_of, source, sources
from alpha.bench import comm_device, command, docs, record, step_ranks
from alpha.bench.comm_device import Case, Ranks, Result, bus
from alpha.errors import CorruptError, InputError, MachineError
from alpha.registry.gpu import GpuClass, devices_of
from alpha.train import engine

CASES = [Case("all_reduce", 1 << 20, True, {"nccl": [20.0, 22.0, 21.0], "ours": [10.0, 9.0, 9.5], "symmetric x": [11.0, 12.0, 11.5]}),
         Case("send", 1 << 10, True, {"ours": [2.5, 2.6, 2.7], "nccl": [11.0, 11.1, 11.2]})]
MACHINE = "cuda_sm90_H100x2-nvlink"


def body() -> dict[str, object]:
    return {"commit": "a" * 40, "taken": "2026-11-25", "environment": {"driver": "580"}, "kernel_hashes": {}, "hardware": "two",
            "peer": "PyTorch 2, NCCL 2", "comm": Result(2, CASES, "", {}).body()}


def test_a_record_holds_figures_that_its_blocks_give(tmp_path: Path) -> None:
    path = record.write(MACHINE, "comm-device", body(), tmp_path)
    found = record.load(path)["comm"]["cases"]
    assert [r["name"] for r in found[0]["rows"]] == ["ours", "nccl", "symmetric x"], "ours first: ratios are to it"
    assert found[0]["rows"][0]["ns"] == 9500.0 and found[1]["rows"][1]["ratio"][1] == pytest.approx(11.1 / 2.6, rel=0.01)
    text = json.loads(path.read_text())
    text["comm"]["cases"][0]["rows"][0]["ns"] = 4000.0
    text["hash"] = record.hash_of(text)
    path.write_text(json.dumps(text))
    with pytest.raises(CorruptError, match="not what its raw blocks give"):
        record.load(path)


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = record.write(MACHINE, "comm-device", body(), tmp_path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    told = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))  # as a full disk
    try:
        with pytest.raises(MachineError, match="untouched"):
            record.write(MACHINE, "comm-device", {**body(), "hardware": "others"}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, told)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_docs_show_our_time_beside_the_peers(tmp_path: Path) -> None:
    record.write(MACHINE, "comm-device", body(), tmp_path)
    shown = docs.devices(record.records(tmp_path))
    assert "| all_reduce | 1 MiB | graph | 9.5 | 21.0 | 11.5 | 0.45 | 110 |" in shown
    assert "| send | 1 KiB | graph | 2.6 | 11.1 | - | 0.23 | 0 |" in shown and "aaaaaaaaaaaa, driver 580, PyTorch 2" in shown
    assert docs.devices([]).startswith("Not recorded.")


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert [round(bus(op, 1 << 30, 4, 1e3)) for op in ("all_reduce", "all_gather", "send")] == [1611, 805, 1074]


def _rank(text: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_the_slowest_rank_counts_and_who_ends_is_told_of() -> None:
    answer = "import sys\nprint('{{}}', flush=True)\nfor line in sys.stdin: print('{{\"us\": {}}}', flush=True)"
    ranks = Ranks([_rank(answer.format(us)) for us in (3.0, 5.0)])
    assert ranks.ask(op="x") == {"us": 5.0}
    ranks.close()
    wrong = Ranks([_rank(answer.format(1.0)), _rank("print('{}', flush=True); input(); print('{\"error\": \"planted\"}', flush=True)")])
    assert wrong.ask(op="x") == {"error": "planted"}
    wrong.close()
    gone = _rank("")
    with gone, pytest.raises(MachineError, match="a rank of the benchmark ended"):
        Ranks([gone])


ANSWERS = """
import json, sys
print(json.dumps({"ready": "made", "nccl": "made"}), flush=True)
for i, line in enumerate(sys.stdin):
    ask = json.loads(line)
    if i == LAST: DEFECT
    print(json.dumps({"loaded": {}} if ask["op"] == "loaded" else {"us": US}), flush=True)
"""


def _answering(us: float, last: int = -1, defect: str = "pass") -> subprocess.Popen[str]:
    return _rank(ANSWERS.replace("LAST", str(last)).replace("DEFECT", defect).replace("US", str(us)))


@pytest.mark.parametrize("defect", ["print(json.dumps({'error': 'late'}), flush=True); continue", "sys.exit(7)"])
def test_a_peer_that_fails_late_has_no_figure_and_costs_no_record(defect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second block of the second case; what it measured in the first one stands, and ours in all."""
    theirs = [_answering(20.0), _answering(20.0, 4, defect)]
    monkeypatch.setattr(comm_device, "ours", lambda ranks: Ranks([_answering(9.0), _answering(10.0)]))
    monkeypatch.setattr(comm_device, "peers", lambda ranks, python: Ranks(theirs))
    result = comm_device.bench(2, "send", blocks=3, python="made", sizes=(1 << 10, 1 << 12, 1 << 14))
    later = ["ours"] if "exit" in defect else ["nccl", "ours"]
    assert [sorted(c.us) for c in result.cases] == [["nccl", "ours"], ["ours"], later]
    assert all(us == [10.0] * 3 for c in result.cases for who, us in c.us.items() if who == "ours")
    assert all(p.poll() is not None for p in theirs)
    record.load(record.write(MACHINE, "comm-device", {**body(), "comm": result.body()}, tmp_path))


def test_a_rank_of_ours_that_ends_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe to it breaks, as that to a reader of the output does, which is none of the command's fault."""
    mine = [_answering(9.0), _answering(9.0, 0, "sys.exit(7)")]
    monkeypatch.setattr(comm_device, "ours", lambda ranks: Ranks(mine))
    monkeypatch.setattr(command, "gpu_class", lambda devices: GpuClass.from_key(MACHINE))
    monkeypatch.setenv(engine.VISIBLE, "0,1")
    assert cli.main(["bench", "comm", "--device", "--case", "send"]) == 3 and "exit status 7" in capsys.readouterr().err
    gone = [_answering(9.0), _answering(9.0)]
    monkeypatch.setattr(comm_device, "ours", lambda ranks: Ranks(gone))
    monkeypatch.setattr(comm_device, "calls_of", lambda nbytes, graph: (gone[1].kill(), gone[1].wait()) and 1)
    assert cli.main(["bench", "comm", "--device", "--case", "send"]) == 3 and "exit status -9" in capsys.readouterr().err


def test_what_was_not_measured_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A budget that is spent, and a call of ours that fails: on the screen, in the record, on the page. Of nothing is no record."""
    monkeypatch.setattr(command, "gpu_class", lambda devices: GpuClass.from_key(MACHINE))
    monkeypatch.setattr(command.record, "clean_commit", lambda: "a" * 40)
    write, failing = record.write, "print(json.dumps({'error': 'planted'}), flush=True); continue"
    monkeypatch.setattr(command.record, "write", lambda *a: write(*a, tmp_path))
    monkeypatch.setattr(command, "_require_whole", lambda args: None)
    monkeypatch.setenv(engine.VISIBLE, "0,1")
    monkeypatch.setattr(comm_device, "ours", lambda ranks: Ranks([_answering(9.0), _answering(10.0, 5, failing)]))
    words = ["bench", "comm", "--device", "--case", "send", "--record"]
    assert cli.main(words) == 1
    assert "NOT MEASURED: send 4096 graph\n" in capsys.readouterr().out
    (path,) = tmp_path.glob("*/comm-device.json")
    assert record.load(path)["comm"]["left"] == ["send 4096 graph"]
    assert "not measured: send 4096 graph" in docs.devices(record.records(tmp_path))
    path.unlink()
    now = iter([0.0])
    monkeypatch.setattr(comm_device, "time", SimpleNamespace(monotonic=lambda: next(now, 9.0)))
    assert cli.main([*words, "--budget", "5"]) == 1 and not list(tmp_path.glob("*/*.json"))
    assert f"NOT MEASURED: {', '.join(f'send {nbytes} graph' for nbytes in comm_device.SIZES)}" in capsys.readouterr().out


def test_ranks_compute_on_the_gpus_that_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    """As the peers beside them do; fewer of them than ranks are refused before anything is started."""
    seen = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(comm_device, "Ranks", lambda processes: processes)
        patch.setattr(comm_device.subprocess, "Popen", lambda *a, env, **k: seen.append(env[engine.VISIBLE]))
        for visible in ("4,7", "4,7,5"):
            patch.setenv(engine.VISIBLE, visible)
            comm_device.ours(2)
    assert seen == ["4,7", "7,4"] * 2
    monkeypatch.setenv(engine.VISIBLE, "1")
    monkeypatch.setattr(command, "gpu_class", lambda devices: GpuClass.from_key(MACHINE))
    monkeypatch.setattr(command, "_runs_here", lambda cfg: None)
    monkeypatch.setattr(comm_device, "bench", lambda *a, **k: pytest.fail("measured"))
    monkeypatch.setattr(step_ranks, "bench", lambda *a, **k: pytest.fail("measured"))
    tiny(tmp_path, "cuda")
    for words in (["comm", "--device"], ["step", str(tmp_path / "gpt.toml")]):
        assert cli.main(["bench", *words, "--nproc", "2"]) == 3 and "2 ranks, 1 GPU" in capsys.readouterr().err


def test_others_do_not_wait_for_a_rank_that_has_ended() -> None:
    waits = _rank("import time; print('{}', flush=True); time.sleep(60)")
    ranks, began = Ranks([waits, _answering(1.0, 0, "sys.exit(7)")]), time.monotonic()
    with pytest.raises(MachineError, match="exit status 7"):
        ranks.ask(op="x")
    assert waits.poll() is not None and time.monotonic() - began < 20


def test_a_case_is_one_line() -> None:
    out = StringIO()
    comm_device.show(CASES[0], 2, Console(file=out, width=160))
    assert out.getvalue().split() == ["all_reduce", "1", "MiB", "graph", "9.5", "us", "110.4", "GB/s", "nccl", "21.0", "us", "(2.21)",
                                      "symmetric", "x", "11.5", "us", "(1.21)"]


def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no such collective among GPUs"):
        comm_device.bench(2, "nothing")
    assert cli.main(["bench", "comm", "--device", "--hosts", "2"]) == 2
    assert cli.main(["bench", "comm", "--device", "--nproc", "2"]) == 3
    assert "NOT_RUN: collectives among GPUs need one for each rank" in capsys.readouterr().err


def test_the_choice_is_whole_and_falls_back_to_what_takes_anything() -> None:
    """Of every size, in every group; addresses that are no whole vectors take packets. No launch has more blocks than it needs. The
    component of a group has the compiled file of whatever the table chooses."""
    components = {(str(c.op), n): c for c in KERNELS for n in groups_of(c)}
    for most_members, table in TABLE.items():
        assert set(table) == set(OPS) - {"barrier", "receive"}
        for op, rows in table.items():
            assert [limit for limit, _ in rows] == sorted(limit for limit, _ in rows)
            for size in range(2, most_members + 1):
                for nbytes in (0, 1, 1 << 20, (1 << 20) + 1, 1 << 40):
                    assert choose(op, nbytes, size, whole=False).algorithm == "packets"
                    how = choose(op, nbytes, size)
                    assert 1 <= how.blocks <= 64
                    if (op, size) in components:
                        loads = how.loads if how.algorithm in ("direct", "relayed") else How.loads
                        file, dtype = ("sum", "f32") if op in SUMS else ("move", "")
                        assert source(file, size, dtype, loads) in sources(op, size)
                assert choose(op, 1 << 10, size).blocks == 1 and choose(op, 1 << 40, size).algorithm != "packets"


def test_a_group_has_one_component_or_is_refused() -> None:
    """Of two, three and four members; each gates what its own compiled files do. None claims groups that it was not measured with."""
    for op in OPS:
        for size in range(1, 10):
            fitting = [c.id for c in KERNELS if c.op == op and c.envelope.why_outside((), {"size": size}) is None]
            assert fitting == {2: [f"{op}.sm90"], 3: [f"{op}.x4.sm90"], 4: [f"{op}.x4.sm90"]}.get(size, [])
    for c in KERNELS:
        assert max(groups_of(c)) == devices_of(c)
        assert {dict(s.defines)["MOST"] for s in sources(str(c.op), devices_of(c))} == {str(devices_of(c))}
