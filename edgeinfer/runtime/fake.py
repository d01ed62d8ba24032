"""A model made of hashes, behind the same protocols as a real one, for exact tests of everything above `native`.

A cell of its KV cache remembers the token and all that the sequence held when the cell was computed; logits are a
function of those. So a stale cell, a missing removal or a wrong position changes the text, and what is not a
sequence's next position is an error at once.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.options import SamplingParams
from edgeinfer.types import Capabilities, KVOp, Logits, Refusal, Row, Sampler, Tokens

SPECIAL = ("<bos>", "<eos>", "<|start|>", "<|end|>")
BOS, EOS, START, END = range(256, 260)
N_VOCAB = 256 + len(SPECIAL)


@dataclass(frozen=True, eq=False, slots=True)
class _Cell:
    """One position of one or more sequences; shared cells are the same object."""

    token: int
    state: int


class FakeBackend:
    """`types.Backend` over hashes; `forwards` counts the passes, `computed_tokens` what they ran."""

    def __init__(
        self,
        *,
        n_ctx: int = 256,
        max_sequences: int = 4,
        max_batch_tokens: int = 64,
        can_trim: bool = True,
        can_save: bool = True,
        window: int | None = None,
        n_vocab: int = N_VOCAB,
    ) -> None:
        self._n_ctx = n_ctx
        self._n_vocab = n_vocab
        self._max_batch_tokens = max_batch_tokens
        self._capabilities = Capabilities(can_trim, can_trim, max_sequences, window)
        self._can_save = can_save
        self._sequences: list[list[_Cell]] = [[] for _ in range(max_sequences)]
        self._aborting = False
        self.forwards = 0
        self.computed_tokens = 0

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
        return self._max_batch_tokens

    def forward(self, rows: Sequence[Row]) -> Logits | Refusal:
        """Run the rows; an abort leaves half of each behind, as a real backend can."""
        n_tokens = sum(len(row.tokens) for row in rows)
        if not 0 < n_tokens <= self._max_batch_tokens:
            raise ValueError(f"a batch of {n_tokens} tokens, not 1 to {self._max_batch_tokens}")
        for row in rows:
            if row.pos0 != len(self._sequences[row.seq_id]):
                held = len(self._sequences[row.seq_id])
                raise ValueError(f"sequence {row.seq_id} holds {held} tokens, the row starts at {row.pos0}")
        if self._aborting:
            for row in rows:
                self._run(row, len(row.tokens) // 2)
            return Refusal.ABORTED
        if self._used_cells + n_tokens > self._n_ctx:
            return Refusal.NO_ROOM
        self.forwards += 1
        self.computed_tokens += n_tokens
        logits = [line for row in rows for line in self._run(row, len(row.tokens))]
        return np.stack(logits) if logits else np.empty((0, self._n_vocab), np.float32)

    def apply(self, op: KVOp) -> bool:
        """Edit the KV cache; False for a part of a sequence that the memory cannot forget, or has forgotten already."""
        cells = self._sequences[op.src]
        end = len(cells) if op.p1 == -1 else op.p1
        whole = op.p0 == 0 and end >= len(cells)
        nothing = op.p0 >= len(cells)
        if not (self._capabilities.can_trim or whole or nothing):
            return False
        length = op.p0 if op.kind == "remove" else end
        if not (whole or nothing) and length and not self._is_intact(op.src, length):
            return False
        if op.kind == "remove":
            if end < len(cells) and not nothing:
                raise ValueError(f"a hole in sequence {op.src}: [{op.p0}, {end}) of {len(cells)}")
            del cells[op.p0 :]
            return True
        target = self._sequences[op.dst]
        if len(target) != op.p0:
            raise ValueError(f"sequence {op.dst} holds {len(target)} tokens, the copy starts at {op.p0}")
        target.extend(cells[op.p0 : end])
        return True

    def save_range(self, seq: int, p0: int, p1: int) -> bytes | None:
        """Tokens and states of `[p0, p1)`; None when the memory cannot be trimmed."""
        cells = self._sequences[seq][p0:p1]
        if not (self._capabilities.can_trim and self._can_save):
            return None
        if not (0 <= p0 < p1 and len(cells) == p1 - p0):
            raise ValueError(f"sequence {seq} holds {len(self._sequences[seq])} tokens, not [{p0}, {p1})")
        return np.array([(cell.token, cell.state) for cell in cells], np.uint32).tobytes()

    def load_range(self, seq: int, p0: int, p1: int, data: bytes, until: int | None = None) -> int:
        """Append `[p0, p1)`, as far as `until`; nothing of a blob of another length, no more than there is room for.

        Room is needed for whole pieces, each as long as the window, as where they are loaded beside the sequence first.
        """
        cells, wanted = self._sequences[seq], p1 if until is None else until
        if not p0 <= len(cells) < wanted <= p1:
            raise ValueError(f"sequence {seq} holds {len(cells)} tokens, the range is [{p0}, {p1}), to {wanted}")
        if not self._capabilities.can_trim or len(data) != 8 * (p1 - p0):
            return len(cells)
        pairs = np.frombuffer(data, np.uint32).reshape(-1, 2).tolist()
        piece = self._capabilities.window or p1 - p0
        for start in range(p0, p1, piece):
            end = min(start + piece, p1)
            if start <= len(cells) < min(end, wanted):
                if self._used_cells + end - start > self._n_ctx:
                    break
                cells.extend(_Cell(*pair) for pair in pairs[len(cells) - p0 : min(end, wanted) - p0])
        return len(cells)

    def abort(self) -> None:
        """Make the next `forward` return ABORTED."""
        self._aborting = True

    def clear_abort(self) -> None:
        """Let `forward` run again."""
        self._aborting = False

    def held(self, seq_id: int) -> list[int]:
        """The tokens of a sequence."""
        return [cell.token for cell in self._sequences[seq_id]]

    @property
    def _used_cells(self) -> int:
        return len({cell for cells in self._sequences for cell in cells})

    def _is_intact(self, seq_id: int, length: int) -> bool:
        """Whether a sequence can go on after its first `length` tokens. Of a window, all that can be lost is lost."""
        window = self._capabilities.window
        lost = 0 if window is None else max(0, len(self._sequences[seq_id]) - window)
        return lost == 0 or lost <= length - (window or 0)

    def _run(self, row: Row, length: int) -> list[NDArray[np.float32]]:
        cells = self._sequences[row.seq_id]
        lines = []
        for index, token in enumerate(row.tokens[:length].tolist()):
            if not 0 <= token < self._n_vocab:
                raise ValueError(f"token {token} is not in the vocabulary of {self._n_vocab}")
            seen = np.array([cell.state for cell in cells] + [token], np.uint32)
            cells.append(_Cell(token, zlib.crc32(seen.tobytes())))
            if index >= row.logits_from:
                lines.append(self._logits(cells[-1].state))
        return lines

    def _logits(self, state: int) -> NDArray[np.float32]:
        return np.random.default_rng(state).normal(0, 3, self._n_vocab).astype(np.float32)


class FakeSampler:
    """`types.Sampler` in numpy: temperature, a repeat penalty, ignore_eos; enough to notice a wrong history."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._seed = 0 if params.seed is None else params.seed
        self._random = np.random.default_rng(self._seed)
        self._history: list[int] = []

    @property
    def seed(self) -> int:
        """The seed in use."""
        return self._seed

    @property
    def reach(self) -> int | None:
        """Every token has its chance."""
        return None

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose a token from one row of logits."""
        scores = logits.astype(np.float64)
        if self._params.ignore_eos:
            scores[[EOS, END]] = -np.inf
        recent = sorted(set(self._history[-self._params.repeat_last_n :]))
        scores[recent] -= self._params.repeat_penalty - 1
        if self._params.temperature == 0:
            return int(scores.argmax())
        scaled = scores / self._params.temperature
        weights = np.exp(scaled - scaled.max())
        return int(self._random.choice(len(weights), p=weights / weights.sum()))

    def accept(self, token: int) -> None:
        """Add a token to the history."""
        self._history.append(token)


def make_fake_sampler(params: SamplingParams) -> Sampler:
    """`types.SamplerFactory` for the fake backend."""
    return FakeSampler(params)


class FakeVocabulary:
    """`types.Vocabulary` of bytes and a few control tokens."""

    n_tokens = N_VOCAB
    adds_bos = True
    bos: int | None = BOS
    eos: int | None = EOS
    end_tokens = frozenset({EOS, END})

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> Tokens:
        """One token per byte of UTF-8, one per control token."""
        tokens = [BOS] if add_special else []
        pattern = "(" + "|".join(map(re.escape, SPECIAL)) + ")"
        for part in re.split(pattern, text) if parse_special else [text]:
            tokens.extend([256 + SPECIAL.index(part)] if parse_special and part in SPECIAL else part.encode())
        return np.array(tokens, np.int32)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The byte; control tokens give nothing unless `special`."""
        if token < 256:
            return bytes([token])
        return SPECIAL[token - 256].encode() if special else b""

    def pieces(self) -> list[bytes]:
        """Those of all tokens."""
        return [self.piece(token) for token in range(self.n_tokens)]

    def text(self, token: int) -> str:
        """How a token is spelled."""
        return self.piece(token, special=True).decode("latin-1")
