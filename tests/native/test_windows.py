"""A model with a sliding window in little room: cells that have left the window are overwritten, and nothing is wrong.

The tiny models have random weights and windows of 16 tokens. (Not those with experts: which of them a token goes to can
flip with the shape of the batch.)
"""

import numpy as np
import pytest
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.api.load import load
from edgeinfer.options import ConvertOptions, RuntimeOptions, SamplingParams
from edgeinfer.types import KVOp, Request, Row

GREEDY = SamplingParams(temperature=0)
N_CTX = 256
BEGINNINGS = (10, 60, 140)
NEARLY_EQUAL = 0.1
"""Logits so close can change places with the shape of the batch, which moves them by up to 0.04; they spread by 1."""


@pytest.fixture(scope="module", params=["gemma2", "gemma3"])
def path(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    options = ConvertOptions(type="BF16", verify=False)
    checkpoint = make_checkpoint(read_model(request.param), PLAIN, folder)
    planned = plan_conversion(checkpoint, folder / "model.gguf", options)
    run_conversion(planned, options)
    return planned.output


def prompts(seed):
    """Beginnings of 10, 60 and 140 tokens that several have in common, and ends that the seed chooses."""
    rng = np.random.default_rng(0)
    beginnings = [rng.integers(3, 300, n).astype(np.int32) for n in BEGINNINGS]
    rng = np.random.default_rng(seed)
    return [np.append(beginnings[i % 3], rng.integers(3, 300, 1 + i)).astype(np.int32) for i in range(12)]


def answers(model, texts):
    """Asked one after the other in three waves, so that later ones find what earlier ones left."""
    engine = model.engine
    generations = []
    for start in range(0, len(texts), 4):
        for i, tokens in enumerate(texts[start : start + 4], start):
            generations.append(engine.submit(Request(i, tokens, GREEDY, 30)))
        while engine.has_work:
            engine.step()
    return generations


def gap(backend, tokens, a, b):
    """How far apart two tokens' logits are after a text."""
    backend.apply(KVOp("remove", 0, 0, 0, -1))
    logits = backend.forward([Row(0, np.array(tokens, np.int32), 0, len(tokens) - 1)])[0]
    return abs(float(logits[a] - logits[b]))


@pytest.mark.parametrize("cached", [False, True])
def test_lost_cells_change_no_answer(path, cached, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    options = RuntimeOptions(ctx_size=N_CTX, prefix_cache=cached)
    refused = []
    for seed in range(1, 2 + cached):  # the second time it finds blocks on disk, of prompts that end in another way
        texts = prompts(seed)
        with load(path, options, max_sequences=3) as model:
            apply = model.backend.apply
            model.backend.apply = lambda op, apply=apply: apply(op) or refused.append(op)
            found = answers(model, texts)
            model.finish_writing(30)
    assert refused, "no cell was lost: the test has no point"
    if cached:
        assert [g.cached_tokens for g in found[:3]] == list(BEGINNINGS)
    with load(path, RuntimeOptions(ctx_size=N_CTX, prefix_cache=False)) as model:
        for tokens, generation in zip(texts, found, strict=True):
            model.backend.apply(KVOp("remove", 0, 0, 0, -1))
            (alone,) = answers(model, [tokens])
            mine, theirs = generation.tokens, alone.tokens
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
            if at is None:
                assert len(mine) == len(theirs)
            else:
                assert gap(model.backend, mine[:at], mine[at], theirs[at]) < NEARLY_EQUAL
