"""Writes tests/convert/golden_encodings.json: what the weights of quantized checkpoints are.

Each checkpoint of `encoded_checkpoint.py` is converted to F32 by llama.cpp's script, dequantized before by the
method's own library where the script does not know the method; kept is a hash of each tensor. Needs the environment of
the peers (scripts/build_peers.py), and another with torch, transformers, gguf, compressed-tensors 0.20.1 and
bitsandbytes 0.50.2, whose python is the argument:

    python -m venv --system-site-packages methods
    methods/bin/pip install torch transformers gguf compressed-tensors==0.20.1 bitsandbytes==0.50.2
    python scripts/golden_encodings.py methods/bin/python
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

import build_peers
import numpy as np
from encoded_checkpoint import ENCODINGS, make_encoded
from toolbox import REPOSITORY, run

from edgeinfer.gguf_file.header import read_header

GOLDEN = REPOSITORY / "tests" / "convert" / "golden_encodings.json"


def tensor_hashes(path: Path) -> dict[str, str]:
    """The beginning of the hash of each layer's matrix in a GGUF file of F32; there is one zero."""
    matrices = [t for t in read_header(path).tensors if t.name.startswith("blk.") and len(t.shape) > 1]
    numbers = {t.name: np.fromfile(path, "<f4", t.nbytes // 4, offset=t.offset) + np.float32(0) for t in matrices}
    return {name: sha256(values.data).hexdigest()[:16] for name, values in numbers.items()}


def main() -> None:
    """Write the golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="of the environment with the methods' libraries")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        outputs = {name: folder / f"{name}.gguf" for name in ENCODINGS}
        pairs = [[str(make_encoded(name, folder)), str(output)] for name, output in outputs.items()]
        job = {"script": str(build_peers.reference().convert_script), "conversions": pairs}
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        script = Path(__file__).with_name("golden_encodings_reference.py")
        subprocess.run([python, script, folder / "job.json"], check=True, stdout=subprocess.DEVNULL)
        golden = {name: tensor_hashes(output) for name, output in outputs.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n", "utf-8")
    print(GOLDEN)


if __name__ == "__main__":
    run(main)
