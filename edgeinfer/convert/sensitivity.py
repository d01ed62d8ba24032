"""What an error of a tensor does to the model: how much KL divergence comes of it, up to a factor that all share.

Relative errors of the output (see `measure`) make the kinds of tensors comparable: measured with one kind and a few
layers quantized at a time, the divergence per relative error is about the same for all matrices of the middle layers.
It is larger for the first layers, whose errors all later ones see, and for the last feed-forward layers. A layer counts
for less the more there are.
"""

from __future__ import annotations

import re

from edgeinfer.convert.mixture_rules import category

ENDS = 8
"""The first and the last layers are an eighth of them each, as in llama.cpp's mixtures."""

_FIRST, _MIDDLE, _LAST = range(3)
_LAYERS: dict[str, tuple[float, float, float]] = {
    "attn_q": (1.7, 0.6, 1.0),
    "attn_k": (1.7, 0.8, 1.5),
    "attn_v": (1.7, 1.0, 1.0),
    "attn_output": (2.3, 0.7, 1.0),
    "ffn_gate": (2.0, 1.0, 2.0),
    "ffn_up": (1.8, 1.0, 2.8),
    "ffn_down": (3.2, 1.0, 2.6),
}
"""Divergence per relative error in the first, the middle and the last layers. `scripts/sensitivity.py` measures it.

From SmolLM2-135M, and Qwen2.5-Coder-0.5B as far as that was measured; rounded, because models differ by more.
"""
_OTHER = (2.0, 1.0, 2.0)
_TOKEN_EMBD, _OUTPUT, _TIED = 0.15, 1.6, 1.7
"""The same, of the whole model's layers together, for the embedding, the head, and an embedding that is both."""


def sensitivity(name: str, n_layers: int, *, is_tied: bool) -> float:
    """The divergence that a relative error of this tensor brings, in a unit that all tensors of a model share."""
    kind = category(name)
    if kind == "output":
        return _OUTPUT
    if kind == "token_embd":
        return _TIED if is_tied else _TOKEN_EMBD
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is None or not n_layers:
        return _OTHER[_MIDDLE]
    return _LAYERS.get(kind, _OTHER)[_band(int(layer[1]), n_layers)] / n_layers


def _band(layer: int, n_layers: int) -> int:
    at_end = n_layers // ENDS
    return _FIRST if layer < at_end else _LAST if layer >= n_layers - at_end else _MIDDLE
