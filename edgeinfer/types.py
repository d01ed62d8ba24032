"""Plain data that several packages share, and the protocols between them.

Nothing here does I/O, imports the C library or knows how a backend works. Token arrays are 1-D `int32`,
logits are 2-D `float32` of shape `(rows that asked, n_vocab)`. Position ranges are half-open: `[p0, p1)`.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.constraint import Constraint as Constraint
from edgeinfer.options import SamplingParams

Tokens = NDArray[np.int32]
Logits = NDArray[np.float32]

FinishReason = Literal["stop", "length", "schema", "interrupted"]


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a forward pass: `tokens` at positions `pos0, pos0 + 1, …` of sequence `seq_id`.

    Logits are wanted for `tokens[logits_from:]`; `logits_from == len(tokens)` asks for none.
    """

    seq_id: int
    tokens: Tokens
    pos0: int
    logits_from: int

    @property
    def n_logits(self) -> int:
        """How many rows of logits this row asks for."""
        return len(self.tokens) - self.logits_from


@dataclass(frozen=True, slots=True)
class KVOp:
    """An edit of the KV cache over positions `[p0, p1)`; `p1 == -1` means to the end.

    `copy` makes `dst` share what `src` holds; `remove` forgets it from `src` (and ignores `dst`).
    """

    kind: Literal["copy", "remove"]
    src: int
    dst: int
    p0: int
    p1: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a model's memory can do."""

    can_trim: bool
    """Whether a tail of a sequence can be removed (not so for recurrent state)."""
    can_share: bool
    """Whether sequences can share cells (a unified KV cache)."""
    max_sequences: int
    window: int | None
    """The sliding window in tokens, None when every layer sees everything."""


class Refusal(Enum):
    """Ordinary reasons for a forward pass to give no logits."""

    NO_ROOM = "no room in the KV cache"
    ABORTED = "aborted"


class Backend(Protocol):
    """Something that runs a model over sequences of tokens. Errors other than a Refusal are raised."""

    @property
    def capabilities(self) -> Capabilities:
        """What the model's memory can do."""
        ...

    @property
    def n_vocab(self) -> int:
        """The length of a row of logits."""
        ...

    @property
    def n_ctx(self) -> int:
        """How many tokens all sequences together can hold."""
        ...

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens that one `forward` takes."""
        ...

    def forward(self, rows: Sequence[Row]) -> Logits | Refusal:
        """Run the rows as one ragged batch.

        Returns logits of shape `(sum of n_logits, n_vocab)` in the order of the rows, as a view that is valid
        until the next call. After NO_ROOM nothing has changed; after ABORTED the caller must remove the tails.
        """
        ...

    def apply(self, op: KVOp) -> bool:
        """Edit the KV cache; False when the model's memory cannot do this."""
        ...

    def save_range(self, seq: int, p0: int, p1: int) -> bytes | None:
        """The state of positions `[p0, p1)` of a sequence as one blob; None where the model's memory cannot do this.

        The blob names neither model nor options: whoever keeps it must.
        """
        ...

    def load_range(self, seq: int, p0: int, p1: int, data: bytes, until: int | None = None) -> int:
        """Append what `save_range` gave for `[p0, p1)` to a sequence whose length is in `[p0, p1)`; its new length.

        What the sequence holds of the range already stays, what lies behind position `until` is left out. The length is
        less than was wanted where there is no room, the blob is of another shape or the memory cannot do this.
        """
        ...

    def abort(self) -> None:
        """Make a `forward` that runs now (in another thread) or the next one return ABORTED soon."""
        ...

    def clear_abort(self) -> None:
        """Let `forward` run again after `abort`."""
        ...


class PrefixCache(Protocol):
    """Beginnings of texts whose KV state outlives its sequence; whatever goes wrong in it is a miss."""

    def match(self, tokens: Tokens) -> int:
        """The length of the longest stored beginning of `tokens`, all of them included."""
        ...

    def restore(self, backend: Backend, seq: int, tokens: Tokens, start: int) -> int:
        """Append stored state of `tokens` to a sequence that holds `tokens[:start]`; returns its new length."""
        ...

    def remember(self, backend: Backend, seq: int, tokens: Tokens) -> None:
        """Keep what is not kept yet of a sequence that begins with `tokens`."""
        ...

    def close(self) -> None:
        """Finish what `remember` began, within a bounded time."""
        ...


