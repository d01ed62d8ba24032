"""What the machine offers, and what this process has taken of it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_CPU_DIRECTORY = Path("/sys/devices/system/cpu")
_LOADAVG = Path("/proc/loadavg")
_OWN_THREADS = Path("/proc/self/task")
_STATUS = Path("/proc/self/status")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_LOOKS = 4
_BETWEEN_LOOKS_S = 1e-3


def default_threads() -> int:
    """The physical cores that this process may run on, no more than its CPU quota.

    Hyper-threads of one core share its vector units: a second thread there slows the first one down.
    """
    cpus = _allowed_cpus()
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota() or len(cores)))


def cores_are_shared() -> bool:
    """Whether other programs keep the cores busy; False where the system doesn't tell.

    A single look also counts what only wakes up for a moment, one time in ten on an idle machine: all must agree.
    """
    for _ in range(_LOOKS):
        try:
            runnable, _, _ = _LOADAVG.read_text().split()[3].partition("/")
            if int(runnable) <= _own_running_threads():
                return False
        except (OSError, ValueError, IndexError):
            return False
        time.sleep(_BETWEEN_LOOKS_S)
    return True


def _own_running_threads() -> int:
    """This process's threads that run or wait for a core: numpy's BLAS keeps one spinning for a while."""
    states = (path.read_text().rpartition(")")[2].split()[0] for path in _OWN_THREADS.glob("*/stat"))
    return max(1, sum(state == "R" for state in states))


def peak_rss_bytes() -> int:
    """The most memory that this program has had resident, in bytes; 0 where the system doesn't tell.

    `getrusage` comes second: on Linux its peak begins with what the parent held when it started this process.
    """
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int) -> str:
    """A name for the core that a logical CPU belongs to; where the topology is unknown, each CPU is a core."""
    try:
        return (_CPU_DIRECTORY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """Whole CPUs that a container may use."""
    try:
        quota, period = _CGROUP_QUOTA.read_text().split()
        return None if quota == "max" else max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):
        return None
