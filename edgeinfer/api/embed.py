"""`edgeinfer.load_encoder`: a model that turns texts into vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api.files import checked_header, resolve
from edgeinfer.api.vocabulary import begin_vocabulary
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.describe import is_encoder, reads_both_ways
from edgeinfer.gguf_file.header import Header
from edgeinfer.native.encoder import NativeEncoder, Pooling
from edgeinfer.native.kernels import LLAMA_CPP
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import Tokens, Vocabulary

# GGUF's numbers (include/llama.h, llama_pooling_type); a file that states none leaves it to its user.
_RANK = 4
_POOLING: dict[int, Pooling] = {0: "mean", 1: "mean", 2: "cls", 3: "last", _RANK: "rank"}


def load_encoder(model: str | Path, options: RuntimeOptions | None = None) -> Encoder:
    """Load an encoder (BERT, EmbeddingGemma, Qwen3-Embedding, …). Close it, or use it in a `with` statement.

    Raises NotFoundError, UnusableInputError for a file that is damaged, generates text or ranks, ResourceError when
    memory does not suffice.
    """
    path = resolve(model)
    header = checked_header(path)
    if _stated_pooling(header) == _RANK:
        raise UnusableInputError(f"{path}: a reranker, which makes scores and no vectors", "use an embedding model")
    return open_encoder(header, options)


def open_encoder(header: Header, options: RuntimeOptions | None = None) -> Encoder:
    """The same for a reranker too, whose vectors are the probabilities of its answers."""
    path, stated = header.path, _stated_pooling(header)
    pooling = _POOLING.get(stated)
    if pooling is None:
        raise UnusableInputError(f"{path}: pooling {stated} is unknown", "known are mean, cls and last token")
    length = header.hyperparameter("embedding_length", 0)
    if header.hyperparameter("embedding_length_out", length) != length:
        raise UnusableInputError(f"{path}: makes vectors of another length than its outputs", "use another model")
    options = options or RuntimeOptions()
    if options.lora:
        raise UsageError(
            "lora: adapters are for models that generate text",
            "merge it: `edgeinfer convert CHECKPOINT --lora ADAPTER`",
        )
    if options.kernels not in ("auto", LLAMA_CPP.name):
        raise UsageError(f"kernels: {options.kernels} does not run encoders", f"use {LLAMA_CPP.name}, or auto")
    vocabulary_over = begin_vocabulary(header)
    native = NativeModel(path, mmap=options.mmap, mlock=options.mlock)
    try:
        encoder = NativeEncoder(native, options, pooling, is_causal=not reads_both_ways(header))
        if encoder.memory and not is_encoder(header):
            encoder.close()
            raise UnusableInputError(f"{path}: the model generates text, it is no encoder", "use `edgeinfer run`")
        return Encoder(native, encoder, vocabulary_over(native.vocabulary), header)
    except BaseException:
        native.close()
        raise


def _stated_pooling(header: Header) -> Any:
    return header.hyperparameter("pooling_type", 0)


class Encoder:
    """A loaded encoder: texts in, vectors out. `load_encoder` makes one."""

    def __init__(self, native: NativeModel, encoder: NativeEncoder, vocabulary: Vocabulary, header: Header) -> None:
        self.header = header
        self.native = native
        self.encoder = encoder
        self.vocabulary = vocabulary

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """One vector of length 1 for each text, shape `(len(texts), n_embd)`.

        Raises ContextOverflowError for a text with more tokens than the model was trained on, UnusableInputError for
        one without any.
        """
        vectors = np.empty((len(texts), self.encoder.n_embd), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            tokens = self.vocabulary.tokenize(text, add_special=True, parse_special=False)
            if len(tokens) == 0:
                raise UnusableInputError(f"the vocabulary has no token for the text {text[:40]!r}", "give another text")
            vector[:] = self.embed_tokens(tokens)
        return vectors

    def embed_tokens(self, tokens: Tokens) -> NDArray[np.float32]:
        """The vector of length 1 for a text's tokens, shape `(n_embd,)`."""
        pooled = self.encoder.embed(tokens)
        return pooled / max(float(np.linalg.norm(pooled)), 1e-12)

    def close(self) -> None:
        """Free everything."""
        self.encoder.close()
        self.native.close()

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