class Sampler(Protocol):
    """A chain of samplers with its own random state and history."""

    @property
    def seed(self) -> int:
        """The seed in use."""
        ...

    @property
    def reach(self) -> int | None:
        """How many of the largest logits the choice can depend on, at most; None where all can matter."""
        ...

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits of shape `(n_vocab,)`; does not change the history."""
        ...

    def accept(self, token: int) -> None:
        """Add a token of the text (prompt or answer) to the history that the penalties see."""
        ...


class SamplerFactory(Protocol):
    """Makes a request's sampler."""

    def __call__(self, params: SamplingParams) -> Sampler:
        """Build the chain that `params` describes."""
        ...


class Vocabulary(Protocol):
    """Text to tokens and back."""

    @property
    def n_tokens(self) -> int:
        """How many tokens there are."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` puts the begin-of-sequence token in front."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """Token ids of `text`; `parse_special` turns the spelling of control tokens into those tokens."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for; control tokens give nothing unless `special`."""
        ...

    def pieces(self) -> list[bytes]:
        """The bytes of every token, in the order of the tokens."""
        ...

    @property
    def end_tokens(self) -> Collection[int]:
        """The tokens that end a generation (end of sequence, of turn, …)."""
        ...

    def text(self, token: int) -> str:
        """How the vocabulary spells a token, control tokens too."""
        ...

    @property
    def bos(self) -> int | None:
        """The begin-of-sequence token."""
        ...

    @property
    def eos(self) -> int | None:
        """The end-of-sequence token."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to do; `id` is the caller's."""

    id: int
    tokens: Tokens
    params: SamplingParams
    max_tokens: int
    end_tokens: Container[int] = frozenset()
    priority: int = 0
    """Higher goes first."""
    deadline_ms: float | None = None
    """After the submission; of two requests of a priority the earlier deadline goes first."""
    constraint: Constraint | None = None
    """Begins with the answer: the prompt is not part of it."""
    logprobs: int | None = None
    """Keep the probability of every token, and of so many of the likeliest."""
    keep_answer: bool = False
    """Whether the prefix cache gets the answer too, for a conversation that goes on in another process."""


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that a request gained in a step; the last event of a request has its `finish_reason`."""

    request_id: int
    tokens: tuple[int, ...]
    from_draft: int = 0
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Logprobs:
    """What the model thought of a token, before any sampler: natural logarithms of probabilities."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens, the likeliest first."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds, and tokens per second over the decode phase."""

    load_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    decode_ms: float = 0.0
    decode_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The envelope of `run --json`, in the contract's order."""

    model: str
    kernels: str
    text: str
    finish_reason: FinishReason
    seed: int
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[dict[str, Any], ...] | None = None
    """Of every token, where they were asked for: `id, piece, logprob, top`."""
    reasoning: str | None = None
    """What the model wrote to itself before `text`."""


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """How much each column of a weight matters: sums of squared activations, of the matrices of one tensor in turn."""

    sums: NDArray[np.float32]
    """Shape `(matrices × row length,)`."""
    counts: NDArray[np.float32]
    """How many activations were summed: one number for all matrices, or one for each."""

    def weights(self, matrix: int, row_length: int) -> NDArray[np.float32]:
        """The mean squares for one matrix, shape `(row length,)`; ones where nothing was seen (an idle expert)."""
        sums = self.sums[matrix * row_length :][:row_length]
        count = self.counts[matrix if self.counts.size > 1 else 0]
        return np.ascontiguousarray(sums / count) if count > 0 else np.ones(row_length, np.float32)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU that the library can use, and its memory in bytes."""

    name: str
    description: str
    free_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model's weights go, and in which layout."""

    repack: bool = True
    """Make copies of weights in the layout that the CPU's kernels want."""
    gpu_layers: int = 0
    """How many layers, the last ones, the output counted as one more."""
    experts_on_cpu: tuple[int, ...] = ()
    """Layers on a GPU whose experts stay in main memory."""
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0


class Quantizer(Protocol):
    """Turns F32 rows into the bytes of a tensor type; safe to call from several threads at once."""

    def prepare(self, types: Iterable[int]) -> None:
        """Build the lookup tables that these ggml types need, once, before any thread starts."""
        ...

    def quantize(
        self,
        ggml_type: int,
        rows: NDArray[np.float32],
        out: NDArray[np.uint8],
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        """Quantize `rows` (C-contiguous, shape `(n, row length)`) into `out` (exactly the bytes needed).

        `weights`, shape `(row length,)`, say how much an error in each column matters.
        """
        ...

    def dequantize(self, ggml_type: int, data: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Widen whole blocks of `data` to F32 (`out` has exactly the elements that they hold)."""
        ...
