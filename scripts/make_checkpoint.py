"""Turns a GGUF file back into an ordinary Hugging Face checkpoint directory, without torch.

SOURCE is a .gguf file of the llama or qwen2 architecture, or a name of models/catalogue.toml. The weights are
dequantized and rounded to BF16, so the result is a checkpoint like any other; the same source always gives the same
bytes. Prints the directory.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from checkpoint_tokenizer import write_json, write_tokenizer
from fetch_model import catalogue, fetch
from numpy.typing import NDArray
from safetensors_writer import TensorSource, to_bf16, write_weights
from toolbox import cache_dir, parse_nbytes, run

from edgeinfer.cli import console
from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.gguf_file.header import Header, TensorInfo, read_header

# Raise it when what this script writes changes: cached checkpoints are then made anew.
REVISION = "1"
REVISION_FILE = ".revision"
DEFAULT_SHARD = "5G"
SLAB_ELEMENTS = 1 << 20

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def cached_checkpoint(source: str, shard: str = DEFAULT_SHARD) -> Path:
    """The checkpoint made from `source` in the cache folder, made now unless it is there already."""
    path = fetch(source) if source in catalogue() else Path(source)
    name = source if source in catalogue() else path.stem
    folder = cache_dir("checkpoints") / (name if shard == DEFAULT_SHARD else f"{name}-{shard}")
    revision = folder / REVISION_FILE
    if revision.is_file() and revision.read_text() == REVISION:
        return folder
    if folder.exists():
        shutil.rmtree(folder)  # an older script's
    make_checkpoint(path, folder, parse_nbytes(shard))
    return folder


def make_checkpoint(path: Path, folder: Path, max_shard_nbytes: int) -> None:
    """Write the checkpoint of the GGUF file `path` as `folder`, which appears only when it is complete."""
    header = read_header(path)
    if header.architecture not in _CLASSES:
        raise UnusableInputError(
            f"{path}: architecture {header.architecture!r} cannot be turned back", f"known are {', '.join(_CLASSES)}"
        )
    tensors = _plan(header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    console.note(f"making a checkpoint of {sum(t.nbytes for t in tensors) / 1e6:.0f} MB from {path.name}")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        partial = Path(scratch) / "checkpoint"
        partial.mkdir()
        tied = all(tensor.name != "lm_head.weight" for tensor in tensors)
        write_json(partial / "config.json", _config(header, tied=tied))
        write_json(partial / "generation_config.json", {"_from_model_config": True, **_token_ids(header)})
        write_tokenizer(partial, header.metadata, header.hyperparameter("context_length"))
        write_weights(partial, tensors, max_shard_nbytes)
        (partial / REVISION_FILE).write_text(REVISION)
        partial.rename(folder)


def _plan(header: Header) -> list[TensorSource]:
    infos = {info.name: info for info in header.tensors}
    if unknown := [name for name in infos if _hugging_face_name(name) is None]:
        raise UnusableInputError(
            f"{header.path}: no Hugging Face name for {', '.join(unknown)}",
            "only plain llama and qwen2 models can be turned back",
        )
    if _same_values(header, infos.get("output.weight"), infos["token_embd.weight"]):
        del infos["output.weight"]
    return [
        TensorSource(
            str(_hugging_face_name(info.name)),
            info.shape[::-1],
            lambda info=info: (to_bf16(slab) for slab in _slabs(header, info)),  # type: ignore[misc]
        )
        for info in infos.values()
    ]


def _hugging_face_name(name: str) -> str | None:
    stem, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if block := re.fullmatch(r"blk\.(\d+)\.(\w+)", stem):
        part = _BLOCK_NAMES.get(block[2])
        return part and f"model.layers.{block[1]}.{part}.{kind}"
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else None


def _slabs(header: Header, info: TensorInfo) -> Iterator[NDArray[np.float32]]:
    """The tensor in F32, in Hugging Face's order of rows, a few rows at a time."""
    data = np.memmap(header.path, np.uint8, "r", info.offset, (info.nbytes,))
    row_length = info.shape[0]
    if len(info.shape) == 1 and not info.type.is_quantized:
        row_length = 1  # a bias: its elements are the rows that the permutation moves
    n_rows = info.n_elements // row_length
    rows = data.reshape(n_rows, -1)
    order = _row_order(header, info, n_rows)
    step = max(1, SLAB_ELEMENTS // row_length)
    for begin in range(0, n_rows, step):
        picked = rows[order[begin : begin + step]]
        values = gguf.quants.dequantize(picked, gguf.GGMLQuantizationType(info.type))
        if not np.isfinite(values).all():
            raise UnusableInputError(f"{header.path}: {info.name} holds NaN or infinity", "use another file")
        yield values


def _row_order(header: Header, info: TensorInfo, n_rows: int) -> NDArray[np.int64]:
    """Which row of the file comes where. llama's query and key heads are stored with their halves interleaved."""
    order = np.arange(n_rows)
    part = info.name.split(".")[-2]
    if header.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return order
    heads = _heads(header) if part == "attn_q" else _kv_heads(header)
    return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _same_values(header: Header, one: TensorInfo | None, other: TensorInfo) -> bool:
    if one is None or one.shape != other.shape:
        return False
    pairs = itertools.zip_longest(_slabs(header, one), _slabs(header, other))
    return all(np.array_equal(to_bf16(a), to_bf16(b)) for a, b in pairs)


def _config(header: Header, *, tied: bool) -> dict[str, Any]:
    number = header.hyperparameter
    hidden_size = number("embedding_length")
    config: dict[str, Any] = {
        "architectures": [_CLASSES[header.architecture]],
        "attention_dropout": 0.0,
        **_token_ids(header),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": number("feed_forward_length"),
        "max_position_embeddings": number("context_length"),
        "model_type": header.architecture,
        "num_attention_heads": _heads(header),
        "num_hidden_layers": number("block_count"),
        "num_key_value_heads": _kv_heads(header),
        "rms_norm_eps": _decimal(number("attention.layer_norm_rms_epsilon")),
        "rope_scaling": _rope_scaling(header),
        "rope_theta": _decimal(number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": next(t.shape[1] for t in header.tensors if t.name == "token_embd.weight"),
    }
    if header.architecture == "llama":
        has_bias = any(t.name.endswith("attn_q.bias") for t in header.tensors)
        config |= {"attention_bias": has_bias, "mlp_bias": False, "pretraining_tp": 1}
        config["head_dim"] = number("attention.key_length", hidden_size // _heads(header))
    else:
        config |= {"sliding_window": None, "use_sliding_window": False}
    return dict(sorted(config.items()))


def _token_ids(header: Header) -> dict[str, int]:
    kinds = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {name: header.metadata.number(f"tokenizer.ggml.{kind}_token_id") for name, kind in kinds.items()}
    return {name: number for name, number in ids.items() if number is not None}


def _rope_scaling(header: Header) -> dict[str, Any] | None:
    kind = header.metadata.text(f"{header.architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "type": kind, "factor": header.hyperparameter("rope.scaling.factor")}
    original = header.hyperparameter("rope.scaling.original_context_length")
    return scaling | ({} if original is None else {"original_max_position_embeddings": original})


def _heads(header: Header) -> int:
    return int(header.hyperparameter("attention.head_count"))


def _kv_heads(header: Header) -> int:
    return int(header.hyperparameter("attention.head_count_kv", _heads(header)))


def _decimal(value: float) -> float:
    """The shortest decimal that is the same F32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help=f"a .gguf file or one of: {', '.join(catalogue())}")
    parser.add_argument("folder", metavar="OUT_DIR", nargs="?", type=Path, help="default: in the cache folder")
    parser.add_argument("--max-shard-size", default=DEFAULT_SHARD, metavar="SIZE", help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.folder is None:
        console.result(str(cached_checkpoint(arguments.source, arguments.max_shard_size)))
        return
    if arguments.folder.exists():
        raise UsageError(f"{arguments.folder} exists", "remove it or name another directory")
    path = fetch(arguments.source) if arguments.source in catalogue() else Path(arguments.source)
    make_checkpoint(path, arguments.folder, parse_nbytes(arguments.max_shard_size))
    console.result(str(arguments.folder))


if __name__ == "__main__":
    run(main)
