"""Opens a PEFT adapter directory: what it adds to which weight. Reads headers only.

LoRA adds `scale · B · A` to a weight (Hu et al. 2021); the settings and names are those of the `peft` library
(src/peft/tuners/lora/config.py, layer.py). A setting that makes more of it than that sum is refused by its name.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.convert.adapters.module_patterns import MAX_CHARS, ModulePatterns
from edgeinfer.convert.checkpoint import TensorSpec, read_safetensors_header
from edgeinfer.convert.json_file import read_object
from edgeinfer.convert.resolve import FLOAT_TYPES
from edgeinfer.errors import UnusableInputError, listed

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
MAX_RANK = 1 << 16
MAX_ALPHA = 1e6

_MERGE_HINT = "merge it with peft's merge_and_unload, save the model, and convert that"
# Settings that say how it was trained or loaded; what they leave in the result is in the tensors.
_OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "peft_type", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying", "fan_in_fan_out", "init_lora_weights", "bias", "r", "lora_alpha",
    "use_rslora", "rank_pattern", "alpha_pattern", "merge_weights",
}  # fmt: skip
_REFUSED = {
    "modules_to_save": "whole modules were trained besides the adapter",
    "use_dora": "DoRA scales the columns of the weights too",
    "lora_bias": "the adapter has biases",
    "trainable_token_indices": "single tokens were trained besides the adapter",
    "alora_invocation_tokens": "an activated LoRA works from its invocation on only",
    "use_qalora": "QA-LoRA adapts groups of inputs",
    "layer_replication": "layers were repeated",
    "target_parameters": "parameters were adapted, not modules",
}
# Of `init_lora_weights`, what leaves the weights of the base as they are. The others take something out of them, and
# belong to what is left (peft: subtract_mutated_init).
_INITS = ("true", "false", "gaussian", "eva", "orthogonal", "mica")
_PREFIX = "base_model.model."
_WEIGHT = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?:embedding_)?(?P<side>[AB])(?:\.weight)?", re.DOTALL)
_EMBEDDING = re.compile(r"\.lora_embedding_[AB]$")


@dataclass(frozen=True, slots=True)
class Delta:
    """What is added to one weight: `alpha / rank · b · a`, as `(outputs, inputs)` of its module."""

    module: str
    """The path of the module in the base model."""
    a: TensorSpec
    """Shape `(rank, inputs)`."""
    b: TensorSpec
    """Shape `(outputs, rank)`."""
    alpha: float
    is_embedding: bool
    """Whether the inputs are tokens."""

    @property
    def rank(self) -> int:
        """The rows of `a`."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """What the product is multiplied with."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter directory: settings and tensor table, no weights."""

    path: Path
    base: str
    """Which model it was trained on, a path or a name on the Hub; "" where it is not stated."""
    revision: str
    deltas: Mapping[str, Delta]
    """By the name of the weight, as the base model's class has it."""
    saved_bases: Mapping[str, TensorSpec]
    """Weights of the base that were saved along, unchanged, by the same names."""

    @property
    def files(self) -> frozenset[Path]:
        """What it consists of."""
        return frozenset({self.path / CONFIG_NAME, self.path / WEIGHTS_NAME})


def is_adapter(path: Path) -> bool:
    """Whether the directory `path` has an adapter in it, not a model."""
    return os.path.lexists(path / CONFIG_NAME) and not os.path.lexists(path / "config.json")


def open_adapter(path: Path) -> PeftAdapter:
    """Read the settings and headers of an adapter directory.

    Raises NotFoundError without settings, UnusableInputError for another method than LoRA, for settings that add
    something else than `scale · B · A` (by name), and for tensors that don't belong together.
    """
    settings = read_object(path / CONFIG_NAME)
    _check_settings(path / CONFIG_NAME, settings)
    if not os.path.lexists(path / WEIGHTS_NAME):
        pickled = os.path.lexists(path / "adapter_model.bin")
        what = "only pickled weights, which could run code when opened" if pickled else f"no {WEIGHTS_NAME}"
        raise UnusableInputError(f"{path}: has {what}", "save it again with peft's save_pretrained")
    specs = read_safetensors_header(path / WEIGHTS_NAME)
    pairs, saved_bases = _pairs(path / WEIGHTS_NAME, specs)
    scaling = _Scaling(path / CONFIG_NAME, settings)
    deltas = {f"{module}.weight": _delta(module, sides, scaling) for module, sides in pairs.items()}
    if not deltas:
        raise UnusableInputError(f"{path / WEIGHTS_NAME}: has no LoRA tensors", "is the training finished?")
    base, revision = settings.get("base_model_name_or_path"), settings.get("revision")
    return PeftAdapter(
        path,
        base if isinstance(base, str) else "",
        revision if isinstance(revision, str) else "",
        deltas,
        saved_bases,
    )


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UnusableInputError(
            f"{path}: peft_type is {reprlib.repr(kind)}, only LORA becomes an adapter", _MERGE_HINT
        )
    if (bias := settings.get("bias", "none")) not in ("none", None):
        raise UnusableInputError(f"{path}: bias is {reprlib.repr(bias)}: biases were trained too", _MERGE_HINT)
    for key, reason in _REFUSED.items():
        if settings.get(key):
            raise UnusableInputError(f"{path}: {key} is {reprlib.repr(settings[key])}: {reason}", _MERGE_HINT)
    if unknown := [key for key, value in settings.items() if value and key not in _OF_TRAINING]:
        raise UnusableInputError(f"{path}: unknown settings: {listed(unknown)}", _MERGE_HINT)
    init = str(settings.get("init_lora_weights", True))
    if init.lower() not in _INITS:
        raise UnusableInputError(
            f"{path}: init_lora_weights is {init[:40]!r}: the adapter belongs to weights that were changed before",
            "save it with peft's path_initial_model_for_weight_conversion",
        )


