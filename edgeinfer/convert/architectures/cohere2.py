"""Command-R7B and Command-A: a Command-R with windows, and rope only in layers that have one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgeinfer.convert.architectures.base import Architecture, head_dim, require
from edgeinfer.convert.architectures.command_r import DEFAULTS, cohere_metadata, parallel_layers
from edgeinfer.convert.architectures.gemma2 import check_layer_types
from edgeinfer.convert.checkpoint import Checkpoint, TensorSpec
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError

_FULL_EVERY = 4
_MAX_BIAS_NBYTES = 1 << 20


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for other layers with a window than llama.cpp's."""
    if config.get("layer_types") is None:
        require(config, "sliding_window_pattern", _FULL_EVERY)
    check_layer_types(config, window_every=_FULL_EVERY)
    require(config, "rotary_pct", 1)
    dim = head_dim(config)
    return {
        **cohere_metadata(config),
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.sliding_window": config.integer("sliding_window"),
        "vocab_size": config.vocab_size,
        "rope.dimension_count": dim,
    }


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Without biases that are nothing but zeros, as the first checkpoints have them."""
    idle = {name for name, spec in checkpoint.tensors.items() if name.endswith(".bias") and _is_zero(spec)}
    if not idle:
        return checkpoint
    kept = {name: spec for name, spec in checkpoint.tensors.items() if name not in idle}
    return replace(checkpoint, tensors=kept, left_out=(*checkpoint.left_out, f"{len(idle)} biases that are all zero"))


def _is_zero(spec: TensorSpec) -> bool:
    if spec.nbytes > _MAX_BIAS_NBYTES:
        return False
    try:
        with open(spec.path, "rb") as file:
            file.seek(spec.offset)
            return not any(file.read(spec.nbytes))
    except OSError as error:
        raise UnusableInputError(f"{spec.path}: cannot be read ({error.strerror})", "was it changed?") from None


ARCHITECTURE = Architecture(
    name="cohere2",
    defaults={**DEFAULTS, "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": _FULL_EVERY},
    metadata=metadata,
    tensors=parallel_layers,
    adapted=adapted,
)
