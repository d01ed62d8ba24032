"""Typed access to a checkpoint's `config.json`, with errors that name the key."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnusableInputError

MAX_VOCAB_SIZE = 1 << 22
"""Sixteen times the largest known: a table of this many tokens still fits into memory."""


class Config:
    """A model's config. What it leaves out has the default that its model class has in transformers."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.values = values
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """The same config, where `defaults` holds for what is missing (or null)."""
        return Config(self.path, self.values, defaults)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """The same config with some values replaced."""
        return Config(self.path, {**self.values, **values}, self._defaults)

    def get(self, key: str) -> Any:
        """The raw value, its default, or None."""
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def integer(self, key: str, *, at_least: int = 1, at_most: int = 2**31 - 1) -> int:
        """A whole number from `at_least` to `at_most`; UnusableInputError when it is missing or something else."""
        value = self.get(key)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not at_least <= value <= at_most:
            raise self._bad(key, f"a whole number from {at_least} to {at_most}", value)
        return value

    def number(self, key: str) -> float:
        """A positive number that F32 can hold; UnusableInputError when it is missing or something else."""
        value = self.get(key)
        if type(value) not in (int, float) or not 0 < value < 1e30:
            raise self._bad(key, "a positive number", value)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; what is missing and has no default is false."""
        value = self.get(key)
        if value is None:
            return False
        if type(value) is not bool:
            raise self._bad(key, "true or false", value)
        return value

    def require(self, key: str, *known: Any) -> None:
        """Raise UnusableInputError unless the value is one of `known`, those that the architecture is built for."""
        if self.get(key) not in known:
            described = " or ".join(map(repr, known))
            raise self.impossible(
                f"{key!r} is {reprlib.repr(self.get(key))}, this architecture is known with {described}"
            )

    def impossible(self, what: str) -> UnusableInputError:
        """The error for values that are well-formed but cannot be."""
        return UnusableInputError(f"{self.path}: {what}", "is this file complete?")

    @property
    def hf_class(self) -> str:
        """The model class, the first of `architectures`."""
        classes = self.values.get("architectures")
        if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
            raise self._bad("architectures", "a list with the model's class", classes)
        return classes[0]

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding, within what a tokenizer could fill."""
        return self.integer("vocab_size", at_most=MAX_VOCAB_SIZE)

    @property
    def quantization_method(self) -> str | None:
        """The name of the method that the weights were quantized with, if any."""
        section = self.values.get("quantization_config")
        if not isinstance(section, dict):
            return None
        return str(section.get("quant_method", "unknown method"))

    @property
    def rope(self) -> Config:
        """The rope settings, of old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) configs alike.

        Keys: `rope_theta`, `rope_type` (in lower case, "default" when nothing is scaled) and what the type needs.
        """
        section: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.get(key)
            if value is not None and not isinstance(value, dict):
                raise self._bad(key, "an object", value)
            section.update(value or {})
        kind = section.get("rope_type") or section.get("type") or "default"
        if not isinstance(kind, str):
            raise self._bad("rope_type", "a name", kind)
        section["rope_type"] = kind.lower()
        for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
            if section.get(key) is None:
                section[key] = self.get(key)
        return Config(self.path, section, self._defaults)

    def _bad(self, key: str, wanted: str, value: Any) -> UnusableInputError:
        state = "is missing" if value is None else f"is {reprlib.repr(value)}"
        return UnusableInputError(f"{self.path}: {key!r} {state}, expected {wanted}", "is this file complete?")
