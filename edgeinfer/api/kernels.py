"""Which compiled kernels run a model: llama.cpp's, or those of its fork where they are faster and compute the same.

The fork's library checks less and has kernels that are wrong for some shapes (see `native.ik`). So a model runs on both
libraries once, in a process of its own that may die of it, and what came out is remembered for model and machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import platform
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.api.adapters import LoadedAdapter
from edgeinfer.atomic_file import replace_file
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.file_lock import lock
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header
from edgeinfer.gguf_file.shards import read_shards
from edgeinfer.home import home
from edgeinfer.native import library
from edgeinfer.native.kernels import LLAMA_CPP, fork_is_installed
from edgeinfer.native.model import NativeModel
from edgeinfer.options import DEFAULT_CACHE_TYPE, RuntimeOptions
from edgeinfer.runtime.footprint import EMBEDDING_NAME, Footprint
from edgeinfer.runtime.memory import Plan

if TYPE_CHECKING:
    import subprocess

ARCHITECTURES = frozenset(
    (
        *("command-r", "falcon", "gemma", "glm4", "glm4moe", "gptneox", "internlm2", "llama"),
        *("qwen2", "qwen2moe", "qwen3", "qwen3moe", "smollm3", "stablelm"),
    )
)
"""Whose logits are llama.cpp's, with random weights and all that the architecture has (`tests/native/test_ik.py`). Of
others they are far off (Gemma 3, Granite) or cost the process (Gemma 2, StarCoder 2); and of `llama` with what follows.
"""
_LLAMA_EXPERTS, _ROPE_FACTORS = "llama.expert_count", "rope_freqs.weight"
_OTHER_TYPES = frozenset(t for t in GGMLType if t > GGMLType.BF16)
"""Newer ones, that the fork does not know, knows by another number, or was not compared with."""
_YARN_BOUNDS = ("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
MAX_DIVERGENCE = 0.05
"""Between the two libraries' answers, in nats: kernels that round otherwise make a tenth of it, a wrong one a hundred
times as much."""
MIN_SPEED_UP = 1.05
"""Less is not worth the risk."""
AUTO_MAX_SEQUENCES = 1
"""With more the fork has to do without flash attention, and many cells make it half as fast as llama.cpp."""
_SILENT_S, _TRIAL_LIMIT_S = 1.5, 300
_CRASHES = frozenset(
    getattr(signal, name, None) for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")
)
"""What ends a process by a fault of its own. Any other signal comes from somebody, or for want of memory or time: that
says nothing of the library."""
SAYS_NOTHING = 75
"""What a trial exits with where the fork's turn did not come (EX_TEMPFAIL of sysexits.h)."""
_BESIDE_NBYTES = 128 << 20
"""What threads, graphs and imports take beside a model."""
_MAX_NBYTES = 4096
_TOKENS = "tokenizer.ggml.tokens"
_File = tuple[str, int, int, int]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came out when a model ran on both libraries; the fork's speed in multiples of llama.cpp's."""

    divergence: float
    """Mean Kullback-Leibler divergence in nats; infinite where the fork could not run it."""
    decode: float = 0.0
    prefill: float = 0.0
    ubatch_size: int | None = None
    """The most tokens that the fork may compute together, where that matters."""

    @property
    def is_sound(self) -> bool:
        """Whether the fork computes what llama.cpp computes."""
        return self.divergence <= MAX_DIVERGENCE

    @property
    def speed_up(self) -> float:
        """Of answers and prompts alike."""
        return math.sqrt(self.decode * self.prefill)


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs a model."""

    name: str = LLAMA_CPP.name
    ubatch_size: int | None = None
    note: str = ""
    """Why it is not the fork, where it could have been."""

    def applied(self, options: RuntimeOptions, max_sequences: int = 1) -> RuntimeOptions:
        """The options with what was decided about them."""
        if self.name == LLAMA_CPP.name:
            return options
        return replace(
            options,
            ubatch_size=min(options.ubatch_size, self.ubatch_size or options.ubatch_size),
            # Of what a cell holds, too: V is transposed without it.
            flash_attn="on" if options.flash_attn != "off" and max_sequences == 1 else "off",
        )


