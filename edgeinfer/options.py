"""What users can set, with the defaults, in one place that imports nothing heavy: the command line reads it.

`edgeinfer.convert`, `edgeinfer.load` and the commands take these; a name here is the option's name with underscores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from typing import Any

from edgeinfer.errors import UsageError

MAX_THREADS = 512
MAX_ADAPTER_SCALE = 1e6
MAX_DRAFT_LAYERS = 512
MAX_DRAFT_TOKENS = 63
"""With the token that is known, 64 rows of a request in a step."""
DRAFTS = ("auto", "off", "lookup", "layers")

Adapters = tuple[tuple[str | PathLike[str], float], ...]
"""Paths and scales."""


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
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    """None draws a fresh seed; the one used is always reported."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse with a UsageError what the samplers would answer with nonsense or by ending the process."""
        _need(self, "temperature", 0, math.inf)
        for name in ("top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"):
            _need(self, name, 0, 1)
        _need(self, "repeat_penalty", 1e-6, 1e6)
        for name in ("presence_penalty", "frequency_penalty"):
            _need(self, name, -math.inf, math.inf)
        for name in ("dry_multiplier", "mirostat_tau", "mirostat_eta"):
            _need(self, name, 0, math.inf)
        _need(self, "repeat_last_n", 0, 2**20)
        _need(self, "top_k", -1, 2**31 - 1)
        _need(self, "mirostat", 0, 2)
        if self.seed is not None:
            _need(self, "seed", 0, 2**32 - 2)
        for token, bias in self.logit_bias:
            if math.isnan(bias):
                raise UsageError(f"the logit_bias of token {token} is nan", "give a number, or -inf to forbid it")


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
    cache_type_k: str | None = None
    """None is `DEFAULT_CACHE_TYPE`, or a smaller type where the memory does not suffice for that."""
    cache_type_v: str | None = None
    mmap: bool = True
    mlock: bool = False
    gpu_layers: int | str = "auto"
    """Layers on the GPUs, the last ones first, the output counted as one more: a number, "all", or "auto" (as fit)."""
    split_mode: str = "layer"
    """What goes to each of several GPUs: whole layers, rows of matrices, or everything to `main_gpu` ("none")."""
    tensor_split: tuple[float, ...] = ()
    """How much each GPU gets, in proportion; empty goes by their free memory."""
    main_gpu: int = 0
    prefix_cache: bool = True
    """Keep the KV state of prompts on disk, and use what is there."""
    draft: str = "auto"
    """Where drafts of the next tokens come from, which the model verifies several at a time: a name of `DRAFTS`, or the
    path of a smaller model, a `.gguf` file; "off" for none."""
    draft_max: int = MAX_DRAFT_TOKENS
    """The most tokens of a draft."""
    draft_layers: int | None = None
    """With the draft "layers", how many of the first ones; None leaves out a sixth, those after the middle."""
    lora: Adapters = ()
    """GGUF adapters that are added to the weights, each with what it is multiplied with."""

    def __post_init__(self) -> None:
        """Refuse with a UsageError what the library would answer by ending the process."""
        for name, most in (("ctx_size", 2**31 - 1), ("threads", MAX_THREADS)):
            if getattr(self, name) is not None:
                _need(self, name, 1, most)
        _need(self, "batch_size", 1, 2**20)
        _need(self, "ubatch_size", 1, 2**20)
        _need_one_of(self, "flash_attn", FLASH_ATTN)
        for name in ("cache_type_k", "cache_type_v"):
            if getattr(self, name) is not None:
                _need_one_of(self, name, CACHE_TYPES)
        if self.draft not in DRAFTS and not self.draft_is_file:
            raise UsageError(f"draft is {self.draft!r}", f"one of {', '.join(DRAFTS)}, or a .gguf file", field="draft")
        _need(self, "draft_max", 1, MAX_DRAFT_TOKENS)
        if self.draft_layers is not None:
            _need(self, "draft_layers", 1, MAX_DRAFT_LAYERS)
            if self.draft != "layers":
                raise UsageError(
                    "draft_layers is given without draft layers", "drop it, or choose that draft", field="draft_layers"
                )
        if self.flash_attn == "off" and self.type_v not in UNQUANTIZED_CACHE_TYPES:
            raise UsageError("a quantized V cache needs flash attention", "drop flash_attn off or cache_type_v")
        if isinstance(self.gpu_layers, str):
            _need_one_of(self, "gpu_layers", GPU_LAYERS)
        else:
            _need(self, "gpu_layers", 0, 2**31 - 1)
        _need_one_of(self, "split_mode", SPLIT_MODES)
        _need(self, "main_gpu", 0, MAX_GPUS - 1)
        if len(self.tensor_split) > MAX_GPUS or not all(0 <= part < math.inf for part in self.tensor_split):
            raise UsageError(
                f"tensor_split is {self.tensor_split}", f"give up to {MAX_GPUS} numbers from 0 on", "tensor_split"
            )
        if self.tensor_split and not any(self.tensor_split):
            raise UsageError("tensor_split gives no GPU anything", "give one of them more than 0", "tensor_split")
        _check_adapters(self.lora)

    @property
    def type_k(self) -> str:
        """The type of the K cache, unless something smaller is made of it."""
        return self.cache_type_k or DEFAULT_CACHE_TYPE

    @property
    def type_v(self) -> str:
        """The type of the V cache, unless something smaller is made of it."""
        return self.cache_type_v or DEFAULT_CACHE_TYPE

    @property
    def draft_is_file(self) -> bool:
        """Whether `draft` is the path of a model."""
        return self.draft.endswith(".gguf")


