"""What running a model takes, in bytes, from its headers alone.

The sizes are those of llama.cpp's buffers: src/llama-kv-cache.cpp, src/llama-graph.cpp, ggml/src/ggml-cpu/repack.cpp.
What cannot be read off a header was measured with `scripts/memory_plan.py`, which compares all of it with real runs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.describe import (
    KV_ELEMENT_NBYTES,
    computing_tensors,
    kv_nbytes_per_token,
    recurrent_state_nbytes,
)
from edgeinfer.gguf_file.header import Header, TensorInfo
from edgeinfer.gguf_file.recurrent import activation_elements
from edgeinfer.runtime.vocabulary import METADATA_KEY

KV_PADDING_TOKENS = 256
PROGRAM_NBYTES = 57 << 20
"""Python, numpy, the C library and what a command imports."""
TOKEN_NBYTES = 206
"""Of the vocabulary: each token's text twice, with the tables around it."""
MERGE_NBYTES = 82
CANDIDATE_NBYTES = 40
"""Of a token while one is chosen: its logit, and what the samplers keep of it."""
QUEUED_NBYTES = 256 << 20
"""State of prompts that waits to be written to the prefix cache, at most."""
CELL_NBYTES = 64
"""What the library notes about each token's place in the cache."""
_F32_NBYTES = 4
_MASK_NBYTES = 6  # of an element: in F32 as it is filled, in F16 as flash attention reads it
_WORK_NBYTES = 1.2  # of an activation, quantized for a multiplication
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERTS = "_exps."
EMBEDDING_NAME = "token_embd.weight"
"""Its rows are looked up, in the original where there is a copy for multiplications."""
_HEAD = "output.weight"

