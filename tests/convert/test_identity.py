"""Our one pass against llama.cpp's two steps: the same tensors to the byte, the same metadata.

golden.json is made by scripts/golden_conversions.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from golden_conversions import CHECKPOINTS, GOLDEN, open_checkpoint, readable_metadata, summarize
from shared_work import shared_by_conversions

from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.convert.file_types import FILE_TYPES
from edgeinfer.errors import UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions

pytestmark = pytest.mark.model

golden: dict[str, Any] = json.loads(GOLDEN.read_text("utf-8"))["checkpoints"]

# What we write differently, and why: docs/convert.md.
DEVIATIONS = {"tiny-qwen2": {"tokenizer.ggml.add_space_prefix"}}


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and what llama.cpp made of it."""

    name: str
    path: Path
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    path = open_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))
    with shared_by_conversions():
        yield Case(request.param, path, golden[request.param])


SLOW = ("IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS")
"""A matter of minutes: `make conformance` runs them. Of smaller models test_gguf_source.py has the like."""


@pytest.mark.parametrize("file_type", [pytest.param(t, marks=[pytest.mark.slow] * (t in SLOW)) for t in FILE_TYPES])
def test_tensors_are_llama_cpps_to_the_byte(case: Case, file_type: str, tmp_path: Path) -> None:
    options = ConvertOptions(type=file_type, verify=False)
    expected = case.expected["types"][file_type]
    if expected is None:
        with pytest.raises(UsageError, match="needs an importance matrix"):
            plan_conversion(case.path, options=options)
        return
    planned = plan_conversion(case.path, tmp_path / "out.gguf", options)
    run_conversion(planned, options)
    header = read_header(planned.output)
    assert summarize(header) == expected
    assert [(t.name, t.shape, t.type, t.nbytes) for t in planned.plan.tensors] == [
        (t.name, t.shape, t.type, t.nbytes) for t in header.tensors
    ]
    assert planned.nbytes == planned.output.stat().st_size


def test_metadata_is_llama_cpps(case: Case, tmp_path: Path) -> None:
    options = ConvertOptions(type="BF16")
    planned = plan_conversion(case.path, tmp_path / "out.gguf", options)
    run_conversion(planned, options)
    ours, theirs = readable_metadata(read_header(planned.output)), case.expected["metadata"]
    different = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert different == DEVIATIONS.get(case.name, set())
