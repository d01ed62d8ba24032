"""Rope with positions of three kinds (time, height, width), which share out the pairs of a head among them."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from edgeinfer.convert.architectures.base import impossible
from edgeinfer.convert.config import Config

MAX_UNTURNED_PAIRS = 4


def sections_metadata(
    config: Config, n_pairs: int, default: list[int] | None = None, *, interleaved: bool = False
) -> dict[str, Any]:
    """How many of a head's `n_pairs` pairs each kind of position turns; a fourth kind is llama.cpp's own, with none.

    `interleaved`: the kinds take turns, instead of standing in blocks. Raises UnusableInputError for sections that
    don't add up, and for those whose last pairs llama.cpp (ggml_mrope_cache_init) would not turn at all because their
    kind has none left; two such pairs are Qwen3-VL's own, the slowest ones.
    """
    sections = config.rope.get("mrope_section") or default
    if not isinstance(sections, list) or any(type(n) is not int or not 0 < n <= n_pairs for n in sections):
        raise impossible(config, f"'mrope_section' is {reprlib.repr(sections)}, expected three numbers of pairs")
    if len(sections) != 3 or sum(sections) != n_pairs:
        raise impossible(
            config, f"'mrope_section' {sections} does not share out the {n_pairs} pairs of a head in three"
        )
    if interleaved and 3 * min(sections) < n_pairs - MAX_UNTURNED_PAIRS:
        raise impossible(config, f"llama.cpp would not turn all pairs of a head with the 'mrope_section' {sections}")
    return {"rope.dimension_sections": np.array([*sections, 0], np.int32)}
