"""The KV cache and the forward pass of a loaded model: `types.Backend` over llama.cpp, or over its fork.

Every argument is checked here first, because the library answers some mistakes by ending the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from edgeinfer.errors import EdgeinferError, ResourceError, UnusableInputError, UsageError
from edgeinfer.native import library
from edgeinfer.native.devices import default_threads
from edgeinfer.native.kernels import ContextSettings
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeModel
from edgeinfer.native.state import RangeState
from edgeinfer.options import DEFAULT_CTX_SIZE, RuntimeOptions
from edgeinfer.types import Capabilities, KVOp, Logits, Refusal, Row


class Observer(Protocol):
    """Looks at every operation of the passes."""

    @property
    def callback(self) -> Any:
        """For a context's `cb_eval`."""

    def check(self) -> None:
        """Raise what went wrong in the callback since the last call; called after each pass."""


MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ, src/llama-cparams.h
_NO_ROOM, _ABORTED, _NO_MEMORY = 1, 2, -2  # what llama_decode returns besides 0


def check_sequences(max_sequences: int) -> None:
    """Raise UsageError for a number of sequences that no context can have."""
    if not 1 <= max_sequences <= MAX_SEQUENCES:
        raise UsageError(f"{max_sequences} sequences at a time", f"give a number from 1 to {MAX_SEQUENCES}")


