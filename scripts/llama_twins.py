"""Checkpoints of model classes that transformers does not have itself, retold as the llama that computes the same.

Their code comes with the checkpoints on the Hub and is never run. What it does is a llama's forward pass (InternLM's
modeling_internlm2.py and modeling_internlm3.py, LG's modeling_exaone.py); what differs is how tensors are called, and
that InternLM2 has query, key and value in one matrix. Runs in the environment of the peers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]

_EXAONE_NAMES = {
    "transformer.wte.": "model.embed_tokens.",
    "transformer.ln_f.": "model.norm.",
    "transformer.h.": "model.layers.",
    ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.",
    ".attn.attention.out_proj.": ".self_attn.o_proj.",
    ".attn.attention.": ".self_attn.",
    ".mlp.c_fc_0.": ".mlp.gate_proj.",
    ".mlp.c_fc_1.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
}
_EXAONE_KEYS = {
    "num_layers": "num_hidden_layers",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
_INTERNLM2_NAMES = {
    "model.tok_embeddings.": "model.embed_tokens.",
    ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".attention.wo.": ".self_attn.o_proj.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
}


def llama_twin(checkpoint: Path) -> Any:
    """The llama in F32, or None for a class that has none."""
    import transformers

    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    retell = _TWINS.get(config["architectures"][0])
    if retell is None:
        return None
    config, tensors = retell(config, load_file(checkpoint / "model.safetensors"))
    del config["architectures"], config["model_type"]
    model = transformers.LlamaForCausalLM._from_config(
        transformers.LlamaConfig(**config), dtype=torch.float32, attn_implementation="eager"
    )
    if config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model


def _exaone(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    renamed = {_EXAONE_KEYS.get(key, key): value for key, value in config.items()}
    return renamed, {_renamed(name, _EXAONE_NAMES): tensor for name, tensor in tensors.items()}


def _internlm2(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".wqkv." not in name:
            name = "lm_head.weight" if name == "output.weight" else _renamed(name, _INTERNLM2_NAMES)
            found[name] = tensor
            continue
        embd = tensor.shape[1]
        groups = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, embd)
        at = name.partition(".attention.")[0]
        for kind, part in (("q", groups[:, :-2]), ("k", groups[:, -2]), ("v", groups[:, -1])):
            found[f"{at}.self_attn.{kind}_proj.weight"] = part.reshape(-1, embd)
    return config, found


def _internlm3(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """A llama has a bias on the output too where query, key and value have one."""
    biased = {**config, "attention_bias": config["qkv_bias"], "mlp_bias": config["bias"]}
    if config["qkv_bias"] and not config["bias"]:
        for i in range(config["num_hidden_layers"]):
            tensors[f"model.layers.{i}.self_attn.o_proj.bias"] = torch.zeros(config["hidden_size"])
    return biased, tensors


def _renamed(name: str, parts: dict[str, str]) -> str:
    return re.sub("|".join(map(re.escape, parts)), lambda match: parts[match[0]], name)


_TWINS: dict[str, Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]] = {
    "ExaoneForCausalLM": _exaone,
    "InternLM2ForCausalLM": _internlm2,
    "InternLM3ForCausalLM": _internlm3,
}
