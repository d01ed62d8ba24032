"""OLMo 3: an OLMo 2 with a sliding window in most layers, which have a rope without scaling."""

from __future__ import annotations

from typing import Any

from edgeinfer.convert.architectures import olmo2
from edgeinfer.convert.architectures.base import Architecture, impossible
from edgeinfer.convert.architectures.windows import window_metadata
from edgeinfer.convert.config import Config

_FULL_EVERY = 4


def metadata(config: Config) -> dict[str, Any]:
    """As OLMo 2's, and the window. llama.cpp leaves the rope of the layers with a window unscaled, as transformers."""
    theta, window_theta = config.rope.get("rope_theta"), config.window_rope.get("rope_theta")
    if window_theta not in (None, theta):
        raise impossible(config, f"'rope_theta' is {window_theta} for windows and {theta} else, llama.cpp has one")
    if config.window_rope.get("rope_type") not in (None, "default"):
        raise impossible(config, "the rope of 'sliding_attention' is scaled, llama.cpp leaves it as it is")
    return {**olmo2.metadata(config), **window_metadata(config, full_every=_FULL_EVERY)}


ARCHITECTURE = Architecture(
    name="olmo2",
    defaults={**olmo2.ARCHITECTURE.defaults, "sliding_window": 4096},
    metadata=metadata,
    tensors=olmo2.tensors,
)
