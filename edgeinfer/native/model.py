"""A loaded GGUF model and its vocabulary."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.native import library
from edgeinfer.native.gpus import place
from edgeinfer.native.library import llama
from edgeinfer.native.mapped import expect_loss
from edgeinfer.native.tokenizer import NativeTokenizer
from edgeinfer.types import Placement, Tokens


class NativeModel:
    """Weights and vocabulary in memory. The caller has checked the file's header: bad ones can end the process.

    Raises UnusableInputError with the library's own reason when it does not load.
    """

    adapters: Sequence[tuple[int, float]] = ()
    """C pointers of adapters and their scales, which every context gets; freed with the model."""

    def __init__(
        self, path: Path, *, mmap: bool = True, mlock: bool = False, placement: Placement | None = None
    ) -> None:
        params = llama.llama_model_default_params()
        params.load_mode = _load_mode(mmap, mlock)
        kept = place(params, placement) if placement else None
        if mmap:
            expect_loss(path)
        handle = _load(path, params)
        del kept
        self._handle: int | None = handle
        self.vocabulary = NativeVocabulary(handle)
        try:
            _check_generates(path, handle)
        except UnusableInputError:
            self.close()
            raise

    @property
    def handle(self) -> int:
        """The C pointer, for the rest of `native`."""
        if self._handle is None:
            raise UsageError("the model is closed", "load it again")
        return self._handle

    @property
    def description(self) -> str:
        """Architecture, size and file type in the library's words."""
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.handle, buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace")

    @property
    def n_parameters(self) -> int:
        """Elements of all tensors together."""
        return int(llama.llama_model_n_params(self.handle))

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of all tensors together."""
        return int(llama.llama_model_size(self.handle))

    @property
    def n_ctx_train(self) -> int:
        """The context length that the model was trained with."""
        return int(llama.llama_model_n_ctx_train(self.handle)) % 2**32  # an unsigned number in the file

    @property
    def is_stateful(self) -> bool:
        """Whether a sequence is a state with memory of its own (recurrent, hybrid), not cells of the KV cache."""
        return bool(llama.llama_model_is_recurrent(self.handle) or llama.llama_model_is_hybrid(self.handle))

    def close(self) -> None:
        """Free the weights; contexts over them must be closed before."""
        if self._handle is not None:
            self.vocabulary.close()
            llama.llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> NativeModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class NativeVocabularyFile:
    """Only the vocabulary of a GGUF file, of any architecture. Close it, or use it in a `with` statement.

    Raises UnusableInputError with the library's own reason when it does not load.
    """

    def __init__(self, path: Path) -> None:
        params = llama.llama_model_default_params()
        params.vocab_only = True
        self._handle: int | None = _load(path, params)
        self.vocabulary = NativeVocabulary(self._handle)
        try:
            _check_vocabulary(path, self._handle)
        except UnusableInputError:
            self.close()
            raise

    def close(self) -> None:
        """Free it; `vocabulary` must not be used any more."""
        if self._handle is not None:
            self.vocabulary.close()
            llama.llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> NativeVocabularyFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _load(path: Path, params: Any) -> int:
    with library.muted():
        handle = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not handle:
        library.forget_errors()
        handle = llama.llama_model_load_from_file(os.fsencode(path), params)
    if not handle:
        reason = library.last_error() or "the library gives no reason"
        raise UnusableInputError(f"{path}: the model does not load: {reason}", "try another file or convert it again")
    return int(handle)


def _load_mode(mmap: bool, mlock: bool) -> Any:
    if mmap:
        return llama.LLAMA_LOAD_MODE_MMAP_MLOCK if mlock else llama.LLAMA_LOAD_MODE_MMAP
    return llama.LLAMA_LOAD_MODE_MLOCK if mlock else llama.LLAMA_LOAD_MODE_NONE


def _check_vocabulary(path: Path, handle: int) -> None:
    if llama.llama_vocab_type(llama.llama_model_get_vocab(handle)) == llama.LLAMA_VOCAB_TYPE_NONE:
        raise UnusableInputError(f"{path}: the file has no vocabulary", "use a file with a tokenizer in it")


def _check_generates(path: Path, handle: int) -> None:
    _check_vocabulary(path, handle)
    if llama.llama_model_has_encoder(handle) or not llama.llama_model_has_decoder(handle):
        raise UnusableInputError(f"{path}: not a decoder-only language model", "use a text generation model")
    if llama.llama_model_is_diffusion(handle):
        raise UnusableInputError(f"{path}: a diffusion model", "use an autoregressive model")


class NativeVocabulary:
    """`types.Vocabulary` over the tokenizer in the model; lives as long as the model does."""

    def __init__(self, model_handle: int) -> None:
        self._open_handle: int | None = llama.llama_model_get_vocab(model_handle)
        self._n_tokens = int(llama.llama_vocab_n_tokens(self._handle))
        self._tokenizer = NativeTokenizer(model_handle)
        self._pieces: dict[int, bytes] = {}  # of the tokens that have been asked for: texts repeat themselves

    @property
    def handle(self) -> int:
        """The C pointer, for the rest of `native`."""
        return self._handle

    @property
    def _handle(self) -> int:
        if self._open_handle is None:
            raise UsageError("the model is closed", "load it again")
        return self._open_handle

    def close(self) -> None:
        """The model goes away: what points into it must not be used any more."""
        self._open_handle = None

    @property
    def n_tokens(self) -> int:
        """How many tokens there are."""
        return self._n_tokens

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` puts the begin-of-sequence token in front."""
        return bool(llama.llama_vocab_get_add_bos(self._handle))

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence token."""
        return self._special(llama.llama_vocab_bos(self._handle))

    @property
    def eos(self) -> int | None:
        """The end-of-sequence token."""
        return self._special(llama.llama_vocab_eos(self._handle))

    def pieces(self) -> list[bytes]:
        """The bytes of every token, in the order of the tokens; a microsecond for each."""
        handle, size = self._handle, 256
        buffer, copy = ctypes.create_string_buffer(size), llama.llama_token_to_piece
        pieces = []
        for token in range(self._n_tokens):
            written = int(copy(handle, token, buffer, size, 0, False))
            pieces.append(buffer.raw[:written] if written >= 0 else self.piece(token))
        return pieces

    @property
    def end_tokens(self) -> Collection[int]:
        """The tokens that end a generation; asks the library each time, for a list would cost a scan of them all."""
        return _EndTokens(self)

    def all_end_tokens(self) -> list[int]:
        """The tokens that end a generation, by asking for each token (tens of milliseconds)."""
        handle, is_end = self._handle, llama.llama_vocab_is_eog
        return [token for token in range(self._n_tokens) if is_end(handle, token)]

    def suppressed_tokens(self) -> list[int]:
        """Tokens that the model's file forbids."""
        count = ctypes.c_int32(0)
        tokens = llama.llama_vocab_get_suppress_tokens(self._handle, ctypes.byref(count))
        return [int(tokens[i]) for i in range(count.value)]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Token ids of `text`. Raises what `NativeTokenizer.tokens` does.

        Raises UnusableInputError when the file says that a token belongs around every text, but not which.
        """
        if add_special:
            self._check_frame()
        assert self._handle
        return self._tokenizer.tokens(text, add_special=add_special, parse_special=parse_special)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; control tokens give nothing unless `special`."""
        if not special and token in self._pieces:
            return self._pieces[token]
        self._check(token)
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            written = int(llama.llama_token_to_piece(self._handle, token, buffer, size, 0, special))
            if written >= 0:
                break
            size = -written
        piece = buffer.raw[:written]
        if not special:
            self._pieces[token] = piece
        return piece

    def text(self, token: int) -> str:
        """How the vocabulary spells a token, control tokens too."""
        self._check(token)
        return str(llama.llama_vocab_get_text(self._handle, token).decode("utf-8", "replace"))

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (end of sequence, of turn, …)."""
        self._check(token)
        return bool(llama.llama_vocab_is_eog(self._handle, token))

    def _check_frame(self) -> None:
        """The library ends the process when it is to add a token that the vocabulary does not have."""
        vocab, is_wordpiece = self._handle, llama.llama_vocab_type(self._handle) == llama.LLAMA_VOCAB_TYPE_WPM
        wanted = {
            "begin": self.bos if is_wordpiece or self.adds_bos else 0,
            "end": self.eos if llama.llama_vocab_get_add_eos(vocab) and not is_wordpiece else 0,
            "separator": self._special(llama.llama_vocab_sep(vocab)) if is_wordpiece else 0,
        }
        missing = [name for name, token in wanted.items() if token is None]
        if missing:
            raise UnusableInputError(
                f"the vocabulary adds a token at the {missing[0]} of a text, but has none", "convert the model again"
            )

    def _check(self, token: int) -> None:
        if not 0 <= token < self._n_tokens:
            raise ValueError(f"token {token} is not in the vocabulary of {self._n_tokens}")

    def _special(self, token: int) -> int | None:
        return token if 0 <= token < self._n_tokens else None


class _EndTokens(Collection[int]):
    def __init__(self, vocabulary: NativeVocabulary) -> None:
        self._vocabulary = vocabulary

    def __contains__(self, token: object) -> bool:
        return isinstance(token, int) and self._vocabulary.is_end(token)

    def __iter__(self) -> Iterator[int]:
        return iter(self._vocabulary.all_end_tokens())

    def __len__(self) -> int:
        return len(self._vocabulary.all_end_tokens())
