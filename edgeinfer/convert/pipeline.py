"""The way of a conversion: headers, tokenizer, plan, stream, verification, and only then the final name."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgeinfer.convert.adapters.merge import merged, open_adapters
from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.checkpoint import Checkpoint, open_checkpoint
from edgeinfer.convert.encodings import decoded
from edgeinfer.convert.file_types import FILE_TYPES
from edgeinfer.convert.gguf_source import build_from_gguf, open_gguf
from edgeinfer.convert.imatrix import load_imatrix
from edgeinfer.convert.output import check_outputs, replaced_when_done, written_to
from edgeinfer.convert.plan import ConvertPlan, build
from edgeinfer.convert.stream import write
from edgeinfer.convert.target import Measure, fitted, label, rule_of_thumb
from edgeinfer.convert.text_model import text_model
from edgeinfer.convert.token_check import OpenVocabulary, settle
from edgeinfer.convert.tokenizer import LoadedTokenizer, load_tokenizer
from edgeinfer.errors import UsageError
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
    """The files that are read: those of the source, the importance matrix, the text to calibrate with."""
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
    measure: Measure = rule_of_thumb,
) -> Planned:
    """Read the headers and plan. The errors are those of the steps: usage, not found, unusable.

    `repository` names a source whose directory does not; `measure` finds the errors that types are chosen by when the
    output is to have a size, and reads weights for that.
    """
    matrix = load_imatrix(Path(options.imatrix)) if options.imatrix else None
    tokenizer: LoadedTokenizer | None = None
    notes: tuple[str, ...] = ()
    if os.path.isfile(source):
        if options.pre is not None:
            raise UsageError(f"--pre has no effect: {source} has its tokenizer already", "drop it")
        if options.lora:
            raise UsageError(f"--lora cannot merge into {source}", "convert the checkpoint, or give it to `run --lora`")
        model = open_gguf(source)
        inputs = frozenset(header.path for header in model.headers)
        plan = build_from_gguf(model, options, matrix)
    else:
        checkpoint = replace(open_checkpoint(source), repository=repository)
        architecture, stated = lookup(checkpoint.config), checkpoint.config
        adapters = open_adapters(options.lora)
        inputs = _files_of(checkpoint).union(*(adapter.files for adapter, _ in adapters))
        checkpoint = architecture.adapted(text_model(decoded(checkpoint), architecture))
        inputs |= _files_of(checkpoint)  # it may have more parts than there seemed to be
        if adapters:
            checkpoint = merged(checkpoint, architecture, adapters, stated)
        tokenizer = load_tokenizer(checkpoint, options.pre)
        plan = build(checkpoint, architecture, tokenizer.metadata, options, matrix)
        settled = settle(plan.metadata, tokenizer, open_vocabulary)
        plan, notes = replace(plan, metadata={**plan.metadata, **settled.metadata}), settled.notes
    if options.has_target:
        plan = fitted(plan, options, measure)
        if matrix is None and not options.calibrate:
            notes += ("without an importance matrix, errors of all columns of a weight counted alike for the types",)
    inputs |= {Path(path) for path in (options.imatrix, options.calibrate) if path}
    names = [_name(source, repository), *(_name(Path(path), None) for path, scale in options.lora if scale)]
    kind = label(options) if options.has_target else plan.file_type.name
    output = output or Path(f"{'-'.join(names)}-{kind}.gguf")
    if options.split_max_size is not None:
        shard = shard_parts(output.name)
        prefix = shard[0] if shard else output.name.removesuffix(".gguf")
        output = output.with_name(shard_name(prefix, 1, len(plan.files)))
    return Planned(source, repository, inputs, tokenizer, plan, output, notes)


_OWN_TYPE = re.compile(rf"[.-]({'|'.join(FILE_TYPES)}|[0-9.]+bpw)$", re.IGNORECASE)


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
    check: Callable[[Path], None],
    threads: int,
    progress: Progress,
) -> float:
    """Write, verify and name the output; returns the seconds that took. `check` verifies the first file.

    Whatever happens before the end, there is nothing new under the output's name. Raises UsageError when it exists
    and may not be overwritten, ResourceError when it cannot be written, and what `write` and `check` raise.
    """
    started = time.perf_counter()
    total = sum(part.nbytes for tensor in planned.plan.tensors for part in tensor.parts)
    check_target(planned, overwrite=options.overwrite)
    with written_to(planned.output):
        outputs = planned.plan.paths(planned.output)
        with replaced_when_done(*outputs, overwrite=options.overwrite) as partial:
            write(planned.plan, partial, quantizer, threads, lambda nbytes: progress(nbytes, total))
            if options.verify:
                check(partial)
    return time.perf_counter() - started


def check_target(planned: Planned, *, overwrite: bool) -> None:
    """Raise UsageError when the output may not be written there, ResourceError when it cannot or does not fit."""
    check_outputs(planned.plan.paths(planned.output), planned.nbytes, planned.inputs, overwrite=overwrite)


def _files_of(checkpoint: Checkpoint) -> frozenset[Path]:
    """What the checkpoint consists of; an earlier output in its directory is no part of it."""
    beside = {path for path in checkpoint.path.iterdir() if path.suffix in (".json", ".jinja", ".md") and path.exists()}
    return frozenset(beside | {spec.path for spec in checkpoint.tensors.values()})