# Which types the CPU's kernels want in another layout, by what the CPU has, and how many rows must go together.
_REPACKED_BY: tuple[tuple[str, dict[GGMLType, int]], ...] = (
    ("AVX2", {GGMLType.Q4_0: 8, GGMLType.Q4_K: 8, GGMLType.IQ4_NL: 8, GGMLType.MXFP4: 8}),
    ("AVX512", {GGMLType.Q2_K: 8}),
    (
        "DOTPROD",
        {
            GGMLType.Q4_0: 4,
            GGMLType.Q4_K: 8,
            GGMLType.Q5_K: 8,
            GGMLType.Q6_K: 8,
            GGMLType.IQ4_NL: 4,
            GGMLType.MXFP4: 4,
            GGMLType.Q8_0: 4,
            GGMLType.Q1_0: 4,
        },
    ),
    ("AMX_INT8", dict.fromkeys((GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.IQ4_XS), 32)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What is decided about a run, as far as it takes memory."""

    ctx_size: int
    type_k: str = "f16"
    type_v: str = "f16"
    repack: bool = True
    flash_attn: bool = True
    mmap: bool = True
    ubatch_size: int = 512
    prefix_cache: bool = True
    logit_rows: int = 2
    """Rows of logits that are kept at a time."""
    sequences: int = 1
    """That run at a time: each has a state of its own in recurrent layers."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of main memory, by what takes them."""

    weights: int
    """Of the file, while the model runs."""
    repacked: int
    """Copies of weights in the layout that the kernels want."""
    read_once: int
    """Of the mapped file, only while the model loads: the originals of the copies. The system can drop them."""
    kv: int
    """With the states of recurrent layers."""
    buffers: int
    """Activations, masks and logits."""
    vocabulary: int
    queued: int
    """What waits to be written to the prefix cache."""
    program: int = PROGRAM_NBYTES

    @property
    def total(self) -> int:
        """What must be free for the model to run at its speed."""
        return self.peak - self.read_once

    @property
    def peak(self) -> int:
        """The most that is resident: with the pages of the file that are read once."""
        return (
            self.weights
            + self.repacked
            + self.read_once
            + self.kv
            + self.buffers
            + self.vocabulary
            + self.queued
            + self.program
        )


def repacked_types(features: Collection[str]) -> dict[GGMLType, int]:
    """Types whose weights the library copies into another layout, and how many rows must go together in it."""
    found: dict[GGMLType, int] = {}
    for feature, types in _REPACKED_BY if "REPACK" in features else ():
        if feature in features:
            found.update(types)
    return found


class Footprint:
    """The sizes of one model: `headers` are those of all its shards, the first one with the metadata."""

    def __init__(self, headers: Sequence[Header], features: Collection[str]) -> None:
        self.header = headers[0]
        self.tensors = computing_tensors(self.header, (tensor for header in headers for tensor in header.tensors))
        self.features = frozenset(features)
        self._rows = repacked_types(self.features)

    @cached_property
    def n_layer(self) -> int:
        """How many blocks the model has."""
        return self._count("block_count")

    @cached_property
    def n_ctx_train(self) -> int:
        """The context length that the model was trained with; 0 where the header does not tell."""
        return self._count("context_length")

    @cached_property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self._count_of("tokenizer.ggml.tokens")

    @cached_property
    def is_tied(self) -> bool:
        """Whether the embedding serves as the output matrix too."""
        return all(tensor.name != _HEAD for tensor in self.tensors)

    def repacked_nbytes(self, tensor: TensorInfo) -> int:
        """Bytes of the copy that is made of a tensor; 0 for none."""
        rows = self._rows.get(tensor.type)
        is_multiplied = tensor.name.endswith(".weight") and len(tensor.shape) == (3 if _EXPERTS in tensor.name else 2)
        if not rows or not is_multiplied or tensor.shape[1] % rows:
            return 0
        if tensor.name == EMBEDDING_NAME and not self.is_tied:
            return 0
        return tensor.nbytes if tensor.name.startswith(("blk.", "output", EMBEDDING_NAME)) else 0

    @cached_property
    def state_nbytes(self) -> int:
        """What each sequence has in recurrent layers."""
        return recurrent_state_nbytes(self.header)

    @cached_property
    def _has_cells(self) -> bool:
        """Whether any layer has a KV cache; a header that does not tell counts as one that has."""
        return kv_nbytes_per_token(self.header) != 0

    def memory_nbytes(self, settings: Settings) -> int:
        """The KV cache, and the states of all sequences."""
        kv = self.kv_nbytes(settings.ctx_size, settings.type_k, settings.type_v)
        return kv + settings.sequences * self.state_nbytes

    def kv_nbytes(self, ctx_size: int, type_k: str, type_v: str) -> int:
        """The KV cache of all layers, with the notes about its cells."""
        if not self._has_cells:
            return 0
        bits = sum(8 * t.block_nbytes / t.block_length for t in (GGMLType[type_k.upper()], GGMLType[type_v.upper()]))
        per_token = (kv_nbytes_per_token(self.header) or 0) * bits / (16 * KV_ELEMENT_NBYTES)
        return int(_padded(ctx_size) * (per_token + CELL_NBYTES))

    def activation_nbytes(self, settings: Settings) -> int:
        """What a pass over a full context holds at a time, without the logits."""
        embedding, heads = self._count("embedding_length"), self._largest("attention.head_count")
        query = heads * self._count("attention.key_length", self._head_length())
        wide = self._feed_forward_length()
        n_tokens = min(settings.ubatch_size, settings.ctx_size)
        n_cells = _padded(settings.ctx_size) if self._has_cells else 0
        recurrent, states = activation_elements(self.header) if self.state_nbytes else (0, 0)
        values = max(2 * embedding + 3 * wide, 3 * embedding + 4 * query, embedding + recurrent)
        masks = 2 if self._count("attention.sliding_window") else 1
        scores = 0 if settings.flash_attn else heads * n_cells  # which flash attention never has all at a time
        work = max(wide, query, embedding) * _WORK_NBYTES
        new_states = settings.sequences * states * _F32_NBYTES
        return int(n_tokens * ((values + scores) * _F32_NBYTES + work + masks * n_cells * _MASK_NBYTES) + new_states)

    def head_lengths(self) -> tuple[int, ...]:
        """Elements of a key and of a value of one head, of each kind of layer; none where there is no such cache."""
        length = self._head_length()
        lengths = tuple(self._count(f"attention.{name}", length) for name in ("key_length", "value_length"))
        lengths += tuple(self._count(f"attention.{name}_swa", lengths[0]) for name in ("key_length", "value_length"))
        return () if self._count("attention.kv_lora_rank") or not all(lengths) else lengths

    def vocabulary_nbytes(self) -> int:
        """The vocabulary in the library, and what chooses a token; a carried tokenizer is another one in Python."""
        merges = self._count_of("tokenizer.ggml.merges")
        carried = METADATA_KEY in self.header.metadata
        tables = (1 + carried) * (self.n_vocab * TOKEN_NBYTES + merges * MERGE_NBYTES)
        return tables + self.n_vocab * CANDIDATE_NBYTES + self.header.data_offset  # which stays mapped

    def needs(self, settings: Settings, on_gpu: Collection[str] = ()) -> Needs:
        """What a run takes of the main memory when the tensors named in `on_gpu` are elsewhere."""
        weights = repacked = read_once = 0
        for tensor in self.tensors:
            copy = self.repacked_nbytes(tensor) if settings.repack else 0
            if tensor.name in on_gpu:
                read_once += tensor.nbytes if settings.mmap else 0
            elif not copy or tensor.name == EMBEDDING_NAME:  # rows of the embedding are looked up in the original
                weights += tensor.nbytes
                repacked += copy
            else:
                repacked += copy
                read_once += tensor.nbytes if settings.mmap else 0
        kv = self.memory_nbytes(settings)
        is_saved = settings.prefix_cache and not self.state_nbytes  # a state cannot be
        return Needs(
            weights=weights,
            repacked=repacked,
            read_once=read_once,
            kv=kv,
            buffers=self.activation_nbytes(settings) + settings.logit_rows * self.n_vocab * _F32_NBYTES,
            vocabulary=self.vocabulary_nbytes(),
            queued=min(QUEUED_NBYTES, kv) if is_saved else 0,
        )

    def needs_of(self, settings: Settings, ctx_size: int) -> Needs:
        """The same with another context."""
        return self.needs(replace(settings, ctx_size=ctx_size))

    def _feed_forward_length(self) -> int:
        """Of a dense layer, or of all experts that a token uses."""
        used = self._count("expert_used_count")
        experts = used * self._count("expert_feed_forward_length") + self._count("expert_shared_feed_forward_length")
        return max(self._largest("feed_forward_length") if not used or not experts else 0, experts)

    def _head_length(self) -> int:
        heads = self._largest("attention.head_count")
        return self._count("embedding_length") // heads if heads else 0

    def _largest(self, name: str) -> int:
        """A hyper-parameter that is one number or one per layer."""
        value = self.header.metadata.get(f"{self.header.architecture}.{name}")
        if isinstance(value, int):
            return max(0, value)
        return (
            max(0, int(value.max())) if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu" else 0
        )

    def _count(self, name: str, default: int = 0) -> int:
        return self.header.metadata.count(f"{self.header.architecture}.{name}", default)

    def _count_of(self, key: str) -> int:
        metadata = self.header.metadata
        return (metadata.value_type(key)[1] or 0) if key in metadata else 0


def layer_of(tensor: TensorInfo) -> int | None:
    """The block that a tensor belongs to."""
    match = _BLOCK.match(tensor.name)
    return int(match[1]) if match else None


def is_expert(tensor: TensorInfo) -> bool:
    """Whether a tensor holds the matrices of experts."""
    return _EXPERTS in tensor.name


def _padded(n_tokens: int) -> int:
    return -(-n_tokens // KV_PADDING_TOKENS) * KV_PADDING_TOKENS
