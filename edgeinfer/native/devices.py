"""What the machine offers: for now, how many threads are worth using."""

from __future__ import annotations

import os
from pathlib import Path

_CPU_DIRECTORY = Path("/sys/devices/system/cpu")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """The physical cores that this process may run on, no more than its CPU quota.

    Hyper-threads of one core share its vector units: a second thread there slows the first one down.
    """
    cpus = _allowed_cpus()
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota() or len(cores)))


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
