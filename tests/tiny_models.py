"""The small random models of tests/conformance, changed for one test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from random_checkpoint import PLAIN, make_checkpoint, read_model

from edgeinfer.api.convert import plan_conversion
from edgeinfer.convert.plan import ConvertPlan


def make_model(name: str, folder: Path, **changes: Any) -> Path:
    """The plain variant of a model with a changed config; a change to None leaves the key out."""
    model = read_model(name)
    config = {key: value for key, value in (model.config | changes).items() if value is not None}
    return make_checkpoint(replace(model, config=config), PLAIN, folder)


def plan_of(checkpoint: Path) -> ConvertPlan:
    """How a checkpoint would be converted."""
    return plan_conversion(checkpoint).plan
