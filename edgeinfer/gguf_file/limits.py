"""What a header may say without the C library ending the process: its assertions, checked before it sees the file.

The assertions are those that src/llama-model.cpp makes about hyper-parameters. Most else that can be wrong with a
model the library reports as an error. Not checked: a token that stands twice in the vocabulary, which takes 100 ms to
find among 150k.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import Header

MAX_BLOCKS = 512
MAX_EXPERTS = 1024


def check_limits(header: Header) -> None:
    """Raise UnusableInputError when the C library would end the process over these hyper-parameters."""
    if not header.architecture:
        _fail(header, "general.architecture is missing: this is not a model")
    blocks = header.hyperparameter("block_count")
    if blocks is not None and not 1 <= blocks <= MAX_BLOCKS:
        _fail(header, f"has {blocks} layers, not 1 to {MAX_BLOCKS}")
    if blocks is not None and _count(header, "nextn_predict_layers") > blocks:
        _fail(header, "has more prediction layers than layers")
    _check_experts(header)


def _check_experts(header: Header) -> None:
    experts = _count(header, "expert_count")
    used = header.metadata.get(f"{header.architecture}.expert_used_count", 0)
    is_integers = isinstance(used, int) or (isinstance(used, np.ndarray) and used.dtype.kind in "iu")
    most_used = int(np.max(used, initial=0)) if is_integers else 0
    groups = _count(header, "expert_group_count")
    groups_used = _count(header, "expert_group_used_count")
    sound = 0 <= most_used <= experts <= MAX_EXPERTS and (most_used > 0) == (experts > 0)
    sound = sound and (groups < experts if experts else groups == 0)
    if groups > 1 and sound:
        sound = experts % groups == 0 and 0 < groups_used < groups
    if not sound:
        _fail(header, f"has impossible experts: {most_used} of {experts}, {groups_used} of {groups} groups")


def _count(header: Header, name: str) -> int:
    return header.metadata.count(f"{header.architecture}.{name}")


def _fail(header: Header, what: str) -> NoReturn:
    raise UnusableInputError(f"{header.path}: {what}", "the file is damaged or was converted wrongly: get another one")
