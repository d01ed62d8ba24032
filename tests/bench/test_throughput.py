"""What the rows say of a run."""

from pathlib import Path

from edgeinfer.bench.throughput import Suite, run
from edgeinfer.options import RuntimeOptions


def test_a_row_says_what_was_run_and_not_what_was_asked_for(tiny_gguf: Path, kernels: str) -> None:
    """The fork maps no file, and takes as many tokens at a time as its trial said: 24, by conftest.py."""
    (row,) = run([tiny_gguf], Suite((4,), (0,), repetitions=1), RuntimeOptions(kernels=kernels))
    found = row["build_commit"].partition(" ")[0], row["load_mode"], row["n_ubatch"], row["flash_attn"]
    ours = {"llama.cpp": ("llama-cpp-python", "mmap", 512, -1), "ik": ("ik-llama-cpp-python", "none", 24, 1)}
    assert found == ours[kernels]