class NativeBackend:
    """One context over a model: `max_sequences` sequences that share a unified KV cache.

    Raises ResourceError when there is not enough memory, UsageError for options that this model cannot have.
    """

    def __init__(
        self,
        model: NativeModel,
        options: RuntimeOptions,
        *,
        max_sequences: int = 1,
        observer: Observer | None = None,
    ) -> None:
        check_sequences(max_sequences)
        self._model = model
        self._kernels = model.kernels
        self._lib = lib = model.kernels.lib
        self._observer = observer
        self._n_ctx = options.ctx_size or min(DEFAULT_CTX_SIZE, model.n_ctx_train)
        self._abort_flag = ctypes.create_string_buffer(b"0")
        self.threads = options.threads or default_threads()
        stateful = model.is_stateful
        # Ranges are saved by way of one more sequence, which costs no memory where the state is cells of the KV cache.
        has_spare = not stateful and max_sequences < MAX_SEQUENCES
        self._settings = settings = ContextSettings(
            self._n_ctx,
            max_sequences + has_spare,
            max_sequences > 1,
            self.threads,
            options,
            ctypes.addressof(self._abort_flag),
            observer.callback if observer else None,
        )
        library.forget_errors()
        self._handle: int | None = self._kernels.open_context(model.handle, settings)
        if not self._handle:
            raise _no_context(self._n_ctx)
        if model.adapters:
            _set_adapters(self._handle, model.adapters)
        self._memory = lib.llama_get_memory(self._handle)
        if not self._memory:
            lib.llama_free(self._handle)
            raise UnusableInputError("the model is an encoder, which writes no text", "use a text generation model")
        self._may_have_gaps = False
        """Whether cells may have become free between others."""
        self._n_vocab = model.vocabulary.n_tokens
        self._batch = _Batch(lib.llama_batch, int(lib.llama_n_batch(self._handle)), max_sequences)
        self._logits = np.empty((0, self._n_vocab), np.float32)
        self._logits_address = 0
        self._capabilities = Capabilities(
            can_trim=not stateful,
            can_share=not stateful,
            max_sequences=max_sequences,
            window=int(lib.llama_model_n_swa(model.handle)) or None,
        )
        self._ranges = (
            RangeState(self._kernels, self._handle, self._memory, max_sequences, self._capabilities.window)
            if has_spare
            else None
        )
        # As the bindings declare it, it returns a pointer object, which costs more per token than sampling does.
        self._logits_address_of = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", lib._lib))

    @property
    def capabilities(self) -> Capabilities:
        """What the model's memory can do."""
        return self._capabilities

    @property
    def n_vocab(self) -> int:
        """The length of a row of logits."""
        return self._n_vocab

    @property
    def n_ctx(self) -> int:
        """How many tokens all sequences together can hold."""
        return self._n_ctx

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens that one `forward` takes."""
        return self._batch.capacity

    def forward(self, rows: Sequence[Row]) -> Logits | Refusal:
        """Run the rows as one batch; see `types.Backend.forward`."""
        n_tokens, n_outputs = self._batch.fill(rows, self._n_vocab)
        library.clear_errors()
        code = self._decode(rows)
        if self._observer is not None:
            self._observer.check()
        if code == _NO_ROOM:
            return Refusal.NO_ROOM
        if code == _ABORTED:
            return Refusal.ABORTED
        if code == _NO_MEMORY:
            raise ResourceError("not enough memory to run the model", "lower the batch or the context size (-c)")
        if code:
            reason = library.last_error()
            raise EdgeinferError(f"llama_decode failed with code {code} on {n_tokens} tokens: {reason}")
        return self._logits_view(n_outputs)

    def _decode(self, rows: Sequence[Row]) -> int:
        close_gaps = self._kernels.close_gaps
        if close_gaps is not None and self._may_have_gaps:
            close_gaps(self._open_handle, self._settings, False)
            self._may_have_gaps = False
        code = int(self._lib.llama_decode(self._open_handle, self._batch.struct))
        if code == _NO_ROOM and close_gaps is not None:
            self._take_back(rows)
            close_gaps(self._open_handle, self._settings, True)
            code = int(self._lib.llama_decode(self._open_handle, self._batch.struct))
            if code == _NO_ROOM:
                self._take_back(rows)
        # The fork does not tell that it was interrupted; whoever asked for it wants no answer any more.
        return _ABORTED if self._abort_flag[0] == b"1" else code

    def _take_back(self, rows: Sequence[Row]) -> None:
        """Of a batch that is computed in several parts, the first ones have got their cells."""
        self._may_have_gaps = True
        for row in rows:
            self._lib.llama_memory_seq_rm(self._memory, row.seq_id, row.pos0, -1)

    def apply(self, op: KVOp) -> bool:
        """Edit the KV cache; False when the model's memory cannot do this."""
        self._batch.check_sequence(op.src)
        if op.p0 < 0 or (op.p1 < op.p0 and op.p1 != -1):
            raise ValueError(f"not a range of positions: [{op.p0}, {op.p1})")
        handle, memory = self._open_handle, self._memory
        assert handle
        if not self._is_intact(op):
            return False
        if op.kind == "remove":
            self._may_have_gaps = True
            return bool(self._lib.llama_memory_seq_rm(memory, op.src, op.p0, op.p1))
        self._batch.check_sequence(op.dst)
        if op.src == op.dst:
            raise ValueError(f"sequence {op.src} cannot be copied onto itself")
        if not self._capabilities.can_share and (op.p0, op.p1) != (0, -1):
            return False
        self._lib.llama_memory_seq_cp(memory, op.src, op.dst, op.p0, op.p1)
        return True

    def _is_intact(self, op: KVOp) -> bool:
        """Whether a sequence with a window can go on where the edit ends it: cells that leave a window can be lost."""
        window, length = self._capabilities.window, op.p0 if op.kind == "remove" else op.p1
        if window is None or length < 1:
            return True
        return int(self._lib.llama_memory_seq_pos_min(self._memory, op.src)) <= max(0, length - window)

    def save_range(self, seq: int, p0: int, p1: int) -> bytes | None:
        """The state of positions `[p0, p1)`; None for recurrent state, and where a layer keeps it in another form."""
        self._batch.check_sequence(seq)
        assert self._handle is not None, "the context is closed"
        return self._ranges.save(seq, p0, p1) if self._ranges else None

    def load_range(self, seq: int, p0: int, p1: int, data: bytes, until: int | None = None) -> int:
        """Append what `save_range` gave; see `types.Backend.load_range`."""
        self._batch.check_sequence(seq)
        assert self._handle is not None, "the context is closed"
        if self._ranges is None:
            return int(self._lib.llama_memory_seq_pos_max(self._memory, seq)) + 1
        self._may_have_gaps = True
        return self._ranges.load(seq, p0, p1, data, p1 if until is None else until)

    def abort(self) -> None:
        """Make the running or next `forward` return ABORTED; callable from any thread."""
        self._abort_flag[0] = b"1"

    def clear_abort(self) -> None:
        """Let `forward` run again after `abort`."""
        self._abort_flag[0] = b"0"

    def close(self) -> None:
        """Free the context; must come before the model's `close`."""
        if self._handle is not None:
            # The view points into the context: an empty one must not.
            self._logits, self._logits_address = np.empty((0, self._n_vocab), np.float32), 0
            self._lib.llama_free(self._handle)
            self._handle = None

    def __enter__(self) -> NativeBackend:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def _open_handle(self) -> int:
        if self._handle is None:
            raise UsageError("the model is closed", "load it again")
        return self._handle

    def _logits_view(self, n_outputs: int) -> Logits:
        """The library's own buffer as an array, which is made anew only when the buffer moved or is too short."""
        if n_outputs == 0:
            self._lib.llama_synchronize(self._open_handle)
            return self._logits[:0]
        address = self._logits_address_of(self._open_handle)
        if address != self._logits_address or n_outputs > len(self._logits):
            buffer = (ctypes.c_float * (n_outputs * self._n_vocab)).from_address(address)
            self._logits = np.frombuffer(memoryview(buffer), np.float32).reshape(n_outputs, self._n_vocab)
            self._logits_address = address
        return self._logits if n_outputs == len(self._logits) else self._logits[:n_outputs]


