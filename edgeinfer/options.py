"""What users can set, with the defaults, in one place that imports nothing heavy: the command line reads it.

`edgeinfer.convert`, `edgeinfer.load` and the commands take these; a name here is the option's name with underscores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token from a row of logits; llama.cpp's names and neutral values.

    A value at its neutral setting (`temperature` 0 excepted, which means greedy) leaves its sampler out.
    Defaults are llama.cpp's (common/common.h, common_params_sampling).
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    seed: int | None = None
    """None draws a fresh seed; the one used is always reported."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class RuntimeOptions:
    """How a model is loaded and run; llama.cpp's names."""

    ctx_size: int | None = None
    """Tokens that the KV cache holds; None takes the model's training context, up to `DEFAULT_CTX_SIZE`."""
    threads: int | None = None
    """None uses the physical cores that this process may run on."""
    batch_size: int = 2048
    ubatch_size: int = 512
    flash_attn: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False


DEFAULT_CTX_SIZE = 4096


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How a checkpoint becomes a GGUF file; llama-quantize's names."""

    type: str = "Q4_K_M"
    tensor_type: tuple[tuple[str, str], ...] = ()
    """(regular expression, type) pairs; the first that is found in a tensor's name decides."""
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    pure: bool = False
    """Every tensor gets the file's type; no mixture."""
    fallback: bool = True
    """Give a tensor whose rows do not divide into blocks another type, rather than refuse."""
    threads: int | None = None
    overwrite: bool = False
    verify: bool = True
