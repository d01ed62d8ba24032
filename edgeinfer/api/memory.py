"""The machine as `runtime.memory` wants it: how much memory this process can have, what the CPU is, which GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edgeinfer.api.adapters import LoadedAdapter
from edgeinfer.api.draft_plan import DraftPlan
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.native import gpus, library
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime.footprint import Footprint
from edgeinfer.runtime.memory import Machine, Plan, plan
from edgeinfer.speculation.draft import most_draft_tokens

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT_NBYTES = 1 << 60
# The files of the second version of control groups, and of the first.
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def this_machine() -> Machine:
    """What a run can have now."""
    return Machine(available_nbytes(), library.features(), gpus.gpu_devices())


def plan_run(
    header: Header,
    options: RuntimeOptions,
    *,
    default_ctx_size: int | None = None,
    max_sequences: int = 1,
    must_fit: bool = True,
    draft: DraftPlan | None = None,
    adapters: Sequence[LoadedAdapter] = (),
) -> Plan:
    """Fit a model, with its adapters and the one that drafts for it, to this machine.

    Raises what `runtime.memory.plan` raises, for main memory only if it `must_fit`.
    """
    machine = this_machine()
    if not must_fit:
        machine = replace(machine, available_nbytes=None)
    footprint = Footprint((*read_shards(header), *(adapter.header for adapter in adapters)), machine.features)
    drafting = None
    if draft is not None:
        from edgeinfer.runtime.draft_footprint import DraftFootprint  # here, because every start imports this module

        drafting = DraftFootprint(
            read_shards(draft.header), machine.features, logit_rows=max_sequences + 1, layers=draft.layers
        )
    return plan(
        footprint,
        options,
        machine,
        default_ctx_size=default_ctx_size,
        logit_rows=_logit_rows(options, max_sequences),
        sequences=max_sequences,
        draft=drafting,
    )


def _logit_rows(options: RuntimeOptions, max_sequences: int) -> int:
    """Rows of logits that the library keeps at a time."""
    # One for each sequence: the requests', as many kept ones, and a spare one. Drafts want one for each token.
    rows = 2 if max_sequences == 1 else 2 * max_sequences + 1
    if options.draft == "off":
        return rows
    most = max(n * (1 + min(options.draft_max, most_draft_tokens(n))) for n in range(1, max_sequences + 1))
    return max(rows, most)


def available_nbytes() -> int | None:
    """Bytes that this process could take without pushing others out; None where the system does not tell.

    What files are cached in counts as free, whether or not it was used twice: a model's own pages are among it.
    """
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    return max(0, min([free, *(room for folder in _cgroups() if (room := _room(folder)) is not None)]))


def _cgroups() -> Iterator[Path]:
    """The control groups that this process is in, whose limits all count."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        lines = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _CGROUP / "memory" if controllers else _CGROUP
        own = root / path.lstrip("/")
        yield from (folder for folder in own.parents if folder.is_relative_to(root) and folder != root)
        yield own
    yield from (_CGROUP, _CGROUP / "memory")


def _room(folder: Path) -> int | None:
    """What a control group may still take; None without a limit."""
    for limit_name, used_name, cached_names in _CGROUP_FILES:
        try:
            limit = int((folder / limit_name).read_text())
            used = int((folder / used_name).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no limit, or another version
            continue
        if limit < _NO_LIMIT_NBYTES:
            return limit - used + sum(int(line.split()[1]) for line in lines if line.startswith(_words(cached_names)))
    return None


def _words(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name} " for name in names)


def expected_nbytes() -> int | None:
    """The same, and where the system does not tell that, half of what is built in."""
    available = available_nbytes()
    if available is not None:
        return available
    total = installed_nbytes()
    return None if total is None else total // 2


def installed_nbytes() -> int | None:
    """The memory that is built in; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
