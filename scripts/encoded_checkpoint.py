"""A tiny Llama in every encoding that quantized checkpoints come in, made of random codes by the published layouts.

`ENCODINGS` names them. Codes and scales come straight from the generator's bits, so that they are the same with every
version of numpy; what they stand for is asked of the methods' own libraries (`golden_encodings.py`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_tokenizer import write_json
from numpy.typing import NDArray
from random_checkpoint import PLAIN, make_checkpoint, read_model
from safetensors_writer import DTYPES, TensorSource, to_bf16, write_weights

from edgeinfer.convert.checkpoint import read_safetensors_header

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "vocab_size": 320,
}
Stored = dict[str, tuple[str, NDArray[Any]]]
"""Type and contents by what follows a module's name."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A way to store the linear layers, but for the head, which stays as it is."""

    config: dict[str, Any]
    """The `quantization_config`."""
    store: Callable[[str, int, int], Stored]
    """Makes the stored tensors of a module of so many rows and columns."""


def make_encoded(name: str, folder: Path) -> Path:
    """Write the checkpoint `folder/NAME` and return that path."""
    plain = make_checkpoint(replace(read_model("llama"), name=name, config=CONFIG), PLAIN, folder)
    encode(plain, ENCODINGS[name])
    return plain.rename(folder / name)


def encode(checkpoint: Path, encoding: Encoding) -> None:
    """Store the layers' matrices of a checkpoint in BF16 otherwise."""
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    for key, (dtype, values) in read_tensors(checkpoint).items():
        module = key.removesuffix(".weight")
        if module.endswith("_proj"):
            rows, columns = values.shape
            tensors |= {module + suffix: stored for suffix, stored in encoding.store(module, rows, columns).items()}
        else:
            tensors[key] = (dtype, values)
    write_tensors(checkpoint, tensors)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    write_json(checkpoint / "config.json", {**config, "quantization_config": encoding.config})


def write_tensors(folder: Path, tensors: dict[str, tuple[str, NDArray[Any]]]) -> None:
    """Write `model.safetensors`."""
    sources = [
        TensorSource(name, values.shape, lambda values=values: [values], dtype)
        for name, (dtype, values) in tensors.items()
    ]
    write_weights(folder, sources, 1 << 30)


def read_tensors(folder: Path) -> dict[str, tuple[str, NDArray[Any]]]:
    """What `write_tensors` wrote."""
    specs = read_safetensors_header(folder / "model.safetensors").values()
    return {
        s.name: (s.dtype, np.fromfile(s.path, DTYPES[s.dtype], s.n_elements, offset=s.offset).reshape(s.shape))
        for s in specs
    }


