"""One short descriptive module per model architecture, found by the model class that a config names."""

from __future__ import annotations

from importlib import import_module

from edgeinfer.convert.architectures.base import Architecture
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError

_MODULES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
}


def lookup(config: Config) -> Architecture:
    """The architecture of a checkpoint. Raises UnusableInputError, with the list of known ones, for any other."""
    module = _MODULES.get(config.hf_class)
    if module is None:
        raise UnusableInputError(
            f"{config.path.parent}: unknown architecture {config.hf_class}", f"known are {', '.join(_MODULES)}"
        )
    architecture: Architecture = import_module(f"{__name__}.{module}").ARCHITECTURE
    return architecture
