"""Compares tests/conformance/golden_adapters with the logits that PEFT gives for the same models and adapters today.

PEFT reads the directory that `random_adapter` writes and must find every tensor that it expects there, and no other.
`--update` writes the golden data anew. Needs the environment of the peers (scripts/build_peers.py), which is made the
first time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import build_peers
import numpy as np
from conformance import POSITIONS
from random_adapter import TinyAdapter, adapter_names, make_adapter, read_adapter_description
from random_checkpoint import FOLDER, PLAIN, make_checkpoint, prompt
from toolbox import run

from edgeinfer.errors import CheckFailedError, ResourceError

GOLDEN = FOLDER / "golden_adapters"
_REFERENCE = """
import json, sys, warnings
import torch, transformers
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file

checkpoint, adapter, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
class_name = json.load(open(checkpoint + "/config.json"))["architectures"][0]
base = getattr(transformers, class_name).from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
model = PeftModel.from_pretrained(base, adapter).eval()
stored = load_file(adapter + "/adapter_model.safetensors")
found = get_peft_model_state_dict(model)
wrong = stored.keys() ^ found.keys() or [n for n in stored if not torch.equal(stored[n].float(), found[n].float())]
if wrong:
    sys.exit(f"PEFT does not have the adapter's tensors: {sorted(wrong)[:5]}")
with torch.inference_mode():
    print(json.dumps(model(torch.tensor([tokens]), use_cache=False).logits[0].tolist()))
"""


def main() -> None:
    """Compare or update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ADAPTER", help="only these adapters")
    parser.add_argument("--update", action="store_true", help="write the golden data anew")
    arguments = parser.parse_args()
    peers = build_peers.reference()
    changed = []
    for name in arguments.names or adapter_names():
        found = _logits(read_adapter_description(name), peers)
        path = GOLDEN / f"{name}.json"
        if arguments.update:
            rows = ",\n".join(f' "{position}": {json.dumps(row)}' for position, row in found.items())
            path.write_text(f"{{\n{rows}\n}}\n", "utf-8")
            continue
        kept = json.loads(path.read_text("utf-8"))
        if not all(np.allclose(row, kept.get(position, np.nan), rtol=0, atol=1e-4) for position, row in found.items()):
            changed.append(name)
    if changed:
        raise CheckFailedError(f"PEFT no longer gives {GOLDEN.name} of {', '.join(changed)}", "see --update")
    print(GOLDEN)


def _logits(adapter: TinyAdapter, peers: build_peers.Peers) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint(adapter.model, PLAIN, Path(scratch))
        folder = make_adapter(adapter, checkpoint, Path(scratch))
        tokens = json.dumps(prompt(adapter.model).tolist())
        command = [peers.peft_python, "-c", _REFERENCE, checkpoint, folder, tokens]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{adapter.name}: the reference failed", done.stderr.strip()[-2000:])
    rows = json.loads(done.stdout)
    return {str(position): [round(x, 5) for x in rows[position]] for position in POSITIONS}


if __name__ == "__main__":
    run(main)