DEFAULT_CTX_SIZE = 4096
DEFAULT_CACHE_TYPE = "f16"
UNQUANTIZED_CACHE_TYPES = ("f32", "f16", "bf16")
GPU_LAYERS = ("auto", "all")
SPLIT_MODES = ("none", "layer", "row")
MAX_GPUS = 16
FLASH_ATTN = ("auto", "on", "off")
ON_OVERFLOW = ("error", "truncate")
"""What becomes of a conversation that no longer fits the context."""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How a checkpoint becomes a GGUF file; llama-quantize's names."""

    type: str | None = None
    """None is Q4_K_M, or F32 for an adapter, or what a size or bits per weight leave."""
    target_size: int | None = None
    """Instead of a type: the most bytes that the output may have, all its files together."""
    target_bpw: float | None = None
    """Instead of a type: the most bits per weight that the output may have in the mean."""
    tensor_type: tuple[tuple[str, str], ...] = ()
    """(regular expression, type) pairs; the first that is found in a tensor's name decides."""
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    pure: bool = False
    """Every tensor gets the file's type; no mixture."""
    fallback: bool = True
    """Give a tensor whose rows do not divide into blocks another type, rather than refuse."""
    pre: str | None = None
    """llama.cpp's name of the pre-tokenizer; None finds it out."""
    allow_requantize: bool = False
    """Quantize tensors of a GGUF source that are quantized already."""
    split_max_size: int | None = None
    """Bytes of tensors that a file of the output may hold; None makes one file."""
    imatrix: str | PathLike[str] | None = None
    """An importance matrix of this model, GGUF or `.dat`."""
    calibrate: str | PathLike[str] | None = None
    """A text file to compute an importance matrix from first."""
    lora: Adapters = ()
    """PEFT adapter directories to merge into the weights, each with what it is multiplied with."""
    base: str | PathLike[str] | None = None
    """Of an adapter, the checkpoint that it was trained on; None takes what the adapter states."""
    threads: int | None = None
    overwrite: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        """Refuse with a UsageError numbers and names that cannot be, and what contradicts each other."""
        if self.imatrix is not None and self.calibrate is not None:
            raise UsageError("--imatrix and --calibrate are both given", "use a matrix, or compute one")
        if self.pre == "":  # which the library would take for "default"
            raise UsageError("--pre without a name", "drop it, or name one of llama.cpp's pre-tokenizers")
        _check_adapters(self.lora)
        if self.threads is not None:
            _need(self, "threads", 1, MAX_THREADS)
        if self.split_max_size is not None:
            _need(self, "split_max_size", 1, 2**63 - 1)
        if self.target_size is not None:
            _need(self, "target_size", 1, 2**63 - 1)
        if self.target_bpw is not None:
            _need(self, "target_bpw", 0.01, 64)
        self._check_target()

    def _check_target(self) -> None:
        given = {
            "--target-size": self.target_size is not None,
            "--target-bpw": self.target_bpw is not None,
            "-t": self.type is not None,
            "--pure": self.pure,
        }
        names = [name for name, is_given in given.items() if is_given]
        if self.has_target and len(names) > 1:
            raise UsageError(f"{names[0]} and {names[1]} are both given", "each of them decides the types: drop one")

    @property
    def has_target(self) -> bool:
        """Whether the types follow from a size."""
        return self.target_size is not None or self.target_bpw is not None

    @property
    def file_type(self) -> str | None:
        """The file type's name, or None for the default; with a target, what tensors have until theirs is chosen."""
        return "Q8_0" if self.has_target else self.type


