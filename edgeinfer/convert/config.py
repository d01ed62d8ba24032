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

    def renamed(self, synonyms: Mapping[str, str]) -> Config:
        """The same config with values under other names, too: `synonyms` tells the new name of an old one."""
        stated = {new: self.values[old] for old, new in synonyms.items() if self.values.get(old) is not None}
        return self.with_values(stated)

    def text_model(self) -> Config:
        """The config of a multimodal model's text model: its section over what stands outside of it; else itself."""
        section = self.values.get("text_config")
        if not isinstance(section, dict):
            return self
        # The text model was once a model of its own, with a class and a name that are not this one's.
        own = {key: value for key, value in section.items() if key not in ("architectures", "_name_or_path")}
        return Config(self.path, {**self.values, **own}, self._defaults)

    @property
    def is_multimodal(self) -> bool:
        """Whether the text model is one part among others; older configs have no section for it."""
        return any(isinstance(self.values.get(key), dict) for key in ("text_config", "vision_config"))

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
        """The name of the method that the weights (or the text model's) were quantized with, if any."""
        section = self._quantization_section()
        if isinstance(section, dict):
            return str(section.get("quant_method") or _unnamed_method(section))
        return None if section is None else reprlib.repr(section)

    @property
    def quantization(self) -> Config:
        """The settings of that method."""
        section = self._quantization_section()
        return Config(self.path, section if isinstance(section, dict) else {})

    def _quantization_section(self) -> Any:
        text = self.values.get("text_config")
        for values in (self.values, text if isinstance(text, dict) else {}):
            for key in ("quantization_config", "compression_config"):
                if values.get(key) is not None:
                    return values[key]
        return None

    @property
    def rope(self) -> Config:
        """The rope settings, of old (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) configs alike.

        Keys: `rope_theta`, `rope_type` (in lower case, "default" when nothing is scaled) and what the type needs.
        """
        section: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            section.update(self._object(key, self.get(key)))
        if "full_attention" in section:  # a rope for each kind of layer
            section = self._object("full_attention", section["full_attention"])
        kind = section.get("rope_type") or section.get("type") or "default"
        if not isinstance(kind, str):
            raise self._bad("rope_type", "a name", kind)
        # Positions of several kinds, which are all the same for text, turn in the ordinary way.
        section["rope_type"] = "default" if kind == "mrope" else kind.lower()
        for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor"):
            if section.get(key) is None:
                section[key] = self.get(key)
        return Config(self.path, section, self._defaults)

    @property
    def window_rope(self) -> Config:
        """The rope settings of the layers with a sliding window, where those have their own."""
        section = self._object("rope_parameters", self.values.get("rope_parameters"))
        own = dict(self._object("sliding_attention", section.get("sliding_attention")))
        if own.get("rope_theta") is None:
            own["rope_theta"] = self.get("rope_local_base_freq")
        return Config(self.path, own)

    def _object(self, key: str, value: Any) -> dict[str, Any]:
        """A value that has to be an object, of which nothing is an empty one."""
        if value is not None and not isinstance(value, dict):
            raise self._bad(key, "an object", value)
        return dict(value or {})

    def _bad(self, key: str, wanted: str, value: Any) -> UnusableInputError:
        state = "is missing" if value is None else f"is {reprlib.repr(value)}"
        return UnusableInputError(f"{self.path}: {key!r} {state}, expected {wanted}", "is this file complete?")


def _unnamed_method(section: Mapping[str, Any]) -> str:
    """Of a section that older versions of transformers wrote, which knew one method only."""
    return "bitsandbytes" if any(key.startswith("load_in_") for key in section) else "unknown method"