def _bits(name: str, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Random bits as numbers of a numpy type; of FP8, no NaN."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(-(-count // 8))
    return raw.view(np.uint8)[:count].view(dtype).reshape(shape)


def _fp8(name: str, shape: tuple[int, ...]) -> tuple[str, NDArray[np.uint8]]:
    codes = _bits(name, shape, "u1")
    return "F8_E4M3", np.where(codes & 0x7F == 0x7F, codes ^ 1, codes)


def _scales(name: str, shape: tuple[int, ...], dtype: str = "F32", exponent: int = -9) -> tuple[str, NDArray[Any]]:
    """From 2^exponent to just below 2^(exponent + 2), exact in BF16 and F16."""
    raw = _bits(name, shape, "<u2")
    values = np.ldexp(1 + (raw >> 1 & 0x7F).astype(np.float32) / 128, exponent + (raw & 1).astype(np.int32))
    if dtype == "BF16":
        return dtype, to_bf16(values)
    return dtype, values.astype({"F32": "<f4", "F16": "<f2"}[dtype])


def _exponents(name: str, shape: tuple[int, ...]) -> tuple[str, NDArray[np.uint8]]:
    return "U8", (_bits(name, shape, "u1") % 4 + 118).astype(np.uint8)


def _one(value: float) -> tuple[str, NDArray[np.float32]]:
    return "F32", np.full((), value, np.float32)


# FP8 and whole numbers of one byte


def _fp8_block(module: str, rows: int, columns: int) -> Stored:
    grid = (-(-rows // 128), -(-columns // 128))
    return {".weight": _fp8(module, (rows, columns)), ".weight_scale_inv": _scales(f"{module}.s", grid)}


def _fp8_tensor(module: str, rows: int, columns: int) -> Stored:
    return {
        ".weight": _fp8(module, (rows, columns)),
        ".weight_scale_inv": _scales(f"{module}.s", (), "BF16"),
        ".activation_scale": _scales(f"{module}.a", (), "BF16"),
    }


def _fbgemm(module: str, rows: int, columns: int) -> Stored:
    return {
        ".weight": _fp8(module, (rows, columns)),
        ".weight_scale": _scales(f"{module}.s", (rows, 1)),
        ".input_scale_ub": _one(1200),
    }


def _modelopt_fp8(module: str, rows: int, columns: int) -> Stored:
    cache = {f".{module[-6]}_scale": _one(1)} if module.endswith(("k_proj", "v_proj")) else {}
    scale = _scales(f"{module}.s", ())
    return {".weight": _fp8(module, (rows, columns)), ".weight_scale": scale, ".input_scale": _one(0.1), **cache}


def _byte(dtype: str, group: int = 0, *, zeros: bool = False) -> Callable[[str, int, int], Stored]:
    def store(module: str, rows: int, columns: int) -> Stored:
        grid = (rows, columns // group if group else 1)
        codes = _fp8(module, (rows, columns)) if dtype != "I8" else ("I8", _bits(module, (rows, columns), "i1"))
        stored = {".weight": codes, ".weight_scale": _scales(f"{module}.s", grid, exponent=-11)}
        return {**stored, **({".weight_zero_point": ("I8", _bits(f"{module}.z", grid, "i1"))} if zeros else {})}

    return store


def _mxfp8(module: str, rows: int, columns: int) -> Stored:
    return {".weight": _fp8(module, (rows, columns)), ".weight_scale": _exponents(f"{module}.s", (rows, columns // 32))}


# Whole numbers of a few bits


def _packed(
    bits: int, group: int = 0, *, zeros: bool = False, order: bool = False
) -> Callable[[str, int, int], Stored]:
    def store(module: str, rows: int, columns: int) -> Stored:
        grid = (rows, columns // group if group else 1)
        stored = {
            ".weight_packed": ("I32", _bits(module, (rows, -(-columns * bits // 32)), "<i4")),
            ".weight_scale": _scales(f"{module}.s", grid),
            ".weight_shape": ("I64", np.array([rows, columns])),
        }
        if zeros:
            stored[".weight_zero_point"] = ("I32", _bits(f"{module}.z", (-(-rows * bits // 32), grid[1]), "<i4"))
        if order:
            stored[".weight_g_idx"] = ("I32", _group_order(module, columns, group))
        return stored

    return store


def _packed_with_gaps(module: str, rows: int, columns: int) -> Stored:
    """Of 5 bits, as older versions packed them: two bits of each word are left over."""
    words = {
        ".weight_packed": _bits(module, (rows, -(-columns // 6)), "<i4"),
        ".weight_zero_point": _bits(f"{module}.z", (-(-rows // 6), columns // 64), "<i4"),
    }
    stored = {suffix: ("I32", values & ((1 << 30) - 1)) for suffix, values in words.items()}
    return {**_packed(5, 64)(module, rows, columns), **stored}


def _group_order(module: str, columns: int, group: int) -> NDArray[np.int32]:
    """Every group as often as any other, in any order."""
    order = np.argsort(_bits(f"{module}.o", (columns,), "<u4"), kind="stable")
    return (order // group).astype(np.int32)


def _gptq(bits: int, group: int = 0, *, order: bool | None = False) -> Callable[[str, int, int], Stored]:
    """`order` None leaves the order of groups out."""

    def store(module: str, rows: int, columns: int) -> Stored:
        size = group or columns
        groups = _group_order(module, columns, size) if order else np.arange(columns, dtype=np.int32) // size
        stored = {
            ".qweight": ("I32", _bits(module, (columns * bits // 32, rows), "<i4")),
            ".qzeros": ("I32", _bits(f"{module}.z", (columns // size, rows * bits // 32), "<i4")),
            ".scales": _scales(f"{module}.s", (columns // size, rows), "F16"),
            ".g_idx": ("I32", groups),
        }
        if order is None:
            stored.pop(".g_idx")
        return stored

    return store


def _awq(group: int, *, zeros: bool = True) -> Callable[[str, int, int], Stored]:
    def store(module: str, rows: int, columns: int) -> Stored:
        stored = {
            ".qweight": ("I32", _bits(module, (columns, rows // 8), "<i4")),
            ".qzeros": ("I32", _bits(f"{module}.z", (columns // group, rows // 8), "<i4")),
            ".scales": _scales(f"{module}.s", (columns // group, rows), "F16"),
        }
        if not zeros:
            stored.pop(".qzeros")
        return stored

    return store


# FP4 and tables


def _mxfp4(module: str, rows: int, columns: int) -> Stored:
    return {
        ".weight_packed": ("U8", _bits(module, (rows, columns // 2), "u1")),
        ".weight_scale": _exponents(f"{module}.s", (rows, columns // 32)),
    }


def _nvfp4(*names: str, factor: float) -> Callable[[str, int, int], Stored]:
    def store(module: str, rows: int, columns: int) -> Stored:
        dtype, scales = _fp8(f"{module}.s", (rows, columns // 16))
        return {
            names[0]: ("U8", _bits(module, (rows, columns // 2), "u1")),
            ".weight_scale": (dtype, scales & 0x7F),
            names[1]: _one(factor * (1 + len(module) / 64)),
            names[2]: _one(0.1),
        }

    return store


_TABLES = {
    "nf4": [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
            0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    "fp4": [0.0, 0.0052083335, 0.6666667, 1.0, 0.33333334, 0.5, 0.16666667, 0.25,
            0.0, -0.0052083335, -0.6666667, -1.0, -0.33333334, -0.5, -0.16666667, -0.25],
}  # fmt: skip


def _bnb4(kind: str, block: int, *, nested: bool = False) -> Callable[[str, int, int], Stored]:
    def store(module: str, rows: int, columns: int) -> Stored:
        n_blocks = rows * columns // block
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [rows, columns]}
        stored: Stored = {
            ".weight": ("U8", _bits(module, (rows * columns // 2, 1), "u1")),
            ".weight.quant_map": ("F32", np.array(_TABLES[kind], np.float32)),
            ".weight.absmax": _scales(f"{module}.s", (n_blocks,), exponent=-5),
        }
        if nested:
            stored[".weight.absmax"] = ("U8", _bits(f"{module}.s", (n_blocks,), "u1"))
            stored[".weight.nested_absmax"] = _scales(f"{module}.n", (-(-n_blocks // 256),), exponent=-6)
            stored[".weight.nested_quant_map"] = ("F32", np.sort(_scales(f"{module}.m", (256,), exponent=-1)[1]))
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03125}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return {**stored, f".weight.quant_state.bitsandbytes__{kind}": ("U8", text)}

    return store


def _bnb8(module: str, rows: int, columns: int) -> Stored:
    return {
        ".weight": ("I8", _bits(module, (rows, columns), "i1")),
        ".SCB": _scales(f"{module}.s", (rows,), exponent=-4),
        ".weight_format": ("U8", np.zeros((), np.uint8)),
    }


# Configs


def _ct(form: str, *weights: dict[str, Any], store: Callable[[str, int, int], Stored]) -> Encoding:
    groups = {f"group_{i}": {"targets": ["Linear"], "weights": w} for i, w in enumerate(weights)}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Encoding(config, store)


def _int(bits: int, group: int = 0, *, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}


def _float(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, **more}


def _ct_block(module: str, rows: int, columns: int) -> Stored:
    stored = _fp8_block(module, rows, columns)
    return {".weight": stored[".weight"], ".weight_scale": stored[".weight_scale_inv"]}


def _mixed(module: str, rows: int, columns: int) -> Stored:
    if module.endswith("down_proj"):
        return _byte("F8_E4M3")(module, rows, columns)
    if module.endswith("q_proj"):
        return _packed(8, 64, zeros=True)(module, rows, columns)
    return _packed(4, 32)(module, rows, columns)


def _gptq_mixed(module: str, rows: int, columns: int) -> Stored:
    return (_gptq(8, 32, order=True) if module.endswith("down_proj") else _gptq(4, 64))(module, rows, columns)


def _gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False, **more}


_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
ENCODINGS = {
    "fp8-block": Encoding({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8_block),
    "fp8-tensor": Encoding({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "fbgemm-fp8": Encoding({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _fbgemm),
    "modelopt-fp8": Encoding({"quant_method": "modelopt", "quant_algo": "FP8"}, _modelopt_fp8),
    "modelopt-nvfp4": Encoding(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        _nvfp4(".weight", ".weight_scale_2", ".input_scale", factor=0.0001),
    ),
    "ct-float-channel": _ct("float-quantized", _float(8, "channel"), store=_byte("F8_E4M3")),
    "ct-float-block": _ct(
        "float-quantized", _float(8, "block", block_structure=[128, 128]), store=_ct_block
    ),
    "ct-int8": _ct("int-quantized", _int(8), store=_byte("I8")),
    "ct-int8-asym": _ct("int-quantized", _int(8, symmetric=False), store=_byte("I8", zeros=True)),
    "ct-naive-group": _ct("naive-quantized", _int(8, 64), store=_byte("I8", 64)),
    "ct-pack3": _ct("pack-quantized", _int(3, 64), store=_packed(3, 64)),
    "ct-pack4": _ct("pack-quantized", _int(4, 32), store=_packed(4, 32)),
    "ct-pack4-asym": _ct("pack-quantized", _int(4, 64, symmetric=False), store=_packed(4, 64, zeros=True)),
    "ct-pack4-order": _ct("pack-quantized", _int(4, 64), store=_packed(4, 64, order=True)),
    "ct-pack5-asym": _ct("pack-quantized", _int(5, 64, symmetric=False), store=_packed(5, 64, zeros=True)),
    "ct-pack5-gaps": _ct("pack-quantized", _int(5, 64, symmetric=False), store=_packed_with_gaps),
    "ct-pack8-channel": _ct("pack-quantized", _int(8), store=_packed(8)),
    "ct-mixed": _ct(
        "mixed-precision", _float(8, "channel"), _int(8, 64, symmetric=False), _int(4, 32), store=_mixed
    ),
    "ct-mxfp4": _ct("mxfp4-pack-quantized", _float(4, "group", group_size=32), store=_mxfp4),
    "ct-mxfp8": _ct("mxfp8-quantized", _float(8, "group", group_size=32, scale_dtype="torch.uint8"), store=_mxfp8),
    "ct-nvfp4": _ct(
        "nvfp4-pack-quantized",
        _float(4, "tensor_group", group_size=16),
        store=_nvfp4(".weight_packed", ".weight_global_scale", ".input_global_scale", factor=10000),
    ),
    "gptq2": Encoding(_gptq_config(2, 64), _gptq(2, 64)),
    "gptq3": Encoding(_gptq_config(3, 32, desc_act=True), _gptq(3, 32, order=True)),
    "gptq4": Encoding(_gptq_config(4, 64), _gptq(4, 64)),
    "gptq4-order": Encoding(_gptq_config(4, 32, desc_act=True), _gptq(4, 32, order=True)),
    "gptq4-v2": Encoding(_gptq_config(4, -1, checkpoint_format="gptq_v2"), _gptq(4)),
    "gptq4-plain": Encoding(_gptq_config(4, 64), _gptq(4, 64, order=None)),
    "gptq8": Encoding(_gptq_config(8, 64), _gptq(8, 64)),
    "gptq-mixed": Encoding(
        _gptq_config(4, 64, dynamic={"+:.*down_proj": {"bits": 8, "group_size": 32, "desc_act": True}}), _gptq_mixed
    ),
    "awq": Encoding(_AWQ_CONFIG, _awq(64)),
    "awq-symmetric": Encoding({**_AWQ_CONFIG, "zero_point": False}, _awq(32, zeros=False)),
    "bnb-nf4": Encoding({**_BNB, "bnb_4bit_quant_type": "nf4"}, _bnb4("nf4", 64)),
    "bnb-nf4-nested": Encoding({**_BNB, "bnb_4bit_use_double_quant": True}, _bnb4("nf4", 64, nested=True)),
    "bnb-fp4": Encoding({**_BNB, "bnb_4bit_quant_type": "fp4"}, _bnb4("fp4", 128)),
    "bnb-int8": Encoding({"load_in_8bit": True}, _bnb8),
}  # fmt: skip
