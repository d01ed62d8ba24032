"""Which layers see all of the text, and which only a window of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgeinfer.convert.architectures.base import impossible, n_layers
from edgeinfer.convert.config import Config


def has_window(config: Config, *, full_every: int) -> list[bool]:
    """For each layer, whether it has the window: as `layer_types` says, else all but every `full_every`-th.

    Raises UnusableInputError for a list that does not say it for every layer.
    """
    kinds, count = config.get("layer_types"), n_layers(config)
    if kinds is None:
        return [(i + 1) % full_every != 0 for i in range(count)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in known for kind in kinds):
        raise impossible(config, f"'layer_types' does not say for {count} layers which are {' or '.join(known)}")
    return [kind == known[0] for kind in kinds]


def window_metadata(config: Config, *, full_every: int) -> dict[str, Any]:
    """The window, and the layers that have it."""
    return {
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": np.array(has_window(config, full_every=full_every)),
    }