def choose(
    header: Header,
    options: RuntimeOptions,
    plan: Plan,
    adapters: Sequence[LoadedAdapter] = (),
    *,
    max_sequences: int = 1,
    may_try: bool = True,
) -> Choice:
    """Decide what runs a model; the first time for a model it takes some seconds, or a minute for a large one.

    Unless it `may_try` a model that has not run on both yet, it says so in the note. Raises UsageError, ResourceError,
    UnusableInputError where the fork was asked for by name and cannot do it.
    """
    if options.kernels == LLAMA_CPP.name:
        return Choice()
    is_asked_for = options.kernels != "auto"
    if not fork_is_installed():
        if is_asked_for:
            raise ResourceError("ik_llama.cpp is not installed", "pip install 'edgeinfer[fast]', or drop --kernels")
        return Choice()
    from edgeinfer.native import ik  # after the cheap question: most have llama.cpp alone

    if ik.version() != ik.VERSION:
        problem = f"ik-llama-cpp-python is version {ik.version() or 'unknown'}, not {ik.VERSION}"
        if is_asked_for:
            raise ResourceError(problem, "pip install 'edgeinfer[fast]'")
        return Choice(note=problem)
    if (reason := _cannot(header, options, plan, adapters, is_shared=max_sequences > 1)) is not None:
        if is_asked_for:
            raise UsageError(f"ik_llama.cpp cannot run it {reason}", "use --kernels llama.cpp, or auto")
        return Choice(note=f"llama.cpp's kernels: ik_llama.cpp cannot run it {reason}")
    if not _fits(header, plan, is_shared=max_sequences > 1):
        problem = "ik_llama.cpp cannot run it in the memory that there is"
        if is_asked_for:
            raise ResourceError(f"{header.path}: {problem}", "close something, or use --kernels llama.cpp")
        return Choice(note=f"llama.cpp's kernels: {problem}")
    if max_sequences > AUTO_MAX_SEQUENCES and not is_asked_for:
        return Choice(note="llama.cpp's kernels: for several requests at a time they are the faster ones as a rule")
    identity, file = ik.identity(), _file(header)
    path = _path(identity, file)
    trial = _read(path)
    if trial is None and may_try:
        if not is_asked_for and (reason := _cannot_keep(path)) is not None:
            return Choice(note=f"llama.cpp's kernels: what is faster cannot be kept in {path.parent} ({reason})")
        trial = _tried(header, identity, file, path)
    if trial is None and not may_try:
        return Choice(note="the faster one, measured when the model first runs")
    if trial is None or not trial.is_sound:
        fault = f"ik_llama.cpp {_fault(trial)}"
        if is_asked_for:
            raise UnusableInputError(f"{header.path}: {fault}", "use --kernels llama.cpp")
        return Choice(note=f"llama.cpp's kernels: {fault}")
    if not is_asked_for and trial.speed_up < MIN_SPEED_UP:
        return Choice(note=f"llama.cpp's kernels: ik_llama.cpp's are {trial.speed_up:.2f} times as fast here")
    return Choice(ik.NAME, trial.ubatch_size)


def open_native(choice: Choice, header: Header, options: RuntimeOptions, plan: Plan) -> NativeModel:
    """The weights in the library that was chosen; raises what `NativeModel` and `IkModel` raise."""
    if choice.name == LLAMA_CPP.name:
        return NativeModel(header.path, mmap=options.mmap, mlock=options.mlock, placement=plan.placement)
    from edgeinfer.native.ik import IkModel

    return IkModel(header.path, header.architecture, n_vocab(header), mlock=options.mlock)


def n_vocab(header: Header) -> int:
    """How many tokens the file has."""
    return header.metadata.value_type(_TOKENS)[1] or 0 if _TOKENS in header.metadata else 0


def _cannot(
    header: Header, options: RuntimeOptions, plan: Plan, adapters: Sequence[LoadedAdapter], *, is_shared: bool
) -> str | None:
    """What of a run the fork is known not to do, or not known to do."""
    tensors = [tensor for part in read_shards(header) for tensor in part.tensors]
    for reason, applies in (
        (f"as a {header.architecture} model", header.architecture not in ARCHITECTURES),
        ("with experts of this kind", header.metadata.count(_LLAMA_EXPERTS) > 0),
        ("with factors for its positions", any(tensor.name == _ROPE_FACTORS for tensor in tensors)),
        ("with bounds of yarn", any(f"{header.architecture}.{key}" in header.metadata for key in _YARN_BOUNDS)),
        ("with a sliding window", header.hyperparameter("attention.sliding_window", 0) > 0),
        ("with adapters", bool(adapters)),
        ("with a draft of its own layers", options.draft == "layers"),
        ("with layers on a GPU", plan.placement.gpu_layers > 0),
        ("with flash attention for several sequences", options.flash_attn == "on" and is_shared),
        ("with a KV cache that is not f16", {options.type_k, options.type_v} != {DEFAULT_CACHE_TYPE}),
        ("with these types of tensors", any(tensor.type in _OTHER_TYPES for tensor in tensors)),
        ("without a vocabulary", not n_vocab(header)),
    ):
        if applies:
            return reason
    return None


def _fits(header: Header, plan: Plan, *, is_shared: bool) -> bool:
    """Whether there is room for what the fork takes more than llama.cpp.

    It copies all weights, an embedding that is the output matrix too once more; several sequences have all scores of
    their attention at a time.
    """
    if plan.available_nbytes is None:
        return True
    footprint = Footprint(read_shards(header), library.features())
    settings = replace(plan.settings, repack=False, mmap=False, flash_attn=plan.settings.flash_attn and not is_shared)
    twice = sum(tensor.nbytes for tensor in footprint.tensors if tensor.name == EMBEDDING_NAME and footprint.is_tied)
    more = footprint.needs(settings).total + twice - footprint.needs(plan.settings).total
    total = plan.needs.total + more
    return total <= plan.available_nbytes and _is_granted(total + _BESIDE_NBYTES)


