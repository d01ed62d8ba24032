"""What other libraries make of quantized checkpoints. Runs in an environment with them; imports nothing of edgeinfer.

Takes one argument, a JSON file: `script` (the path of convert_hf_to_gguf.py) and `conversions`, pairs of a checkpoint
directory and an output. Where llama.cpp's script knows the method, it converts the checkpoint itself; elsewhere the
method's own library dequantizes it first, and where that has no code for a processor, the published layout is followed
here, one number at a time.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
KNOWN_TO_LLAMA_CPP = (
    "fp8-block", "fp8-tensor", "modelopt-fp8", "ct-float-channel", "ct-float-block", "ct-int8", "ct-pack4",
    "ct-pack4-asym", "gptq2", "gptq4", "gptq4-order", "gptq4-v2", "gptq8",
)  # fmt: skip


def main() -> None:
    """Do what the JSON file asks for."""
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    for checkpoint, output in job["conversions"]:
        source = Path(checkpoint)
        if source.name not in KNOWN_TO_LLAMA_CPP:
            source = dequantized(source, Path(output).with_suffix(".plain"))
        convert(Path(job["script"]), source, output)
        print(output, file=sys.stderr)


def convert(script: Path, checkpoint: Path, output: str) -> None:
    """Convert a checkpoint to F32 with llama.cpp's script, whatever its tokenizer."""
    sys.path.insert(0, str(script.parent))
    import conversion.base
    import convert_hf_to_gguf

    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    conversion.base.TextModel.set_vocab = lambda self: self._set_vocab_gpt2()
    model_class = convert_hf_to_gguf.get_model_class("LlamaForCausalLM")
    model_class.set_vocab = lambda self: self._set_vocab_gpt2()
    sys.argv = [str(script), str(checkpoint), "--outtype", "f32", "--outfile", output]
    convert_hf_to_gguf.main()


def dequantized(source: Path, target: Path) -> Path:
    """A checkpoint with the weights as F32."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text("utf-8"))
    quantization = config.pop("quantization_config")
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    stored = load_file(source / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if "_proj" not in name}
    for module in dict.fromkeys(name.partition("_proj.")[0] + "_proj" for name in stored if "_proj." in name):
        parts = {name.removeprefix(f"{module}."): t for name, t in stored.items() if name.startswith(f"{module}.")}
        plain[f"{module}.weight"] = dequantize(source.name, quantization, parts).float().contiguous()
    save_file(plain, target / "model.safetensors", {"format": "pt"})
    return target


def dequantize(name: str, quantization: dict[str, Any], parts: Tensors) -> torch.Tensor:
    """The weight of one module."""
    if name.startswith("ct-"):
        return compressed_tensors(name, quantization, parts)
    if name.startswith("bnb-"):
        return bitsandbytes(parts)
    if name == "modelopt-nvfp4":
        return fp4(parts["weight"], parts["weight_scale"].float() * parts["weight_scale_2"])
    if name.startswith("awq"):
        return awq(quantization, parts)
    if name.startswith("gptq"):
        return gptq(parts)
    assert name == "fbgemm-fp8"
    return parts["weight"].float() * parts["weight_scale"]


def compressed_tensors(name: str, quantization: dict[str, Any], parts: Tensors) -> torch.Tensor:
    """By the library's own compressor of the scheme that fits the stored tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    form, group = quantization["format"], quantization["config_groups"]["group_0"]
    if form == "mixed-precision":
        groups = quantization["config_groups"]
        at = 0 if "weight" in parts else 1 if "weight_zero_point" in parts else 2
        form, group = ("float-quantized", "pack-quantized", "pack-quantized")[at], groups[f"group_{at}"]
    if "gaps" in name:
        return with_gaps(parts)
    order = parts.pop("weight_g_idx", None)
    scheme = QuantizationScheme(targets=["Linear"], weights=group["weights"])
    if order is not None:
        # The library no longer does this: columns are in groups once they are sorted by the group that they are in.
        by_group = torch.argsort(order.long(), stable=True)
        rows, columns = parts["weight_shape"].tolist()
        per = 32 // scheme.weights.num_bits
        shifts = torch.arange(per) * scheme.weights.num_bits
        mask = (1 << scheme.weights.num_bits) - 1
        codes = (parts["weight_packed"].long()[..., None] >> shifts & mask).reshape(rows, columns)[:, by_group]
        packed = (codes.reshape(rows, -1, per) << shifts).sum(-1)
        parts["weight_packed"] = torch.where(packed < 1 << 31, packed, packed - (1 << 32)).int()
    if form == "nvfp4-pack-quantized":
        return fp4(parts["weight_packed"], parts["weight_scale"].float() / parts["weight_global_scale"])
    weight = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"]
    if order is not None:
        weight = weight[:, torch.argsort(by_group)]
    return weight


