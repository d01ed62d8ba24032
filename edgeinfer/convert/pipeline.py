"""The way of a conversion: headers, tokenizer, plan, stream, verification, and only then the final name."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.checkpoint import Checkpoint, open_checkpoint
from edgeinfer.convert.file_types import file_type
from edgeinfer.convert.imatrix import ExpectedMatrix, ImportanceMatrix, load_imatrix
from edgeinfer.convert.plan import ConvertPlan, build
from edgeinfer.convert.stream import write
from edgeinfer.convert.text_model import text_model
from edgeinfer.convert.token_check import OpenVocabulary, settle
from edgeinfer.convert.tokenizer import LoadedTokenizer, load_tokenizer
from edgeinfer.convert.verify import OpenModel, verify
from edgeinfer.convert.writer import data_nbytes, encode_header
from edgeinfer.errors import ResourceError, UsageError
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Quantizer

Progress = Callable[[int, int], None]
"""Told the input bytes just done and their total."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversion that can begin: everything that can be refused without reading weights has been."""

    checkpoint: Checkpoint
    tokenizer: LoadedTokenizer
    plan: ConvertPlan
    output: Path
    notes: tuple[str, ...] = ()
    """What the user should know about the output."""

    @property
    def nbytes(self) -> int:
        """The size that the output will have."""
        return len(encode_header(self.plan.metadata, self.plan.tensors)) + data_nbytes(self.plan.tensors)


def prepare(source: Path, output: Path | None, options: ConvertOptions, open_vocabulary: OpenVocabulary) -> Planned:
    """Read the headers and plan. The errors are those of the steps: usage, not found, unusable, resources."""
    wanted = file_type(options.type)
    checkpoint = open_checkpoint(source)
    architecture = lookup(checkpoint.config)
    checkpoint = architecture.adapted(text_model(checkpoint, architecture))
    tokenizer = load_tokenizer(checkpoint, options.pre)
    plan = build(checkpoint, architecture, tokenizer.metadata, options, _matrix(options))
    settled = settle(plan.metadata, tokenizer, open_vocabulary)
    plan = replace(plan, metadata={**plan.metadata, **settled.metadata})
    name = re.sub(r"[^\w.-]", "-", os.path.basename(os.path.abspath(source))) or "model"
    return Planned(checkpoint, tokenizer, plan, output or Path(f"{name}-{wanted.name}.gguf"), settled.notes)


def _matrix(options: ConvertOptions) -> ImportanceMatrix | None:
    if options.imatrix is not None:
        return load_imatrix(Path(options.imatrix))
    return ExpectedMatrix(Path(options.calibrate)) if options.calibrate is not None else None


def execute(
    planned: Planned,
    options: ConvertOptions,
    quantizer: Quantizer,
    open_model: Callable[[Path], AbstractContextManager[OpenModel]],
    threads: int,
    progress: Progress,
) -> float:
    """Write, verify and name the output; returns the seconds that took.

    Whatever happens before the end, there is nothing new under the output's name. Raises UsageError when it exists
    and may not be overwritten, ResourceError when it cannot be written, and what `write` and `verify` raise.
    """
    started = time.perf_counter()
    total = sum(part.nbytes for tensor in planned.plan.tensors for part in tensor.parts)
    try:
        check_target(planned, overwrite=options.overwrite)
        with replaced_when_done(planned.output, overwrite=options.overwrite) as partial:
            write(planned.plan, partial, quantizer, threads, lambda nbytes: progress(nbytes, total))
            if options.verify:
                verify(partial, planned.plan, planned.tokenizer.original, quantizer, open_model)
    except OSError as error:
        raise ResourceError(
            f"{planned.output}: cannot be written ({error.strerror})", "free some space, or choose another -o"
        ) from error
    return time.perf_counter() - started


@contextmanager
def replaced_when_done(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary path beside `output` that takes its name if the block ends well, and goes away if not.

    Raises UsageError when another process has made `output` meanwhile and it may not be overwritten.
    """
    # Not made of the output's name, which may be as long as a name can be already.
    partial = output.with_name(f".edgeinfer-{secrets.token_hex(8)}.partial")
    try:
        yield partial
        if os.path.lexists(output) and not overwrite:  # another process was faster
            raise _exists(output)
        os.replace(partial, output)
        _sync_directory(output.parent)
    finally:
        with suppress(OSError):  # it has its new name, or was never made; another error says more
            partial.unlink()


def check_target(planned: Planned, *, overwrite: bool) -> None:
    """Raise UsageError when the output may not be written there, ResourceError when it cannot or does not fit."""
    output, nbytes = planned.output, planned.nbytes
    if output.is_dir():
        raise UsageError(f"{output}: is a directory", "name a file with -o")
    if os.path.lexists(output) and not overwrite:
        raise _exists(output)
    if output.exists() and not output.is_file():
        raise UsageError(f"{output}: not a regular file", "name a file with -o")
    if output.exists() and any(map(output.samefile, _files_of(planned.checkpoint))):
        raise UsageError(f"{output}: is part of the checkpoint itself", "choose another -o")
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise ResourceError(f"{output.parent}: not a directory that can be written to", "choose another -o")
    free = shutil.disk_usage(output.parent).free
    if nbytes > free:
        raise ResourceError(
            f"{output}: needs {nbytes} bytes, the disk has {free} free", "free some space, or choose a smaller type"
        )


def _files_of(checkpoint: Checkpoint) -> set[Path]:
    """What the checkpoint consists of; an earlier output in its directory is no part of it."""
    beside = {path for path in checkpoint.path.iterdir() if path.suffix in (".json", ".jinja", ".md") and path.exists()}
    return beside | {spec.path for spec in checkpoint.tensors.values()}


def _exists(output: Path) -> UsageError:
    return UsageError(f"{output}: exists already", "give --overwrite to replace it")


def _sync_directory(directory: Path) -> None:
    """Make the new name survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