def _is_granted(nbytes: int) -> bool:
    """Whether the system would hand out this much. Without it llama.cpp says so, and the fork ends the process."""
    try:
        mmap.mmap(-1, nbytes).close()
    except (OSError, ValueError, OverflowError):  # a limit of the process, or of the system
        return False
    return True


def _fault(trial: Trial | None) -> str:
    if trial is None:
        return "could not be tried to the end"
    if math.isinf(trial.divergence):
        return "cannot run it on this machine"
    return f"computes something else (divergence {trial.divergence:.3f})"


def _tried(header: Header, identity: str, file: _File, path: Path) -> Trial | None:
    """A trial that is made now, or was while this process waited for another one's.

    Raises NotFoundError and UnusableInputError where the file is not the one that was looked at any more.
    """
    from edgeinfer.native import ik

    with _alone(path.parent):
        if (trial := _read(path)) is not None:
            return trial
        trial = _run_trial(header.path)
        if _file(header) != file:
            raise UnusableInputError(f"{header.path}: it was replaced while it was tried", "run it again")
        if trial is None or ik.identity() != identity:  # so was the package
            return None
        _keep(trial, path)
        return trial


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One trial at a time, where that can be had: two would take the processor from each other, and measure that."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(folder / ".lock", "ab", opener=_open_at_once))
            if not lock(file.fileno(), _SILENT_S):
                _tell("waiting for another program, which tries kernels")
                lock(file.fileno(), _TRIAL_LIMIT_S)
        yield


def _cannot_keep(path: Path) -> str | None:
    """Why nothing can be remembered there: then every start would be the first."""
    import tempfile  # here, because every start imports this module

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(_MAX_NBYTES))
    except OSError as error:
        return error.strerror or "cannot be written"
    return None


def _keep(trial: Trial, path: Path) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(_as_json(trial)).encode())


def _file(header: Header) -> _File:
    """Which file it is. Raises NotFoundError."""
    try:
        status = header.path.stat()
    except OSError as error:
        raise NotFoundError(f"{header.path}: it is gone ({error.strerror})", "check the path") from None
    return str(header.path.absolute()), status.st_size, status.st_mtime_ns, header.tensor_nbytes


def _path(identity: str, file: _File) -> Path:
    """By all that a trial depends on: both libraries, the file, the machine."""
    about = (identity, library.build(), file, platform.node(), platform.machine(), os.cpu_count())
    return home() / "kernels" / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.json"


def _as_json(trial: Trial) -> dict[str, float | int | None]:
    divergence = None if math.isinf(trial.divergence) else trial.divergence
    return {
        "divergence": divergence,
        "decode": trial.decode,
        "prefill": trial.prefill,
        "ubatch_size": trial.ubatch_size,
    }


def _read(path: Path) -> Trial | None:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            return _parsed(file.read(_MAX_NBYTES))
    except OSError:
        return None


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # no wait for a pipe's other end


def _parsed(data: bytes) -> Trial | None:
    """A trial of what a process or a file says; None where that is none."""
    try:
        found: Any = json.loads(data)
        divergence = math.inf if found["divergence"] is None else float(found["divergence"])
        size = None if found["ubatch_size"] is None else int(found["ubatch_size"])
        trial = Trial(divergence, float(found["decode"]), float(found["prefill"]), size)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    numbers = trial.divergence, trial.decode, trial.prefill, trial.ubatch_size or 1
    return trial if all(number >= 0 for number in numbers) else None


def _run_trial(path: Path) -> Trial | None:
    """Both libraries in a process of their own. One that dies cannot run the model; None where nothing came out."""
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
        return Trial(math.inf)  # or every start would wait as long
    except OSError:
        return None
    if process.returncode == SAYS_NOTHING or (process.returncode < 0 and -process.returncode not in _CRASHES):
        return None
    return (_parsed(said) if process.returncode == 0 else None) or Trial(math.inf)


def _said(process: subprocess.Popen[bytes], name: str) -> bytes:
    """What it writes; a person is told what goes on if it takes long. Raises subprocess.TimeoutExpired."""
    import subprocess

    try:
        return process.communicate(timeout=_SILENT_S)[0]
    except subprocess.TimeoutExpired:
        _tell(f"trying once which kernels run {name} faster (--kernels)")
        return process.communicate(timeout=_TRIAL_LIMIT_S)[0]


def _tell(what: str) -> None:
    import logging

    logging.getLogger(__name__).warning("note: %s", "".join(c if c.isprintable() else "?" for c in what))
