"""Runs on hosts that share nothing but a network: namespaces of this machine (suites/support/apart.py), with the commands that users give.

NOT_RUN, with the reason, where the machine makes none. `python suites/support/apart_runs.py bits` makes the whole bit table,
`python suites/support/apart_faults.py` the whole fault table.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import apart
import apart_faults
import apart_runs
import pytest
import ranked_runs
from apart import BOTH, Hosts, Wire

from alpha.bench.comm import SIZES

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "train.yaml"

pytestmark = pytest.mark.skipif(bool(apart.why_not(tun=True)), reason=f"NOT_RUN: {apart.why_not(tun=True)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart")
    apart_runs.corpus(path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """What one process leaves of 40 steps."""
    return apart_runs.alone(folder, "alone", apart_faults.STEPS)


def packets(hosts: Hosts, count: int) -> list[tuple[float, int]]:
    """Datagrams from host 0 to host 1, 1 ms apart, as they come: (seconds on the way, number)."""
    receive = hosts.start(1, [sys.executable, "-c", RECEIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert receive.stdout is not None
    receive.stdout.readline()
    hosts.start(0, [sys.executable, "-c", SEND, str(count)]).wait()
    out, _ = receive.communicate(timeout=60)  # closes its input: all were sent
    return [(float(a), int(b)) for a, b in (line.split() for line in out.splitlines())]


SEND = """
import socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(int(sys.argv[1])):
    link.sendto(f"{time.monotonic()} {i}".encode(), ("10.77.0.2", 5000))
    time.sleep(0.001)
"""
RECEIVE = """
import select, socket, sys, time
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.bind(("10.77.0.2", 5000))
link.settimeout(0.3)
print("here", flush=True)
sent = False
while True:
    try:
        moment, number = link.recv(100).split()
        print(time.monotonic() - float(moment), int(number))
    except TimeoutError:
        if sent:
            break
        sent = bool(select.select([sys.stdin], [], [], 0)[0])
