"""Which compiled kernels run a model: llama.cpp's, or those of its fork where they are faster and compute the same.

The fork's library checks less and has kernels that are wrong for some shapes (see `native.ik`). So it runs nothing that
`fork_limits` leaves out, and the rest only when `trials` found that it computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgeinfer.api.adapters import LoadedAdapter
from edgeinfer.api.fork_limits import fits, n_vocab, reason_against
from edgeinfer.api.trials import Trial, trial_of, trials_folder
from edgeinfer.errors import EdgeinferError, ResourceError, UnusableInputError, UsageError
from edgeinfer.gguf_file.header import Header
from edgeinfer.native import ik_package
from edgeinfer.native.kernels import LLAMA_CPP
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime.memory import Plan

MIN_SPEED_UP = 1.05
"""Less is not worth the risk."""
AUTO_MAX_SEQUENCES = 1
"""With more the fork has to do without flash attention, and many cells make it half as fast as llama.cpp."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs a model."""

    name: str = LLAMA_CPP.name
    ubatch_size: int | None = None
    note: str = ""
    """Why it is llama.cpp, where there is the fork too."""

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
    if not ik_package.is_installed():
        if is_asked_for:
            raise ResourceError("ik_llama.cpp is not installed", "pip install 'edgeinfer[fast]', or drop --kernels")
        return Choice()
    if problem := ik_package.problem():
        if is_asked_for:
            raise ResourceError(problem, "pip install 'edgeinfer[fast]'")
        return Choice(note=problem)
    if (reason := reason_against(header, options, plan, adapters, is_shared=max_sequences > 1)) is not None:
        problem = f"ik_llama.cpp cannot run it {reason}"
        if is_asked_for:
            raise UsageError(problem, "use --kernels llama.cpp, or auto")
        return Choice(note=problem)
    if not fits(header, plan, is_shared=max_sequences > 1):
        problem = "ik_llama.cpp cannot run it in the memory that there is"
        if is_asked_for:
            raise ResourceError(f"{header.path}: {problem}", "close other programs, or use --kernels llama.cpp")
        return Choice(note=problem)
    if max_sequences > AUTO_MAX_SEQUENCES and not is_asked_for:
        return Choice(note="for several requests at a time they are the faster ones as a rule")
    try:
        trial = trial_of(header, ik_package.identity, may_try=may_try, must_keep=not is_asked_for)
    except OSError as error:
        return Choice(note=f"what is faster cannot be kept in {trials_folder()} ({error.strerror})")
    if trial is None and not may_try:
        return Choice(note="or ik, if that is faster: it is measured when the model first runs")
    if trial is None or not trial.is_sound:
        problem = _fault(trial)
        if is_asked_for:
            raise UnusableInputError(f"{header.path}: {problem}", "use --kernels llama.cpp")
        return Choice(note=problem)
    if not is_asked_for and trial.speed_up < MIN_SPEED_UP:
        return Choice(note=f"ik_llama.cpp's are {trial.speed_up:.2f} times as fast here")
    return Choice(ik_package.NAME, trial.ubatch_size)


def open_native(
    header: Header, options: RuntimeOptions, plan: Plan, adapters: Sequence[LoadedAdapter], *, max_sequences: int
) -> tuple[NativeModel, Choice]:
    """The weights, in the library that is to run them; raises what `choose`, `NativeModel` and `IkModel` raise."""
    choice = choose(header, options, plan, adapters, max_sequences=max_sequences)
    if choice.name == ik_package.NAME:
        from edgeinfer.native.ik import IkModel

        try:
            return IkModel(header.path, header.architecture, n_vocab(header), mlock=options.mlock), choice
        except EdgeinferError as error:  # what it could do when it was tried
            if options.kernels != "auto":
                raise
            choice = Choice(note=error.message)
    return NativeModel(header.path, mmap=options.mmap, mlock=options.mlock, placement=plan.placement), choice


def _fault(trial: Trial | None) -> str:
    if trial is None:
        return "ik_llama.cpp could not be tried to the end"
    if math.isinf(trial.divergence):
        return trial.fault or "ik_llama.cpp cannot run it on this machine"
    return f"ik_llama.cpp computes something else (divergence {trial.divergence:.3f})"
