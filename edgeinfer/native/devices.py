"""What the machine offers, and what this process has taken of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_CPU_DIRECTORY = Path("/sys/devices/system/cpu")
_LOADAVG = Path("/proc/loadavg")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """The physical cores that this process may run on, no more than its CPU quota.

    Hyper-threads of one core share its vector units: a second thread there slows the first one down.
    """
    cpus = _allowed_cpus()
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota() or len(cores)))


def other_running_threads() -> int:
    """How many threads besides this one run or wait for a core at this moment; 0 where the system doesn't tell."""
    try:
        runnable, _, _ = _LOADAVG.read_text().split()[3].partition("/")
        return max(0, int(runnable) - 1)
    except (OSError, ValueError, IndexError):
        return 0


def peak_rss_bytes() -> int:
    """The most memory that this process has had resident, in bytes; 0 where the system doesn't tell."""
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
