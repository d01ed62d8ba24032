"""Each architecture against its references: llama.cpp's script and quantizer to the byte, transformers' logits closely.

`golden/` holds what the references said; `make conformance` asks them anew and tests every type's data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import GOLDEN, TYPES
from golden_conversions import readable_metadata, summarize
from random_checkpoint import PLAIN, make_checkpoint, model_names, prompt, read_model

from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.api.embed import load_encoder
from edgeinfer.api.model import load
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.types import Refusal, Row

golden: dict[str, Any] = {name: json.loads((GOLDEN / f"{name}.json").read_text("utf-8")) for name in model_names()}
VARIANTS = [(name, variant) for name in golden for variant in golden[name]["variants"]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {(name, variant): make_checkpoint(read_model(name), variant, folder) for name, variant in VARIANTS}


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_every_tensor_has_the_type_that_llama_cpp_gives_it(
    name: str, variant: str, checkpoints: dict[tuple[str, str], Path]
) -> None:
    for file_type, expected in golden[name]["variants"][variant]["types"].items():
        plan = plan_conversion(checkpoints[name, variant], options=ConvertOptions(type=file_type)).plan
        counts: dict[str, int] = {}
        for tensor in plan.tensors:
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + 1
        assert counts == expected["types"], file_type


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
@pytest.mark.parametrize("file_type", TYPES)
def test_tensors_are_llama_cpps_to_the_byte(
    name: str, variant: str, file_type: str, checkpoints: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    options = ConvertOptions(type=file_type, verify=False)
    planned = plan_conversion(checkpoints[name, variant], tmp_path / "out.gguf", options)
    run_conversion(planned, options)
    header = read_header(planned.output)
    assert summarize(header) == golden[name]["variants"][variant]["types"][file_type]
    assert planned.nbytes == planned.output.stat().st_size


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_metadata_is_llama_cpps(
    name: str, variant: str, checkpoints: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    options = ConvertOptions(type="BF16")
    planned = plan_conversion(checkpoints[name, variant], tmp_path / "out.gguf", options)
    run_conversion(planned, options)
    metadata = readable_metadata(read_header(planned.output))
    ours = {key: value for key, value in metadata.items() if not key.startswith("tokenizer.")}
    theirs = golden[name]["variants"][variant]["metadata"]
    different = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert different == set(read_model(name).deviations), {k: (ours.get(k), theirs.get(k)) for k in different}


@pytest.mark.parametrize("name", golden)
def test_logits_are_those_of_transformers(name: str, checkpoints: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    options = ConvertOptions(type="F32", verify=False)
    planned = plan_conversion(checkpoints[name, PLAIN], tmp_path / "out.gguf", options)
    run_conversion(planned, options)
    model, tokens = read_model(name), prompt(read_model(name))
    if planned.plan.is_encoder:
        with load_encoder(planned.output) as encoder:
            found = {"0": encoder.embed_tokens(tokens)}
        for position, expected in golden[name]["logits"].items():
            np.testing.assert_allclose(found[position], expected, rtol=0, atol=model.tolerance)
        return
    exact = RuntimeOptions(ctx_size=64, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
    with load(planned.output, exact) as loaded:
        logits = loaded.backend.forward([Row(0, tokens, 0, 0)])
        assert not isinstance(logits, Refusal)
        for position, expected in golden[name]["logits"].items():
            np.testing.assert_allclose(logits[int(position)], expected, rtol=0, atol=model.tolerance)
