"""The way of a conversion: headers, tokenizer, plan, stream, verification, and only then the final name."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.checkpoint import Checkpoint, open_checkpoint
from edgeinfer.convert.file_types import FILE_TYPES, file_type
from edgeinfer.convert.gguf_source import build_from_gguf, open_gguf
from edgeinfer.convert.imatrix import load_imatrix
from edgeinfer.convert.plan import ConvertPlan, build
from edgeinfer.convert.stream import write
from edgeinfer.convert.text_model import text_model
from edgeinfer.convert.token_check import OpenVocabulary, settle
from edgeinfer.convert.tokenizer import LoadedTokenizer, load_tokenizer
from edgeinfer.convert.verify import OpenModel, verify
from edgeinfer.errors import ResourceError, UsageError
from edgeinfer.gguf_file.shards import shard_name, shard_parts
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Quantizer

Progress = Callable[[int, int], None]
"""Told the input bytes just done and their total."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversion that can begin: everything that can be refused without reading weights has been."""

    source: Path
    repository: str | None
    """Of the Hugging Face Hub, where the source comes from one."""
    inputs: frozenset[Path]
    """The files that the source consists of."""
    tokenizer: LoadedTokenizer | None
    """None for a GGUF source, which has no other tokenizer than its own."""
    plan: ConvertPlan
    output: Path
    """The file to give to whoever runs the model: the only one, or the first shard."""
    notes: tuple[str, ...] = ()
    """What the user should know about the output."""

    @property
    def nbytes(self) -> int:
        """The size that all files of the output will have together."""
        return sum(file.nbytes for file in self.plan.files)


def prepare(
    source: Path,
    output: Path | None,
    options: ConvertOptions,
    open_vocabulary: OpenVocabulary,
    *,
    repository: str | None = None,
) -> Planned:
    """Read the headers and plan. The errors are those of the steps: usage, not found, unusable.

    `repository` names a source whose directory does not.
    """
    wanted = file_type(options.type)
    matrix = load_imatrix(Path(options.imatrix)) if options.imatrix else None
    tokenizer: LoadedTokenizer | None = None
    notes: tuple[str, ...] = ()
    if os.path.isfile(source):
        model = open_gguf(source)
        inputs = frozenset(header.path for header in model.headers)
        plan = build_from_gguf(model, options, matrix)
    else:
        checkpoint = replace(open_checkpoint(source), repository=repository)
        architecture = lookup(checkpoint.config)
        inputs = _files_of(checkpoint)
        checkpoint = architecture.adapted(text_model(checkpoint, architecture))
        tokenizer = load_tokenizer(checkpoint, options.pre)
        plan = build(checkpoint, architecture, tokenizer.metadata, options, matrix)
        settled = settle(plan.metadata, tokenizer, open_vocabulary)
        plan, notes = replace(plan, metadata={**plan.metadata, **settled.metadata}), settled.notes
    output = output or Path(f"{_name(source, repository)}-{wanted.name}.gguf")
    if options.split_max_size is not None:
        shard = shard_parts(output.name)
        prefix = shard[0] if shard else output.name.removesuffix(".gguf")
        output = output.with_name(shard_name(prefix, 1, len(plan.files)))
    return Planned(source, repository, inputs, tokenizer, plan, output, notes)


_OWN_TYPE = re.compile(rf"[.-]({'|'.join(FILE_TYPES)})$", re.IGNORECASE)


def _name(source: Path, repository: str | None) -> str:
    """What to call the output after the source: without a GGUF's suffix, shard number and type."""
    name = repository.rpartition("/")[2] if repository else os.path.basename(os.path.abspath(source))
    if os.path.isfile(source):
        shard = shard_parts(name)
        name = _OWN_TYPE.sub("", shard[0] if shard else name.removesuffix(".gguf"))
    return re.sub(r"[^\w.-]", "-", name) or "model"


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
    with written_to(planned.output):
        check_target(planned, overwrite=options.overwrite)
        outputs = planned.plan.paths(planned.output)
        with replaced_when_done(*outputs, overwrite=options.overwrite) as partial:
            write(planned.plan, partial, quantizer, threads, lambda nbytes: progress(nbytes, total))
            if options.verify:
                original = planned.tokenizer.original if planned.tokenizer else None
                verify(partial, planned.plan, original, quantizer, open_model)
    return time.perf_counter() - started


@contextmanager
def written_to(output: Path) -> Iterator[None]:
    """Turn an OSError into a ResourceError that names the output."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{output}: cannot be written ({error.strerror})", "free some space, or choose another -o"
        ) from error


@contextmanager
def replaced_when_done(*outputs: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary path of the first of `outputs`; the files there take their names if the block ends well.

    If not, they go away. The others are to be made beside the first, each by its own name. The first output gets its
    name last, so that whoever sees it sees all; an interruption among the renames takes the new names back, too.

    Raises UsageError when another process has made an output meanwhile and it may not be overwritten.
    """
    # Not made of the output's name, which may be as long as a name can be already.
    folder = outputs[0].with_name(f".edgeinfer-{secrets.token_hex(8)}.partial")
    partials = tuple(folder / output.name for output in outputs)
    named: list[Path] = []
    try:
        folder.mkdir()
        yield partials[0]
        for output in outputs:
            if os.path.lexists(output) and not overwrite:  # another process was faster
                raise _exists(output)
        for partial, output in reversed(list(zip(partials, outputs, strict=True))):
            named.append(output)
            os.replace(partial, output)
        named.clear()
        _sync_directory(folder.parent)
    finally:
        for output in named:
            output.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def check_target(planned: Planned, *, overwrite: bool) -> None:
    """Raise UsageError when the output may not be written there, ResourceError when it cannot or does not fit."""
    for output in planned.plan.paths(planned.output):
        _check_name(output, planned.inputs, overwrite=overwrite)
    folder, nbytes = planned.output.parent, planned.nbytes
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ResourceError(f"{folder}: not a directory that can be written to", "choose another -o")
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ResourceError(
            f"{planned.output}: needs {nbytes} bytes, the disk has {free} free",
            "free some space, or choose a smaller type",
        )


def _check_name(output: Path, inputs: frozenset[Path], *, overwrite: bool) -> None:
    if output.is_dir():
        raise UsageError(f"{output}: is a directory", "name a file with -o")
    if os.path.lexists(output) and not overwrite:
        raise _exists(output)
    if output.exists() and not output.is_file():
        raise UsageError(f"{output}: not a regular file", "name a file with -o")
    if output.exists() and any(map(output.samefile, inputs)):
        raise UsageError(f"{output}: is part of the checkpoint itself", "choose another -o")


def _files_of(checkpoint: Checkpoint) -> frozenset[Path]:
    """What the checkpoint consists of; an earlier output in its directory is no part of it."""
    beside = {path for path in checkpoint.path.iterdir() if path.suffix in (".json", ".jinja", ".md") and path.exists()}
    return frozenset(beside | {spec.path for spec in checkpoint.tensors.values()})


def _exists(output: Path) -> UsageError:
    return UsageError(f"{output}: exists already", "give --overwrite to replace it")


def _sync_directory(directory: Path) -> None:
    """Make the new name survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
