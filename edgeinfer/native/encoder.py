"""An encoder's forward pass: a text's tokens in, one vector out.

Every argument is checked here first, because the library answers some mistakes by ending the process.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ContextOverflowError, EdgeinferError, ResourceError
from edgeinfer.native import library
from edgeinfer.native.devices import default_threads
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeModel
from edgeinfer.options import DEFAULT_CTX_SIZE, RuntimeOptions
from edgeinfer.types import Tokens

Pooling = Literal["mean", "cls", "last", "rank"]
_POOLING = {"mean": 1, "cls": 2, "last": 3, "rank": 4}  # enum llama_pooling_type
_PIECE_TOKENS = 512
"""At a time where only the last output counts: a decoder has logits of all of them in memory, which nobody reads."""


class NativeEncoder:
    """One context over a model that reads a text as a whole, or over a decoder whose outputs become one vector.

    With the pooling "rank" the vector is the probabilities of the model's answers. Raises ResourceError when there is
    not enough memory.
    """

    def __init__(self, model: NativeModel, options: RuntimeOptions, pooling: Pooling, *, is_causal: bool) -> None:
        self._model = model
        length = llama.llama_model_n_cls_out if pooling == "rank" else llama.llama_model_n_embd_out
        self.n_embd = int(length(model.handle))
        self.n_ctx = min(options.ctx_size or DEFAULT_CTX_SIZE, model.n_ctx_train)
        in_pieces = is_causal and pooling in ("last", "rank")
        self._n_batch = min(_PIECE_TOKENS, self.n_ctx) if in_pieces else self.n_ctx
        self._handle = self._open(options, pooling)
        self.memory = llama.llama_get_memory(self._handle)
        """None of a model that has no KV cache, because it reads a text as a whole."""
        if not self.memory and self._n_batch < self.n_ctx:
            self.close()
            self._n_batch = self.n_ctx
            self._handle = self._open(options, pooling)

    def _open(self, options: RuntimeOptions, pooling: Pooling) -> int | None:
        params = llama.llama_context_default_params()
        params.n_ctx = self.n_ctx
        # The library takes a text in one piece or ends the process, except where only the last output counts.
        params.n_batch = params.n_ubatch = self._n_batch
        params.n_threads = params.n_threads_batch = options.threads or default_threads()
        params.embeddings = True
        params.pooling_type = _POOLING[pooling]
        params.no_perf = True
        library.forget_errors()
        handle: int | None = llama.llama_init_from_model(self._model.handle, params)
        if not handle:
            reason = library.last_error() or "the library gives no reason"
            raise ResourceError(f"a context of {self.n_ctx} tokens cannot be made: {reason}", "lower ctx_size")
        return handle

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """The pooled output, shape `(n_embd,)`. Raises ContextOverflowError when the tokens don't fit."""
        assert self._handle is not None, "the context is closed"
        if len(tokens) > self.n_ctx:
            raise ContextOverflowError(
                f"a text of {len(tokens)} tokens does not fit the context of {self.n_ctx}", "shorten or split it"
            )
        if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= self._model.vocabulary.n_tokens:
            raise ValueError("no tokens, or one outside the vocabulary")
        if self.memory:
            llama.llama_memory_clear(self.memory, True)
        owned = np.ascontiguousarray(tokens, np.int32)
        library.forget_errors()
        for start in range(0, len(owned), self._n_batch):
            self._decode(owned[start : start + self._n_batch])
        pooled = llama.llama_get_embeddings_seq(self._handle, 0)
        if not pooled:
            raise EdgeinferError(f"the library has no vector of {len(owned)} tokens: {library.last_error()}")
        return np.ctypeslib.as_array(pooled, (self.n_embd,)).copy()

    def _decode(self, piece: NDArray[np.int32]) -> None:
        pointer = piece.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        code = int(llama.llama_decode(self._handle, llama.llama_batch_get_one(pointer, len(piece))))
        if code:
            raise EdgeinferError(f"llama_decode failed with code {code} on {len(piece)} tokens: {library.last_error()}")

    def close(self) -> None:
        """Free the context; must come before the model's `close`."""
        if self._handle is not None:
            llama.llama_free(self._handle)
            self._handle = None

    def __enter__(self) -> NativeEncoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
