"""A GGUF turned back into a checkpoint: names, values, order of rows, tokenizer."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from make_checkpoint import make_checkpoint
from safetensors import safe_open
from safetensors_writer import to_bf16
from tokenizers import Tokenizer

from edgeinfer.errors import UnusableInputError

HIDDEN, FFN, HEADS, KV_HEADS, BLOCKS = 64, 96, 4, 2, 2
BYTE_ALPHABET = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
TOKENS = [*BYTE_ALPHABET, "Ġt", "he", "<|end|>", "<tool>", "[PAD260]"]
TEXT = (
    "Hello, world! I'll count 1234567 of them, THEY'RE here.\n\n  indented\tTab\r\n"
    "Привет, мир! 你好,世界。こんにちは 안녕하세요 "
    "مرحبا שלום नमस्ते ไทย Ünïcödé ½ ² ٣ 👋🏽👨‍👩‍👧 "
    "<|im_start|>user\nx<|im_end|>\ndef f(x: int) -> str:\n    return f'{x!r}'  # ok\n"
    "   \n\n\n trailing   "
)


def _tiny_gguf(path: Path, arch: str, tensors: dict[str, np.ndarray]) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(BLOCKS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if arch == "qwen2" else "smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 3) + [3, 4, 5])
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_eos_token_id(258)
    writer.add_chat_template("{{ messages }}")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(*, bias: bool, untied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if untied:
        shapes["output.weight"] = (len(TOKENS), HIDDEN)
    for i in range(BLOCKS):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": (kv, HIDDEN),
            f"blk.{i}.attn_v.weight": (kv, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, FFN),
        }
        if bias:
            shapes |= {f"blk.{i}.attn_{x}.bias": (HIDDEN if x == "q" else kv,) for x in "qkv"}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, as BF16 bits."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "np") as file:
            names = list(file.keys())
        raw = path.read_bytes()
        n = int.from_bytes(raw[:8], "little")
        for name in names:
            info = json.loads(raw[8 : 8 + n])[name]
            begin, end = info["data_offsets"]
            assert info["dtype"] == "BF16"
            found[name] = np.frombuffer(raw[8 + n + begin : 8 + n + end], np.uint16).reshape(info["shape"])
    return found


def _permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Hugging Face's rows in llama's order: per head, the two halves interleaved."""
    rest = weights.shape[1:]
    return weights.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(weights.shape)


def test_llama_gets_its_names_back_and_its_query_rows_in_order(tmp_path: Path) -> None:
    source = _tensors(bias=False, untied=False)
    make_checkpoint(_tiny_gguf(tmp_path / "a.gguf", "llama", source), tmp_path / "out", 10**9)
    found = _read(tmp_path / "out")
    assert len(found) == len(source)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        back = found[f"model.layers.1.self_attn.{name}_proj.weight"]
        np.testing.assert_array_equal(_permuted(back, heads), to_bf16(source[f"blk.1.attn_{name}.weight"]))
    np.testing.assert_array_equal(
        found["model.layers.0.mlp.down_proj.weight"], to_bf16(source["blk.0.ffn_down.weight"])
    )
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is True


def test_qwen2_keeps_its_rows_biases_and_untied_head(tmp_path: Path) -> None:
    source = _tensors(bias=True, untied=True)
    make_checkpoint(_tiny_gguf(tmp_path / "a.gguf", "qwen2", source), tmp_path / "out", 10**9)
    found = _read(tmp_path / "out")
    assert len(found) == len(source)
    for x in "qkv":
        for kind in ("weight", "bias"):
            back = found[f"model.layers.0.self_attn.{x}_proj.{kind}"]
            np.testing.assert_array_equal(back, to_bf16(source[f"blk.0.attn_{x}.{kind}"]))
    np.testing.assert_array_equal(found["lm_head.weight"], to_bf16(source["output.weight"]))
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_repeats_the_embedding_is_tied(tmp_path: Path) -> None:
    source = _tensors(bias=True, untied=False)
    source["output.weight"] = source["token_embd.weight"]
    make_checkpoint(_tiny_gguf(tmp_path / "a.gguf", "qwen2", source), tmp_path / "out", 10**9)
    assert "lm_head.weight" not in _read(tmp_path / "out")


