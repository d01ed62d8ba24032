"""What transformers and llama.cpp's own script make of a checkpoint. Runs in the environment of the peers.

Takes one argument, a JSON file: `script` (the path of convert_hf_to_gguf.py), `outtype` and `conversions` (pairs of a
checkpoint directory and an output), or `checkpoint`, `tokens` and `logits`: where to save the logits of the tokens as
an array of shape `(tokens, vocabulary)`; or both. Imports nothing of edgeinfer.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import rwkv7_reference
import torch
from llama_twins import llama_twin


def convert(script: Path, pairs: list[list[str]], outtype: str) -> None:
    """Convert each checkpoint to `outtype` with llama.cpp's script.

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
    repaired: list[Any] = []

    def with_plain_vocabulary(*arguments: Any, **options: Any) -> Any:
        model_class = get_model_class(*arguments, **options)
        model_class.set_vocab = lambda self: self._set_vocab_gpt2()
        model_class.lerp_weights = {}  # RWKV's, which otherwise keep what the model before had
        model_class._is_tokenizer_xlmroberta = lambda self: False
        if model_class not in repaired:
            repaired.append(model_class)
            model_class.modify_tensors = _with_what_it_returns(model_class.modify_tensors)
            if model_class.__name__ == "ExaoneModel":
                model_class.set_gguf_parameters = _with_epsilon(model_class.set_gguf_parameters)
        model_class._find_rerank_config = find_answers
        # What the class collects in itself must not come from the checkpoint before.
        model_class.module_paths, model_class.dense_features_dims = [], {}
        return model_class

    def find_answers(self: Any) -> None:
        """Not by their texts, which our tokenizer does not have."""
        self.is_rerank, self.is_tied_embeddings = True, self.hparams["tie_word_embeddings"]
        self.token_true_id, self.token_false_id = answers(self.dir_model)

    convert_hf_to_gguf.get_model_class = with_plain_vocabulary
    for checkpoint, output in pairs:
        sys.argv = [str(script), checkpoint, "--outtype", outtype, "--outfile", output]
        sys.argv.append("--sentence-transformers-dense-modules")
        convert_hf_to_gguf.main()


def _with_what_it_returns(modify_tensors: Any) -> Any:
    """The same generator, which also yields what it returns: StableLM's loses the norms of heads by returning them."""

    def modified(self: Any, *arguments: Any) -> Any:
        yield from (yield from modify_tensors(self, *arguments)) or ()

    return modified


def _with_epsilon(set_gguf_parameters: Any) -> Any:
    """The same, with the key that EXAONE's loader wants; the script writes it as that of another kind of norm."""

    def modified(self: Any) -> None:
        set_gguf_parameters(self)
        self.gguf_writer.add_layer_norm_rms_eps(self.hparams["layer_norm_epsilon"])

    return modified


def logits(checkpoint: str, tokens: list[int]) -> Any:
    """The logits of every token, F32, shape `(tokens, vocabulary)`; instead of them, an encoder's vector as one row.

    The checkpoint must fit the class exactly; a class that is not in transformers itself has none.
    """
    import transformers

    if twin := llama_twin(Path(checkpoint)):
        with torch.inference_mode():
            return twin.eval()(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    class_name = json.loads((Path(checkpoint) / "config.json").read_text("utf-8"))["architectures"][0]
    if class_name == "RWKV7ForCausalLM":
        return rwkv7_reference.logits(checkpoint, tokens)
    if not hasattr(transformers, class_name):
        return np.empty((0, 0), np.float32)
    model, report = getattr(transformers, class_name).from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: [n for n in names if not n.startswith("pooler.")] for kind, names in report.items()}
    problems = {kind: names for kind, names in problems.items() if names}
    if problems:
        sys.exit(f"{checkpoint}: transformers complains about {problems}")
    has_modules = (Path(checkpoint) / "modules.json").exists()
    # Layers that share another's keys and values find them in the cache only.
    options: dict[str, Any] = {"use_cache": bool(getattr(model.config, "num_kv_shared_layers", 0))}
    if "use_cache" not in inspect.signature(model.forward).parameters:
        options = {}
    with torch.inference_mode():
        outputs = model.eval()(torch.tensor([tokens]), output_hidden_states=has_modules, **options)
    if hasattr(outputs, "logits") and not has_modules:
        return outputs.logits[0].numpy()
    last = outputs.hidden_states[-1] if hasattr(outputs, "logits") else outputs.last_hidden_state
    vector = pooled(Path(checkpoint), last[0], getattr(outputs, "logits", None))
    return torch.nn.functional.normalize(vector, dim=0)[None].numpy()


def pooled(checkpoint: Path, outputs: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
    """A vector of a model's last outputs, as sentence-transformers makes it: the mean where nothing is stated.

    A reranker's has the probabilities of its two answers.
    """
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
        elif module["type"].endswith("LogitScore"):
            assert logits is not None
            vector = logits[0, -1, answers(checkpoint)].softmax(dim=0)
    return vector


def answers(checkpoint: Path) -> list[int]:
    """The tokens with which a reranker says yes and no."""
    stated = json.loads((checkpoint / "1_LogitScore" / "config.json").read_text("utf-8"))
    return [stated["true_token_id"], stated["false_token_id"]]


def main() -> None:
    """Do what the JSON file asks for."""
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    if "logits" in job:
        np.save(job["logits"], logits(job["checkpoint"], job["tokens"]))
    if "conversions" in job:
        convert(Path(job["script"]), job["conversions"], job["outtype"])


if __name__ == "__main__":
    main()
