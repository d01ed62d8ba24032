"""Regenerates tests/convert/golden_imatrix.json: our test checkpoints quantized with an importance matrix.

For each checkpoint of golden_conversions.py: our own BF16 file (its tensors are llama.cpp's: golden.json), then
`llama_model_quantize` of the installed library to TYPES, with a matrix of random numbers. Kept are a hash of the tensor
table with all data and the count of tensors per type. Needs neither torch nor llama.cpp's tools.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from golden_conversions import CHECKPOINTS, open_checkpoint, summarize
from toolbox import REPOSITORY, run

from edgeinfer.api.convert import convert
from edgeinfer.convert.file_types import FILE_TYPES, FileType
from edgeinfer.convert.imatrix import ImportanceMatrix, load_imatrix, save_imatrix
from edgeinfer.convert.mixture import may_quantize
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.header import Header, read_header
from edgeinfer.options import ConvertOptions
from edgeinfer.types import Importance

# Those whose rules ask for the matrix or the layer; every type is compared on a small model, by the test itself.
TYPES = ("Q2_K_S", "Q4_0", "IQ4_NL", "IQ3_XXS")
GOLDEN = REPOSITORY / "tests" / "convert" / "golden_imatrix.json"


def random_matrix(header: Header) -> dict[str, Importance]:
    """Whole numbers for every weight of the layers, of three decades, one in sixteen 0; the same with every numpy."""
    entries = {}
    for seed, tensor in enumerate(header.tensors):
        if tensor.name.startswith("blk.") and may_quantize(tensor.name, tensor.shape):
            n_matrices = tensor.shape[2] if len(tensor.shape) > 2 else 1
            raw = np.random.PCG64(seed).random_raw(tensor.shape[0] * n_matrices)
            sums = (raw >> 4 & 1023) ** np.uint64(2) * (raw & 15 > 0)
            entries[tensor.name] = Importance(sums.astype(np.float32), np.full(1, 7, np.float32))
    return entries


def quantize_with_matrix(source: Path, output: Path, file_type: FileType, matrix: ImportanceMatrix) -> None:
    """`llama_model_quantize` with a matrix whose tensors have one count each."""
    weights = {name: entry.weights(0, entry.sums.size) for name, entry in matrix.entries.items()}
    data = (llama_cpp.llama_cpp.llama_model_imatrix_data * (len(weights) + 1))()  # ends with an empty one
    for slot, (name, values) in zip(data, weights.items(), strict=False):
        slot.name = name.encode()
        slot.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        slot.size = values.size
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = file_type.id
    params.imatrix = ctypes.cast(data, type(params.imatrix))
    if llama_cpp.llama_model_quantize(bytes(source), bytes(output), ctypes.byref(params)):
        raise UnusableInputError(f"{source}: llama.cpp does not quantize it to {file_type.name}", "see its log")


def prepare(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """The checkpoint, its BF16 file and the matrix, all in `folder`."""
    checkpoint, source, matrix = open_checkpoint(name, folder), folder / f"{name}.gguf", folder / f"{name}-imatrix.gguf"
    convert(checkpoint, source, ConvertOptions(type="BF16", verify=False))
    save_imatrix(matrix, random_matrix(read_header(source)), ["random"], 1, 512)
    return checkpoint, source, matrix


def main() -> None:
    """Write the golden file."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    golden: dict[str, dict[str, Any]] = {name: {} for name in CHECKPOINTS}
    for name in CHECKPOINTS:
        with tempfile.TemporaryDirectory() as scratch:
            _, source, matrix = prepare(name, Path(scratch))
            for type_name in TYPES:
                output = Path(scratch) / "quantized.gguf"
                quantize_with_matrix(source, output, FILE_TYPES[type_name], load_imatrix(matrix))
                golden[name][type_name] = summarize(read_header(output))
                print(name, type_name, file=sys.stderr)
    document = {"library": llama_cpp.__version__, "checkpoints": golden}
    GOLDEN.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", "utf-8")
    print(GOLDEN)


if __name__ == "__main__":
    run(main)