def test_shards_hold_the_same_tensors_and_the_index_finds_them(tmp_path: Path) -> None:
    path = _tiny_gguf(tmp_path / "a.gguf", "qwen2", _tensors(bias=True, untied=True))
    make_checkpoint(path, tmp_path / "one", 10**9)
    make_checkpoint(path, tmp_path / "many", 50_000)
    one, many = _read(tmp_path / "one"), _read(tmp_path / "many")
    assert one.keys() == many.keys()
    assert all(np.array_equal(one[name], many[name]) for name in one)
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(one)
    assert {*index["weight_map"].values()} == {p.name for p in (tmp_path / "many").glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in one.values())


def test_the_same_source_gives_the_same_bytes(tmp_path: Path) -> None:
    path = _tiny_gguf(tmp_path / "a.gguf", "llama", _tensors(bias=False, untied=True))
    for name in ("one", "two"):
        make_checkpoint(path, tmp_path / name, 10**9)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)


def test_added_tokens_keep_their_ids_and_padding_is_left_out(tmp_path: Path) -> None:
    make_checkpoint(
        _tiny_gguf(tmp_path / "a.gguf", "qwen2", _tensors(bias=True, untied=False)), tmp_path / "out", 10**9
    )
    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer.json"))
    assert tokenizer.token_to_id("<|end|>") == 258
    assert tokenizer.token_to_id("<tool>") == 259
    assert tokenizer.token_to_id("[PAD260]") is None
    assert tokenizer.decode([258, 259], skip_special_tokens=True) == "<tool>"
    assert tokenizer.encode(" the<|end|>").ids == [256, 257, 258]


def test_unknown_tensors_are_all_named_and_nothing_is_left(tmp_path: Path) -> None:
    source = _tensors(bias=False, untied=False) | {
        "rope_freqs.weight": np.ones(8, np.float32),
        "blk.0.ffn_gate_inp.weight": np.ones((4, HIDDEN), np.float32),
    }
    path = _tiny_gguf(tmp_path / "a.gguf", "llama", source)
    with pytest.raises(UnusableInputError, match=r"rope_freqs\.weight, blk\.0\.ffn_gate_inp\.weight"):
        make_checkpoint(path, tmp_path / "out", 10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_nan_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = _tensors(bias=False, untied=False)
    source["blk.1.ffn_up.weight"][3, 5] = np.nan
    path = _tiny_gguf(tmp_path / "a.gguf", "llama", source)
    with pytest.raises(UnusableInputError, match=r"blk\.1\.ffn_up\.weight"):
        make_checkpoint(path, tmp_path / "out", 10**9)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize(
    ("bits", "expected"),
    [(0x3F800000, 0x3F80), (0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0xBF808001, 0xBF81)],
)
def test_bf16_rounds_to_nearest_even(bits: int, expected: int) -> None:
    assert to_bf16(np.array([bits], np.uint32).view(np.float32))[0] == expected


def c_library_tokens(path: Path, text: str) -> list[int]:
    """What the C library makes of `text`, special tokens parsed, nothing put in front."""
    import llama_cpp

    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p())
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    assert model
    try:
        raw = text.encode()
        out = (llama_cpp.llama_token * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(llama_cpp.llama_model_get_vocab(model), raw, len(raw), out, len(out), False, True)
        return list(out[:n])
    finally:
        llama_cpp.llama_model_free(model)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level: int, text: bytes, data: int) -> None:
    pass


@pytest.mark.model
def test_the_real_tokenizer_encodes_like_the_c_library(smollm2_gguf: Path, smollm2_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_checkpoint / "tokenizer.json"))
    assert tokenizer.encode(TEXT).ids == c_library_tokens(smollm2_gguf, TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT).ids, skip_special_tokens=False) == TEXT
