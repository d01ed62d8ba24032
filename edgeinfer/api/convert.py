"""`edgeinfer.convert`: from a checkpoint to a GGUF file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api.embed import open_encoder
from edgeinfer.api.files import checked_header, read_text
from edgeinfer.api.imatrix import imatrix
from edgeinfer.api.load import load
from edgeinfer.api.source import locate, locate_base
from edgeinfer.api.vocabulary import open_vocabulary
from edgeinfer.convert.adapters.conversion import plan_adapter, verify_adapter
from edgeinfer.convert.adapters.peft import is_adapter, open_adapter
from edgeinfer.convert.imatrix import ExpectedMatrix
from edgeinfer.convert.kept_errors import KeptErrors
from edgeinfer.convert.measure import measure
from edgeinfer.convert.output import written_to
from edgeinfer.convert.pipeline import Planned, check_target, execute, prepare
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.target import Measure, rule_of_thumb
from edgeinfer.convert.verify import verify
from edgeinfer.errors import CheckFailedError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.home import home
from edgeinfer.native.devices import default_threads, peak_rss_bytes
from edgeinfer.native.kernels import LLAMA_CPP
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.temporary import temporary_folder
from edgeinfer.types import Refusal, Row, Tokens, Vocabulary

_VERIFY_OPTIONS = RuntimeOptions(ctx_size=64, prefix_cache=False, kernels=LLAMA_CPP.name)
_DEFAULTS = ConvertOptions()
# All that decides about types and files is the output's own; how the source is read is not.
_OF_CALIBRATION: dict[str, Any] = {
    "type": "Q8_0",
    "target_size": None,
    "target_bpw": None,
    "tensor_type": (),
    "output_tensor_type": None,
    "token_embedding_type": None,
    "pure": False,
    "fallback": True,
    "split_max_size": None,
    "calibrate": None,
    "verify": False,
}


@dataclass(frozen=True, slots=True)
class Fallback:
    """A tensor whose rows did not divide into the blocks of the type that it should have had."""

    tensor: str
    wanted: str
    got: str
    extra_bytes: int
    """What that costs; negative where the other type is smaller."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert --json` prints, in the contract's order."""

    output: str
    architecture: str
    type: str
    bytes: int
    bits_per_weight: float
    tensors: int
    parameters: int
    fallbacks: list[Fallback]
    seconds: float
    peak_rss_bytes: int
    verified: bool
    tensor_types: dict[str, int]
    """How many weights have which type, most first."""