"""
"""Ends when nothing came for 0.3 s after all was sent: six times the longest way of a packet."""


def test_the_wire_does_to_packets_what_it_says() -> None:
    """Losses, copies, delays, another order and cuts, each alone; and a clean wire does nothing."""
    with Hosts(2, Wire()) as hosts:
        clean = packets(hosts, 300)
        assert [n for _, n in clean] == list(range(300))
        hosts.change(Wire(loss=0.2))
        lost = packets(hosts, 1000)
        assert 700 < len(lost) < 900 and [n for _, n in lost] == sorted({n for _, n in lost})
        hosts.change(Wire(double=0.2))
        assert 1100 < len(packets(hosts, 1000)) < 1300
        hosts.change(Wire(delay_s=0.05))
        late = packets(hosts, 100)
        assert min(s for s, _ in late) >= 0.05 and [n for _, n in late] == list(range(100))
        hosts.change(Wire(jitter_s=0.05))
        mixed = [n for _, n in packets(hosts, 300)]
        assert sorted(mixed) == list(range(300)) and mixed != sorted(mixed)
        hosts.change(Wire(cut=((1, 0),)))
        assert len(packets(hosts, 50)) == 50
        hosts.change(Wire(cut=((0, 1),)))
        assert not packets(hosts, 50)


def test_hosts_have_the_bits_of_one_process(folder: Path) -> None:
    """One layout of the bit table. Planted: a run of another number of logical shards is told apart."""
    one = apart_runs.alone(folder, "one")
    with Hosts(2) as hosts:
        assert not apart_runs.differs(folder, "h2n2", one, apart_runs.together(hosts, folder, "h2n2", 2, 2, 1))
        assert "other steps" in apart_runs.differs(folder, "h2n1", one, apart_runs.together(hosts, folder, "h2n1", 2, 1, 1,
                                                                                             ["--set", "train.shards=4"]))


@pytest.mark.parametrize("name", ["partition, both ways", "host 0 is killed"])
def test_a_host_that_is_lost(folder: Path, alone: dict[str, Any], name: str) -> None:
    """The run goes on and has the bits of one process; all who are left say what they lost, within the bounds of the fault table."""
    strike, lost = apart_faults.STRUCK[name]
    line, wrong = apart_faults.sample(folder, name.replace(" ", "-").replace(",", ""), alone, Wire(), strike, lost)
    assert line and not wrong, wrong


def test_a_bad_network_is_no_fault(folder: Path, alone: dict[str, Any]) -> None:
    """Packets are lost, doubled, late and in another order: nobody is accused. Planted: the same judge sees a way that is cut."""
    def undisturbed(job: apart_faults.Job) -> apart_faults.Both:
        return None, None

    line, wrong = apart_faults.sample(folder, "bad", alone, Wire(loss=0.01, double=0.01, delay_s=0.002, jitter_s=0.003), undisturbed, False)
    assert line and not wrong, wrong

    def cut(job: apart_faults.Job) -> apart_faults.Both:
        job.reach()
        job.hosts.change(Wire(cut=BOTH))
        assert job.reported(0, 1) is not None
        job.hosts.change(Wire())
        return None, None

    _, wrong = apart_faults.sample(folder, "cut", alone, Wire(), cut, False)
    assert "a false alarm" in wrong, wrong


def test_the_map_of_two_hosts(capfd: pytest.CaptureFixture[str]) -> None:
    """Each host says what it is made of, and ways between hosts are told from those inside them."""
    assert apart_runs.two_hosts(SIZES[:4]) == 0
    said = capfd.readouterr().out
    for words in ("host 0: ranks 0 to 1; ", "host 1: ranks 2 to 3; ", "inside host 0: ", "host 0 to host 1: ", "inside host 1: ",
                  "  link net0"):
        assert said.count(words) == (2 if "link" in words else 1), said
    near, far = (float(said.split(words)[1].split(" us")[0].replace(",", "")) for words in ("inside host 1: ", "host 0 to host 1: "))
    assert far > 0 and near > 0 and "those that move most get the" in said


def test_the_job_of_kubernetes(folder: Path, alone: dict[str, Any]) -> None:
    """The manifest says what it must, and its command line, with what Kubernetes sets, runs: also after a pod was lost and made again."""
    yaml = pytest.importorskip("yaml", reason="NOT_RUN: PyYAML is not installed (it comes with requirements.lock)")
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    container, = pod["containers"]
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["publishNotReadyAddresses"] is True and pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"] and pod["restartPolicy"] == "Never"
    assert {e["name"] for e in container["env"]} == {"ALPHA_SECRET"} and "secretKeyRef" in container["env"][0]["valueFrom"]
    command, hosts = container["command"], spec["completions"]
    assert command[:3] == ["alpha", "train", "run.toml"] and command[command.index("--hosts") + 1] == str(hosts)
    first = f"{name}-0.{pod['subdomain']}"
    assert command[command.index("--meet") + 1] == f"{first}:{service['spec']['ports'][0]['port']}"

    path = apart_runs.run_file(folder, "pods", 1)
    words = [*apart_runs.ALPHA, str(path), *command[3:], *apart_faults.STEPS]
    with Hosts(hosts, Wire(), known=[f"{name}-{i}.{pod['subdomain']}" for i in range(hosts)]) as made:
        def start(index: int) -> apart_runs.Started:
            return apart_runs.Started(made.begin(index, words, apart_runs.environment(JOB_COMPLETION_INDEX=str(index))))

        pods, until = [start(i) for i in range(hosts)], time.monotonic() + apart_faults.PATIENCE_S
        while not pods[0].when("step 12/40"):
            assert time.monotonic() < until and pods[0].process.poll() is None, pods[0].text
            time.sleep(0.01)
        made.kill(1)
        time.sleep(apart_faults.ENGINE_S)
        pods[1] = start(1)
        assert [one.wait() for one in pods] == [0] * hosts, [one.text for one in pods]
        found = ranked_runs.left(folder / "runs" / "pods")
        assert all(found[what] == alone[what] for what in apart_runs.SAME)
        assert pods[0].text.count("ranks     4, ") == 2, pods[0].text
