"""What starts from the warm server behaves as what a fresh interpreter starts, and ends with who asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import apart
import pytest
import warm

from alpha.train import peak

CODE = "import os, sys; print(sys.argv, os.getcwd(), __name__, sys.path[0], sys.stdin.read()); print('to stderr', file=sys.stderr)"
ENDS = ("pass", "raise SystemExit", "import sys; sys.exit(3)", "import sys; sys.exit('words')", "1 / 0",
        "import os; os.kill(os.getpid(), 9)", "import atexit; atexit.register(print, 'last'); print('first')",
        "import threading; threading.Thread(target=lambda: print('of a thread')).start()")


def cold(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL, timeout=60,
                          check=False)


@pytest.mark.parametrize("words", [("-c", CODE, "a", "b"), ("script.py", "a"), ("-m", "made", "a")], ids=["code", "script", "module"])
def test_it_finds_what_a_fresh_one_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(CODE)
    (tmp_path / "made.py").write_text(CODE.replace("sys.path[0], ", ""))
    fresh, here = cold(*words, cwd=tmp_path), warm.run(words, cwd=tmp_path)
    assert fresh.returncode == 0 and "to stderr" in fresh.stderr
    assert (here.returncode, here.stdout, here.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_it_is_of_another_tree(tmp_path: Path) -> None:
    """What Alpha stands on stays imported; of Alpha there is what that tree has, also in processes that it starts."""
    (tmp_path / "alpha").mkdir()
    (tmp_path / "alpha" / "__init__.py").write_text("WHOSE = 'another'")
    code = ("import subprocess, sys; known = 'numpy' in sys.modules; import alpha; print(known, alpha.WHOSE, flush=True); "
            "subprocess.run([sys.executable, '-c', 'import alpha; print(alpha.WHOSE)'])")
    done = warm.run(["-c", code], cwd=tmp_path, root=tmp_path, environment={"COLUMNS": "77"})
    assert done.stdout.split() == ["True", "another", "another"]
    assert warm.run(["-c", "import alpha.cli"]).returncode == 0
    assert warm.run(["-c", "import os; print(os.environ['COLUMNS'])"], environment={"COLUMNS": "77"}).stdout == "77\n"


def test_its_streams_are_new() -> None:
    """Each line comes at once where the environment says so, what a stream says of itself is of its own file, and what is not to be in the
    environment is not there."""
    code = ("import os, sys, time; [s.reconfigure(errors='strict') for s in (sys.stdout, sys.stderr)]; print('LANG' in os.environ); "
            "time.sleep(60)")
    process = warm.start(["-c", code], environment={"LANG": None, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"False\n" and process.poll() is None
    process.kill()
    assert warm.run(["-c", "import os; print(os.environ['LANG'])"], environment={"LANG": "C"}).stdout == "C\n"


@pytest.mark.skipif(bool(apart.why_not()), reason=f"NOT_RUN: {apart.why_not()}")
def test_it_is_on_a_host() -> None:
    """It sees what `ip netns exec` shows a process there: links in /sys, names in /etc/hosts, addresses; and this process none of it."""
    code = ("import os, socket; print(sorted(os.listdir('/sys/class/net')), os.readlink('/proc/self/ns/net'), open('/etc/hosts').read(), "
            "socket.gethostbyname('other'), os.getcwd())")
    with apart.Hosts(2, known=["own", "other"]) as hosts:
        there = hosts.begin(0, ["-c", code], {})
        assert there.stdout is not None
        warm_said = there.stdout.read().decode()
        plain = hosts.start(0, [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert plain.stdout is not None
        assert warm_said == plain.stdout.read() and "net0" in warm_said and hosts.address(1) in warm_said, warm_said
    assert "net0" not in os.listdir("/sys/class/net") and "other" not in Path("/etc/hosts").read_text().split()


@pytest.mark.parametrize("other", [False, True], ids=["this tree", "another"])
def test_the_peak_is_measured_quickly(tmp_path: Path, other: bool) -> None:
    """In this tree and in another, where what else the module says is that tree's own."""
    if other:
        (tmp_path / "alpha" / "train").mkdir(parents=True)
        for name, text in (("", ""), ("train/", ""), ("train/peak", "SIZE, REPEATS, COPIES, COPY_BYTES, ROUNDS = 7, 8, 9, 10, 11")):
            (tmp_path / "alpha" / (f"{name}.py" if text else f"{name}__init__.py")).write_text(text)
    done = warm.run(["-c", "from alpha.train import peak as p; print(p.SIZE, p.REPEATS, p.COPIES, p.COPY_BYTES, p.ROUNDS)"], cwd=tmp_path,
                    root=tmp_path if other else None)
    assert done.stdout.split() == [*(str(x) for x in warm.PEAK.values()), str(11 if other else peak.ROUNDS)], done.stderr


