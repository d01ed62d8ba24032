"""Small Hugging Face checkpoints for the tests: random weights, tokenizers trained by the library itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors_writer import to_bf16
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps over there.",
    "Ein schöner Tag für Übungen in der Straße; das Wetter ist schön.",
    "def f(x): return x + 1  # the answer is 42 or 1234567",
    "Hello, world. Hello, there. Hello again and again and again.",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

Tensors = dict[str, NDArray[Any]]


@cache
def byte_level_tokenizer(split: str = "") -> str:
    """tokenizer.json of a byte-level BPE; `split` is the regex of its pre-tokenizer, none for GPT-2's own."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
    tokenizer.pre_tokenizer = (  # type: ignore[assignment]
        pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(split), "isolated"), bytes_only])
        if split
        else bytes_only
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer.to_str()


@cache
def sentencepiece_tokenizer() -> str:
    """tokenizer.json as it is made from a SentencePiece BPE model: `▁` for spaces, `<0xNN>` for unknown bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[assignment]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    tokenizer.train_from_iterator(TEXT, trainer)
    document = json.loads(tokenizer.to_str())
    # The trainer calls the bytes special; in a converted model they are ordinary entries of the vocabulary.
    document["added_tokens"] = document["added_tokens"][:3]
    return json.dumps(document)


def llama_config(**changes: Any) -> dict[str, Any]:
    """A two-layer Llama whose rows divide into blocks of 32; a change to None leaves the key out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": 320,
        "hidden_act": "silu",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def qwen2_config(**changes: Any) -> dict[str, Any]:
    """The same as a Qwen2."""
    return llama_config(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **changes})


def random_tensors(config: Mapping[str, Any]) -> Tensors:
    """F32 weights of the shapes that `config` asks for."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", hidden // heads)
    q, kv = heads * dim, config.get("num_key_value_heads", heads) * dim
    is_qwen2 = config["architectures"] == ["Qwen2ForCausalLM"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if is_qwen2 or config.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, q)
        if config.get("attention_bias"):
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) * np.float32(0.05) for name, shape in shapes.items()}


def write_safetensors(path: Path, tensors: Tensors, dtype: str = "BF16") -> Path:
    """F32 arrays as a file of `dtype`; arrays of another type as what they are."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, values in tensors.items():
        kind, raw = _encoded(values, dtype)
        begin, end = end, end + len(raw)
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [begin, end]}
        parts.append(raw)
    return write_raw_safetensors(path, header, b"".join(parts))


def write_raw_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes, length: int | None = None) -> Path:
    """A file with whatever header; `length` is what it claims to be long, when that isn't the truth."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def _encoded(values: NDArray[Any], dtype: str) -> tuple[str, bytes]:
    if values.dtype != np.float32:
        return {"float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8"}[values.dtype.name], values.tobytes()
    narrow = {"BF16": to_bf16, "F16": lambda v: v.astype(np.float16), "F32": lambda v: v}[dtype](values)
    return dtype, np.ascontiguousarray(narrow).tobytes()


def write_shards(folder: Path, shards: Iterable[Tensors]) -> None:
    """Numbered shards and their index."""
    parts = list(shards)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_safetensors(folder / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, document: Any) -> None:
    """A JSON file as `json` writes it."""
    path.write_text(json.dumps(document), "utf-8")


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
    *,
    tokenizer: str | None = None,
    settings: dict[str, Any] | None = None,
    dtype: str = "BF16",
) -> Path:
    """A complete checkpoint directory; by default a sound two-layer Llama with a GPT-2-like tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config() if config is None else config
    write_json(folder / "config.json", config)
    write_safetensors(folder / "model.safetensors", random_tensors(config) if tensors is None else tensors, dtype)
    (folder / "tokenizer.json").write_text(byte_level_tokenizer() if tokenizer is None else tokenizer, "utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]} if settings is None else settings,
    )
    return folder


def change_json(path: Path, change: dict[str, Any]) -> None:
    """Replace keys of a JSON file."""
    write_json(path, {**json.loads(path.read_text("utf-8")), **change})
