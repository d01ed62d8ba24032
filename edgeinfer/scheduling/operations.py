"""How much of a prompt a pass may take, so that who interrupts it need not wait for long.

A pass that has begun ends only between two of its operations. The longest are the multiplication by the largest matrix
of a layer and, far into a text, the attention of a layer: half a second to a second each over 512 tokens for a model of
seven billion parameters on two cores.
"""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_S = 0.2
"""What an operation may take, of the quarter of a second after which an interrupted answer has ended."""
PIECE_STEP = 64
"""Pieces of a prompt are multiples of that. llama.cpp computes attention in tiles of so many rows: with pieces of 128,
192 or 256 tokens the logits are bit for bit those of pieces of 512, with 96 they are not (SmolLM2-135M, x86)."""
_ATTENTION_FACTOR = 1.6  # a multiply-add of the attention takes so much longer (Qwen2.5-0.5B, x86, measured)
_ASSUMED_SPEED = 2e10  # multiply-adds a second: a slow machine, until this one was measured


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds of a pass for each of its tokens."""

    weights: int
    """By the weights of all layers. The output is left out: of a prompt, one row gets there."""
    largest: int
    """In one operation."""
    attended: int
    """In one layer, for each token that is attended to."""
    n_layers: int

    def of_token(self, depth: float) -> float:
        """Of a token at a depth, in all operations; those of the attention count as what they take."""
        return self.weights + self.n_layers * self._attention(depth)

    def piece_tokens(self, depth: int, speed: float | None) -> int:
        """How many tokens from `depth` on run at `speed` without an operation that takes longer than `LONGEST_S`."""
        longest = max(self.largest, self._attention(depth), 1)
        tokens = int(LONGEST_S * (speed or _ASSUMED_SPEED) / longest)
        return max(tokens - tokens % PIECE_STEP, PIECE_STEP)

    def _attention(self, depth: float) -> float:
        return _ATTENTION_FACTOR * self.attended * depth
