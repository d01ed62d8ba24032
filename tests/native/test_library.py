"""What this package assumes about the compiled library, held against it: a new version must fail here first."""

import ctypes
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from processes import PATIENCE_S

from edgeinfer.convert.gguf_source import READABLE
from edgeinfer.finite import is_finite
from edgeinfer.ggml_types import GGMLType
from edgeinfer.native import library
from edgeinfer.native.library import llama, load_ggml_base
from edgeinfer.native.quantize import GGMLQuantizer, TypeTraits, type_traits

FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)

# sizeof on 64-bit machines, from include/llama.h of the pinned release.
SIZES = {
    "llama_model_params": 80,
    "llama_context_params": 160,
    "llama_model_quantize_params": 64,
    "llama_batch": 56,
    "llama_token_data": 12,
    "llama_token_data_array": 32,
    "llama_logit_bias": 8,
    "llama_sampler_chain_params": 1,
}


def test_the_pinned_release_is_installed():
    from importlib.metadata import version

    assert version("llama-cpp-python") == "0.3.36"


@pytest.mark.parametrize(("name", "nbytes"), SIZES.items())
def test_structures_have_the_size_that_the_header_gives_them(name, nbytes):
    assert ctypes.sizeof(getattr(llama, name)) == nbytes


def test_defaults_read_through_the_structures_make_sense():
    """A shifted field would read another one's value."""
    context = llama.llama_context_default_params()
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 2048, 512, 1)
    assert (context.type_k, context.type_v) == (GGMLType.F16, GGMLType.F16)
    assert context.flash_attn_type == -1
    assert (context.embeddings, context.offload_kqv, context.swa_full, context.kv_unified) == (False, True, True, False)
    assert (context.n_samplers, context.ctx_other) == (0, None)
    model = llama.llama_model_default_params()
    assert (model.vocab_only, model.check_tensors, model.use_extra_bufts, model.no_alloc) == (False, False, True, False)
    assert model.load_mode in (-1, 1)
    quantize = llama.llama_model_quantize_default_params()
    assert (quantize.nthread, quantize.quantize_output_tensor, quantize.pure) == (0, True, False)
    assert not quantize.imatrix


def test_tensor_types_have_the_blocks_of_the_library():
    ggml = ctypes.CDLL(llama._lib._name.replace("libllama", "libggml-base"))
    ggml.ggml_type_size.restype = ctypes.c_size_t
    ggml.ggml_blck_size.restype = ctypes.c_int64
    for kind in GGMLType:
        assert (ggml.ggml_blck_size(int(kind)), ggml.ggml_type_size(int(kind))) == (
            kind.block_length,
            kind.block_nbytes,
        )


def test_the_library_says_what_it_is():
    assert library.version()
    assert "CPU" in library.system_info()


def test_threads_that_ask_at_once_are_told_the_same():
    """What is remembered of a model goes by it."""

    def ask(_):
        return {library.system_info() for _ in range(3000)}

    with ThreadPoolExecutor(3) as pool:
        assert set().union(*pool.map(ask, range(3))) == {library.system_info()}


def test_errors_are_kept_and_the_first_is_the_cause():
    library.forget_errors()
    for level, text in [
        (4, b"load: impl: tensor 'x' is "),
        (5, b"missing\n"),
        (3, b"a warning\n"),
        (4, b"load failed\n"),
    ]:
        library._log(level, text, None)
    assert library.last_error() == "tensor 'x' is missing"
    library.forget_errors()
    assert library.last_error() == ""


def test_the_bindings_package_can_still_be_imported_afterwards():
    code = "from edgeinfer.native import library; import sys; assert 'llama_cpp' not in sys.modules; " + (
        "import llama_cpp; assert llama_cpp.Llama and llama_cpp.llama_cpp is library.llama"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_type_traits_are_read_where_the_library_has_them():
    for kind in GGMLType:
        traits = type_traits(kind)
        assert traits.type_name.decode().upper() == kind.name
        assert (traits.block_length, traits.block_nbytes) == (kind.block_length, kind.block_nbytes)
        assert traits.is_quantized == kind.is_quantized
    assert ctypes.sizeof(TypeTraits) == 56


@pytest.mark.parametrize("kind", sorted(READABLE), ids=lambda kind: kind.name)
def test_every_readable_type_has_a_way_back_to_float(kind):
    """The function in the traits against the one that the library exports by name."""
    ggml = load_ggml_base()
    rng = np.random.default_rng(0)
    data = rng.integers(0, 60, 4 * kind.block_nbytes * (256 // kind.block_length), np.uint8)
    ours, theirs = np.zeros((2, 4 * 256), np.float32)
    if kind is GGMLType.F32:
        with pytest.raises(ValueError, match="no way back"):
            GGMLQuantizer().dequantize(kind, data, ours)
        return
    GGMLQuantizer().dequantize(kind, data, ours)
    name = {GGMLType.F16: "ggml_fp16_to_fp32_row", GGMLType.BF16: "ggml_bf16_to_fp32_row"}.get(
        kind, f"dequantize_row_{kind.name.lower().replace('_k', '_K')}"
    )
    function = getattr(ggml, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    function(data.ctypes.data, theirs.ctypes.data, theirs.size)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_dequantizing_checks_sizes_before_the_library_sees_them():
    with pytest.raises(ValueError, match="take 34 bytes, not 33"):
        GGMLQuantizer().dequantize(GGMLType.Q8_0, np.zeros(33, np.uint8), np.zeros(32, np.float32))
    with pytest.raises(ValueError, match="does not divide"):
        GGMLQuantizer().dequantize(GGMLType.Q8_0, np.zeros(34, np.uint8), np.zeros(31, np.float32))
    with pytest.raises(ValueError, match="not a valid"):
        type_traits(99)


def test_errors_are_kept_when_the_bindings_package_has_set_its_own_log(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    code = (
        "import pathlib, sys\n"
        "from edgeinfer.native import library\n"
        "from edgeinfer.native.model import NativeModel\n"
        "import llama_cpp\n"
        "try:\n    NativeModel(pathlib.Path(sys.argv[1]))\n"
        "except Exception as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "bad.gguf")],
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "does not load" in done.stdout
    assert "gives no reason" not in done.stdout
    assert done.stderr == ""


def test_a_verbose_log_is_for_people_and_leaves_out_what_only_debugs_the_library(capsys):
    library.set_verbose(True)
    try:
        for level, text in ((1, b"a line per tensor\n"), (2, b"model "), (5, b"params\n"), (3, b"a warning\n")):
            library._log(level, text, None)
    finally:
        library.set_verbose(False)
    assert capsys.readouterr().err == "model params\na warning\n"


# Q8_1 the library does not check, and F64 as if it were F32.
@pytest.mark.parametrize("kind", sorted(set(GGMLType) - {GGMLType.Q8_1, GGMLType.F64}), ids=lambda kind: kind.name)
def test_what_is_not_finite_is_what_the_library_finds(kind, capfd):
    validate = load_ggml_base().ggml_validate_row_data
    validate.argtypes, validate.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_bool
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (8000 if kind in FLOATS else 1000, kind.block_nbytes), np.uint8)
    found = [is_finite(kind, block) for block in blocks]
    assert capfd.readouterr().err == ""
    assert found == [validate(kind, block.ctypes.data, block.nbytes) for block in blocks]
    assert is_finite(kind, blocks[found].reshape(-1))
    has_factors = kind.name not in ("I8", "I16", "I32", "I64", "NVFP4")
    assert all(found) != has_factors
    assert is_finite(kind, blocks.reshape(-1)) != has_factors
