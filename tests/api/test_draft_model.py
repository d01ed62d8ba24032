"""Which models may draft for another one, and that real ones change nothing of its text."""

import subprocess
import sys
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from ggufs import write_gguf

import edgeinfer
from edgeinfer.api.draft_model import open_draft
from edgeinfer.api.draft_plan import MAX_UNUSED_TOKENS, DraftPlan
from edgeinfer.api.layers import chosen_layers, layers_model
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native.context import NativeBackend
from edgeinfer.native.library import llama
from edgeinfer.native.model import NativeModel
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.types import Row

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROMPT = "Explain why the sky is blue."


def vocabulary(path, tokens, *, arch="llama", **numbers):
    """A header with these tokens and hyper-parameters; no layers."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("gpt2")
    if tokens:
        writer.add_token_list(tokens)
    for name, value in numbers.items():
        key = f"{arch}.{name}"
        writer.add_array(key, value) if isinstance(value, list) else writer.add_uint32(key, value)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_header(path)


def plan(target, draft):
    return DraftPlan.of(target, RuntimeOptions(draft=str(draft.path)))


@pytest.mark.parametrize(
    ("tokens", "difference"),
    [
        (["a", "b", "x", "y"], "its token 2 is 'x', not 'c'"),
        (["a", "b" * 99], f"its token 1 is '{'b' * 40}…', not 'b'"),
        (["a", "b", "c", *map(str, range(MAX_UNUSED_TOKENS + 1))], f"it has {MAX_UNUSED_TOKENS + 4} tokens, not 3"),
        ([], "draft.gguf has no vocabulary"),
    ],
)
def test_another_vocabulary_is_refused_with_the_first_difference(tmp_path, tokens, difference):
    target = vocabulary(tmp_path / "target.gguf", ["a", "b", "c"])
    draft = vocabulary(tmp_path / "draft.gguf", tokens)
    with pytest.raises(UnusableInputError) as refused:
        plan(target, draft)
    assert refused.value.message == f"{draft.path}: cannot draft for target.gguf: {difference}"


def test_a_vocabulary_may_be_padded_to_another_length(tmp_path):
    target = vocabulary(tmp_path / "target.gguf", ["a", "b", "c"])
    draft = vocabulary(tmp_path / "draft.gguf", ["a", "b", "c", "unused"])
    assert plan(target, draft).header.path == draft.path
    assert plan(draft, target).header.path == target.path


def test_files_that_are_damaged_or_not_there_are_refused(tmp_path):
    target = read_header(write_gguf(tmp_path / "target.gguf"))
    with pytest.raises(NotFoundError):
        DraftPlan.of(target, RuntimeOptions(draft=str(tmp_path / "missing.gguf")))
    whole = (tmp_path / "target.gguf").read_bytes()
    for name, data in (("cut.gguf", whole[: len(whole) // 2]), ("empty.gguf", b""), ("text.gguf", b"not a model" * 9)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UnusableInputError):
            DraftPlan.of(target, RuntimeOptions(draft=str(tmp_path / name)))


def test_what_is_neither_a_name_nor_a_file_is_wrong_usage():
    for options in (
        {"draft": "Lookup"},
        {"draft": "model.bin"},
        {"draft_layers": 4},
        {"draft": "layers", "draft_layers": 0},
    ):
        with pytest.raises(UsageError):
            RuntimeOptions(**options)


def test_the_cache_of_the_draft_counts_before_anything_is_loaded(tmp_path, monkeypatch):
    from edgeinfer.api import memory

    header = read_header(write_gguf(tmp_path / "a.gguf"))
    options, draft = RuntimeOptions(ctx_size=4096), DraftPlan(header, None)
    alone = memory.plan_run(header, options).needs
    both = memory.plan_run(header, options, draft=draft).needs
    assert both.kv == 2 * alone.kv
    assert both.weights + both.repacked == 2 * (alone.weights + alone.repacked)
    assert (both.queued, both.program) == (alone.queued, alone.program)
    monkeypatch.setattr(memory, "available_nbytes", lambda: both.total - 1)
    memory.plan_run(header, options)
    with pytest.raises(ResourceError, match="4096 tokens"):
        memory.plan_run(header, options, draft=draft)
    fitted = memory.plan_run(header, RuntimeOptions(), draft=draft)
    assert fitted.settings.ctx_size < 4096


def test_a_run_without_room_for_its_draft_is_refused(tmp_path, monkeypatch):
    from edgeinfer.api import memory

    path = write_gguf(tmp_path / "a.gguf")
    need = memory.plan_run(read_header(path), RuntimeOptions(ctx_size=4096)).needs.total
    monkeypatch.setattr(memory, "available_nbytes", lambda: need)
    with pytest.raises(ResourceError):
        edgeinfer.load(path, RuntimeOptions(ctx_size=4096, draft=str(path)))


def test_layers_are_the_first_ones_or_all_but_those_after_the_middle(tmp_path):
    header = vocabulary(tmp_path / "a.gguf", ["a"], block_count=12)
    assert chosen_layers(header, 5) == [0, 1, 2, 3, 4]
    assert chosen_layers(header, None) == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("arch", "numbers", "first", "error"),
    [
        ("llama", {"block_count": 12}, 12, UsageError),
        ("llama", {"block_count": 3}, None, UnusableInputError),
        ("llama", {}, None, UnusableInputError),
        ("gemma3", {"block_count": 12}, 3, UnusableInputError),
        ("llama", {"block_count": 12, "expert_count": 4}, 3, UnusableInputError),
        ("llama", {"block_count": 4, "attention.head_count_kv": [2, 2, 1, 1]}, 3, UnusableInputError),
    ],
)
def test_layers_that_make_no_model_are_refused(tmp_path, arch, numbers, first, error):
    header = vocabulary(tmp_path / "a.gguf", ["a"], arch=arch, **numbers)
    with pytest.raises(error):
        chosen_layers(header, first)


def logits(model):
    with NativeBackend(model, RuntimeOptions(ctx_size=64)) as backend:
        return backend.forward([Row(0, np.arange(300, 340, dtype=np.int32), 0, 0)]).copy()


def test_all_layers_over_the_mapped_file_compute_what_the_model_computes_and_take_no_memory(smollm2_gguf, monkeypatch):
    defaults = llama.llama_model_default_params

    def without_repacking():
        params = defaults()
        params.use_extra_bufts = False
        return params

    header = read_header(smollm2_gguf)
    monkeypatch.setattr(llama, "llama_model_default_params", without_repacking)
    with NativeModel(smollm2_gguf) as model:
        wanted = logits(model)
    before = anonymous_nbytes()
    with layers_model(header, range(30)) as model:
        found = logits(model)
        grown = anonymous_nbytes() - before
        assert model.vocabulary.n_tokens == wanted.shape[1]
    np.testing.assert_array_equal(found, wanted)
    with layers_model(header, range(20)) as model:
        assert not np.array_equal(logits(model), wanted)
    assert grown < header.tensor_nbytes / 2  # the vocabulary and working memory; a copy of the weights would be 98 MB


def anonymous_nbytes():
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
    except OSError:  # not Linux: nothing to compare
        return 0


@pytest.mark.parametrize("draft", ["itself", "layers", "first layers"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_a_real_draft_leaves_the_text_as_it_is(draft, params, smollm2_gguf, kernels):
    if kernels == "ik" and draft != "itself":
        pytest.skip("a draft of a model's own layers shares llama.cpp's weights")
    options = {
        "itself": RuntimeOptions(draft=str(smollm2_gguf), ctx_size=512, kernels=kernels),
        "layers": RuntimeOptions(draft="layers", ctx_size=512),
        "first layers": RuntimeOptions(draft="layers", draft_layers=20, ctx_size=512),
    }[draft]
    plain_options = RuntimeOptions(draft="off", ctx_size=512, prefix_cache=False, kernels=kernels)
    with edgeinfer.load(smollm2_gguf, plain_options) as model:
        plain = model.generate(PROMPT, params=params, max_tokens=40)
    with edgeinfer.load(smollm2_gguf, options) as model:
        drafted = model.generate(PROMPT, params=params, max_tokens=40)
        use = model.engine.drafting.use[model.drafter.source.name]
    assert use.proposals > 0
    assert use.failures == 0
    # Kernels round otherwise for other numbers of rows: where two tokens are as good, a text may go on with either.
    same = next((i for i, (a, b) in enumerate(zip(plain.text, drafted.text, strict=False)) if a != b), len(plain.text))
    assert same >= min(20, len(plain.text))
    if draft == "itself":
        assert use.accepted_tokens > 0
    if draft == "itself" and params is GREEDY:
        assert use.accepted_tokens > 0.6 * use.drafted_tokens


@pytest.mark.parametrize(
    ("draft", "code", "message"),
    [
        ("missing.gguf", 3, "no such"),
        ("other.gguf", 4, "token 0 is 'token0', not"),
        ("nonsense", 2, "one of auto, off"),
    ],
)
def test_the_command_says_in_one_line_why_a_draft_is_refused(draft, code, message, smollm2_gguf, tmp_path):
    write_gguf(tmp_path / "other.gguf")
    command = [sys.executable, "-m", "edgeinfer", "run", str(smollm2_gguf), "Hello", "--draft", draft]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""


def test_an_encoder_is_refused(minilm_checkpoint, tmp_path):
    from edgeinfer.api.convert import convert
    from edgeinfer.options import ConvertOptions

    convert(minilm_checkpoint, tmp_path / "encoder.gguf", ConvertOptions(type="F16"))
    header = read_header(tmp_path / "encoder.gguf")
    target = SimpleNamespace(n_ctx=64, threads=1)
    with pytest.raises(UnusableInputError, match=r"encoder.gguf: cannot draft: the model is an encoder"):
        open_draft(DraftPlan.of(header, RuntimeOptions(draft=str(header.path))), target, RuntimeOptions(), 1)
