"""Regenerates tests/convert/golden.json: what llama.cpp's own two steps make of our test checkpoints.

For each checkpoint: `convert_hf_to_gguf.py --outtype bf16`, then `llama_model_quantize` of the installed library to
every type that needs no importance matrix. Kept are a hash of the tensor table with all data, the count of tensors per
type, and the metadata with hashes for arrays. Needs the peers (scripts/build_peers.py).
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import build_peers
import llama_cpp
import numpy as np
from make_checkpoint import cached_checkpoint
from tiny_checkpoint import NAMES, make_tiny
from toolbox import REPOSITORY, run

from edgeinfer.convert.file_types import FILE_TYPES
from edgeinfer.gguf_file.header import Header, read_header

GOLDEN = REPOSITORY / "tests" / "convert" / "golden.json"
CHECKPOINTS = ("smollm2", *NAMES)


def summarize(header: Header) -> dict[str, Any]:
    """One hash over all tensors (name, shape, type, bytes, in order), and how many have which type."""
    digest = hashlib.sha256()
    with open(header.path, "rb") as file:
        for tensor in header.tensors:
            digest.update(f"{tensor.name} {tensor.shape} {tensor.type.name}\n".encode())
            file.seek(tensor.offset)
            digest.update(file.read(tensor.nbytes))
    return {"sha256": digest.hexdigest(), "types": dict(sorted(Counter(t.type.name for t in header.tensors).items()))}


def readable_metadata(header: Header) -> dict[str, Any]:
    """The metadata with its types; an array is its length and a hash."""
    return {key: _readable(header, key) for key in sorted(header.metadata)}


def _readable(header: Header, key: str) -> str:
    value_type, length = header.metadata.value_type(key)
    value = header.metadata[key]
    if length is None:
        return f"{value_type.name} {value}"
    data = (
        "\0".join(value).encode("utf-8", "surrogateescape") if isinstance(value, list) else np.asarray(value).tobytes()
    )
    return f"{value_type.name}[{length}] sha256 {hashlib.sha256(data).hexdigest()}"


def open_checkpoint(name: str, folder: Path) -> Path:
    """The directory of a test checkpoint; the tiny ones are made in `folder`."""
    if name != "smollm2":
        return make_tiny(name, folder)
    # The directory's name becomes general.name, so it must not depend on the cache.
    link = folder / "SmolLM2-135M-Instruct"
    link.symlink_to(cached_checkpoint("smollm2"))
    return link


def main() -> None:
    """Write the golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", choices=CHECKPOINTS, action="append", help="leave the other checkpoints' data as it is"
    )
    names = parser.parse_args().only or CHECKPOINTS
    peers = build_peers.build()
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            found = _golden(name, Path(scratch), peers)
        golden = json.loads(GOLDEN.read_text("utf-8")) if GOLDEN.exists() else {"checkpoints": {}}
        golden["library"] = llama_cpp.__version__
        golden["checkpoints"][name] = found
        GOLDEN.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n", "utf-8")
    print(GOLDEN)


def _golden(name: str, scratch: Path, peers: build_peers.Peers) -> dict[str, Any]:
    checkpoint = open_checkpoint(name, scratch)
    intermediate = scratch / "bf16.gguf"
    command = [str(peers.python), str(peers.convert_script), str(checkpoint), "--outtype", "bf16"]
    subprocess.run([*command, "--outfile", str(intermediate)], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = {"metadata": readable_metadata(read_header(intermediate)), "types": {}}
    for file_type in FILE_TYPES.values():
        output = scratch / "quantized.gguf"
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = file_type.id
        failed = llama_cpp.llama_model_quantize(bytes(intermediate), bytes(output), ctypes.byref(params))
        # The only reason for a failure here: the type needs an importance matrix.
        found["types"][file_type.name] = None if failed else summarize(read_header(output))
        print(name, file_type.name, "needs an importance matrix" if failed else "done", file=sys.stderr)
    return found


if __name__ == "__main__":
    run(main)
