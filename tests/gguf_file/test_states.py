"""Models whose layers keep a state for each sequence: what that takes, and what in them would end the process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ggufs import write_gguf

from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.describe import describe, kv_nbytes_per_token, recurrent_state_nbytes
from edgeinfer.gguf_file.header import Header, read_header
from edgeinfer.gguf_file.limits import check_limits
from edgeinfer.runtime.footprint import Footprint, Settings

# Of Qwen3-Next-80B.
SIZES = {"conv_kernel": 4, "state_size": 128, "group_count": 16, "time_step_rank": 32, "inner_size": 4096}
ONE_STATE = (3 * (4096 + 2 * 2048) + 128 * 4096) * 4
PER_TOKEN = 2 * 32 * 2  # of an attention layer of `write_gguf`


def _header(tmp_path: Path, arch: str = "qwen3next", **changes: Any) -> Header:
    """Changes to None leave a key out."""
    values = {
        "block_count": 8,
        "rope.dimension_sections": [1, 1, 1, 0],
        **{f"ssm.{key}": value for key, value in SIZES.items()},
    } | {key.replace("__", "."): value for key, value in changes.items()}
    extra = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    return read_header(write_gguf(tmp_path / "a.gguf", arch=arch, extra=extra))


@pytest.mark.parametrize(
    ("changes", "attentions", "states"),
    [
        ({}, 2, 6),
        ({"full_attention_interval": 2}, 4, 4),
        ({"nextn_predict_layers": 1}, 1, 6),
        ({"attention__recurrent_layers": [True] * 3 + [False] * 5}, 5, 3),
        ({"attention__recurrent_layers": [True] * 3 + [False] * 5, "nextn_predict_layers": 1}, 4, 3),
    ],
)
def test_layers_with_a_state_have_no_cache(
    changes: dict[str, Any], attentions: int, states: int, tmp_path: Path
) -> None:
    header = _header(tmp_path, **changes)
    assert kv_nbytes_per_token(header) == attentions * PER_TOKEN
    assert recurrent_state_nbytes(header) == states * ONE_STATE
    need = describe(header).memory[0]
    assert (need.kv_nbytes, need.state_nbytes) == (2048 * attentions * PER_TOKEN, states * ONE_STATE)


def test_the_memory_plan_counts_a_state_for_each_sequence(tmp_path: Path) -> None:
    footprint = Footprint([_header(tmp_path)], frozenset())
    one, many = (footprint.needs(Settings(4096, sequences=n)).kv for n in (1, 8))
    assert many - one == 7 * 6 * ONE_STATE


def test_a_layer_for_one_more_token_is_not_read(tmp_path: Path) -> None:
    def weights(**changes: Any) -> int:
        header = _header(tmp_path, **{"block_count": 2, **changes})
        return Footprint([header], frozenset()).needs(Settings(4096)).weights

    assert weights() - weights(nextn_predict_layers=1) == 8 * 64 * 2  # blk.1.ffn_up.weight in F16


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.parametrize(
    "changes",
    [
        *({f"ssm__{key}": value} for key in SIZES for value in (0, None)),
        {"ssm__conv_kernel": 1},
        {"ssm__group_count": 5},
        {"ssm__inner_size": 4097},
    ],
    ids=str,
)
def test_delta_nets_that_cannot_be_are_refused(arch: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_limits(_header(tmp_path, arch))
    with pytest.raises(UnusableInputError, match="impossible states"):
        check_limits(_header(tmp_path, arch, **changes))


MIXERS = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 8,
}


@pytest.mark.parametrize(
    ("arch", "change"),
    [
        *(("mamba2", {key: 0}) for key in MIXERS),
        ("mamba", {"ssm.conv_kernel": 1}),
        ("mamba", {"ssm.time_step_rank": 0}),
        ("falcon-h1", {"ssm.group_count": 3}),
        ("granitehybrid", {"ssm.time_step_rank": 9}),
        ("granitehybrid", {"ssm.inner_size": 256}),
        ("rwkv7", {"wkv.head_size": 0}),
        ("rwkv7", {"wkv.head_size": 24}),
    ],
    ids=str,
)
def test_mixers_that_cannot_be_are_refused(arch: str, change: dict[str, Any], tmp_path: Path) -> None:
    def header(**changes: Any) -> Header:
        values = {**MIXERS, "wkv.head_size": 16, **changes}
        extra = {f"{arch}.{key}": value for key, value in values.items()}
        return read_header(write_gguf(tmp_path / "a.gguf", arch=arch, extra=extra))

    check_limits(header())
    with pytest.raises(UnusableInputError, match="impossible"):
        check_limits(header(**change))


def test_a_convolution_without_its_bias_is_refused(tmp_path: Path) -> None:
    """The library adds it without looking whether it is there."""
    header = read_header(
        write_gguf(tmp_path / "a.gguf", arch="mamba2", extra={f"mamba2.{k}": v for k, v in MIXERS.items()})
    )
    check_limits(header)
    convolution = replace(header.tensors[0], name="blk.0.ssm_conv1d.weight")
    with pytest.raises(UnusableInputError, match=r"lacks blk\.0\.ssm_conv1d\.bias"):
        check_limits(replace(header, tensors=(*header.tensors, convolution)))


def test_attention_in_every_0th_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInputError, match="full_attention_interval"):
        check_limits(_header(tmp_path, full_attention_interval=0))


@pytest.mark.parametrize("sections", [None, 0, [0, 0, 0, 0], [1, -1, 0, 0], [2**31 - 1] * 4, [], "x"])
def test_sections_that_cannot_be_are_refused(sections: Any, tmp_path: Path) -> None:
    check_limits(_header(tmp_path, "qwen3vl"))
    with pytest.raises(UnusableInputError, match="dimension_sections"):
        check_limits(_header(tmp_path, "qwen3vl", rope__dimension_sections=sections))
