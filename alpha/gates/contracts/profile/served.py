"""Cases of blocks that another process times (alpha/profile/served.py): what is asked and answered, and how a server may end. Floor 7.

Servers here are small programs. Nobody sleeps: who is silent waits for a word that only comes when a case sends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alpha.component import Measured
from alpha.gates.contracts.checks import all_hold, differs, words
from alpha.gates.contracts.engine import child_environment
from alpha.gates.contracts.profile.support import Case, folder
from alpha.profile.served import Served

SERVER = """
import json, os, sys
from alpha.profile.served import serve

def add(a, b): return a + b
def say(text):
    print(text)  # a library that prints
    os.write(1, b"and one that does not ask Python\\n")
    return text
def fail(text, long): raise ValueError(text * long)
def wait(path):
    with open(path) as f: return f.read()
def die(code):
    sys.stderr.write("first words\\nlast words\\n\\n"); sys.stderr.flush(); os._exit(code)
serve({f.__name__: f for f in (add, say, fail, wait, die)} | {"environment": lambda name: os.environ.get(name)})
"""
ANSWERS = """
import os, sys
sys.stdin.readline()
out = '{"ok": 1}\\n{"ok": 2}\\n{"o'
os.write(1, out.encode())
sys.stdin.readline(); sys.stdin.readline()
os.write(1, b'k": 3}\\n')
"""
"""Two answers and a part of the third at once."""


class Asked(Served):
    """A server that answers soon, or not at all."""

    def ask(self, do: str, *, patience: float = 30.0, meanwhile: Callable[[], object] | None = None, **arguments: Any) -> Any:
        """The result of one request."""
        return super().ask(do, patience=patience, meanwhile=meanwhile, **arguments)


def started(program: str, name: str = "made", **more: str) -> Served:
    """A server that runs a program."""
    return Asked(name, [sys.executable, "-c", program], child_environment(**more))


def gone(pid: int) -> bool:
    """Whether a process is there no more, nor its body."""
    return not Path(f"/proc/{pid}").exists()


def answered(rng: np.random.Generator) -> Measured:
    """Requests and answers one by one: values, errors, prints that are no answers, answers in parts; what is done meanwhile."""
    checks = []
    word = f"word {rng.integers(1 << 30)}"
    with folder() as root:
        pipe = root / "pipe"
        os.mkfifo(pipe)
        with started(SERVER, ALPHA_MADE=word) as served:
            for _ in range(5):
                a, b = int(rng.integers(1 << 40)), float(rng.random())
                checks.append(differs("sum", served.ask("add", a=a, b=b), a + b))
            text = "ä\n\u2603 " * int(rng.integers(1, 1 << 15))  # longer than a pipe holds
            checks.append(("a long text", served.ask("add", a=text, b=text) == text * 2))
            checks.append(differs("said", served.ask("say", text="not an answer"), "not an answer"))
            checks.append(differs("environment", served.ask("environment", name="ALPHA_MADE"), word))
            checks.append(differs("an error", words(lambda: served.ask("fail", text="no ", long=1)),
                                  ("ServedError", "made failed at 'fail'", "ValueError: no", "", "")))
            came = words(lambda: served.ask("fail", text="x", long=9999))[2]
            checks.append(differs("a long error", came, ("ValueError: " + "x" * 9999)[:2000]))
            checks.append(differs("no such request", words(lambda: served.ask("sub"))[1:3], ("made failed at 'sub'", "KeyError: 'sub'")))
            calls: list[int] = []

            def meanwhile() -> None:
                calls.append(1)
                if len(calls) == 3:
                    with pipe.open("w") as f:
                        f.write(word)

            checks.append(differs("meanwhile", (served.ask("wait", path=str(pipe), meanwhile=meanwhile), len(calls) >= 3), (word, True)))
            checks.append(differs("goes on", served.ask("add", a=1, b=2, meanwhile=lambda: None), 3))
            pid = served.pid
            checks.append(("it is there", not gone(pid)))
        checks.append(("it ended", gone(pid)))
        numbers = rng.integers(1 << 40, size=3).tolist()
        asked = [{"do": "add", "a": n, "b": 1} for n in numbers] + [{"do": "say", "text": "hm"}, {"do": "fail", "text": " a ", "long": 2}]
        done = subprocess.run([sys.executable, "-c", SERVER], input="".join(json.dumps(x) + "\n" for x in asked), capture_output=True,
                              text=True, check=False, timeout=60, env=child_environment())
        lines = [f'{{"ok": {n + 1}}}' for n in numbers] + ['{"ok": "hm"}', '{"error": "ValueError:  a  a"}']
        checks.append(differs("until the caller closes", (done.stdout.splitlines(), done.returncode), (lines, 0)))
        checks.append(differs("prints", sorted(done.stderr.splitlines()), ["and one that does not ask Python", "hm"]))
        with started(ANSWERS) as served:
            checks.append(differs("in parts", [served.ask("one"), served.ask("two"), served.ask("three")], [1, 2, 3]))
    return all_hold(checks)


def ended(rng: np.random.Generator) -> Measured:
    """Servers that cannot be started, end, fall silent, or were closed: each is told by its name, its request and its last words; a process
    that is silent is ended, and closing twice is no error."""
    checks = []
    code = int(rng.integers(1, 99))
    came = words(lambda: Served("none", ["/no/such/program", "x"]))
    why = "/no/such/program: [Errno 2] No such file or directory: '/no/such/program'"
    checks.append(differs("none", came, ("ServedError", "none cannot be started", why, "a program that runs", "")))
    with started(SERVER, "peer") as served:
        died = ("ServedError", "peer ended at 'die'", f"exit code {code}: last words", "", "")
        checks.append(differs("died", words(lambda: served.ask("die", code=code)), died))
        again = "peer ended at 'add'"
        for more in ("x" * (1 << 20), "x"):
            checks.append(differs("asked again", words(lambda more=more: served.ask("add", a=more, b="")),  # type: ignore[misc]
                                  (died[0], again, *died[2:])))
        served.close()  # with a request half written
        checks.append(differs("asked when closed", words(lambda: served.ask("add", a=1, b=1)), (died[0], again, *died[2:])))
    with started("import sys; sys.exit('few words')") as served:
        checks.append(differs("one line of words", words(lambda: served.ask("any"))[2], "exit code 1: few words"))
    for line in ("5", "{}", "[1]"):
        with started(f"print({line!r}, flush=True); input()") as served:
            said = words(lambda: served.ask("any"))
            other = f"something else on its output: {line}"
            checks.append(differs("no answer", said, ("ServedError", "made gave no answer to 'any'", other, "", "")))
    with started("pass") as served:
        said = words(lambda: served.ask("any"))
        checks.append(differs("no words", said, ("ServedError", "made ended at 'any'", "exit code 0: no words", "", "")))
    silent = "import sys\nsys.stdin.readline()\nsys.stdin.readline()"
    calls: list[int] = []
    ways: tuple[tuple[float, dict[str, Any]], ...] = ((0.0, {}), (0.002, {}), (0.1, {"meanwhile": lambda: calls.append(1)}))
    for patience, how in ways:
        with started(silent) as served:
            want = ("ServedError", "made gave no answer to 'any' and was ended", f"silence for {patience:g} s", "", "")
            ask = partial(served.ask, "any", patience=patience, **how)
            checks.append(differs("silent", words(ask), want))
            checks.append(("ended", gone(served.pid)))
            served.close()
    checks.append(("meanwhile", len(calls) > 0))
    with started(silent) as served:
        pid = served.pid
        served.close()
        checks.append(("closed", gone(pid) and words(lambda: served.ask("any"))[2] == "exit code -9: no words"))
    try:
        with started(silent) as served:
            pid = served.pid
            raise KeyError("the case's own")
    except KeyError:
        checks.append(("an error ends it, too", gone(pid)))
    return all_hold(checks)


PARITY: Sequence[tuple[str, Case]] = (("answered", answered),)
FAULTS: Sequence[tuple[str, Case]] = (("ended", ended),)
