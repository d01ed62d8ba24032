"""What transformers and llama.cpp's own script make of a checkpoint. Runs in the environment of the peers.

Takes one argument, a JSON file: `script` (the path of convert_hf_to_gguf.py) and `conversions` (pairs of a checkpoint
directory and an output), or `checkpoint`, `tokens` and `logits`: where to save the logits of the tokens as an array of
shape `(tokens, vocabulary)`; or both. Imports nothing of edgeinfer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch


def convert(script: Path, pairs: list[list[str]]) -> None:
    """Convert each checkpoint to BF16 with llama.cpp's script.

    The vocabulary is always written the same way: the script knows tokenizers by a hash of what they do to a text, and
    ours is too small to be one of them. What becomes of tokenizers is tested elsewhere. And exponentials are rounded
    correctly: torch's in F32 differ from one machine to another.
    """
    sys.path.insert(0, str(script.parent))
    import conversion.base
    import convert_hf_to_gguf

    exp = torch.exp
    torch.exp = lambda numbers: exp(numbers.to(torch.float64)).to(torch.float32)
    text_model = conversion.base.TextModel
    text_model.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    get_model_class = convert_hf_to_gguf.get_model_class

    def with_plain_vocabulary(*arguments: Any, **options: Any) -> Any:
        model_class = get_model_class(*arguments, **options)
        model_class.set_vocab = lambda self: self._set_vocab_gpt2()
        model_class._is_tokenizer_xlmroberta = lambda self: False
        # What the class collects in itself must not come from the checkpoint before.
        model_class.module_paths, model_class.dense_features_dims = [], {}
        return model_class

    convert_hf_to_gguf.get_model_class = with_plain_vocabulary
    for checkpoint, output in pairs:
        sys.argv = [str(script), checkpoint, "--outtype", "bf16", "--outfile", output]
        sys.argv.append("--sentence-transformers-dense-modules")
        convert_hf_to_gguf.main()


def logits(checkpoint: str, tokens: list[int]) -> Any:
    """The logits of every token, F32, shape `(tokens, vocabulary)`; instead of them, an encoder's vector as one row.

    The checkpoint must fit the class exactly; a class that is not in transformers itself has none.
    """
    import transformers

    class_name = json.loads((Path(checkpoint) / "config.json").read_text("utf-8"))["architectures"][0]
    if not hasattr(transformers, class_name):
        return np.empty((0, 0), np.float32)
    model, report = getattr(transformers, class_name).from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: [n for n in names if not n.startswith("pooler.")] for kind, names in report.items()}
    problems = {kind: names for kind, names in problems.items() if names}
    if problems:
        sys.exit(f"{checkpoint}: transformers complains about {problems}")
    with torch.inference_mode():
        outputs = model.eval()(torch.tensor([tokens]), use_cache=False)
        if hasattr(outputs, "logits") and not (Path(checkpoint) / "modules.json").exists():
            return outputs.logits[0].numpy()
        if hasattr(outputs, "logits"):
            outputs = model.model.eval()(torch.tensor([tokens]), use_cache=False)
        return torch.nn.functional.normalize(pooled(Path(checkpoint), outputs.last_hidden_state[0]), dim=0)[
            None
        ].numpy()


def pooled(checkpoint: Path, outputs: torch.Tensor) -> torch.Tensor:
    """A vector of a model's last outputs, as sentence-transformers makes it: the mean where nothing is stated."""
    from safetensors.torch import load_file

    stated = checkpoint / "modules.json"
    vector = outputs.mean(dim=0)
    for module in json.loads(stated.read_text("utf-8")) if stated.exists() else []:
        folder = checkpoint / module["path"]
        if module["type"].endswith("Pooling"):
            mode = json.loads((folder / "config.json").read_text("utf-8"))
            vector = outputs[-1] if mode.get("pooling_mode_lasttoken") else outputs.mean(dim=0)
        elif module["type"].endswith("Dense"):
            vector = load_file(folder / "model.safetensors")["linear.weight"].float() @ vector
    return vector


def main() -> None:
    """Do what the JSON file asks for."""
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    if "logits" in job:
        np.save(job["logits"], logits(job["checkpoint"], job["tokens"]))
    if "conversions" in job:
        convert(Path(job["script"]), job["conversions"])


if __name__ == "__main__":
    main()
