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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edgeinfer.atomic_file import replace_file
from edgeinfer.errors import NotFoundError, UnusableInputError
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
    getattr(signal, name, None) for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
)
"""What ends a process by a fault of its own. Any other signal comes from somebody, or for want of memory or time."""
SAYS_NOTHING = 75
"""What a trial exits with that says nothing of the fork: memory was short, or llama.cpp could not run the model either
(EX_TEMPFAIL of sysexits.h)."""
_MAX_NBYTES, _MAX_FAULT = 4096, 500


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
    fault: str = ""
    """Why the fork could not run it, in a line, where that is known."""

    @property
    def is_sound(self) -> bool:
        """Whether the fork computes what llama.cpp computes."""
        return self.divergence <= MAX_DIVERGENCE

    @property
    def speed_up(self) -> float:
        """Of answers and prompts alike."""
        return math.sqrt(self.decode * self.prefill)


def trials_folder() -> Path:
    """Where trials are kept; it need not exist."""
    return home() / "kernels"


def trial_of(header: Header, identity: Callable[[], str], *, may_try: bool, must_keep: bool) -> Trial | None:
    """The trial of a model on this machine: an earlier one, or one that is made now, if that may be.

    `identity` tells which library the fork is at the moment. Raises OSError instead of making a trial that it
    `must_keep` where nothing can be written, for every start would make it anew; NotFoundError, UnusableInputError for
    a model that is gone or replaced.
    """
    told = identity()
    path = _path(header, told)
    if _is_enough(kept := _read(path)) or not may_try:
        return kept
    try:
        turn = _turn(path.parent)
    except OSError:
        if must_keep and kept is None:
            raise
        return kept or _made(header)
    with turn:
        if _is_enough(kept := _read(path)):
            return kept
        was_disturbed = cores_are_shared()
        trial = _made(header)
        if trial is None or identity() != told:
            return kept
        trial = replace(trial, was_disturbed=was_disturbed)
        with contextlib.suppress(OSError):
            replace_file(path, as_json(trial).encode())
    return trial


def _made(header: Header) -> Trial | None:
    files = _files(header)
    trial = _run_trial(header.path)
    if _files(header) != files:
        raise UnusableInputError(f"{header.path}: it was replaced while it was tried", "run it again")
    return trial


def _is_enough(trial: Trial | None) -> bool:
    """One that was disturbed stands until nothing disturbs another."""
    return trial is not None and (not trial.was_disturbed or cores_are_shared())


def _turn(folder: Path) -> contextlib.closing[BinaryIO]:
    """One trial at a time: two would take the cores from each other, and measure that.

    Raises OSError where nothing can be written.
    """
    import tempfile  # here, because every start imports this module

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as room:
        room.write(bytes(_MAX_NBYTES))
    file = (folder / "lock").open("ab")
    with contextlib.suppress(OSError):  # of a file system without locks
        if not lock(file.fileno(), _SILENT_S):
            _tell("waiting for another program, which tries kernels")
            lock(file.fileno(), _TRIAL_LIMIT_S)
    return contextlib.closing(file)


def _path(header: Header, identity: str) -> Path:
    """By all that a trial depends on: both libraries, the model's files, the machine."""
    about = (identity, library.build(), _files(header), platform.node(), platform.machine(), os.cpu_count())
    return trials_folder() / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.json"


def _files(header: Header) -> list[tuple[str, int, int, int, int]]:
    """Which files a model is, and when they changed, also by what sets the time back, as unpacking an archive does.

    Raises NotFoundError.
    """
    try:
        found = [(part, part.path.stat()) for part in read_shards(header)]
    except OSError as error:
        raise NotFoundError(f"{header.path}: it is gone ({error.strerror})", "check the path") from None
    return [
        (str(part.path.absolute()), part.tensor_nbytes, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for part, status in found
    ]


def as_json(trial: Trial) -> str:
    """What is kept of it, and what the process that made it says."""
    return json.dumps(asdict(trial) | {"divergence": None if math.isinf(trial.divergence) else trial.divergence})


def _read(path: Path) -> Trial | None:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            return _parsed(file.read(_MAX_NBYTES))
    except OSError:
        return None


def _open_at_once(path: str, flags: int) -> int:
    """Without a wait for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _parsed(data: bytes) -> Trial | None:
    """A trial of what a process or a file says; None where that is none."""
    try:
        found: Any = json.loads(data)
        divergence = math.inf if found["divergence"] is None else float(found["divergence"])
        size = None if found["ubatch_size"] is None else int(found["ubatch_size"])
        was_disturbed = found["was_disturbed"] is True
        fault = _shown(str(found["fault"]))[:_MAX_FAULT]
        trial = Trial(divergence, float(found["decode"]), float(found["prefill"]), size, was_disturbed, fault)
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return None
    numbers = trial.divergence, trial.decode, trial.prefill, trial.ubatch_size or 1
    return trial if all(number >= 0 for number in numbers) else None


def _run_trial(path: Path) -> Trial | None:
    """Both libraries in a process of their own. A fork that dies, or comes to no end, cannot run the model.

    None where that says nothing of the fork.
    """
    import subprocess  # here, because every start imports this module

    # So that it finds the packages that this process finds.
    package_root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join([*(entry for entry in sys.path if isinstance(entry, str)), package_root])
    command = [sys.executable, "-P", "-m", "edgeinfer.api.kernel_trial", str(path.absolute())]
    try:
        ended, kept_open = os.pipe()  # which closes with this process, whatever ends it
        try:
            with subprocess.Popen(
                command,
                stdin=ended,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            ) as process:
                try:
                    said = _said(process, path.name)
                except BaseException:
                    process.kill()
                    raise
        finally:
            os.close(ended)
            os.close(kept_open)
    except subprocess.TimeoutExpired:
        # Remembered, or every start would wait as long.
        return Trial(math.inf, fault=f"ik_llama.cpp did not run it in {_TRIAL_LIMIT_S} s")
    except OSError:
        return None
    if process.returncode == SAYS_NOTHING or (process.returncode < 0 and -process.returncode not in _CRASHES):
        return None
    if process.returncode < 0:
        return Trial(
            math.inf, fault=f"ik_llama.cpp ended with {signal.Signals(-process.returncode).name} when it was tried"
        )
    return (_parsed(said) if process.returncode == 0 else None) or Trial(math.inf)


def _said(process: subprocess.Popen[bytes], name: str) -> bytes:
    """What it writes; a person is told what goes on if it takes long. Raises subprocess.TimeoutExpired."""
    import subprocess

    try:
        return process.communicate(timeout=_SILENT_S)[0]
    except subprocess.TimeoutExpired:
        _tell(f"trying which kernels run {_shown(name)} faster (--kernels)")
        return process.communicate(timeout=_TRIAL_LIMIT_S)[0]


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _tell(what: str) -> None:
    import logging

    logging.getLogger(__name__).warning("note: %s", what)
