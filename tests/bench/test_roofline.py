"""Which weights a token reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.bench.machine import reset_peak_rss
from edgeinfer.bench.roofline import memory_bandwidth_gbps, weight_nbytes_per_token
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import Header, TensorInfo
from edgeinfer.gguf_file.metadata import Metadata
from edgeinfer.native.devices import peak_rss_bytes


class _Numbers(Metadata):
    def __init__(self, numbers: dict[str, int]) -> None:
        super().__init__(b"", {})
        self._numbers = numbers

    def number(self, key: str, default: int | float | None = None) -> int | float | None:
        return self._numbers.get(key.partition(".")[2], default)


def _header(names: list[str], **numbers: int) -> Header:
    tensors = tuple(TensorInfo(name, (100, 10), GGMLType.Q8_0, 0, 1000) for name in names)
    return Header(Path("x"), 3, 32, _Numbers(numbers), tensors, 0, 0)


def test_a_tied_embedding_is_read_whole_as_the_head() -> None:
    assert weight_nbytes_per_token(_header(["token_embd.weight", "blk.0.x.weight"])) == 2000


def test_of_an_untied_embedding_one_row_is_read() -> None:
    assert weight_nbytes_per_token(_header(["token_embd.weight", "output.weight"])) == 1100


def test_of_the_experts_those_in_use_are_read() -> None:
    header = _header(["blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight"], expert_count=8, expert_used_count=2)
    assert weight_nbytes_per_token(header) == 1250


def test_the_machine_reads_memory_at_a_believable_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.bench.roofline.MAX_BUFFER_NBYTES", 16 << 20)
    assert 0.1 < memory_bandwidth_gbps(2) < 10_000


def test_the_peak_counts_this_process() -> None:
    reset_peak_rss()
    peak = peak_rss_bytes()
    assert peak == 0 or peak > 10 << 20
