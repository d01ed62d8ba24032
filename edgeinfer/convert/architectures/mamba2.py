"""Mamba 2: a state space whose heads decay by one number each, with a gated norm before the output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgeinfer.convert.architectures.base import (
    Architecture,
    Part,
    TensorRule,
    check_activation,
    impossible,
    n_layers,
    require,
    tensor,
)
from edgeinfer.convert.architectures.blocks import layers, norm
from edgeinfer.convert.architectures.mamba import RECURRENT_CONTEXT, backbone_tensors, convolution
from edgeinfer.convert.architectures.transforms import Elementwise, negative_exponential
from edgeinfer.convert.config import Config


@dataclass(frozen=True, slots=True)
class Mixer:
    """The sizes of a Mamba 2 mixer."""

    embd: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution sees: the heads, and for each group what goes into the state and what comes out."""
        return self.inner + 2 * self.groups * self.state

    @property
    def sections(self) -> tuple[int, ...]:
        """Rows of the projection into the mixer: gate, heads, into the state, out of it, and each head's time step."""
        return self.inner, self.inner, self.groups * self.state, self.groups * self.state, self.heads

    def metadata(self) -> dict[str, Any]:
        """The keys that llama.cpp's loader wants."""
        return {
            "ssm.conv_kernel": self.kernel,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.heads,
            "ssm.group_count": self.groups,
        }


def mixer(config: Config, *, prefix: str = "", inner: int | None = None) -> Mixer:
    """The mixer of a config, whose keys begin with `prefix`; UnusableInputError where sizes don't fit together.

    Heads are `inner` elements together, else `expand` times the hidden size.
    """
    names = _PREFIXED if prefix else _PLAIN
    embd = config.integer("hidden_size")
    if inner is None:
        inner = int(config.number(f"{prefix}expand") * embd)
    heads, groups = config.integer(names["heads"]), config.integer(names["groups"])
    if inner % heads or heads % groups:
        raise impossible(config, f"{inner} elements in {heads} heads ({names['heads']}) in {groups} groups")
    found = Mixer(
        embd,
        heads,
        inner // heads,
        groups,
        config.integer(names["state"]),
        config.integer(names["kernel"], at_least=2),
    )
    if config.get(names["head_dim"]) != "auto" and config.integer(names["head_dim"]) != found.head_dim:
        raise impossible(config, f"{heads} heads of {config.get(names['head_dim'])} elements, {inner} together")
    return found


_PLAIN = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "kernel": "conv_kernel",
}
_PREFIXED = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
}


def mixer_tensors(
    m: Mixer,
    to: str,
    at: str,
    *,
    has_norm: bool = True,
    into: tuple[Elementwise, ...] = (),
    out: Elementwise | None = None,
) -> Iterator[TensorRule]:
    """The mixer at `at`; `into` and `out` change the sections of the first projection, and the last one."""
    shape = (sum(m.sections), m.embd)
    starts = [sum(m.sections[:i]) for i in range(len(m.sections))]
    yield TensorRule(
        f"{to}.ssm_in.weight",
        shape,
        tuple(
            Part(f"{at}.in_proj.weight", shape, start, n_rows, change=change)
            for start, n_rows, change in zip(starts, m.sections, into or [None] * len(starts), strict=True)
        ),
    )
    yield from convolution(to, at, m.channels, m.kernel)
    yield tensor(f"{to}.ssm_dt.bias", f"{at}.dt_bias", (m.heads,))
    a_log = Part(f"{at}.A_log", (m.heads,), change=negative_exponential)
    yield TensorRule(f"{to}.ssm_a", (m.heads, 1), (a_log,))
    yield TensorRule(f"{to}.ssm_d", (m.heads, 1), (Part(f"{at}.D", (m.heads,)),))
    if has_norm:
        length = m.inner // m.groups
        weight = Part(f"{at}.norm.weight", (m.inner,), row_length=length)
        yield TensorRule(f"{to}.ssm_norm.weight", (m.groups, length), (weight,))
    yield tensor(f"{to}.ssm_out.weight", f"{at}.out_proj.weight", (m.embd, m.inner), change=out)


def metadata(config: Config) -> dict[str, Any]:
    """Raises UnusableInputError for variants that llama.cpp lacks."""
    check_activation(config, "hidden_act", "silu", "swish")
    require(config, "use_bias", False)
    require(config, "use_conv_bias", True)
    require(config, "time_step_limit", None, [0, math.inf])
    return {
        "context_length": RECURRENT_CONTEXT,
        "embedding_length": config.integer("hidden_size"),
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "block_count": n_layers(config),
        **mixer(config).metadata(),
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon"),
    }


def tensors(config: Config) -> Iterator[TensorRule]:
    """A norm and a mixer in each layer."""
    yield from backbone_tensors(config)
    for to, at in layers(config, "backbone.layers"):
        yield from norm(f"{to}.attn_norm", f"{at}.norm", config.integer("hidden_size"))
        yield from mixer_tensors(mixer(config), to, f"{at}.mixer")


ARCHITECTURE = Architecture(
    name="mamba2",
    defaults={
        "conv_kernel": 4,
        "expand": 2,
        "head_dim": 64,
        "hidden_size": 4096,
        "layer_norm_epsilon": 1e-5,
        "n_groups": 8,
        "num_heads": 128,
        "num_hidden_layers": 64,
        "state_size": 128,
        "tie_word_embeddings": False,
        "use_bias": False,
        "use_conv_bias": True,
        "vocab_size": 32768,
    },
    metadata=metadata,
    tensors=tensors,
    prefix="model.",
)