def plan_conversion(
    source: str | Path,
    output: str | Path | None = None,
    options: ConvertOptions = _DEFAULTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Planned:
    """Read a source's headers and plan its conversion; fetches a source that is on the Hub.

    Weights are read only where the types are to fit a size, for samples; `progress` is told the tensors measured and
    their total. With `calibrate` the types are then still provisional: what they follow from is computed by
    `run_conversion`. `convert` says what it raises.
    """
    target = Path(output) if output is not None else None
    located = locate(source, target, options)
    if is_adapter(located.path):
        adapter = open_adapter(located.path)
        base = locate_base(adapter, options.base)
        return plan_adapter(adapter, base, target, options, repository=located.repository)
    if options.base is not None:
        raise UsageError(f"--base has no effect: {source} is no adapter", "drop it")
    errors = rule_of_thumb if options.calibrate is not None else _measuring(options, progress)
    planned = prepare(located.path, target, options, open_vocabulary, repository=located.repository, measure=errors)
    if options.calibrate is not None:
        _check_calibration(planned, Path(options.calibrate))
    return planned


def run_conversion(
    planned: Planned,
    options: ConvertOptions = _DEFAULTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Carry out a planned conversion; `progress` is told the input bytes just done and their total."""
    if options.calibrate is not None:
        return _run_calibrated(planned, options, Path(options.calibrate), progress)
    seconds = execute(
        planned,
        options,
        GGMLQuantizer(),
        lambda path: _verify(path, planned),
        options.threads or default_threads(),
        progress,
    )
    plan = planned.plan
    return Converted(
        output=str(planned.output),
        architecture=plan.architecture,
        type=plan.file_type.name,
        bytes=sum(path.stat().st_size for path in plan.paths(planned.output)),
        bits_per_weight=round(plan.bits_per_weight, 4),
        tensors=len(plan.tensors),
        parameters=plan.n_parameters,
        fallbacks=[
            Fallback(t.name, t.fallback_from.name, t.type.name, round(t.fallback_extra_nbytes))
            for t in plan.fallbacks
            if t.fallback_from
        ],
        seconds=round(seconds, 3),
        peak_rss_bytes=peak_rss_bytes(),
        verified=options.verify,
        tensor_types=plan.weights_by_type,
    )


def _verify(path: Path, planned: Planned) -> None:
    if planned.plan.is_adapter:
        verify_adapter(path, planned.plan)
        return
    opener = _open_encoder if planned.plan.is_encoder else _open_decoder
    verify(path, planned.plan, planned.tokenizer, opener)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A written model as `convert.verify` wants it."""

    vocabulary: Vocabulary
    run: Callable[[Tokens], NDArray[np.float32] | Refusal]

    def outputs(self, tokens: Tokens) -> NDArray[np.float32]:
        outputs = self.run(tokens)
        if isinstance(outputs, Refusal):
            raise CheckFailedError(f"the written model does not run: {outputs.value}", "this is a bug in edgeinfer")
        return outputs


@contextmanager
def _open_decoder(path: Path) -> Iterator[_Opened]:
    # A few tokens only: a model for another machine is checked on a smaller one too.
    with load(path, _VERIFY_OPTIONS, must_fit=False) as model:
        yield _Opened(model.vocabulary, lambda tokens: model.backend.forward([Row(0, tokens, 0, len(tokens) - 1)]))


@contextmanager
def _open_encoder(path: Path) -> Iterator[_Opened]:
    with open_encoder(checked_header(path), _VERIFY_OPTIONS) as model:
        yield _Opened(model.vocabulary, model.embed_tokens)


def _check_calibration(planned: Planned, text: Path) -> None:
    """What is wrong with the model or the text is said before the work starts."""
    if planned.plan.is_encoder:
        raise UsageError(
            f"{planned.source}: an encoder, whose importance matrix cannot be computed here", "drop --calibrate"
        )
    read_text(text)


def _run_calibrated(
    planned: Planned, options: ConvertOptions, text: Path, progress: Callable[[int, int], None]
) -> Converted:
    """Convert to a temporary Q8_0 file, compute the importance matrix with that, then convert with the matrix."""
    started_s = time.perf_counter()
    check_target(planned, overwrite=options.overwrite)
    with written_to(planned.output), temporary_folder(planned.output.parent) as folder:
        model, matrix = folder / "q8_0.gguf", folder / ExpectedMatrix(text).name
        plain = replace(options, **_OF_CALIBRATION)
        run_conversion(_planned_as(planned, model, plain), plain)
        imatrix(model, text, matrix, threads=options.threads)
        model.unlink()  # makes room for the output
        options = replace(options, imatrix=matrix, calibrate=None)
        converted = run_conversion(_planned_as(planned, planned.output, options), options, progress)
    return replace(converted, seconds=round(time.perf_counter() - started_s, 3))


def _planned_as(planned: Planned, output: Path, options: ConvertOptions) -> Planned:
    errors = _measuring(options, lambda done, total: None)
    return prepare(planned.source, output, options, open_vocabulary, repository=planned.repository, measure=errors)


def _measuring(options: ConvertOptions, progress: Callable[[int, int], None]) -> Measure:
    """Measures with the C library's quantizers and keeps what was found under the store's home."""

    def measured(tensors: Sequence[tuple[TensorPlan, Sequence[GGMLType]]]) -> list[dict[GGMLType, float]]:
        kept = KeptErrors(home() / "quantization-errors", (tensor for tensor, _ in tensors))
        return measure(tensors, GGMLQuantizer(), options.threads or default_threads(), kept, progress)

    return measured


def convert(source: str | Path, output: str | Path | None = None, options: ConvertOptions = _DEFAULTS) -> Converted:
    """Quantize `source` into a GGUF file: a Hugging Face checkpoint (directory or Hub id) or another GGUF file.

    A PEFT adapter becomes a GGUF adapter, for `RuntimeOptions.lora`.

    `output` defaults to `NAME-TYPE.gguf` in the current directory; it appears only when it is complete and checked.
    Raises UsageError, NotFoundError, UnusableInputError (a broken or unknown source), ResourceError (no space, not
    writable), CheckFailedError (the verification found a difference).
    """
    return run_conversion(plan_conversion(source, output, options), options)
