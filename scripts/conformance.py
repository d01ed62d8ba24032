"""Compares tests/conformance/golden with what transformers and llama.cpp make of the same checkpoints today.

For each variant of each model: `convert_hf_to_gguf.py --outtype bf16` (or what the model says), then
`llama_model_quantize` of the installed library to a handful of types, and its dry run to all of them. Kept are a hash
of all tensors with their data, a hash of the types alone (null where they need an importance matrix), the metadata, and
transformers' logits at a few positions.
`--update` writes the golden data anew. Needs the environments of the peers (scripts/build_peers.py), which are made the
first time. Two models are worked on at a time.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import build_peers
import llama_cpp
import numpy as np
from golden_conversions import readable_metadata, summarize
from random_checkpoint import FOLDER, PLAIN, TinyModel, make_checkpoint, model_names, prompt, read_model
from toolbox import run

from edgeinfer.convert.file_types import FILE_TYPES, FileType
from edgeinfer.errors import CheckFailedError, ResourceError
from edgeinfer.gguf_file.header import read_header

TYPES = ("BF16", "Q4_K_M", "Q3_K_M", "Q5_K_S", "IQ4_XS", "Q2_K", "Q4_0", "MXFP4_MOE")
POSITIONS = (20, 47)
"""Positions of the prompt whose logits are kept."""
GOLDEN = FOLDER / "golden"


def main() -> None:
    """Compare or update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", help="only these models")
    parser.add_argument("--update", action="store_true", help="write the golden data anew")
    arguments = parser.parse_args()
    names = arguments.names or model_names()
    peers = build_peers.reference()
    changed = []
    # Processes, because what the library logs is one setting for the whole of one.
    with ProcessPoolExecutor(2) as pool:
        for name, found in zip(names, pool.map(_asked, names, repeat(peers)), strict=True):
            path = GOLDEN / f"{name}.json"
            if arguments.update:
                path.write_text(_encode(found), "utf-8")
            elif not _agrees(found, path):
                changed.append(name)
            print(name, "changed" if name in changed else "written" if arguments.update else "as committed")
    if changed:
        raise CheckFailedError(f"the references no longer give {GOLDEN.name} of {', '.join(changed)}", "see --update")


def _asked(name: str, peers: build_peers.Peers) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        return _reference(read_model(name), Path(scratch), peers)


def _reference(model: TinyModel, scratch: Path, peers: build_peers.Peers) -> dict[str, Any]:
    checkpoints = {variant: make_checkpoint(model, variant, scratch) for variant in model.variants}
    converted = {variant: scratch / f"{variant}.gguf" for variant in checkpoints}
    logits = scratch / "logits.npy"
    conversion = {
        "script": str(peers.convert_script),
        "outtype": model.outtype,
        "conversions": [[str(checkpoints[v]), str(converted[v])] for v in checkpoints],
    }
    forward = {"checkpoint": str(checkpoints[PLAIN]), "tokens": prompt(model).tolist(), "logits": str(logits)}
    if model.needs_newer_transformers:
        _run_reference(model, scratch, peers.python, conversion)
        _run_reference(model, scratch, peers.newer_python, forward)
    else:
        _run_reference(model, scratch, peers.python, conversion | forward)
    rows = np.load(logits)
    positions = POSITIONS if len(rows) > 1 else range(len(rows))  # an encoder has one row, or none to compare with
    return {
        "variants": {variant: _quantized(path) for variant, path in converted.items()},
        "logits": {str(position): [round(float(x), 5) for x in rows[position]] for position in positions},
    }


def _run_reference(model: TinyModel, scratch: Path, python: Path, job: dict[str, Any]) -> None:
    (scratch / "job.json").write_text(json.dumps(job), "utf-8")
    script = Path(__file__).with_name("conformance_reference.py")
    done = subprocess.run([python, script, scratch / "job.json"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{model.name}: the references failed", done.stderr.strip()[-2000:])


def _quantized(intermediate: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    for name in TYPES:
        output = intermediate.with_suffix(".quantized")
        _quantize(intermediate, output, FILE_TYPES[name])
        found[name] = summarize(read_header(output))
        # Not the intermediate's: the script calls that MXFP4_MOE where the experts came so.
        metadata = metadata or readable_metadata(read_header(output))
    return {
        "metadata": {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")},
        "tables": {name: _type_table(intermediate, file_type) for name, file_type in FILE_TYPES.items()},
        "types": found,
    }


def _quantize(source: Path, output: Path, file_type: FileType, *, dry_run: bool = False) -> str:
    """What the library logs meanwhile."""
    lines: list[str] = []
    keep = llama_cpp.llama_log_callback(lambda level, text, data: lines.append(text.decode("utf-8", "replace")))
    llama_cpp.llama_log_set(keep, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.dry_run = file_type.id, dry_run
    params.allow_requantize = True  # the script leaves a checkpoint's MXFP4 as it is
    failed = llama_cpp.llama_model_quantize(bytes(source), bytes(output), ctypes.byref(params))
    llama_cpp.llama_log_set(_SILENT, None)
    if failed:
        raise ResourceError(f"llama_model_quantize to {file_type.name} failed", "".join(lines)[-500:])
    return "".join(lines)


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)
_TENSOR_LINE = re.compile(r"\] (\S+) +- \[[^]]*\], type = +(\w+), size = [^\n(]*(?:\((\w+)\))?\n")


def _type_table(intermediate: Path, file_type: FileType) -> str | None:
    """The types that the library would give the tensors; None where it would ask for an importance matrix."""
    log = _quantize(intermediate, intermediate.with_suffix(".none"), file_type, dry_run=True)
    if "require an imatrix" in log:
        return None
    # What is never quantized stays BF16 there; a script that is asked for a type of floats writes it in that one.
    kept = {"bf16": file_type.name} if file_type.name in ("F16", "F32") else {}
    return type_table((name, (new or kept.get(old, old)).upper()) for name, old, new in _TENSOR_LINE.findall(log))


def type_table(types: Iterable[tuple[str, str]]) -> str:
    """A hash over the name and type of every tensor: the part of a file that a plan knows already."""
    return hashlib.sha256("\n".join(map(" ".join, types)).encode()).hexdigest()[:16]


def _agrees(found: dict[str, Any], path: Path) -> bool:
    kept = json.loads(path.read_text("utf-8"))
    close = all(
        np.allclose(row, kept["logits"].get(position, np.nan), rtol=0, atol=1e-4)
        for position, row in found["logits"].items()
    )
    return close and found["variants"] == kept["variants"]


def _encode(found: dict[str, Any]) -> str:
    """Indented, but a row of logits is one line."""
    rows = ",\n".join(f'  "{position}": {json.dumps(row)}' for position, row in found["logits"].items())
    variants = json.dumps(found["variants"], indent=1, sort_keys=True)
    return f'{{"variants": {variants},\n "logits": {{\n{rows}\n }}\n}}\n'


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    run(main)
