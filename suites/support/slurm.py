"""A real Slurm on hosts of one machine (apart.py): Debian's slurmctld, slurmd and munge, for tests. Needs root.

Host i is node h<i>. All that it writes is in `folder`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType

import apart
from apart import Hosts

TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
CONF = """
ClusterName=alpha
SlurmctldHost=h0({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
KillWait=5
SlurmdTimeout=10
MinJobAge=3600
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""
UP_S = 30.0
"""Within which all nodes are there."""


def why_not() -> str:
    """'' where a Slurm can be started here; else what is missing."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    return f"Slurm needs {', '.join(missing)}, of Debian's slurmctld, slurmd, slurm-client and munge" if missing else apart.why_not()


class Slurm:
    """One controller and `count` nodes with four processors each, so Slurm believes."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.hosts, self._daemons = Hosts(count, known=[f"h{i}" for i in range(count)]), list[subprocess.Popen[str]]()
        try:
            self._configure()
            self._daemon(0, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={folder}/munge.key",
                         f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed")
            self._until(lambda: (folder / "munge.socket").exists())
            self._daemon(0, "unshare", "--uts", "sh", "-c", "hostname h0; exec slurmctld -D -i")
            for i in range(count):
                self.node(i)
            self._until(lambda: self.run("sinfo", "-h", "-o", "%t %D").split() == ["idle", str(count)])
        except BaseException:
            self.close()
            raise

    def _configure(self) -> None:
        for name in ("state", *(f"spool-h{i}" for i in range(self.count))):
            (self.folder / name).mkdir()
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        os.chmod(self.folder, 0o755)  # munged trusts no folder that others may write
        nodes = "\n".join(f"NodeName=h{i} NodeAddr={Hosts.address(i)} CPUs=4 RealMemory=1000" for i in range(self.count))
        (self.folder / "slurm.conf").write_text(CONF.format(folder=self.folder, address=Hosts.address(0), nodes=nodes))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # looked for where it is not named, and not used here

    @property
    def environment(self) -> dict[str, str]:
        """Of Slurm's commands."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER_")) and k not in ("RANK", "WORLD_SIZE")}
        return {**kept, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _daemon(self, host: int, *command: str) -> subprocess.Popen[str]:
        log = open(self.folder / f"{Path(command[0]).name}-{host}.out", "w")
        with log:
            self._daemons.append(self.hosts.start(host, command, env=self.environment, stdout=log, stderr=log, start_new_session=True))
        return self._daemons[-1]

    def node(self, host: int) -> None:
        """Start the daemon of a node."""
        self._daemon(host, "unshare", "--uts", "sh", "-c", f"hostname h{host}; exec slurmd -D -N h{host}")

    def run(self, *command: str, host: int = 0) -> str:
        """What one of Slurm's commands prints."""
        process = self.hosts.start(host, command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return process.communicate()[0]

    def submit(self, *words: str) -> int:
        """The number of a job that `sbatch` takes."""
        said = self.run("sbatch", *words)
        found = re.search(r"Submitted batch job (\d+)", said)
        assert found, said
        return int(found[1])

    def state(self, job: int) -> str:
        """Such as RUNNING or COMPLETED."""
        found = re.search(r"JobState=(\S+)", self.run("scontrol", "show", "job", str(job)))
        return found[1] if found else ""

    def wait(self, job: int, *states: str, seconds: float = 240.0) -> str:
        """The job's state once it is one of these, or one that it does not leave."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "BOOT_FAIL", "NODE_FAIL")
        self._until(lambda: self.state(job) in (*states, *final), seconds)
        return self.state(job)

    def _until(self, ready: object, seconds: float = UP_S) -> None:
        until = time.monotonic() + seconds
        while not ready():  # type: ignore[operator]
            if time.monotonic() > until:
                logs = {p.name: p.read_text(errors="replace")[-600:] for p in self.folder.glob("*.log")}
                raise TimeoutError(f"Slurm does not get on: {self.run('sinfo', '-N', '-l')} {logs}")
            time.sleep(0.2)

    def __enter__(self) -> Slurm:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, with all that it runs."""
        self.hosts.close()
        for daemon in self._daemons:
            daemon.wait()
