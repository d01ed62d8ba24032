"""Plans for machines that are not at hand: recorded device lists, and a model that is only a header."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
from ggufs import write_gguf

from edgeinfer.errors import ResourceError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import RuntimeOptions
from edgeinfer.runtime import footprint as sizes
from edgeinfer.runtime.draft_footprint import DraftFootprint
from edgeinfer.runtime.footprint import Footprint, Settings, layer_of
from edgeinfer.runtime.memory import MIN_CTX_SIZE, Machine, Plan, plan
from edgeinfer.runtime.offload import MARGIN_NBYTES
from edgeinfer.types import Device

# What llama_print_system_info said on these machines.
XEON = frozenset(["AVX", "AVX2", "F16C", "FMA", "AVX512", "AVX512_VNNI", "LLAMAFILE", "OPENMP", "REPACK"])
ATOM = frozenset(["SSE3", "SSSE3", "OPENMP", "REPACK"])
RASPBERRY_PI_5 = frozenset(["NEON", "ARM_FMA", "FP16_VA", "DOTPROD", "LLAMAFILE", "OPENMP", "REPACK"])

# What ggml_backend_dev_* say: name, description, free and total bytes.
GIB = 1 << 30
LAPTOP = (Device("CUDA0", "NVIDIA GeForce RTX 3050 Laptop GPU", 3_780_000_000, 4_087_000_000),)
TWO_CARDS = (
    Device("CUDA0", "NVIDIA GeForce RTX 3090", 24_800_000_000, 25_300_000_000),
    Device("CUDA1", "NVIDIA GeForce RTX 3060", 12_100_000_000, 12_600_000_000),
)
FULL_CARD = (Device("Vulkan0", "AMD Radeon RX 6600", 600_000_000, 8_573_000_000),)

LAYERS, WIDTH, HIDDEN, VOCABULARY = 8, 256, 512, 64
PER_TOKEN = LAYERS * 2 * WIDTH * 2 + sizes.CELL_NBYTES


def model(
    tmp_path: Path,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.Q4_0,
    tied: bool = False,
    experts: int = 0,
    features: frozenset[str] = XEON,
) -> Footprint:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_token_list([f"token{i}" for i in range(VOCABULARY)])

    def add(name: str, *shape: int) -> None:
        rows = np.zeros((*shape[:-1], shape[-1] // 32 * 18), np.uint8)
        writer.add_tensor(name, rows, raw_dtype=kind)

    add("token_embd.weight", VOCABULARY, WIDTH)
    for i in range(LAYERS):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(WIDTH, np.float32))
        add(f"blk.{i}.attn_q.weight", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_up{'_exps' if experts else ''}.weight", *((experts,) if experts else ()), HIDDEN, WIDTH)
    if not tied:
        add("output.weight", VOCABULARY, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Footprint([read_header(tmp_path / "model.gguf")], features)


def fixed(footprint: Footprint, options: RuntimeOptions | None = None) -> Plan:
    """The plan on a machine that has everything."""
    return plan(footprint, options or RuntimeOptions(), Machine(None, XEON))


def on(footprint: Footprint, available_nbytes: int, **options: Any) -> Plan:
    return plan(footprint, RuntimeOptions(**options), Machine(available_nbytes, XEON))


def bytes_for(footprint: Footprint, **options: Any) -> int:
    return fixed(footprint, RuntimeOptions(**options)).needs.total


def test_what_fits_is_left_alone(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    found = on(footprint, bytes_for(footprint))
    assert (found.settings.ctx_size, found.settings.type_k, found.placement.repack) == (4096, "f16", True)
    assert found.changes == found.notes == ()


def test_the_cache_is_what_its_shape_and_types_say(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    assert footprint.kv_nbytes(1024, "f16", "f16") == 1024 * PER_TOKEN
    assert footprint.kv_nbytes(1000, "f16", "f16") == 1024 * PER_TOKEN  # the library rounds up
    assert footprint.kv_nbytes(1024, "q8_0", "f16") == 1024 * (LAYERS * WIDTH * (34 / 32 + 2) + sizes.CELL_NBYTES)


def test_every_sequence_has_its_states_and_a_model_without_attention_no_cache(tmp_path: Path) -> None:
    sizes_of_a_mixer = {"conv_kernel": 4, "inner_size": 128, "state_size": 16, "group_count": 2, "time_step_rank": 8}
    extra = {f"mamba2.ssm.{key}": value for key, value in sizes_of_a_mixer.items()}
    footprint = Footprint([read_header(write_gguf(tmp_path / "a.gguf", arch="mamba2", extra=extra))], XEON)
    state = 2 * 4 * (3 * (128 + 2 * 2 * 16) + 16 * 128)  # layers, bytes, inputs of the convolution, the state
    for sequences, ctx_size in ((1, 512), (4, 512), (4, 8192)):
        options = RuntimeOptions(ctx_size=ctx_size)
        needs = plan(footprint, options, Machine(None, XEON), sequences=sequences).needs
        assert (needs.kv, needs.queued) == (sequences * state, 0)  # and nothing of it can be saved
    with pytest.raises(ResourceError, match="and 4 recurrent states"):
        plan(footprint, options, Machine(1 << 20, XEON), sequences=4)


def test_first_the_context_gives_way_as_little_as_it_must(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    found = on(footprint, bytes_for(footprint, ctx_size=2304) + 1000)
    assert (found.settings.ctx_size, found.settings.type_k) == (2304, "f16")
    assert found.needs.total <= found.available_nbytes
    (note,) = found.notes
    assert "2304 tokens, not 4096" in note
    assert found.applied(RuntimeOptions()).ctx_size == 2304


def test_then_the_type_of_the_cache(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    least = bytes_for(footprint, ctx_size=MIN_CTX_SIZE)
    found = on(footprint, least - 1)
    assert (found.settings.type_k, found.settings.type_v) == ("q8_0", "q8_0")
    assert found.settings.ctx_size >= MIN_CTX_SIZE
    assert "q8_0" in found.notes[0]
    kept = on(footprint, least - 1, cache_type_k="f16")
    assert (kept.settings.type_k, kept.settings.type_v) == ("f16", "q8_0")


def test_then_copies_of_weights_where_there_are_two_of_them(tmp_path: Path) -> None:
    tied = model(tmp_path, tied=True)
    least = bytes_for(tied, ctx_size=MIN_CTX_SIZE, cache_type_k="q8_0", cache_type_v="q8_0")
    found = on(tied, least - 1)
    assert not found.placement.repack
    assert found.needs.repacked == 0
    assert "copies" in found.notes[0]


def test_what_is_asked_for_is_never_made_smaller(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    asked = {"ctx_size": 2048, "cache_type_k": "f16", "cache_type_v": "f16"}
    need = bytes_for(footprint, **asked)
    assert on(footprint, need, **asked).settings.ctx_size == 2048
    with pytest.raises(ResourceError) as caught:
        on(footprint, need - 1, **asked)
    message = caught.value.message
    assert f"needs {-(-need // 2**20)} MiB" in message
    assert "2048 tokens" in message
    assert "-c" in caught.value.hint
    assert "\n" not in message
    with pytest.raises(ResourceError):
        on(footprint, 1 << 20)


def test_without_flash_attention_the_cache_of_values_stays_as_it_is(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    with pytest.raises(ResourceError):
        on(footprint, bytes_for(footprint, ctx_size=MIN_CTX_SIZE) - 1, flash_attn="off")


def test_without_flash_attention_all_scores_are_there_at_a_time(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    off, on_ = (fixed(footprint, RuntimeOptions(flash_attn=f)).needs.buffers for f in ("off", "auto"))
    assert off - on_ == 4 * 4096 * 512 * 4  # heads, cells, tokens, bytes


def test_nothing_is_refused_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert fixed(model(tmp_path), RuntimeOptions(ctx_size=2**31 - 1)).settings.ctx_size == 2**31 - 1


@pytest.mark.parametrize(
    ("features", "copied"), [(XEON, True), (RASPBERRY_PI_5, True), (ATOM, False), (frozenset(), False)]
)
def test_which_weights_are_copied_is_a_matter_of_the_cpu(
    tmp_path: Path, features: frozenset[str], copied: bool
) -> None:
    footprint = model(tmp_path, features=features)
    names = {t.name for t in footprint.tensors if footprint.repacked_nbytes(t)}
    everything = {t.name for t in footprint.tensors if len(t.shape) > 1} - {"token_embd.weight"}
    assert names == (everything if copied else set())
    needs = fixed(footprint).needs
    assert needs.repacked == needs.read_once
    assert needs.weights + needs.read_once == sum(t.nbytes for t in footprint.tensors)


def test_a_tied_embedding_is_there_twice(tmp_path: Path) -> None:
    needs = fixed(model(tmp_path, tied=True)).needs
    assert needs.repacked == needs.read_once + VOCABULARY * WIDTH * 18 // 32


def with_draft(footprint: Footprint, options: RuntimeOptions | None = None, **kind: Any) -> Plan:
    draft = DraftFootprint([footprint.header], footprint.features, logit_rows=2, **kind)
    return plan(footprint, options or RuntimeOptions(), Machine(None, XEON), draft=draft)


def test_a_draft_comes_on_top(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    alone, both = fixed(footprint).needs, with_draft(footprint).needs
    assert both.kv == 2 * alone.kv
    assert both.weights + both.repacked == 2 * (alone.weights + alone.repacked)
    assert both.program == alone.program
    assert alone.buffers < both.buffers < 2 * alone.buffers  # it reads fewer tokens at a time


def test_a_draft_of_layers_shares_the_file(tmp_path: Path) -> None:
    footprint = model(tmp_path, features=ATOM)  # which makes no copies
    alone, both = fixed(footprint).needs, with_draft(footprint, layers=(0, 1)).needs
    assert (both.weights, both.repacked) == (alone.weights, 0)
    assert both.kv == alone.kv * (LAYERS + 2) // LAYERS


def test_a_draft_of_layers_reads_what_the_target_copies(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    alone, both = fixed(footprint).needs, with_draft(footprint, layers=(0, 1)).needs
    copied = [t for t in footprint.tensors if footprint.repacked_nbytes(t) and layer_of(t) in (None, 0, 1)]
    assert both.weights - alone.weights == sum(t.nbytes for t in copied) > 0
    assert both.repacked == alone.repacked
    unmapped = with_draft(footprint, RuntimeOptions(mmap=False), layers=(0, 1)).needs
    own = [t for t in footprint.tensors if layer_of(t) in (None, 0, 1)]
    assert unmapped.weights - alone.weights == sum(t.nbytes for t in own)


def test_the_cache_is_not_made_smaller_than_the_draft_allows(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    odd = SimpleNamespace(head_lengths=lambda: (40, 40), needs=footprint.needs)
    options = RuntimeOptions(ctx_size=4096)
    least = Machine(plan(footprint, options, Machine(None, XEON), draft=footprint).needs.total - 1, XEON)
    assert plan(footprint, options, least, draft=footprint).settings.type_k == "q8_0"
    with pytest.raises(ResourceError):
        plan(footprint, options, least, draft=cast("Footprint", odd))


def on_gpu(footprint: Footprint, devices: tuple[Device, ...], **options: Any) -> Plan:
    return plan(footprint, RuntimeOptions(**options), Machine(None, XEON, devices))


def test_a_gpu_with_room_gets_everything_and_main_memory_keeps_the_embedding(tmp_path: Path) -> None:
    found = on_gpu(model(tmp_path), LAPTOP)
    assert found.placement.gpu_layers == LAYERS + 1
    assert found.needs.kv == 0
    assert found.needs.weights == VOCABULARY * WIDTH * 18 // 32
    assert found.notes == ()


def test_a_gpu_without_room_gets_as_many_layers_as_fit(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    options: dict[str, Any] = {"ctx_size": 1 << 16}
    kv_of_a_layer = footprint.kv_nbytes(1 << 16, "f16", "f16") // LAYERS
    buffers = footprint.activation_nbytes(Settings(1 << 16)) + 512 * VOCABULARY * 4
    free = MARGIN_NBYTES + buffers + 3 * kv_of_a_layer + (3 << 20)  # the weights of three layers and the output
    device = Device("CUDA0", "a small one", free, 2 * free)
    found = on_gpu(footprint, (device,), **options)
    assert found.placement.gpu_layers == 4  # with the output
    assert found.needs.kv == pytest.approx(5 * kv_of_a_layer, rel=1e-3)
    names = {t.name for t in footprint.tensors if layer_of(t) in (5, 6, 7) or t.name == "output.weight"}
    expected = footprint.needs(found.settings, names)
    assert found.needs.weights == expected.weights
    with pytest.raises(ResourceError, match="CUDA0"):
        on_gpu(footprint, (device,), gpu_layers="all", cache_type_k="f16", cache_type_v="f16", **options)
    assert on_gpu(footprint, (device,), gpu_layers=2, **options).placement.gpu_layers == 2
    assert on_gpu(footprint, (device,), gpu_layers=0, **options).placement.gpu_layers == 0


def test_a_full_gpu_gets_nothing_and_says_so_only_when_it_was_asked(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    found = on_gpu(footprint, FULL_CARD)
    assert found.placement.gpu_layers == 0
    assert "too little" in found.gpu_note
    assert found.notes == ()
    none = on_gpu(footprint, (), gpu_layers="all")
    assert none.placement.gpu_layers == 0
    assert "no GPU" in none.notes[0]
    assert on_gpu(footprint, ()).notes == ()
    assert on_gpu(footprint, (), gpu_layers=0).gpu_note == ""


def test_experts_stay_in_main_memory_before_a_layer_does(tmp_path: Path) -> None:
    footprint = model(tmp_path, experts=64)
    experts = HIDDEN * WIDTH * 64 * 18 // 32
    whole = sum(t.nbytes for t in footprint.tensors) + footprint.kv_nbytes(4096, "f16", "f16")
    whole += footprint.activation_nbytes(Settings(4096)) + 512 * VOCABULARY * 4
    device = Device("CUDA0", "one", MARGIN_NBYTES + whole - 3 * experts + 4096, 0)
    found = on_gpu(footprint, (device,))
    assert found.placement.gpu_layers == LAYERS + 1
    assert found.placement.experts_on_cpu == (0, 1, 2)
    assert found.needs.weights + found.needs.repacked == 3 * experts + VOCABULARY * WIDTH * 18 // 32


def test_two_gpus_share_by_their_memory_or_as_told(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    assert on_gpu(footprint, TWO_CARDS).placement.gpu_layers == LAYERS + 1
    first, second = TWO_CARDS
    full = (first, Device(second.name, second.description, 0, second.total_nbytes))
    assert on_gpu(footprint, full).placement.gpu_layers == LAYERS + 1  # all of it goes to the first
    assert on_gpu(footprint, full, tensor_split=(0, 1)).placement.gpu_layers == 0
    assert on_gpu(footprint, full, split_mode="none", main_gpu=1).placement.gpu_layers == 0
    assert on_gpu(footprint, full, split_mode="none").placement.gpu_layers == LAYERS + 1
    assert on_gpu(footprint, TWO_CARDS, split_mode="row", tensor_split=(3, 1)).placement.tensor_split == (3, 1)


def test_a_gpu_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    footprint = model(tmp_path)
    for wrong in ({"main_gpu": 2}, {"tensor_split": (1.0, 1.0, 1.0)}):
        with pytest.raises(UsageError, match="2 GPUs"):
            on_gpu(footprint, TWO_CARDS, **wrong)