class _Batch:
    """The library's batch structure over numpy arrays, filled by slices."""

    def __init__(self, structure: Any, capacity: int, max_sequences: int) -> None:
        self.capacity = capacity
        self._max_sequences = max_sequences
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._outputs = np.zeros(capacity, np.int8)
        # Each token belongs to one sequence: a count of 1, and a pointer to that sequence's id.
        self._counts = np.ones(capacity, np.int32)
        self._ids = np.arange(max_sequences, dtype=np.int32)
        self._id_pointers = np.zeros(capacity, np.uintp)
        self._ids_address = self._ids.ctypes.data
        self.struct = structure(
            0,
            self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            None,
            self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            self._id_pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            self._outputs.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def check_sequence(self, seq_id: int) -> None:
        if not 0 <= seq_id < self._max_sequences:
            raise ValueError(f"sequence {seq_id} is not one of {self._max_sequences}")

    def fill(self, rows: Sequence[Row], n_vocab: int) -> tuple[int, int]:
        """Lay the rows out one after the other; returns how many tokens, and how many rows of logits."""
        start = n_outputs = 0
        for row in rows:
            length = len(row.tokens)
            end = start + length
            self._check(row, length, end)
            if length == 1:  # every row while decoding: the fewest operations, for the caches are cold after a pass
                lowest = highest = self._tokens[start] = int(row.tokens[0])
                self._positions[start] = row.pos0
                self._id_pointers[start] = self._ids_address + self._ids.itemsize * row.seq_id
                self._outputs[start] = 1 - row.logits_from
            else:
                lowest, highest = row.tokens.min(), row.tokens.max()
                self._tokens[start:end] = row.tokens
                self._positions[start:end] = np.arange(row.pos0, row.pos0 + length)
                self._id_pointers[start:end] = self._ids_address + self._ids.itemsize * row.seq_id
                self._outputs[start:end] = 0
                self._outputs[start + row.logits_from : end] = 1
            if lowest < 0 or highest >= n_vocab:
                raise ValueError(f"a token outside the vocabulary of {n_vocab}")
            start, n_outputs = end, n_outputs + length - row.logits_from
        if start == 0:
            raise ValueError("a batch without rows")
        self.struct.n_tokens = start
        return start, n_outputs

    def _check(self, row: Row, length: int, end: int) -> None:
        if not 0 <= row.seq_id < self._max_sequences:
            raise ValueError(f"sequence {row.seq_id} is not one of {self._max_sequences}")
        if row.pos0 < 0 or not 0 <= row.logits_from <= length or length == 0:
            raise ValueError(f"not a row: {length} tokens at {row.pos0}, logits from {row.logits_from}")
        if end > self.capacity:
            raise ValueError(f"a batch of {end} tokens or more, not 1 to {self.capacity}")


def _set_adapters(context: int, adapters: Sequence[tuple[int, float]]) -> None:
    handles = (llama.llama_adapter_lora_p_ctypes * len(adapters))()
    for i, (handle, _) in enumerate(adapters):
        handles[i] = ctypes.cast(handle, llama.llama_adapter_lora_p_ctypes)
    scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
    llama.llama_set_adapters_lora(context, handles, len(adapters), scales)


def _no_context(n_ctx: int) -> EdgeinferError:
    reason = library.last_error() or "the library gives no reason"
    message = f"a context of {n_ctx} tokens cannot be made: {reason}"
    if "alloc" in reason or "reserve" in reason or "memory" in reason:
        return ResourceError(message, "lower the context size (-c) or quantize the cache (--cache-type-k/v q8_0)")
    return UsageError(message, "try other runtime options")
