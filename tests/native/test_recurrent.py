"""Models whose memory is a state that each token changes: nothing of it can be cut off or shared, and nothing is wrong.

Tiny models with random weights, in F32 with a cache in F32, so that the shape of a batch moves logits by 1e-5 at most.
"""

import llama_cpp
import numpy as np
import pytest
from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.batch import load_for_batch
from edgeinfer.api.convert import plan_conversion, run_conversion
from edgeinfer.api.load import load
from edgeinfer.gguf_file.describe import kv_nbytes_per_token, recurrent_state_nbytes
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions, SamplingParams
from edgeinfer.types import Request, Row

GREEDY = SamplingParams(temperature=0)
EXACT = RuntimeOptions(ctx_size=512, flash_attn="off", cache_type_k="f32", cache_type_v="f32")
N_NEW = 12


SLOW = pytest.mark.slow
MODELS = [
    "mamba2",
    "granitehybrid-dense",
    *(pytest.param(name, marks=SLOW) for name in ("falcon-mamba", "falcon-h1", "granitehybrid", "lfm2", "rwkv7")),
]


@pytest.fixture(scope="module", params=MODELS)
def path(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    options = ConvertOptions(type="F32", verify=False)
    checkpoint = make_checkpoint(read_model(request.param), PLAIN, folder)
    planned = plan_conversion(checkpoint, folder / "model.gguf", options)
    run_conversion(planned, options)
    return planned.output


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))


def answers(model, texts):
    """All at once."""
    generations = [model.engine.submit(Request(i, t, GREEDY, N_NEW)) for i, t in enumerate(texts)]
    while model.engine.has_work:
        model.engine.step()
    return generations


@pytest.fixture(scope="module")
def texts():
    rng = np.random.default_rng(5)
    beginning = rng.integers(3, 300, 50)
    return [np.append(beginning, rng.integers(3, 300, 1 + 5 * i)).astype(np.int32) for i in range(6)]


@pytest.fixture(scope="module")
def cold(path, texts):
    """What each text gives alone, in a context of its own."""
    found = []
    for text in texts:
        with load(path, EXACT) as model:
            found.append(answers(model, [text])[0].tokens)
    return found


def test_together_is_as_alone_and_a_second_time_as_the_first(path, texts, cold):
    with load(path, EXACT, max_sequences=4) as model:
        for _ in range(2):
            assert [g.tokens for g in answers(model, texts)] == cold


def test_an_answer_that_goes_on_is_not_computed_again_and_one_that_differs_is(path, texts, cold):
    with load(path, EXACT) as model:
        for text, expected in zip(texts, cold, strict=True):
            assert answers(model, [text])[0].tokens == expected
        longer = np.array([*cold[-1], 7, 8, 9], np.int32)
        (going_on,) = answers(model, [longer])
        (other,) = answers(model, [texts[0]])
    assert going_on.cached_tokens == len(cold[-1]) - 1
    assert (other.cached_tokens, other.tokens) == (0, cold[0])
    with load(path, EXACT) as model:
        assert answers(model, [longer])[0].tokens == going_on.tokens


def test_after_an_interruption_all_is_as_before(path, texts, cold):
    with load(path, EXACT, max_sequences=2) as model:
        for n_steps in (0, 1, 3):
            for i, text in enumerate(texts[:2]):
                model.engine.submit(Request(i, text, GREEDY, N_NEW))
            for _ in range(n_steps):
                model.engine.step()
            model.backend.abort()  # in the middle of the next pass, as Ctrl-C does it
            while model.engine.has_work:
                model.engine.step()
            assert [g.tokens for g in answers(model, texts[:2])] == cold[:2]


def test_a_preempted_request_begins_anew(path, texts, cold):
    with load(path, EXACT) as model:
        urgent = Request(1, texts[1], GREEDY, N_NEW, priority=1)
        low = model.engine.submit(Request(0, texts[0], GREEDY, N_NEW))
        for _ in range(3):
            model.engine.step()
        high = model.engine.submit(urgent)
        while model.engine.has_work:
            model.engine.step()
        assert [low.tokens, high.tokens] == cold[:2]


def test_a_sequences_state_is_as_large_as_it_is_said_to_be(path, texts):
    with load(path, RuntimeOptions(ctx_size=512, prefix_cache=False)) as model:
        text = texts[-1]
        model.backend.forward([Row(0, text, 0, len(text))])
        nbytes = llama_cpp.llama_state_seq_get_size(model.backend._handle, 0)
        known = recurrent_state_nbytes(model.header) + len(text) * kv_nbytes_per_token(model.header)
    notes = nbytes - known  # positions of cells, types and sizes of rows
    assert 0 < notes < 1000 + 12 * len(text)


def test_a_batch_is_as_wide_as_a_quarter_of_the_memory_has_states(path, monkeypatch):
    header = read_header(path)
    available = header.tensor_nbytes + 4 * 5 * recurrent_state_nbytes(header) + 100
    monkeypatch.setattr("edgeinfer.api.batch.expected_nbytes", lambda: available)
    options = RuntimeOptions(ctx_size=1024)
    with load_for_batch(path, options) as model:
        assert model.engine.limits.max_running == 5
    with load_for_batch(path, options, parallel=7) as model:
        assert model.engine.limits.max_running == 7
