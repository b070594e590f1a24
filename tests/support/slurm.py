"""Slurm on this machine: its real daemons, a controller and nodes, until the `with` block ends.

Its programs are in Debian's packages slurm-wlm and munge. All nodes are this machine: each is a
`slurmd` with a name and a port. What the cluster runs lives in a PID namespace. When that ends,
or the test's process does, the kernel kills everything in it. To make one, the test must be root.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
import pytest

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scancel", "squeue", "unshare")
_NAMESPACE = ("unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_START_SECONDS = 60
# A credential lives this long. A job that Slurm has put back into the queue starts a second later;
# Slurm's own default is 120.
_CREDENTIAL_SECONDS = 5
_CGROUPS = Path("/sys/fs/cgroup")
_SETTINGS = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthInfo=socket={root}/munge/socket,cred_expire={credential_seconds}
FirstJobId={first_job_id}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{limits}
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=3072
SlurmdParameters=config_overrides
SlurmdTimeout=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
KillWait=60
OverTimeLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace_seconds}
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
_CGROUP_SETTINGS = """
CgroupPlugin=cgroup/v1
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainCores=no
"""


class Slurm:
    """A cluster. A test that asks for it is skipped where Slurm or the right to run it is missing.

    Jobs of the partition `high` displace those of `low`, the default.

    Args:
        nodes: number of nodes: each has two processors and 4 GiB.
        grace_seconds: from SIGTERM to the end of a job that is displaced.

    Attributes:
        nodes: their names.
        has_cgroups: whether Slurm tracks jobs by cgroups, version 1, and limits their memory so, as
            clusters do. Otherwise a process whose parent has ended outlives its job.
    """

    def __init__(self, nodes: int, *, grace_seconds: int = 0) -> None:
        missing = [name for name in _PROGRAMS if shutil.which(name) is None]
        if missing:
            pytest.skip(f"Slurm is not installed here (slurm-wlm, munge): there is no {missing[0]}")
        if os.geteuid() != 0:
            pytest.skip("only root can run Slurm's daemons here")
        if subprocess.run([*_NAMESPACE, "true"], stderr=subprocess.DEVNULL, check=False).returncode:
            pytest.skip("root cannot make a PID namespace here, so nothing would end the daemons")
        self.has_cgroups = all(
            os.access(_CGROUPS / kind, os.W_OK) for kind in ("freezer", "memory")
        )
        # Slurm names cgroups by nodes, and another cluster may run on this machine.
        prefix = f"n{secrets.token_hex(2)}x"
        self.nodes = [f"{prefix}{number}" for number in range(nodes)]
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(nodes + 1)
        self._root = Path(tempfile.mkdtemp(prefix="slurm-"))
        for name in ("state", "munge"):
            (self._root / name).mkdir(mode=0o700)
        self._conf = self._root / "slurm.conf"
        self._conf.write_text(
            _SETTINGS.format(
                root=self._root,
                host=host,
                ports=ports,
                credential_seconds=_CREDENTIAL_SECONDS,
                grace_seconds=grace_seconds,
                # A job chooses its port by its number.
                first_job_id=secrets.randbelow(9000) + 1,
                tracking="cgroup" if self.has_cgroups else "linuxproc",
                limits="cgroup" if self.has_cgroups else "none",
                nodes="\n".join(
                    f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
                    " CPUs=2 RealMemory=4096"
                    for name, port in zip(self.nodes, ports[1:], strict=True)
                ),
            )
        )
        (self._root / "cgroup.conf").write_text(_CGROUP_SETTINGS if self.has_cgroups else "")
        # Jobs find each other by the names of nodes.
        hosts = Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(self.nodes)}\n"
        (self._root / "hosts").write_text(hosts)
        # The first process of the namespace is a shell that runs what it reads.
        self._shell = subprocess.Popen(
            [*_NAMESPACE, "sh"],
            stdin=subprocess.PIPE,
            stdout=(self._root / "output").open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"SLURM_CONF": str(self._conf)},
            text=True,
        )
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise

    def _start(self) -> None:
        munge = self._root / "munge"
        self._run(f"mount --bind {self._root}/hosts /etc/hosts")
        self._run(f"mungekey --create --keyfile={munge}/key")
        files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = " ".join(f"--{option}={munge}/{name}" for option, name in files.items())
        self._run(f"munged --force {options} --socket={munge}/socket")
        self._run("slurmctld -D &")
        for name in self.nodes:
            self.start_node(name)
        self.wait_until(
            lambda: self.states() == dict.fromkeys(self.nodes, "idle"), "the nodes", _START_SECONDS
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()  # the shell ends, and with it the namespace
        self._shell.wait(30)
        for name in self.nodes:
            for folder in sorted(_CGROUPS.glob(f"*/slurm_{name}/**/"), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
        shutil.rmtree(self._root, ignore_errors=True)

    def _run(self, command: str) -> None:
        """Run a command in the namespace. Its output is in the log."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(command + "\n")
        self._shell.stdin.flush()

    @property
    def log(self) -> str:
        """What the daemons have written."""
        logs = [self._root / "output", *sorted(self._root.glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in logs)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        self._run(f"slurmd -D -N {name} &")

    def kill_daemon(self, name: str) -> None:
        """Kill the daemon of a node; its jobs go on, and nobody can reach them."""
        for process in self._processes():
            if process.cmdline()[-2:] == ["-N", name]:
                process.kill()

    def kill_node(self, name: str) -> None:
        """Kill all that a node runs, its daemon first, as when its power fails."""
        self.kill_daemon(name)
        tasks = self.tasks(name)
        for process in [one for task in tasks for one in task.parents() if "step" in one.name()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in tasks:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def tasks(self, name: str) -> list[psutil.Process]:
        """The processes of the jobs on a node."""
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("SLURMD_NODENAME") == name:
                    found.append(process)
        return found

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.Process(self._shell.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def call(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout_seconds: float = 300,
    ) -> str:
        """Run one of Slurm's commands; what it printed."""
        done = subprocess.run(
            command,
            env={**(env or os.environ), "SLURM_CONF": str(self._conf)},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.log}"
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """The state of each node, as `sinfo` shows it."""
        lines = self.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %t")
        return dict(line.split() for line in lines.splitlines())

    def job(self, job_id: str) -> dict[str, str]:
        """What the controller knows of a job: `JobState`, `Reason`, `Restarts`, …"""
        words = self.call("scontrol", "--oneliner", "show", "job", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job_id: str, *states: str) -> None:
        """Wait until a job is in one of these states."""
        self.wait_until(lambda: self.job(job_id)["JobState"] in states, f"{job_id}: {states}")

    def wait_until(
        self, holds: Callable[[], bool], what: str, timeout_seconds: float = 400
    ) -> None:
        """Wait until something holds; fail after a time."""
        deadline = time.monotonic() + timeout_seconds
        while not holds():
            assert time.monotonic() < deadline, f"too late: {what}\n{self.log}"
            time.sleep(0.2)


def _free_ports(count: int) -> Sequence[int]:
    """Ports on which nobody listens, below those that the kernel gives to outgoing connections."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, 32_000), 200):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found
