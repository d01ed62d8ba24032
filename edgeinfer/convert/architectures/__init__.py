"""One short descriptive module per model architecture, found by the model class that a config names."""

from __future__ import annotations

from importlib import import_module

from edgeinfer.convert.architectures.base import Architecture
from edgeinfer.convert.config import Config
from edgeinfer.errors import UnusableInputError

_MODULES = {
    "BertForMaskedLM": "bert",
    "BertModel": "bert",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command_r",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneForCausalLM": "exaone",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon_h1",
    "FalconMambaForCausalLM": "mamba",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Gemma3TextModel": "gemma_embedding",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma3nForConditionalGeneration": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "internlm3",
    "Lfm2ForCausalLM": "lfm2",
    "Llama4ForCausalLM": "llama4",
    "Llama4ForConditionalGeneration": "llama4",
    "LlamaForCausalLM": "llama",
    "Mamba2ForCausalLM": "mamba2",
    "MambaForCausalLM": "mamba",
    "Ministral3ForCausalLM": "mistral3",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "ModernBertForMaskedLM": "modern_bert",
    "ModernBertModel": "modern_bert",
    "NomicBertModel": "nomic_bert",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen2VLForConditionalGeneration": "qwen2vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3Model": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3VLForConditionalGeneration": "qwen3vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "RWKV7ForCausalLM": "rwkv7",
    "Rwkv7ForCausalLM": "rwkv7",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
    "XLMRobertaModel": "xlm_roberta",
}


def lookup(config: Config) -> Architecture:
    """The architecture of a checkpoint. Raises UnusableInputError, with the list of known ones, for any other.

    A module of which llama.cpp makes several architectures chooses by the config.
    """
    module = _MODULES.get(config.hf_class)
    if module is None:
        raise UnusableInputError(
            f"{config.path.parent}: unknown architecture {config.hf_class}", f"known are {', '.join(_MODULES)}"
        )
    found = import_module(f"{__name__}.{module}")
    architecture: Architecture = found.architecture(config) if hasattr(found, "architecture") else found.ARCHITECTURE
    return architecture
