"""Reduces a checkpoint to its text model, with the tensor names and the config that the architecture's rules expect."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from edgeinfer.convert.architectures.base import Architecture
from edgeinfer.convert.checkpoint import Checkpoint, TensorSpec
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError

# How multimodal checkpoints name the text model's tensors, by the versions of transformers that saved them.
_TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
# How the names of the other parts begin: encoders of images and sounds, and what joins them to the text model.
_OTHER_PARTS = (
    "vision_tower", "vision_model", "visual", "multi_modal_projector", "mm_projector", "connector",
    "audio_tower", "audio_model", "embed_vision", "embed_audio",
)  # fmt: skip


def text_model(checkpoint: Checkpoint, architecture: Architecture) -> Checkpoint:
    """The same checkpoint with the text model's config and tensors only; `left_out` tells the rest.

    Raises UnusableInputError when two tensors then have the same name.
    """
    config = text_config(checkpoint.config, architecture)
    tensors: dict[str, TensorSpec] = {}
    left_out: Counter[str] = Counter()
    for name, spec in checkpoint.tensors.items():
        if checkpoint.config.is_multimodal:
            part = name.removeprefix("model.").partition(".")[0]
            if part in _OTHER_PARTS:
                left_out[part] += 1
                continue
            name = _text_name(name)
        name = name.removeprefix(architecture.prefix)
        if name.endswith(architecture.buffers):
            continue
        if name in tensors:
            raise UnusableInputError(
                f"{checkpoint.path}: {spec.name} and {tensors[name].name} are the same tensor",
                "the files were merged wrongly: get the original",
            )
        tensors[name] = spec
    notes = tuple(f"{count} tensors of {part} (only the text model converts)" for part, count in left_out.items())
    return replace(checkpoint, config=config, tensors=tensors, left_out=notes)


def text_config(config: Config, architecture: Architecture) -> Config:
    """The text model's config, with the names of keys and the defaults of the architecture."""
    return config.text_model().renamed(architecture.synonyms).with_defaults(architecture.defaults)


def _text_name(name: str) -> str:
    for prefix, replacement in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
