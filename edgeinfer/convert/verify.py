"""Reopens a finished file and holds it against the plan and the checkpoint's own tokenizer."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.convert.token_check import first_difference
from edgeinfer.convert.tokenizer import LoadedTokenizer
from edgeinfer.errors import CheckFailedError, UnusableInputError
from edgeinfer.finite import is_finite
from edgeinfer.gguf_file.header import TensorInfo, read_header
from edgeinfer.types import Tokens, Vocabulary

_CHECK_NBYTES = 8 << 20


class OpenModel(Protocol):
    """A model that is ready to run."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Its vocabulary."""
        ...

    def outputs(self, tokens: Tokens) -> NDArray[np.float32]:
        """What it makes of the tokens, of any shape: logits, or an encoder's vector."""
        ...


def verify(
    path: Path,
    plan: ConvertPlan,
    tokenizer: LoadedTokenizer | None,
    open_model: Callable[[Path], AbstractContextManager[OpenModel]],
) -> None:
    """Check a written file: its tensor table, every tensor finite, tokens as the checkpoint's, one forward pass.

    `path` is the first shard of a split output. Without a `tokenizer`, tokens are not compared.
    Raises CheckFailedError with the first difference.
    """
    try:
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(check_tensors, path, plan)
            with open_model(path) as model:  # meanwhile: the library reads a vocabulary on one core
                checking.result()
                tokens = _check_tokens(model.vocabulary, tokenizer)
                _check_outputs(model, tokens)
    except UnusableInputError as error:
        raise CheckFailedError(
            f"the written file is unusable: {error.message}",
            "this is a bug in edgeinfer" if tokenizer else "does the source itself run?",
        ) from error


def check_tensors(path: Path, plan: ConvertPlan) -> None:
    """Whether the files have the planned tensors, all of them finite. Raises CheckFailedError, UnusableInputError."""
    for file, file_path in zip(plan.files, plan.paths(path), strict=True):
        infos = read_header(file_path).tensors
        planned = [(t.name, t.shape, t.type, t.nbytes) for t in file.tensors]
        if [(t.name, t.shape, t.type, t.nbytes) for t in infos] != planned:
            raise CheckFailedError(
                "the written file's tensor table is not the planned one", "this is a bug in edgeinfer"
            )
        with open(file_path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for info in infos:
                _check_tensor(info, data)


def _check_tensor(info: TensorInfo, data: mmap.mmap) -> None:
    step = _CHECK_NBYTES // info.type.block_nbytes * info.type.block_nbytes
    for start in range(0, info.nbytes, step):
        part = np.frombuffer(data, np.uint8, min(step, info.nbytes - start), info.offset + start)
        valid = is_finite(info.type, part)
        del part  # a mapping with a view of it cannot be closed
        if not valid:
            raise CheckFailedError(
                f"tensor {info.name} as {info.type.name} has values that are not finite", "choose another type"
            )


def _check_tokens(vocabulary: Vocabulary, tokenizer: LoadedTokenizer | None) -> Tokens:
    """Compare what the file makes of text with what the original does; returns the tokens of a short text."""
    difference = first_difference(vocabulary, tokenizer.original) if tokenizer else None
    if tokenizer and (missed := [token for token in tokenizer.end_tokens if token not in vocabulary.end_tokens]):
        difference = f"token {missed[0]} does not end a text"
    if difference is not None:
        raise CheckFailedError(f"the written tokenizer is not the original: {difference}", "this is a bug in edgeinfer")
    tokens = vocabulary.tokenize("Hello, world", add_special=False, parse_special=True)
    if len(tokens) == 0:
        raise CheckFailedError("the tokenizer makes no tokens of a text", "download its files again")
    return tokens


def _check_outputs(model: OpenModel, tokens: Tokens) -> None:
    if not np.isfinite(model.outputs(tokens)).all():
        raise CheckFailedError("the written model's outputs are not finite", "try -t BF16 to see which it is")
