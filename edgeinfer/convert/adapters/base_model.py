"""The base model of an adapter: its rules, and the names that those have for the modules of its class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.convert.adapters.peft import Delta, PeftAdapter
from edgeinfer.convert.architectures import lookup
from edgeinfer.convert.architectures.base import Architecture, ConstantRule, TensorRule, impossible
from edgeinfer.convert.checkpoint import Checkpoint, TensorSpec
from edgeinfer.convert.config import Config
from edgeinfer.convert.json_file import read_object
from edgeinfer.convert.text_model import text_model
from edgeinfer.errors import UnusableInputError, listed

MAX_PARTS = 1 << 17
"""Nearly twice the weights of the largest known model."""


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What the config alone tells of a model."""

    config: Config
    architecture: Architecture

    @classmethod
    def of(cls, folder: Path) -> BaseModel:
        """Of the checkpoint in `folder`. Raises NotFoundError without a config, UnusableInputError."""
        config = Config(folder / "config.json", read_object(folder / "config.json"))
        return cls(config, lookup(config))

    def rules(self) -> list[TensorRule | ConstantRule]:
        """How the tensors of the file are made of its weights."""
        adapted = self.architecture.adapted(self._text({}))
        return rules_of(self.architecture, adapted.config)

    def named(self, adapter: PeftAdapter, rules: Iterable[TensorRule | ConstantRule]) -> dict[str, Delta]:
        """The adapter's deltas by the names that the rules use.

        Raises UnusableInputError for weights of other parts than the text model, and for saved weights of another
        shape than the model's.
        """
        specs = {name: delta.a for name, delta in adapter.deltas.items()}
        renamed = self._renamed(specs)
        lost = specs.keys() - renamed.values()
        if lost:
            raise UnusableInputError(
                f"{adapter.path}: {len(lost)} adapted weights are no part of the text model: {listed(sorted(lost))}",
                "train an adapter of the text model alone",
            )
        known = {part.source for rule in rules if isinstance(rule, TensorRule) for part in rule.parts}
        # Of a model without its head, modules are called `layers`, not `model.layers`.
        return {
            new if new in known or f"model.{new}" not in known else f"model.{new}": adapter.deltas[old]
            for new, old in renamed.items()
        }

    def saved_bases(self, adapter: PeftAdapter) -> dict[str, TensorSpec]:
        """The base's weights that lie beside the adapter's, by the names that the rules use."""
        renamed = self._renamed(adapter.saved_bases)
        return {new: adapter.saved_bases[old] for new, old in renamed.items()}

    def _renamed(self, specs: Mapping[str, TensorSpec]) -> dict[str, str]:
        """The rules' names of weights, and the ones of the model's class that they stand for."""
        originals = {id(spec): name for name, spec in specs.items()}
        tensors = self.architecture.adapted(self._text(specs)).tensors
        return {new: originals[id(spec)] for new, spec in tensors.items() if id(spec) in originals}

    def _text(self, specs: Mapping[str, TensorSpec]) -> Checkpoint:
        return text_model(Checkpoint(self.config.path.parent, self.config, dict(specs)), self.architecture)


def rules_of(architecture: Architecture, config: Config) -> list[TensorRule | ConstantRule]:
    """All rules. Raises UnusableInputError for a config that makes no model, or one beyond any that there could be."""
    architecture.metadata(config)  # refuses the sizes that the rules take for granted
    found: list[TensorRule | ConstantRule] = []
    n_parts = 0
    for rule in architecture.tensors(config):
        found.append(rule)
        n_parts += len(rule.parts) if isinstance(rule, TensorRule) else 0
        if n_parts > MAX_PARTS:
            raise impossible(config, f"more than {MAX_PARTS} weights")
    return found


def check_saved_bases(saved: Mapping[str, TensorSpec], rules: Iterable[TensorRule | ConstantRule], where: str) -> None:
    """Raise UnusableInputError for a saved weight of another shape than the model's: its vocabulary has grown."""
    shapes = {part.source: part.shape for rule in rules if isinstance(rule, TensorRule) for part in rule.parts}
    for name, spec in saved.items():
        if name in shapes and spec.shape != shapes[name]:
            raise UnusableInputError(
                f"{where}: {name} was saved along with {list(spec.shape)} elements, the base has {list(shapes[name])}: "
                "the vocabulary was changed",
                "merge it with peft's merge_and_unload, save the model, and convert that",
            )
