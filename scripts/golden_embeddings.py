"""Compares tests/api/golden_embeddings.json with what transformers makes of all-MiniLM-L6-v2 today.

Kept are a few sentences and their embeddings: the mean of the last layer's outputs, of length 1. `--update` writes
them anew. Needs the environment of the peers (scripts/build_peers.py), which is made the first time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import zipfile
from pathlib import Path

import build_peers
import numpy as np
from fetch_model import fetch
from toolbox import REPOSITORY, run

from edgeinfer.errors import CheckFailedError, ResourceError

GOLDEN = REPOSITORY / "tests" / "api" / "golden_embeddings.json"
SENTENCES = (
    "The cat sits outside.",
    "A dog plays in the garden with a red ball, and nobody minds.",
    "How do I convert a checkpoint to GGUF?",
    "Die Straßenbahn fährt um 8:45 Uhr über die Brücke.",
    "def add(a, b):\n    return a + b",
    "东京 costs $1,234.56 — naïve façade 🚀",
    " ".join(["Long texts have to be read as a whole, too, up to the last word."] * 16),
)
_REFERENCE = """
import json, sys
import torch, transformers
path, sentences = sys.argv[1], json.load(sys.stdin)
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
model = transformers.BertModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
with torch.inference_mode():
    outputs = [model(**tokenizer(s, return_tensors="pt")).last_hidden_state[0].mean(dim=0) for s in sentences]
json.dump([torch.nn.functional.normalize(o, dim=0).tolist() for o in outputs], sys.stdout)
"""


def unpack_checkpoint(folder: Path) -> Path:
    """The checkpoint all-MiniLM-L6-v2 as a directory in `folder`."""
    target = folder / "all-MiniLM-L6-v2"
    with zipfile.ZipFile(fetch("minilm")) as archive:
        archive.extractall(target)
    return target


def main() -> None:
    """Compare or update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the golden data anew")
    arguments = parser.parse_args()
    peers = build_peers.reference()
    with tempfile.TemporaryDirectory() as scratch:
        command = [peers.python, "-c", _REFERENCE, unpack_checkpoint(Path(scratch))]
        done = subprocess.run(command, input=json.dumps(SENTENCES), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError("the reference failed", done.stderr.strip()[-2000:])
    found = [[round(x, 5) for x in vector] for vector in json.loads(done.stdout)]
    if arguments.update:
        rows = ",\n".join(map(json.dumps, found))
        GOLDEN.write_text(f"[\n{rows}\n]\n", "utf-8")
    elif not np.allclose(found, json.loads(GOLDEN.read_text("utf-8")), rtol=0, atol=2e-5):
        raise CheckFailedError(f"transformers no longer gives {GOLDEN.name}", "see --update")
    print(GOLDEN)


if __name__ == "__main__":
    run(main)
