"""Typed access to a checkpoint's `config.json`, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.errors import UnusableInputError


class Config:
    """A model's config. What it leaves out has the default that its model class has in transformers."""

    def __init__(self, path: Path, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.values = values
        self._defaults = defaults or {}

    def with_defaults(self, defaults: Mapping[str, Any]) -> Config:
        """The same config, where `defaults` holds for what is missing (or null)."""
        return Config(self.path, self.values, defaults)

    def get(self, key: str) -> Any:
        """The raw value, its default, or None."""
        value = self.values.get(key)
        return self._defaults.get(key) if value is None else value

    def integer(self, key: str, *, at_least: int = 1) -> int:
        """A whole number of at least `at_least`; UnusableInputError when it is missing or something else."""
        value = self.get(key)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not at_least <= value < 2**31:
            raise self._bad(key, f"a whole number of at least {at_least}", value)
        return value

    def number(self, key: str) -> float:
        """A finite number; UnusableInputError when it is missing or something else."""
        value = self.get(key)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise self._bad(key, "a number", value)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; what is missing and has no default is false."""
        value = self.get(key)
        if value is None:
            return False
        if type(value) is not bool:
            raise self._bad(key, "true or false", value)
        return value

    @property
    def hf_class(self) -> str:
        """The model class, the first of `architectures`."""
        classes = self.values.get("architectures")
        if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
            raise self._bad("architectures", "a list with the model's class", classes)
        return classes[0]

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

        Keys: `rope_theta`, `rope_type` ("default" when nothing is scaled) and what the type needs.
        """
        section: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = self.values.get(key)
            if value is not None and not isinstance(value, dict):
                raise self._bad(key, "an object", value)
            section.update(value or {})
        section.setdefault("rope_type", section.get("type") or "default")
        section.setdefault("rope_theta", self.get("rope_theta"))
        return Config(self.path, section, self._defaults)

    def _bad(self, key: str, wanted: str, value: Any) -> UnusableInputError:
        state = "is missing" if value is None else f"is {value!r}"
        return UnusableInputError(f"{self.path}: {key!r} {state}, expected {wanted}", "is this file complete?")
