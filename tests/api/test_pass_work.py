"""What a pass consists of, from headers."""

from types import SimpleNamespace

from edgeinfer.api.pass_work import pass_work
from edgeinfer.gguf_file.header import read_header
from edgeinfer.types import Placement


def test_a_dense_model(smollm2_gguf):
    work = pass_work(read_header(smollm2_gguf), Placement())
    attention, feed_forward = 2 * 576 * 576 + 2 * 576 * 192, 3 * 576 * 1536
    assert work.weights == 30 * (attention + feed_forward)
    assert (work.largest, work.attended, work.n_layers) == (576 * 1536, 2 * 576, 30)


def test_of_experts_those_count_that_a_token_uses(monkeypatch):
    tensors = [
        SimpleNamespace(name="token_embd.weight", shape=(64, 1000)),
        SimpleNamespace(name="blk.0.attn_norm.weight", shape=(64,)),
        SimpleNamespace(name="blk.0.attn_output.weight", shape=(128, 64)),
        SimpleNamespace(name="blk.1.ffn_up_exps.weight", shape=(64, 96, 8)),
    ]
    header = SimpleNamespace(tensors=tensors, hyperparameter=lambda name, default: {"expert_used_count": 2}[name])
    monkeypatch.setattr("edgeinfer.api.pass_work.read_shards", lambda first: (first,))
    work = pass_work(header, Placement())
    assert (work.weights, work.largest) == (128 * 64 + 2 * 64 * 96, 2 * 64 * 96)
    assert (work.attended, work.n_layers) == (256, 1)


def test_a_gpu_is_left_alone(smollm2_gguf):
    assert pass_work(read_header(smollm2_gguf), Placement(gpu_layers=1)) is None