class _Scaling:
    """Rank and alpha of each module, from the settings."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._by_root = bool(settings.get("use_rslora"))
        self._rank, self._ranks = settings.get("r", 8), self._patterns(settings, "rank_pattern")
        self._alpha, self._alphas = settings.get("lora_alpha", 8), self._patterns(settings, "alpha_pattern")

    def rank(self, module: str) -> int:
        rank = self._value(module, self._ranks, self._rank)
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise UnusableInputError(f"{self._path}: rank {reprlib.repr(rank)} of {module}", "is this file complete?")
        return rank

    def alpha(self, module: str) -> float:
        """Divided by the rank it is the scale; rank-stabilized LoRA divides by the root (Kalajdzievski 2023)."""
        alpha = self._value(module, self._alphas, self._alpha)
        if type(alpha) not in (int, float) or not 0 < abs(alpha) < MAX_ALPHA:
            raise UnusableInputError(
                f"{self._path}: lora_alpha {reprlib.repr(alpha)} of {module}: not a number other than 0",
                "is this file complete?",
            )
        return float(alpha) * (math.sqrt(self.rank(module)) if self._by_root else 1)

    def _value(self, module: str, patterns: ModulePatterns, default: Any) -> Any:
        try:
            return patterns.get(module, default)
        except ValueError as error:
            raise UnusableInputError(f"{self._path}: rank_pattern or alpha_pattern: {error}", _MERGE_HINT) from None

    def _patterns(self, settings: Mapping[str, Any], key: str) -> ModulePatterns:
        stated = settings.get(key) or {}
        try:
            if not isinstance(stated, dict):
                raise ValueError("not an object")
            return ModulePatterns(stated)
        except ValueError as error:
            raise UnusableInputError(f"{self._path}: {key}: {error}", "is this file complete?") from None


def _pairs(
    path: Path, specs: Mapping[str, TensorSpec]
) -> tuple[dict[str, dict[str, TensorSpec]], dict[str, TensorSpec]]:
    """The two sides of each module, and the base's own weights that lie beside them."""
    pairs: dict[str, dict[str, TensorSpec]] = {}
    saved_bases: dict[str, TensorSpec] = {}
    others = []
    for name, spec in specs.items():
        if name.startswith(_PREFIX) and name.endswith(".base_layer.weight"):
            module = name.removeprefix(_PREFIX).removesuffix(".base_layer.weight")
            saved_bases[f"{module}.weight"] = spec
        elif len(name) <= MAX_CHARS + len(_PREFIX) and (found := _WEIGHT.fullmatch(name)):
            pairs.setdefault(found["module"], {})[found["side"]] = spec
        else:
            others.append(name)
    if others:
        raise UnusableInputError(
            f"{path}: {len(others)} tensors are no part of a LoRA adapter: {listed(others)}", _MERGE_HINT
        )
    if halves := [module for module, sides in pairs.items() if len(sides) < 2]:
        raise UnusableInputError(f"{path}: lora_A or lora_B is missing for {listed(halves)}", "download it again")
    return pairs, saved_bases


def _delta(module: str, sides: Mapping[str, TensorSpec], scaling: _Scaling) -> Delta:
    a, b = sides["A"], sides["B"]
    for spec in (a, b):
        if spec.dtype not in FLOAT_TYPES:
            raise UnusableInputError(f"{spec.path}: {spec.name} is {spec.dtype}, not F32, F16 or BF16", _MERGE_HINT)
    rank = scaling.rank(module)
    if len(a.shape) != 2 or len(b.shape) != 2 or 0 in (*a.shape, *b.shape) or not a.shape[0] == b.shape[1] == rank:
        raise UnusableInputError(
            f"{a.path}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, expected rank {rank}",
            f"do {CONFIG_NAME} and the weights belong together?",
        )
    return Delta(module, a, b, scaling.alpha(module), bool(_EMBEDDING.search(a.name)))
