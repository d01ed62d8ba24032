"""GGUF files that are damaged, lie or are meant to do harm, each made from a sound one by a named change.

A family is a function from the parts of a sound file to named changes of it. Nothing here knows what the library or
the checks make of a change: it may be harmless.
"""

# Tables of cases read better as they stand.
# ruff: noqa: E501, SIM905, UP031
# fmt: off

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, product

import numpy as np
from gguf_parts import Parts, T, Tensor, array, f32, read_texts, take_apart, text, texts, u32, value

__all__ = ["FAMILIES", "Mutant", "mutants", "take_apart"]

Mutant = tuple[str, Callable[[], bytes]]
"""A name, and the file."""
_TOKENS, _MODEL, _PRE = "tokenizer.ggml.tokens", "tokenizer.ggml.model", "tokenizer.ggml.pre"


def _of(parts: Parts) -> Callable[[], bytes]:
    return parts.encoded


def truncations(parts: Parts) -> Iterator[Mutant]:
    """The file ends early: everywhere in the header's tables, and in the data."""
    whole = parts.encoded()
    n_header = len(parts.header())
    cuts = [0, 3, 4, 8, 16, 24, 25, n_header - 1, n_header, len(whole) - 1, len(whole) - 33]
    cuts += [24 + (n_header - 24) * i // 24 for i in range(1, 24)]
    cuts += [n_header + (len(whole) - n_header) * i // 8 for i in range(1, 8)]
    for cut in cuts:
        yield f"cut at {cut}", lambda cut=cut: whole[:cut]
    yield "longer than its tensors", lambda: whole + bytes(1 << 20)


def flips(parts: Parts) -> Iterator[Mutant]:
    """Bytes of the header are others, wherever that hits."""
    whole, n_header = parts.encoded(), len(parts.header())
    for seed in range(60):
        chance = random.Random(seed)
        raw = bytearray(whole)
        for _ in range(1 + seed % 4):
            at = chance.randrange(4, n_header)
            patch = chance.choice(
                [
                    bytes([raw[at] ^ 1 << chance.randrange(8)]),
                    chance.randbytes(4),
                    struct.pack("<Q", chance.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
                ]
            )
            raw[at : at + len(patch)] = patch
        yield f"flips of seed {seed}", lambda raw=bytes(raw): raw


def counts(parts: Parts) -> Iterator[Mutant]:
    """Counts, versions and alignments that lie."""
    for count in (0, 1, len(parts.tensors) - 1, len(parts.tensors) + 1, 10**6, 2**31, 2**60, 2**64 - 1):
        yield f"{count} tensors announced", _of(replace(parts, n_tensors=count))
    for count in (0, len(parts.fields) - 1, len(parts.fields) + 1, 10**6, 2**31, 2**60, 2**64 - 1):
        yield f"{count} pairs announced", _of(replace(parts, n_fields=count))
    for version in (0, 1, 2, 4, 3 << 24, 2**32 - 1):
        yield f"version {version}", _of(replace(parts, version=version))
    for alignment in (1, 2, 4, 8, 16, 64, 4096, 1 << 20, 1 << 31):
        stated = parts.changed({"general.alignment": u32(alignment)})
        yield f"alignment of {alignment} stated only", _of(stated)
        if alignment <= 4096:
            yield f"alignment of {alignment}", _of(replace(stated, alignment=alignment))


def offsets(parts: Parts) -> Iterator[Mutant]:
    """Tensors that lie where they cannot, or over each other."""
    first, second, last = parts.tensors[0].name, parts.tensors[1].name, parts.tensors[-1].name
    for name, offset in product((first, second, last), (1, 32, 1 << 31, 1 << 62, 2**64 - 32, 2**64 - 1)):
        yield f"{name.decode()} at {offset}", _of(parts.with_tensor(name.decode(), offset=offset))
    everything_at_once = tuple(replace(t, offset=0) for t in parts.tensors)
    yield "every tensor at 0", _of(replace(parts, tensors=everything_at_once))
    yield "tensors in reverse", _of(replace(parts, tensors=parts.tensors[::-1]))


def _scalars(raw: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Other values of one that is a number or a text."""
    kind = T(struct.unpack_from("<I", raw)[0])
    yield "missing", None
    if kind is T.STRING:
        yield from (("a number", u32(1)), ("empty", text("")), ("not UTF-8", text(b"\xff\xfe\0x")))
        yield from (("unknown", text("x" * 300)), ("texts", texts(["a"])))
        return
    yield from (("a text", text("1")), ("one in an array", array(T.UINT32, [1])), ("array of floats", array(T.FLOAT32, [1.0])))
    yield "600 in an array", array(T.UINT32, [1] * 600)
    if kind is T.BOOL:
        yield from (("true", value(T.BOOL, 1)), ("false", value(T.BOOL, 0)), ("2", u32(2)))
    elif kind in (T.FLOAT32, T.FLOAT64):
        for number in (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e30, 1e-30, 1.0, 3e38):
            yield str(number), f32(number)
        yield from (("a whole number", u32(1)), ("of 64 bits", value(T.FLOAT64, 1.0)))
    else:
        now = int.from_bytes(raw[4:], "little")
        for number in dict.fromkeys((0, 1, 2, 3, 7, now - 1, now + 1, now * 2, now // 2, 1000, 1 << 20, 2**31 - 1, 2**31, 2**32 - 1)):
            if 0 <= number < 2**32:
                yield str(number), u32(number)
        yield from (("-1", value(T.INT32, -1)), ("of 64 bits", value(T.UINT64, now)), ("2**63", value(T.UINT64, 2**63)))
        yield from (("a fraction", f32(0.5)), ("true", value(T.BOOL, 1)))


def _arrays(raw: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Other values of an array."""
    kind = T(struct.unpack_from("<I", raw, 4)[0])
    (count,) = struct.unpack_from("<Q", raw, 8)
    yield from (("missing", None), ("a number", u32(1)), ("a text", text("x")))
    if kind is T.STRING:
        yield from (("numbers", array(T.INT32, range(count))), ("empty", texts([])))
        return
    width = (len(raw) - 16) // count if count else 4
    yield "empty", struct.pack("<IIQ", T.ARRAY, kind, 0)
    yield "half of it", struct.pack("<IIQ", T.ARRAY, kind, count // 2) + raw[16 : 16 + count // 2 * width]
    yield "one more", struct.pack("<IIQ", T.ARRAY, kind, count + 1) + raw[16:] + raw[16 : 16 + width]
    yield "twice", struct.pack("<IIQ", T.ARRAY, kind, 2 * count) + 2 * raw[16:]
    yield "zeros", raw[:16] + bytes(len(raw) - 16)
    yield "all ones", raw[:16] + (b"\1" if kind is T.BOOL else b"\xff") * (len(raw) - 16)
    yield "huge", raw[:16] + (b"\1" if kind is T.BOOL else b"\xff\xff\xff\x7f") * ((len(raw) - 16) // 4)
    yield from (("of texts", texts(["x"] * count)), ("of bytes", array(T.UINT8, [1] * count)), ("of floats", array(T.FLOAT32, [1.0] * count)))
    yield "of 64 bits", array(T.UINT64, [2**63] * count)
    yield "1000 long", array(T.INT32, [1] * 1000)


def metadata(parts: Parts) -> Iterator[Mutant]:
    """Every value of the file is missing, of another type, and something else."""
    for key, raw in parts.fields.items():
        changes = _arrays(raw) if raw[:4] == struct.pack("<I", T.ARRAY) else _scalars(raw)
        for name, new in changes:
            yield f"{key}: {name}", _of(parts.changed({key: new}))


# Hyper-parameters that the library reads for some model, in the file of one that has none of them.
_MORE = (
    "attention.sliding_window", "attention.key_length", "attention.value_length", "attention.key_length_swa",
    "attention.value_length_swa", "attention.head_count_kv", "attention.kv_lora_rank", "attention.q_lora_rank", "attention.shared_kv_layers",
    "attention.key_length_mla", "attention.value_length_mla", "attention.group_norm_groups", "attention.relative_buckets_count",
    "attention.temperature_length", "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
    "rope.dimension_count", "rope.dimension_count_swa", "rope.scaling.original_context_length", "rope.scaling.factor",
    "rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_ext_factor", "expert_count", "expert_used_count", "expert_group_count",
    "expert_group_used_count", "expert_shared_count", "expert_feed_forward_length", "expert_shared_feed_forward_length",
    "expert_gating_func", "expert_weights_scale", "moe_every_n_layers", "interleave_moe_layer_step", "nextn_predict_layers",
    "leading_dense_block_count", "pooling_type", "vocab_size", "embedding_length_out", "embedding_length_per_layer_input",
    "features_length", "n_deepstack_layers", "logit_scale", "residual_scale", "embedding_scale", "attention.scale",
    "attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count", "wkv.head_size",
    "shortconv.l_cache", "token_shift_count", "block_count", "decoder_block_count", "decoder_start_token_id",
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon", "full_attention_interval",
    "router_logit_softcapping", "swin_norm", "rescale_every_n_layers", "time_mix_extra_dim", "timescale",
)
_VALUES = {
    "0": u32(0), "1": u32(1), "3": u32(3), "100000": u32(100_000), "2**32-1": u32(2**32 - 1), "0.0": f32(0.0),
    "nan": f32(float("nan")), "inf": f32(float("inf")), "-1.0": f32(-1.0), "1e30": f32(1e30), "pair": array(T.UINT32, [2, 0]),
    "negative pair": array(T.INT32, [-1, -2]), "text": text("x"),
}


def additions(parts: Parts) -> Iterator[Mutant]:
    """Hyper-parameters that the model does not have."""
    for name, (label, new) in product(_MORE, _VALUES.items()):
        if (key := f"{parts.architecture}.{name}") not in parts.fields:
            yield f"with {name} = {label}", _of(parts.changed({key: new}))
    for name, flag in product(("attention.causal", "use_parallel_residual", "attention.sliding_window_pattern", "rope.scaling.finetuned", "expert_weights_norm"), (0, 1)):
        yield f"with {name} = {bool(flag)}", _of(parts.changed({f"{parts.architecture}.{name}": value(T.BOOL, flag)}))
    for kind in ("none", "linear", "yarn", "longrope", "", "x"):
        yield f"rope scaling {kind!r}", _of(parts.changed({f"{parts.architecture}.rope.scaling.type": text(kind)}))
    for length, kind in product((0, 1, 3, 4, 5, 600), (T.INT32, T.UINT32, T.FLOAT32, T.BOOL)):
        for name in ("rope.dimension_sections", "attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length", "classifier.output_labels"):
            yield f"{name} of {length} {kind.name}", _of(parts.changed({f"{parts.architecture}.{name}": array(kind, [1] * length)}))
    for n_windows in range(6):
        windowed = {f"{parts.architecture}.attention.sliding_window": u32(16), f"{parts.architecture}.attention.sliding_window_pattern": u32(n_windows)}
        yield f"a window every {n_windows} layers", _of(parts.changed(windowed))
    for model in ("", "imatrix", "adapter", "mmproj", "vocab", "x"):
        yield f"general.type {model!r}", _of(parts.changed({"general.type": text(model)}))


ARCHITECTURES = (
    "llama llama4 deci falcon grok gpt2 gptj gptneox mpt baichuan starcoder refact bert modern-bert nomic-bert nomic-bert-moe "
    "neo-bert jina-bert-v2 jina-bert-v3 bloom stablelm qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3next qwen3vl qwen3vlmoe "
    "qwen35 qwen35moe phi2 phi3 phimoe plamo plamo2 plamo3 codeshell orion internlm2 minicpm minicpm3 gemma gemma2 gemma3 "
    "gemma3n gemma4 gemma-embedding starcoder2 mamba mamba2 jamba falcon-h1 xverse command-r cohere2 dbrx olmo olmo2 olmoe openelm arctic "
    "deepseek deepseek2 chatglm glm4 glm4moe bitnet t5 t5encoder jais nemotron nemotron_h exaone exaone4 rwkv6 rwkv6qwen2 rwkv7 "
    "arwkv7 granite granitemoe granitehybrid chameleon wavtokenizer-dec plm bailingmoe bailingmoe2 dots1 arcee afmoe ernie4_5 "
    "ernie4_5-moe hunyuan-moe hunyuan-dense smollm3 gpt-oss lfm2 lfm2moe dream smallthinker llada llada-moe seed_oss grovemoe "
    "apertus minimax-m2 cogvlm rnd1 pangu-embedded mistral3 kimi-linear clip unknown"
).split()


def architectures(parts: Parts) -> Iterator[Mutant]:
    """The same file as a model of another architecture."""
    old = parts.architecture
    for new in ARCHITECTURES:
        if new != old:
            renamed = {(new + key.removeprefix(old) if key.startswith(f"{old}.") else key): raw for key, raw in parts.fields.items()}
            yield f"called {new}", _of(replace(parts, fields={**renamed, "general.architecture": text(new)}))
    for odd in ("", "(unknown)", "LLAMA", "llama\0", "x" * 100_000, "%s%s%s%n"):
        yield f"called {odd[:20]!r}", _of(parts.changed({"general.architecture": text(odd)}))


TOKENIZER_MODELS = "llama gpt2 bert t5 rwkv plamo2 gemma4 hybriddna whitespace test none no_vocab unknown".split()
PRE_TOKENIZERS = (
    "default llama-bpe deepseek-llm deepseek-coder deepseek-v3 falcon mpt starcoder gpt-2 jais-2 gemma4 sarvam-moe roberta-bpe "
    "whitespace refact command-r qwen2 qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat chatglm-bpe viking jais tekken smollm codeshell bloom "
    "gpt3-finnish exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 superbpe trillion granite-docling bailingmoe "
    "seed-coder hunyuan hunyuan-dense joyai-llm kimi-k2 grok-2 afmoe minimax-m2 solar-open tiny_aya youtu minicpm5 mellum2 unknown"
).split()


def vocabularies(parts: Parts) -> Iterator[Mutant]:
    """The vocabulary as another tokenizer's, and with tokens that should not be."""
    for model in TOKENIZER_MODELS:
        yield f"vocabulary called {model}", _of(parts.changed({_MODEL: text(model)}))
        yield f"vocabulary called {model}, nothing else", _of(parts.changed({_MODEL: text(model), _PRE: None, "tokenizer.ggml.merges": None, "tokenizer.ggml.scores": None, "tokenizer.ggml.token_type": None}))
    for pre in PRE_TOKENIZERS:
        yield f"pre-tokenizer {pre}", _of(parts.changed({_PRE: text(pre)}))
    tokens = read_texts(parts.fields[_TOKENS])
    n = len(tokens)
    odd: dict[str, list[bytes]] = {
        "none": [], "one": tokens[:1], "half": tokens[: n // 2], "one less": tokens[:-1], "one more": [*tokens, b"more"],
        "twice": tokens * 2, "all the same": [b"a"] * n, "all empty": [b""] * n, "one twice": [tokens[-1], *tokens[1:]],
        "one empty": [b"", *tokens[1:]], "two empty": [b"", b"", *tokens[2:]], "one like an empty one": [b"", b"[EMPTY_0]", *tokens[2:]],
        "not UTF-8": [b"\xff\xfe" + t for t in tokens], "broken UTF-8": [t + b"\xe4\xbd" for t in tokens], "with NUL": [t + b"\0x" for t in tokens],
        "NULs": [b"\0" * (i + 1) for i in range(n)], "one huge": [b"x" * 5_000_000, *tokens[1:]], "numbers": [str(i).encode() for i in range(n)],
        "spaces": [b" " * (i + 1) for i in range(n)], "rwkv's": _rwkv_tokens(n), "rwkv's broken": [b"'\\x" + str(i).encode() for i in range(n)],
        "bytes of plamo": [*(b"<0x%02X>" % i for i in range(256)), *tokens[256:]][:n], "lower bytes": [*(b"<0x%02x>" % i for i in range(256)), *tokens[256:]][:n],
        "escapes": [b"\x1b[2J%d\n" % i for i in range(n)], "surrogates": [b"\xed\xa0\x80%d" % i for i in range(n)],
        "hex that is none": [*(b"<0xZZ>%d" % i for i in range(n))], "<0x": [b"<0x" + b"A" * i for i in range(n)],
    }
    for name, new in odd.items():
        yield f"tokens: {name}", _of(parts.changed({_TOKENS: texts(new)}))
    for name, model in product(("rwkv's", "rwkv's broken", "bytes of plamo", "lower bytes", "hex that is none", "<0x", "with NUL", "not UTF-8", "all empty"), ("rwkv", "plamo2", "llama", "bert", "t5", "gpt2")):
        yield f"{model} with tokens: {name}", _of(parts.changed({_TOKENS: texts(odd[name]), _MODEL: text(model)}))
    for model, kind in product(("llama", "gpt2", "bert", "t5", "rwkv", "plamo2"), (0, 1, 2, 3, 4, 5, 6, 7, -1)):
        scores = {"tokenizer.ggml.scores": array(T.FLOAT32, [float("nan")] * n), "tokenizer.ggml.token_type": array(T.INT32, [kind] * n)}
        yield f"{model}, every token of type {kind}, no scores", _of(parts.changed({_MODEL: text(model), "tokenizer.ggml.token_type": scores["tokenizer.ggml.token_type"]}))
        yield f"{model}, every token of type {kind}, scores NaN", _of(parts.changed({_MODEL: text(model), **scores}))
    for name, score in (("inf", float("inf")), ("-inf", -float("inf")), ("0", 0.0), ("1e38", 1e38)):
        yield f"scores {name}", _of(parts.changed({"tokenizer.ggml.scores": array(T.FLOAT32, [score] * n)}))
    yield from _merges(parts)
    yield from _special(parts, n)


def _rwkv_tokens(count: int) -> list[bytes]:
    """As RWKV's own vocabulary spells them: 256 bytes, then words."""
    return [*(b"\\x%02x" % i for i in range(256)), *(b"w%d" % i for i in range(count))][:count]


def _merges(parts: Parts) -> Iterator[Mutant]:
    odd = {
        "none": [], "empty": [b""] * 9, "without a space": [b"ab"] * 9, "spaces": [b" " * 9] * 9, "NUL": [b"\0 \0"] * 9,
        "not UTF-8": [b"\xff \xfe"] * 9, "one huge": [b"a" * 5_000_000 + b" b"], "a circle": [b"a b", b"ab a", b"b ab", b"a b"],
        "of nothing": [b"a ", b" a", b"  "],
    }
    for name, new in odd.items():
        yield f"merges: {name}", _of(parts.changed({"tokenizer.ggml.merges": texts(new)}))


def _special(parts: Parts, n_tokens: int) -> Iterator[Mutant]:
    names = "bos eos eot eom unknown seperator padding mask cls fim_pre fim_suf fim_mid prefix suffix".split()
    for name, token in product(names, (0, n_tokens - 1, n_tokens, 2**31 - 1, 2**31, 2**32 - 1)):
        yield f"{name} token {token}", _of(parts.changed({f"tokenizer.ggml.{name}_token_id": u32(token)}))
    for names, flag in product((("bos",), ("eos",), ("sep",), ("bos", "eos", "sep")), (0, 1)):
        flags: dict[str, bytes | None] = {f"tokenizer.ggml.add_{name}_token": value(T.BOOL, flag) for name in names}
        yield f"add {names} {flag}", _of(parts.changed(flags))
        gone = {f"tokenizer.ggml.{name}_token_id": u32(2**32 - 1) for name in ("bos", "eos", "seperator", "cls")}
        yield f"add {names} {flag} of none", _of(parts.changed({**flags, **gone}))
    for kind, numbers in ((T.INT32, [-1, 2**31 - 1]), (T.INT32, range(n_tokens)), (T.UINT32, [1]), (T.INT32, [])):
        yield f"suppressed {kind.name} {len(numbers)}", _of(parts.changed({"tokenizer.ggml.suppress_tokens": array(kind, numbers)}))


def tensors(parts: Parts) -> Iterator[Mutant]:
    """Tensors that are missing, too many, of another shape or type, and full of what is no number."""
    seen: set[str] = set()
    for tensor in parts.tensors:
        name = tensor.name.decode()
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        if kind not in seen:
            seen.add(kind)
            for label, changed in _changed_tensors(tensor):
                kept = chain.from_iterable(changed if t is tensor else (t,) for t in parts.tensors)
                yield f"{name} {label}", _of(replace(parts, tensors=tuple(kept)))
    extra = [Tensor(name, (32,), 0, bytes(128)) for name in (b"more", b"output.bias", b"blk.0.more.weight", b"blk.511.attn_q.weight", b"blk.4294967295.attn_q.weight", b"blk.-1.attn_q.weight", b"cls.weight", b"rope_freqs.weight", b"output.weight", b"blk.0.attn_sinks.weight", b"\xff\xfe", b"", b"x" * 63, b"a\0b", b"\n\x1b[2J")]
    for tensor in extra:
        yield f"with {tensor.name!r}", _of(replace(parts, tensors=(*parts.tensors, tensor)))
    yield "no tensors", _of(replace(parts, tensors=()))
    yield "20000 more tensors", _of(replace(parts, tensors=parts.tensors + tuple(Tensor(b"t%d" % i, (1,), 0, bytes(4)) for i in range(20_000))))


def _changed_tensors(tensor: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    yield "missing", ()
    yield "twice", (tensor, tensor)
    yield "renamed", (replace(tensor, name=tensor.name + b"x"),)
    shape = tensor.shape
    shapes = {
        "a row less": (*shape[:-1], shape[-1] - 1), "turned": shape[::-1], "flat": (int(np.prod(shape)),), "with more dimensions": (*shape, 1, 1, 1)[:4],
        "without dimensions": (), "with 0": (0, *shape[1:]), "huge": (2**40, *shape[1:]), "overflowing": (2**62, 4, 2**62, 4),
        "with 5 dimensions": (*shape, 1, 1, 1, 1, 1)[:5], "of one": (1,),
    }
    for label, new in shapes.items():
        if new != shape:
            yield label, (replace(tensor, shape=new),)
            n_bytes = int(np.prod(new, dtype=object)) * len(tensor.data) // int(np.prod(shape))
            if n_bytes != len(tensor.data) and n_bytes < 1 << 24:
                yield f"{label}, with data", (replace(tensor, shape=new, data=(tensor.data + bytes(n_bytes))[:n_bytes]),)
    sizes = {0: 32, 1: 16, 2: 4.5, 8: 8.5, 12: 4.5, 16: 2.0625, 24: 8, 26: 32, 27: 64, 28: 64, 30: 16, 4: 16, 5: 16, 36: 16, 39: 4.25, 41: 1.125, 99: 16, 2**31: 16, 9: 9, 15: 9.125}
    n_elements = int(np.prod(shape))
    for number, bits in sizes.items():
        if number != tensor.type:
            n_bytes = int(n_elements * bits / 8)
            yield f"of type {number}", (replace(tensor, type=number, data=(tensor.data * 5)[:n_bytes]),)
    for label, pattern in (("of NaN", b"\xff"), ("of zeros", b"\0"), ("of the largest", b"\xff\x7b")):
        yield label, (replace(tensor, data=(pattern * len(tensor.data))[: len(tensor.data)]),)


def templates(parts: Parts) -> Iterator[Mutant]:
    """Chat templates that go on for ever, fill the memory, look for a way out, or are none."""
    hostile = {
        "an endless loop": "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}",
        "a large range": "{{ range(10**12) | list }}", "a huge text": "{{ 'a' * 10**10 }}", "a huge list": "{{ [0] * 10**10 }}",
        "a huge number": "{{ 10 ** 10 ** 10 }}", "doubling": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
        "a recursive macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "a macro that doubles": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}x{% endmacro %}{{ f(60) }}",
        "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "deep ifs": "{% if 1 %}" * 3000 + "x" + "{% endif %}" * 3000,
        "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}", "another way out": "{{ cycler.__init__.__globals__.os.system('id') }}",
        "format": "{{ '%1000000000d' % 1 }}", "format method": "{{ '{:1000000000}'.format(1) }}", "open": "{% if %}", "a tag that is none": "{% nothing %}",
        "empty": "", "a space": " ", "NUL": "\0", "raises": "{{ raise_exception('no') }}", "raises lines": "{{ raise_exception('a\nb\x1b[2J') }}",
        "import": "{% import 'x' as y %}", "include": "{% include '/etc/passwd' %}", "extends": "{% extends 'x' %}", "undefined": "{{ nothing.at.all }}", "divides": "{{ 1 / 0 }}",
        "strftime": "{{ strftime_now('%Y' * 100000) }}", "1 MiB": "x" * (1 << 20), "8 MiB": "x" * (8 << 20), "slow regex": "{{ ('a' * 100000) | striptags | wordwrap(1) | urlize }}",
        "batch": "{{ [1] | batch(10**10) | list }}", "center": "{{ 'x' | center(10**10) }}", "indent": "{{ 'x\n' * 1000 | indent(10**9) }}", "tojson": "{{ range(10**9) | list | tojson }}",
        "lorem": "{{ lipsum(n=10**8) }}", "changes messages": "{% set _ = messages.append(messages) %}{{ messages }}", "sleeps by sum": "{{ range(10**9) | sum }}",
        "sorts": "{{ range(10**8) | sort | first }}", "control words": "<|im_start|>" * 100_000, "surrogates": "{{ '\\ud800' }}", "many tokens": "{{ 'hi ' * 10**6 }}",
    }
    for name, template in hostile.items():
        yield f"template: {name}", _of(parts.changed({"tokenizer.chat_template": text(template)}))
    yield "template: not UTF-8", _of(parts.changed({"tokenizer.chat_template": text(b"\xff\xfe{{ messages }}")}))
    yield "template: a list", _of(parts.changed({"tokenizer.chat_template": texts(["a", "b"])}))


def carried_tokenizers(parts: Parts) -> Iterator[Mutant]:
    """A tokenizer.json in the metadata that is broken or means harm."""
    plain = '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":%s,"pre_tokenizer":%s,"post_processor":null,"decoder":null,"model":%s}'
    model = '{"type":"BPE","vocab":{"h":0,"i":1,"hi":2},"merges":["h i"]}'
    slow = '{"type":"Replace","pattern":{"Regex":"(h|i|hi|ih)*(h|i|hi|ih)*(h|i|hi|ih)*Q"},"content":"x"}'
    hostile = {
        "empty": "", "null": "null", "nothing": "{}", "a list": "[]", "deep": "[" * 100_000, "deep objects": '{"a":' * 100_000, "a number": "1" * 5000,
        "small": plain % ("null", "null", model), "another vocabulary": plain % ("null", "null", '{"type":"BPE","vocab":{"h":0,"i":1000000},"merges":[]}'),
        "huge ids": plain % ("null", "null", '{"type":"BPE","vocab":{"h":4294967295,"i":4294967294},"merges":[]}'),
        "no tokens": plain % ("null", "null", '{"type":"BPE","vocab":{},"merges":[]}'), "a merge of nothing": plain % ("null", "null", '{"type":"BPE","vocab":{"h":0},"merges":["x y"]}'),
        "unigram": plain % ("null", "null", '{"type":"Unigram","unk_id":5,"vocab":[["h",0.0]]}'), "unigram without tokens": plain % ("null", "null", '{"type":"Unigram","unk_id":null,"vocab":[]}'),
        "unigram of NaN": plain % ("null", "null", '{"type":"Unigram","unk_id":0,"vocab":[["h",-1e308],["i",1e308],["hi",1e999]]}'),
        "wordpiece": plain % ("null", "null", '{"type":"WordPiece","unk_token":"x","continuing_subword_prefix":"##","max_input_chars_per_word":100,"vocab":{"h":0}}'),
        "wordlevel": plain % ("null", "null", '{"type":"WordLevel","vocab":{"h":0},"unk_token":"x"}'),
        "a bad regex": plain % ('{"type":"Replace","pattern":{"Regex":"(("},"content":"x"}', "null", model), "a slow regex": plain % (slow, "null", model),
        "a growing regex": plain % ('{"type":"Replace","pattern":{"Regex":""},"content":"xxxxxxxx"}', "null", model),
        "growth": plain % ('{"type":"Sequence","normalizers":[' + ",".join(['{"type":"Replace","pattern":{"String":"h"},"content":"' + "h" * 2000 + '"}'] * 4) + "]}", "null", model),
        "a slow split": plain % ("null", '{"type":"Split","pattern":{"Regex":"(.*)*(.*)*(.*)*Q"},"behavior":"Isolated","invert":false}', model),
        "a split on nothing": plain % ("null", '{"type":"Split","pattern":{"Regex":""},"behavior":"Isolated","invert":false}', model),
        "a charsmap": plain % ('{"type":"Precompiled","precompiled_charsmap":"AAAAAAAA"}', "null", model),
        "a wrong charsmap": plain % ('{"type":"Precompiled","precompiled_charsmap":"' + "//8A" * 100 + '"}', "null", model),
        "deep sequences": plain % ('{"type":"Sequence","normalizers":[' * 500 + "]}" * 500, "null", model),
        "NUL": "\0", "1 MiB of added tokens": (plain % ("null", "null", model)).replace('"added_tokens":[]', '"added_tokens":[' + ",".join('{"id":%d,"content":"t%d","single_word":false,"lstrip":true,"rstrip":true,"normalized":true,"special":true}' % (i, i) for i in range(8000)) + "]"),
        "an empty added token": (plain % ("null", "null", model)).replace('"added_tokens":[]', '"added_tokens":[{"id":3,"content":"","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}]'),
        "dropout": plain % ("null", "null", model[:-1] + ',"dropout":0.5}'), "dropout of 2": plain % ("null", "null", model[:-1] + ',"dropout":2.0}'),
    }
    for name, document in hostile.items():
        yield f"carried tokenizer: {name}", _of(parts.changed({"tokenizer.huggingface.json": text(document)}))
    yield "carried tokenizer: not UTF-8", _of(parts.changed({"tokenizer.huggingface.json": text(b"\xff\xfe{}")}))
    yield "carried tokenizer: a number", _of(parts.changed({"tokenizer.huggingface.json": u32(1)}))


def recommendations(parts: Parts) -> Iterator[Mutant]:
    """Sampling that the file recommends."""
    names = ("temp", "top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold", "penalty_last_n", "penalty_repeat", "mirostat", "mirostat_tau", "mirostat_eta")
    odd = (f32(float("nan")), f32(float("inf")), f32(-1e30), value(T.INT32, -1), value(T.INT32, 2**31 - 1), value(T.UINT64, 2**64 - 1), text("x"), f32(1e-40))
    for name, (number, new) in product(names, enumerate(odd)):
        yield f"general.sampling.{name} {number}", _of(parts.changed({f"general.sampling.{name}": new}))
    yield "all of them", _of(parts.changed({f"general.sampling.{name}": f32(float("nan")) for name in names}))


FAMILIES: dict[str, Callable[[Parts], Iterator[Mutant]]] = {
    function.__name__: function
    for function in (
        truncations, flips, counts, offsets, metadata, additions, architectures, vocabularies, tensors, templates, carried_tokenizers, recommendations,
    )
}


def mutants(parts: Parts, *families: str) -> Iterator[Mutant]:
    """The changed files of these families, or of all."""
    for family in families or FAMILIES:
        yield from FAMILIES[family](parts)
