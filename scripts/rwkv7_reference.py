"""RWKV-7 in a page of numpy, from the paper ("RWKV-7 Goose", 2025), over the tensors that flash-linear-attention saves.

Runs in the environment of the peers, whose transformers has no such class. Imports nothing of edgeinfer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch


def logits(checkpoint: str, tokens: list[int]) -> Any:
    """The logits of every token in F64, shape `(tokens, vocabulary)`."""
    folder = Path(checkpoint)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    loaded = safetensors.torch.load_file(folder / "model.safetensors")
    weights = {name: tensor.double().numpy() for name, tensor in loaded.items()}
    epsilon, first_value = config["norm_eps"], None

    def norm(x: Any, name: str) -> Any:
        return _standard(x, epsilon) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = norm(weights["model.embeddings.weight"][tokens], "model.layers.0.pre_norm")
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        own = {name.removeprefix(f"{at}."): value for name, value in weights.items() if name.startswith(f"{at}.")}
        mixed, first_value = _time_mix(own, norm(x, f"{at}.attn_norm"), first_value, config)
        x = x + mixed
        x = x + _channel_mix(own, norm(x, f"{at}.ffn_norm"))
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


def _channel_mix(w: dict[str, Any], x: Any) -> Any:
    hidden = (x + (_shifted(x) - x) * w["ffn.x_k"]) @ w["ffn.key.weight"].T
    return np.maximum(hidden, 0) ** 2 @ w["ffn.value.weight"].T


def _time_mix(w: dict[str, Any], x: Any, first_value: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """What the tokens get from the state that each head keeps, and the values of the first layer."""
    seen = {letter: x + (_shifted(x) - x) * w[f"attn.x_{letter}"].reshape(-1) for letter in "rwkvag"}

    def low_rank(letter: str, inner: Any = lambda y: y) -> Any:
        down, up = w[f"attn.{letter}_lora.lora.0.weight"], w[f"attn.{letter}_lora.lora.2.weight"]
        return inner(seen[letter] @ down.T) @ up.T + w.get(f"attn.{letter}_lora.lora.2.bias", 0)

    r, k, v = (seen[letter] @ w[f"attn.{letter}_proj.weight"].T for letter in "rkv")
    decay = np.exp(-np.exp(-0.5) * _sigmoid(low_rank("w", np.tanh)))
    rate, gate = _sigmoid(low_rank("a")), low_rank("g", _sigmoid)
    if first_value is None:
        first_value = v
    else:
        v = v + (first_value - v) * _sigmoid(low_rank("v"))
    dim = config["head_dim"]
    removal = _heads(k * w["attn.k_k"], dim)
    removal /= np.maximum(np.linalg.norm(removal, axis=-1, keepdims=True), 1e-12)
    k = k * (1 + (rate - 1) * w["attn.k_a"])
    r, k, v, decay, rate = (_heads(y, dim) for y in (r, k, v, decay, rate))
    read = _recurrence(r, decay, k, v, removal, rate)
    read = _standard(read, dim * config["norm_eps"]).reshape(x.shape)
    read = read * w["attn.g_norm.weight"] + w["attn.g_norm.bias"]
    bonus = (r * k * w["attn.r_k"]).sum(axis=-1, keepdims=True) * v
    return ((read + bonus.reshape(x.shape)) * gate) @ w["attn.o_proj.weight"].T, first_value


def _recurrence(r: Any, decay: Any, k: Any, v: Any, removal: Any, rate: Any) -> Any:
    """What each token reads; all of shape `(tokens, heads, elements of a head)`. The state maps keys to values."""
    n_tokens, n_heads, dim = r.shape
    state, read = np.zeros((n_heads, dim, dim)), np.empty_like(v)
    for t in range(n_tokens):
        remembered = np.einsum("hvk,hk->hv", state, removal[t])
        state = state * decay[t][:, None, :] - remembered[:, :, None] * (removal[t] * rate[t])[:, None, :]
        state = state + v[t][:, :, None] * k[t][:, None, :]
        read[t] = np.einsum("hvk,hk->hv", state, r[t])
    return read


def _heads(x: Any, dim: int) -> Any:
    return x.reshape(len(x), -1, dim)


def _shifted(x: Any) -> Any:
    """Each token's predecessor, zeros for the first."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def _standard(x: Any, epsilon: float) -> Any:
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + epsilon)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))
