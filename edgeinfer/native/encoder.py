"""An encoder's forward pass: a text's tokens in, one vector out.

Every argument is checked here first, because the library answers some mistakes by ending the process.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import ContextOverflowError, EdgeinferError, ResourceError, UnusableInputError
from edgeinfer.native import library
from edgeinfer.native.devices import default_threads
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeModel
from edgeinfer.options import DEFAULT_CTX_SIZE, RuntimeOptions
from edgeinfer.types import Tokens

Pooling = Literal["mean", "cls", "last"]
_POOLING = {"mean": 1, "cls": 2, "last": 3}  # enum llama_pooling_type


class NativeEncoder:
    """One context over an encoder model, which reads a text as a whole.

    Raises UnusableInputError for a model that is none, ResourceError when there is not enough memory.
    """

    def __init__(self, model: NativeModel, options: RuntimeOptions, pooling: Pooling) -> None:
        self._model = model
        self.n_embd = int(llama.llama_model_n_embd_out(model.handle))
        self.n_ctx = min(options.ctx_size or DEFAULT_CTX_SIZE, model.n_ctx_train)
        params = llama.llama_context_default_params()
        # The library takes a text in one piece or ends the process.
        params.n_ctx = params.n_batch = params.n_ubatch = self.n_ctx
        params.n_threads = params.n_threads_batch = options.threads or default_threads()
        params.embeddings = True
        params.pooling_type = _POOLING[pooling]
        params.no_perf = True
        library.forget_errors()
        self._handle: int | None = llama.llama_init_from_model(model.handle, params)
        if not self._handle:
            reason = library.last_error() or "the library gives no reason"
            raise ResourceError(f"a context of {self.n_ctx} tokens cannot be made: {reason}", "lower ctx_size")
        if llama.llama_get_memory(self._handle):
            self.close()
            raise UnusableInputError("the model generates text, it is no encoder", "use `edgeinfer run`")

    def embed(self, tokens: Tokens) -> NDArray[np.float32]:
        """The pooled output, shape `(n_embd,)`. Raises ContextOverflowError when the tokens don't fit."""
        assert self._handle is not None, "the context is closed"
        if len(tokens) > self.n_ctx:
            raise ContextOverflowError(
                f"a text of {len(tokens)} tokens does not fit the context of {self.n_ctx}", "shorten or split it"
            )
        if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= self._model.vocabulary.n_tokens:
            raise ValueError("no tokens, or one outside the vocabulary")
        owned = np.ascontiguousarray(tokens, np.int32)
        pointer = owned.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        library.forget_errors()
        code = int(llama.llama_encode(self._handle, llama.llama_batch_get_one(pointer, len(owned))))
        pooled = None if code else llama.llama_get_embeddings_seq(self._handle, 0)
        if not pooled:
            raise EdgeinferError(f"llama_encode failed with code {code} on {len(owned)} tokens: {library.last_error()}")
        return np.ctypeslib.as_array(pooled, (self.n_embd,)).copy()

    def close(self) -> None:
        """Free the context; must come before the model's `close`."""
        if self._handle is not None:
            llama.llama_free(self._handle)
            self._handle = None

    def __enter__(self) -> NativeEncoder:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
