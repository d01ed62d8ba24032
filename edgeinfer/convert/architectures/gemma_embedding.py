"""EmbeddingGemma: a Gemma 3 that reads both ways, and two matrices after the pooling that make the vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeinfer.convert.architectures import gemma3
from edgeinfer.convert.architectures.base import Architecture, TensorRule, impossible, n_layers, require, tensor
from edgeinfer.convert.architectures.blocks import as_part_of_a_model
from edgeinfer.convert.architectures.pooling import modules, pooling_metadata
from edgeinfer.convert.checkpoint import Checkpoint, read_safetensors_header
from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import read_object
from edgeinfer.errors import UnusableInputError


@dataclass(frozen=True, slots=True)
class _Dense:
    """A matrix after the pooling, in a directory of its own."""

    folder: Path
    n_in: int
    n_out: int

    @property
    def source(self) -> str:
        """Its name among the checkpoint's tensors."""
        return f"{self.folder.name}/linear.weight"


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """With the names of a model that has a head, and with the matrices after the pooling."""
    checkpoint = as_part_of_a_model(checkpoint)
    tensors = dict(checkpoint.tensors)
    for dense in _dense_layers(checkpoint.config):
        for name, spec in read_safetensors_header(dense.folder / "model.safetensors").items():
            tensors[f"{dense.folder.name}/{name}"] = spec
    return replace(checkpoint, tensors=tensors)


def metadata(config: Config) -> dict[str, Any]:
    """As gemma3; a window counts both sides together, as the config does."""
    require(config, "use_bidirectional_attention", True)
    if n_layers(config) < gemma3.WINDOW_PATTERN:
        raise impossible(config, "all layers have a window, at which llama.cpp ends the process")
    dense = {
        f"dense_{number}_feat_{side}": size
        for number, layer in _numbered(config)
        for side, size in (("in", layer.n_in), ("out", layer.n_out))
    }
    pooling = pooling_metadata(config, "Dense")
    return {**gemma3.windowed_metadata(config), "attention.causal": False, **pooling, **dense}


def tensors(config: Config) -> Iterator[TensorRule]:
    """As gemma3, without a head."""
    yield from gemma3.tensors(config.with_values({"tie_word_embeddings": True}))
    for number, layer in _numbered(config):
        yield tensor(f"dense_{number}.weight", layer.source, (layer.n_out, layer.n_in))


def _numbered(config: Config) -> Iterator[tuple[int, _Dense]]:
    """The matrices after the pooling with llama.cpp's numbers, which begin at 2."""
    return enumerate(_dense_layers(config), 2)


def _dense_layers(config: Config) -> list[_Dense]:
    """None or two. Raises UnusableInputError for others, which end the C library's process."""
    folders = [folder for kind, folder in modules(config, "Dense") if kind == "Dense"]
    layers = [_dense_layer(folder) for folder in folders]
    if not layers:
        return []
    embd = config.integer("hidden_size")
    sizes = [(layer.n_in, layer.n_out) for layer in layers]
    if len(set(folders)) != 2 or len(sizes) != 2 or sizes != [(embd, sizes[0][1]), (sizes[0][1], embd)]:
        raise impossible(
            config, f"modules.json has Dense layers of {sizes}, llama.cpp knows two, from {embd} and back to it"
        )
    return layers


def _dense_layer(folder: Path) -> _Dense:
    path = folder / "config.json"
    # What sentence-transformers' class assumes (models/Dense.py).
    stated = Config(path, read_object(path), {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"})
    if not str(stated.get("activation_function")).endswith(".Identity") or stated.flag("bias"):
        raise UnusableInputError(
            f"{path}: a bias or an activation, llama.cpp has neither after the pooling", "is this an EmbeddingGemma?"
        )
    return _Dense(folder, stated.integer("in_features"), stated.integer("out_features"))


ARCHITECTURE = Architecture(
    name="gemma-embedding",
    defaults=gemma3.ARCHITECTURE.defaults,
    metadata=metadata,
    tensors=tensors,
    adapted=adapted,
)
