"""One short descriptive module per model architecture, found by the model class that a config names."""

from __future__ import annotations

from importlib import import_module

from edgeinfer.convert.architectures.base import Architecture
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError

_MODULES = {
    "BertForMaskedLM": "bert",
    "BertModel": "bert",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "FalconMambaForCausalLM": "mamba",
    "GPT2LMHeadModel": "gpt2",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextModel": "gemma_embedding",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "Lfm2ForCausalLM": "lfm2",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "NomicBertModel": "nomic_bert",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
    "XLMRobertaModel": "xlm_roberta",
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