def parse_adapter(text: str) -> tuple[str, float]:
    """`PATH` or `PATH=SCALE`; where no number follows, an `=` is a part of the path."""
    path, found, number = text.rpartition("=")
    try:
        return (path, float(number)) if found and path else (text, 1.0)
    except ValueError:
        return text, 1.0


def _check_adapters(adapters: Adapters) -> None:
    for path, scale in adapters:
        if not str(path):
            raise UsageError("lora is without a name", "give a path, with =SCALE if you like", field="lora")
        if not abs(scale) <= MAX_ADAPTER_SCALE:  # NaN compares with nothing
            raise UsageError(
                f"lora has the scale {scale} for {path}",
                f"give a number from {-MAX_ADAPTER_SCALE:g} to {MAX_ADAPTER_SCALE:g}",
                field="lora",
            )


def parse_gpu_layers(text: str) -> int | str:
    """`auto`, `all` or a number."""
    if text in GPU_LAYERS:
        return text
    if text.isdecimal() and len(text) <= len(str(2**31)):
        return int(text)
    raise UsageError(f"--gpu-layers is {text!r}", "auto, all, or a number of layers from 0 on")


def parse_tensor_split(text: str) -> tuple[float, ...]:
    """`3,1`: how much each GPU gets."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UsageError(f"--tensor-split is {text!r}", "give numbers with commas between them, as 3,1") from None


def parse_logit_bias(text: str) -> tuple[int, float]:
    """`ID+BIAS` or `ID-BIAS`, llama.cpp's way; `ID-inf` forbids a token."""
    for sign in "+-":
        token, found, value = text.partition(sign)
        if found and token.isdigit():
            try:
                return int(token), float(sign + value)
            except ValueError:
                break
    raise UsageError(f"logit-bias {text[:40]!r} is not ID+BIAS or ID-BIAS", "for example 42-inf or 42+1.5")


def _need(options: Any, name: str, least: float, most: float) -> None:
    """A number from `least` to `most`, never NaN or infinity."""
    value = getattr(options, name)
    if not (least <= value <= most and math.isfinite(value)):
        span = f"from {least:.10g} to {most:.10g}" if math.isfinite(most) else f"of at least {least:g}"
        if not math.isfinite(least):
            span = "that is finite"
        raise UsageError(f"{name} is {value}", f"give a number {span}", field=name)


def _need_one_of(options: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(options, name)
    if value not in choices:
        raise UsageError(f"{name} is {value!r}", f"one of {', '.join(choices)}", field=name)
