"""Reopens a finished file and holds it against the plan and the checkpoint's own tokenizer."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from edgeinfer.convert.plan import ConvertPlan
from edgeinfer.errors import CheckFailedError, UnusableInputError
from edgeinfer.gguf_file.header import TensorInfo, read_header
from edgeinfer.types import Backend, Quantizer, Refusal, Row, Tokens, Vocabulary

if TYPE_CHECKING:
    import tokenizers

_CHECK_NBYTES = 8 << 20
_ADDED_TOKENS_TRIED = 32

CORPUS = (
    "The quick brown fox, it's said, jumps over 3 lazy dogs; they'd cost $1,234.56 in 2026!",
    "Ein schöner Tag für Übungen: Straßenbahn, naïve façade, œuvre — déjà vu.",
    "Съешь же ещё этих мягких французских булок. Το γρήγορο άλογο. שלום עולם. مرحبا بالعالم",
    "私は昨日、東京で1000円の本を買いました。你好,世界!안녕하세요 세계",
    "नमस्ते दुनिया। สวัสดีชาวโลก ខ្មែរ မြန်မာ",
    "def f(x: int) -> str:\n\treturn f'{x:>10}'  # tab and spaces\n\n\n    if x != 0:\r\n        pass\n",
    "emoji 🚀 family 👨‍👩‍👧‍👦 flag 🇩🇪 thumbs 👍🏽 math ∑∫√≠ arrows →⇒",
    "   leading, trailing   and    inner spaces \t\n  ",
)


class OpenModel(Protocol):
    """A model that is ready to run."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Its vocabulary."""
        ...

    @property
    def backend(self) -> Backend:
        """What runs it."""
        ...


def verify(
    path: Path,
    plan: ConvertPlan,
    original: tokenizers.Tokenizer | None,
    quantizer: Quantizer,
    open_model: Callable[[Path], AbstractContextManager[OpenModel]],
) -> None:
    """Check a written file: its tensor table, every tensor finite, tokens equal to `original`'s, one decode.

    `path` is the first shard of a split output. Without an `original`, tokens are not compared.
    Raises CheckFailedError with the first difference.
    """
    try:
        _check_tensors(path, plan, quantizer)
        with open_model(path) as model:
            tokens = _check_tokens(model.vocabulary, original)
            _check_decode(model.backend, tokens)
    except UnusableInputError as error:
        raise CheckFailedError(
            f"the written file is unusable: {error.message}",
            "this is a bug in edgeinfer" if original else "does the source itself run?",
        ) from error


def _check_tensors(path: Path, plan: ConvertPlan, quantizer: Quantizer) -> None:
    for file, file_path in zip(plan.files, plan.paths(path), strict=True):
        infos = read_header(file_path).tensors
        planned = [(t.name, t.shape, t.type, t.nbytes) for t in file.tensors]
        if [(t.name, t.shape, t.type, t.nbytes) for t in infos] != planned:
            raise CheckFailedError(
                "the written file's tensor table is not the planned one", "this is a bug in edgeinfer"
            )
        with open(file_path, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for info in infos:
                _check_tensor(info, data, quantizer)


def _check_tensor(info: TensorInfo, data: mmap.mmap, quantizer: Quantizer) -> None:
    step = _CHECK_NBYTES // info.type.block_nbytes * info.type.block_nbytes
    for start in range(0, info.nbytes, step):
        part = np.frombuffer(data, np.uint8, min(step, info.nbytes - start), info.offset + start)
        valid = quantizer.is_valid(info.type, part)
        del part  # a mapping with a view of it cannot be closed
        if not valid:
            raise CheckFailedError(
                f"tensor {info.name} as {info.type.name} has values that are not finite", "choose another type"
            )


def _check_tokens(vocabulary: Vocabulary, original: tokenizers.Tokenizer | None) -> Tokens:
    """Compare on several languages, code and emoji, with added tokens inside; returns the tokens of the last text."""
    if original is None:
        return vocabulary.tokenize("Hello, world", add_special=False, parse_special=True)
    added = [t.content for t in original.get_added_tokens_decoder().values()][:_ADDED_TOKENS_TRIED]
    texts = [*CORPUS, "".join(f"{token}a b" for token in added), "Hello, world"]
    tokens = np.empty(0, np.int32)
    for text in texts:
        expected = original.encode(text, add_special_tokens=False).ids
        tokens = vocabulary.tokenize(text, add_special=False, parse_special=True)
        if tokens.tolist() != expected:
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(expected))
            raise CheckFailedError(
                f"llama.cpp tokenizes {text!r} differently from tokenizer.json, from token {at} on",
                "this tokenizer has no exact counterpart yet: --no-verify writes the file all the same",
            )
    return tokens


def _check_decode(backend: Backend, tokens: Tokens) -> None:
    logits = backend.forward([Row(0, tokens, 0, len(tokens) - 1)])
    if isinstance(logits, Refusal) or not np.isfinite(logits).all():
        raise CheckFailedError("the written model gives logits that are not finite", "try -t BF16 to see which it is")
