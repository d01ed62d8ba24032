"""compressed-tensors (vLLM's LLM Compressor): several formats, and groups of modules that each have their own settings.

Which group of the config a module is in shows in the shapes of what is stored for it. The config's patterns are not
matched: they are a stranger's regular expressions, which can take forever.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from functools import partial
from typing import Any

from edgeinfer.convert.checkpoint import Checkpoint, Encoding
from edgeinfer.convert.config import Config
from edgeinfer.convert.encodings import mxfp4, nvfp4, packed
from edgeinfer.convert.encodings.base import Parts, misfit, with_decoded
from edgeinfer.convert.encodings.grid import Block
from edgeinfer.convert.encodings.scaled import block_candidates, with_scaled, without_activation_scales
from edgeinfer.errors import UnusableInputError

FORMATS = (
    "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mxfp8-quantized",
    "mxfp4-pack-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def decoded(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its weights: `weight` or `weight_packed`, and `weight_scale`.

    Raises UnusableInputError for a format that is not known.
    """
    settings = checkpoint.config.quantization
    groups = _groups(settings)
    sparsity = settings.get("sparsity_config")
    for section in (settings, *groups, *([Config(settings.path, sparsity)] if isinstance(sparsity, dict) else ())):
        form = section.get("format")
        if form is not None and form not in FORMATS:
            raise UnusableInputError(
                f"{settings.path}: the weights are quantized already (compressed-tensors, {reprlib.repr(form)})",
                "convert the checkpoint that it was made from",
            )
    weights = [
        Config(settings.path, group.get("weights")) for group in groups if isinstance(group.get("weights"), dict)
    ]
    sizes = list(dict.fromkeys(w.integer("num_bits", at_most=8) for w in weights if w.get("num_bits") is not None))
    checkpoint = without_activation_scales(checkpoint)
    checkpoint = with_decoded(
        checkpoint,
        ".weight_packed",
        [".weight_scale"],
        [".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"],
        partial(_decode_packed, sizes=sizes),
        ".weight",
    )
    return with_scaled(checkpoint, _blocks(weights))


def _groups(settings: Config) -> list[Config]:
    groups: Any = settings.get("config_groups")
    if groups is None:
        return []
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise UnusableInputError(f"{settings.path}: 'config_groups' are not objects", "is this file complete?")
    return [Config(settings.path, group) for group in groups.values()]


def _blocks(weights: Sequence[Config]) -> list[Block]:
    return [block for section in weights for block in block_candidates(section, "block_structure")]


def _decode_packed(parts: Parts, *, sizes: Sequence[int]) -> tuple[tuple[int, ...], Encoding]:
    codes, scales, factor = parts[".weight_packed"], parts[".weight_scale"], parts.get(".weight_global_scale")
    if codes.dtype != "U8":
        return packed.decode(parts, sizes)
    others = [spec for suffix, spec in parts.items() if suffix in (".weight_zero_point", ".weight_g_idx")]
    if others:
        raise misfit(others[0], "stands beside FP4 numbers, which have no such thing")
    if factor:
        return nvfp4.decode(codes, scales, factor, is_divisor=True)
    return mxfp4.decode_matrix(codes, scales)