def with_gaps(parts: Tensors) -> torch.Tensor:
    """Six numbers of 5 bits in a word, as older versions of the library had them."""
    rows, columns = parts["weight_shape"].tolist()
    shifts = torch.arange(6) * 5
    codes = (parts["weight_packed"][..., None] >> shifts & 31).reshape(rows, -1)[:, :columns]
    zeros = (parts["weight_zero_point"].T[..., None] >> shifts & 31).reshape(columns // 64, -1)[:, :rows].T
    values = (codes - zeros.repeat_interleave(64, dim=1)).float()
    return values * parts["weight_scale"].repeat_interleave(64, dim=1)


def bitsandbytes(parts: Tensors) -> torch.Tensor:
    """By the library's functions."""
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    if "SCB" in parts:
        return functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
    weight = parts.pop("weight")
    state = functional.QuantState.from_dict(
        {k.removeprefix("weight."): v for k, v in parts.items()}, torch.device("cpu")
    )
    if state.shape[-1] % state.blocksize == 0:
        return functional.dequantize_4bit(weight, state)
    # The kernel for a CPU lets each row begin with a block, where quantizing did not.
    return _dequantize_4bit_compute(
        weight.reshape(-1), state.absmax, state.code, state.blocksize, state.shape, torch.float32
    )


def fp4(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers by compressed-tensors' function. Its compressor would round what comes out to BF16."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    rows, half = packed.shape
    return unpack_fp4_from_uint8(packed, rows, 2 * half).float() * scales.repeat_interleave(16, dim=1)


def awq(quantization: dict[str, Any], parts: Tensors) -> torch.Tensor:
    """By compressed-tensors' converter of AutoAWQ's checkpoints."""
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    converter = AutoAWQConverter.from_autoawq_config(quantization)
    qzeros = parts.get("qzeros")
    weight, scale, zeros = converter._convert_gemm_module(parts["qweight"], parts["scales"], qzeros)
    per_group = weight.shape[1] // scale.shape[1]
    values = weight.float()
    if zeros is not None:
        values -= zeros.float().repeat_interleave(per_group, dim=1)
    return values * scale.float().repeat_interleave(per_group, dim=1)


def gptq(parts: Tensors) -> torch.Tensor:
    """One number at a time, as AutoGPTQ packs them: from the lowest bit on, across the borders of words."""
    n_groups, n_rows = parts["scales"].shape
    n_words = parts["qweight"].shape[0]
    bits = parts["qzeros"].shape[1] * 32 // n_rows
    n_columns = n_words * 32 // bits
    groups = parts.get("g_idx", torch.arange(n_columns) // (n_columns // n_groups)).long()
    columns = parts["qweight"].T.contiguous().numpy()
    codes = torch.tensor([_numbers(column.tobytes(), bits, n_columns) for column in columns])
    zeros = torch.tensor([_numbers(row.numpy().tobytes(), bits, n_rows) for row in parts["qzeros"]]) + 1
    return parts["scales"].float().T[:, groups] * (codes - zeros.T[:, groups]).float()


def _numbers(data: bytes, bits: int, count: int) -> list[int]:
    run = int.from_bytes(data, "little")
    return [run >> i * bits & (1 << bits) - 1 for i in range(count)]


if __name__ == "__main__":
    main()
