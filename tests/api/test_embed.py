"""A real sentence encoder against transformers; scripts/golden_embeddings.py regenerates what it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from golden_embeddings import GOLDEN, SENTENCES

from edgeinfer.api.convert import convert
from edgeinfer.api.embed import load_encoder
from edgeinfer.errors import UsageError
from edgeinfer.options import ConvertOptions, RuntimeOptions


@pytest.mark.parametrize(("file_type", "least_cosine"), [("F16", 0.9999), ("Q8_0", 0.999), ("Q4_K_M", 0.985)])
def test_embeddings_are_those_of_transformers(
    file_type: str, least_cosine: float, minilm_checkpoint: Path, tmp_path: Path
) -> None:
    golden = np.array(json.loads(GOLDEN.read_text("utf-8")), np.float32)
    convert(minilm_checkpoint, tmp_path / "minilm.gguf", ConvertOptions(type=file_type))
    with load_encoder(tmp_path / "minilm.gguf") as encoder:
        found = encoder.embed(SENTENCES)
    cosines = (found * golden).sum(axis=1) / np.linalg.norm(golden, axis=1)
    assert cosines.min() >= least_cosine, cosines
    # The bytes are llama.cpp's; what Q4_K_M loses on these sentences lies between 0.988 and 0.995.
    assert cosines.mean() >= 0.99, cosines


def test_the_fork_runs_no_encoders(tiny_gguf: Path) -> None:
    with pytest.raises(UsageError, match="ik does not run encoders"):
        load_encoder(tiny_gguf, RuntimeOptions(kernels="ik"))
