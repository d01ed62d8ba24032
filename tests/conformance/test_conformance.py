"""Each architecture against its references: llama.cpp's script and quantizer to the byte, transformers' logits closely.

`golden/` holds what the references said; `make conformance` asks them anew and tests every type's data.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import GOLDEN, TYPES, type_table
from golden_conversions import readable_metadata, summarize
from numpy.typing import NDArray
from random_checkpoint import PLAIN, make_checkpoint, model_names, prompt, read_model
from shared_work import shared_by_conversions

from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.api.embed import open_encoder
from edgeinfer.api.load import load
from edgeinfer.errors import UsageError
from edgeinfer.gguf_file.describe import is_encoder
from edgeinfer.gguf_file.header import Header, read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.types import Refusal, Row, Tokens

golden: dict[str, Any] = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(GOLDEN.glob("*.json"))}
VARIANTS = [(name, variant) for name in golden for variant in golden[name]["variants"]]


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint and what the references said about it."""

    name: str
    path: Path
    expected: dict[str, Any]


@pytest.fixture(scope="module", params=VARIANTS, ids="-".join)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, variant = request.param
    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(read_model(name), variant, Path(folder))
        with shared_by_conversions():
            yield Case(name, path, golden[name]["variants"][variant])


def test_every_model_has_golden_data() -> None:
    assert set(golden) == set(model_names()), "scripts/conformance.py --update MODEL"


def test_every_tensor_has_the_type_that_llama_cpp_gives_it(case: Case, pytestconfig: pytest.Config) -> None:
    tables = case.expected["tables"]
    for file_type in tables if pytestconfig.getoption("--all-types") else TYPES:
        table = tables[file_type]
        options = ConvertOptions(type=file_type)
        if table is None:
            with pytest.raises(UsageError, match="needs an importance matrix"):
                plan_conversion(case.path, options=options)
            continue
        plan = plan_conversion(case.path, options=options).plan
        assert type_table((t.name, t.type.name) for t in plan.tensors) == table, file_type


@pytest.mark.parametrize("file_type", TYPES)
def test_tensors_are_llama_cpps_to_the_byte(case: Case, file_type: str, tmp_path: Path) -> None:
    header = _convert(case.path, file_type, tmp_path)
    assert summarize(header) == case.expected["types"][file_type]
    if file_type == "BF16":
        ours = {key: text for key, text in readable_metadata(header).items() if not key.startswith("tokenizer.")}
        theirs = case.expected["metadata"]
        different = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
        assert different == set(read_model(case.name).deviations), {k: (ours.get(k), theirs.get(k)) for k in different}


@pytest.mark.parametrize("name", golden)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = read_model(name)
    header = _convert(make_checkpoint(model, PLAIN, tmp_path), "F32", tmp_path, verify=True)
    outputs = _embedding(header, prompt(model)) if is_encoder(header) else _logits(header.path, prompt(model))
    for position, expected in golden[name]["logits"].items():
        np.testing.assert_allclose(outputs[int(position)], expected, rtol=0, atol=model.tolerance)


def _logits(path: Path, tokens: Tokens) -> NDArray[np.float32]:
    exact = RuntimeOptions(ctx_size=64, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
    with load(path, exact) as loaded:
        logits = loaded.backend.forward([Row(0, tokens, 0, 0)])
        assert not isinstance(logits, Refusal)
        return logits.copy()


def _embedding(header: Header, tokens: Tokens) -> NDArray[np.float32]:
    with open_encoder(header) as encoder:
        return encoder.embed_tokens(tokens)[None]


def _convert(checkpoint: Path, file_type: str, folder: Path, *, verify: bool = False) -> Header:
    options = ConvertOptions(type=file_type, verify=verify)
    planned = plan_conversion(checkpoint, folder / "out.gguf", options)
    run_conversion(planned, options)
    return read_header(planned.output)