@pytest.mark.parametrize("code", ENDS)
def test_it_ends_as_a_fresh_one_does(tmp_path: Path, code: str) -> None:
    fresh, here = cold("-c", code, cwd=tmp_path), warm.run(["-c", code], cwd=tmp_path)
    assert (here.returncode, here.stdout) == (fresh.returncode, fresh.stdout)
    assert here.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_signals_are_the_default_ones_and_reach_it() -> None:
    process = warm.start(["-c", "import signal, time; print(signal.getsignal(signal.SIGINT), flush=True); time.sleep(60)"],
                         stdout=subprocess.PIPE)
    assert process.stdout is not None and b"default_int_handler" in process.stdout.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == process.poll() == -signal.SIGTERM
    process.kill()


def test_who_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[warm.Process](), warm.start
    monkeypatch.setattr(warm, "start", lambda *given, **how: started.append(start(*given, **how)) or started[-1])
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(["-c", "import time; time.sleep(600)"], timeout=0.5)
    ends(str(started[0].pid))


def test_random_numbers_are_its_own() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.default_rng().random())"
    first, second = (warm.run(["-c", code]).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


def test_all_ends_with_who_asked(tmp_path: Path) -> None:
    """A process that started one by a server of its own and is killed: neither is left."""
    code = ("import os, sys, time, warm\nprocess = warm.start(['-c', 'import time; time.sleep(600)'])\n"
            "print(process.pid, open(f'/proc/{process.pid}/stat').read().split()[3], flush=True)\ntime.sleep(600)")
    asks = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
    try:
        assert asks.stdout is not None
        pids = asks.stdout.readline().split()
        assert len(pids) == 2
    finally:
        asks.kill()
        asks.communicate(timeout=60)
    for pid in pids:
        ends(pid)


def ends(pid: str) -> None:
    """Wait until there is no such process, or nobody has asked how it ended."""
    deadline = time.monotonic() + 60
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and ") Z " not in stat.read_text():
        assert time.monotonic() < deadline, f"{pid} is left"
        time.sleep(0.02)


def test_it_is_asked_over_its_pipes() -> None:
    """As `subprocess.Popen` has it: what is written arrives, a reader sees the end of one that was killed, and two threads wait for it."""
    script = str(warm.ROOT / "suites" / "support" / "made_peer.py")
    process = warm.popen([sys.executable, script, str(warm.ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.DEVNULL)
    assert isinstance(process, warm.Served) and process.stdin is not None and process.stdout is not None
    process.stdin.write(b'{"do": "repeats", "way": "right", "ns": 1}\n')
    process.stdin.flush()
    assert process.stdout.readline() == b'{"ok": 3}\n' and process.poll() is None
    codes: list[int] = []
    waiting = [threading.Thread(target=lambda: codes.append(process.wait())) for _ in range(2)]
    for thread in waiting:
        thread.start()
    os.kill(process.pid, signal.SIGKILL)
    for thread in waiting:
        thread.join(timeout=60)
    assert codes == [-9, -9] and process.stdout.read() == b""
    process.kill()
    process.stdin.close(), process.stdout.close()
    plain = warm.popen([sys.executable, "-c", "pass"])
    assert isinstance(plain, subprocess.Popen) and plain.wait(timeout=60) == 0


def test_gates_measure_the_peak_as_elsewhere(tmp_path: Path) -> None:
    """Other commands measure it quickly. A case of `train.loop` reads the size, so its gate would fail here and nowhere else."""
    (tmp_path / "alpha" / "train").mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("train/__init__.py", ""), ("train/peak.py", "SIZE = 512"),
                       ("__main__.py", "from alpha.train import peak; print(peak.SIZE)")):
        (tmp_path / "alpha" / name).write_text(text)
    seen = [warm.run(["-m", "alpha", word], cwd=tmp_path, root=tmp_path, environment={}).stdout for word in ("gate", "train")]
    assert seen == ["512\n", f"{warm.PEAK['SIZE']}\n"]
