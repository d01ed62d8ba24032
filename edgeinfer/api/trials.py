"""How a model runs on both libraries: tried once, in a process of its own that may die of it, and remembered.

What came out holds for this file, this machine and these two libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edgeinfer.atomic_file import replace_file
from edgeinfer.file_lock import lock
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.home import home
from edgeinfer.native import library
from edgeinfer.native.devices import cores_are_shared

if TYPE_CHECKING:
    import subprocess

MAX_DIVERGENCE = 0.05
"""Between the two libraries' answers, in nats: kernels that round otherwise make a tenth of it, a wrong one a hundred
times as much."""
_SILENT_S, _TRIAL_LIMIT_S = 1.5, 300
_CRASHES = frozenset(
    -getattr(signal, name) for name in ("SIGABRT", "SIGSEGV", "SIGILL", "SIGFPE", "SIGBUS") if hasattr(signal, name)
)
"""How a library ends its process. Any other signal comes from somebody, or for want of memory."""
UNDECIDED = 5
"""The exit code of a trial that says nothing of the fork: memory was short, or llama.cpp could not run it either."""
_MAX_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class Trial:
    """What came out when a model ran on both libraries; the fork's speed in multiples of llama.cpp's."""

    divergence: float
    """Mean Kullback-Leibler divergence in nats; infinite where the fork could not run it."""
    decode: float = 0.0
    prefill: float = 0.0
    ubatch_size: int | None = None
    """The most tokens that the fork may compute together, where that matters."""
    was_disturbed: bool = False
    """Whether other programs kept the cores busy, so that the times mean little."""

    @property
    def is_sound(self) -> bool:
        """Whether the fork computes what llama.cpp computes."""
        return self.divergence <= MAX_DIVERGENCE

    @property
    def speed_up(self) -> float:
        """Of answers and prompts alike."""
        return math.sqrt(self.decode * self.prefill)


def trial_of(header: Header, identity: str, *, may_try: bool, must_keep: bool) -> Trial | None:
    """The trial of a model on this machine: an earlier one, or one that is made now, if that may be.

    Raises OSError instead of making one that it `must_keep` where nothing can be written, for every start would make
    it anew.
    """
    path = _path(header, identity)
    if _is_enough(kept := _read(path)) or not may_try:
        return kept
    try:
        turn = _turn(path.parent)
    except OSError:
        if must_keep and kept is None:
            raise
        return kept or _run_trial(header.path)
    with turn:
        if _is_enough(kept := _read(path)):
            return kept
        was_disturbed = cores_are_shared()
        trial = _run_trial(header.path)
        if trial is None:
            return kept
        trial = replace(trial, was_disturbed=was_disturbed)
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(_as_json(trial)).encode())
    return trial


def _is_enough(trial: Trial | None) -> bool:
    """One that was disturbed stands until nothing disturbs another."""
    return trial is not None and (not trial.was_disturbed or cores_are_shared())


def _turn(folder: Path) -> contextlib.closing[BinaryIO]:
    """One trial at a time: two would take the cores from each other, and measure that. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("ab")
    with contextlib.suppress(OSError):  # of a file system without locks
        lock(file.fileno(), _TRIAL_LIMIT_S)
    return contextlib.closing(file)


def _path(header: Header, identity: str) -> Path:
    """By all that a trial depends on: both libraries, the file, the machine."""
    files = [(str(part.path.absolute()), part.tensor_nbytes, *_times(part.path)) for part in read_shards(header)]
    about = (identity, library.build(), files, platform.node(), platform.machine(), os.cpu_count())
    return home() / "kernels" / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.json"


def _times(path: Path) -> tuple[int, int, int]:
    """Of a file: its size, and when it was changed, also by what sets the time back, as unpacking an archive does."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _as_json(trial: Trial) -> dict[str, float | None]:
    return asdict(trial) | {"divergence": None if math.isinf(trial.divergence) else trial.divergence}


def _read(path: Path) -> Trial | None:
    try:
        with path.open("rb") as file:
            return _parsed(file.read(_MAX_NBYTES))
    except OSError:
        return None


def _parsed(data: bytes) -> Trial | None:
    """A trial of what a process or a file says; None where that is none."""
    try:
        found: Any = json.loads(data)
        divergence = math.inf if found["divergence"] is None else float(found["divergence"])
        size = None if found["ubatch_size"] is None else int(found["ubatch_size"])
        was_disturbed = found["was_disturbed"] is True
        trial = Trial(divergence, float(found["decode"]), float(found["prefill"]), size, was_disturbed)
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None
    numbers = trial.divergence, trial.decode, trial.prefill, trial.ubatch_size or 1
    return trial if all(number >= 0 for number in numbers) else None


def _run_trial(path: Path) -> Trial | None:
    """Both libraries in a process of their own. A fork that dies, or comes to no end, cannot run the model.

    None where that says nothing of the fork.
    """
    import subprocess  # here, because every start imports this module

    package_root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "edgeinfer.api.kernel_trial", str(path.absolute())]
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": paths},
        ) as process:
            try:
                said = _said(process, path.name)
            except BaseException:
                process.kill()
                raise
    except subprocess.TimeoutExpired:
        return Trial(math.inf)
    except OSError:
        return None
    if process.returncode == UNDECIDED or (process.returncode < 0 and process.returncode not in _CRASHES):
        return None
    return (_parsed(said) if process.returncode == 0 else None) or Trial(math.inf)


def _said(process: subprocess.Popen[bytes], name: str) -> bytes:
    """What it writes; a person is told what goes on if it takes long. Raises subprocess.TimeoutExpired."""
    import logging
    import subprocess

    try:
        return process.communicate(timeout=_SILENT_S)[0]
    except subprocess.TimeoutExpired:
        logging.getLogger(__name__).warning("note: trying which kernels run %s faster (--kernels)", name)
        return process.communicate(timeout=_TRIAL_LIMIT_S)[0]
