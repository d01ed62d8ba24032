"""The `general.*` keys: what a model hub shows of a model, gathered from the model card, the config and the name."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.convert.checkpoint import Checkpoint
from edgeinfer.convert.json_file import read_file, read_object_if_there
from edgeinfer.convert.model_name import name_parts, size_label
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.errors import EdgeinferError

MAX_README_NBYTES = 16 << 20
MAX_CARD_NBYTES = 1 << 20

# generation_config.json's name of a sampling default, GGUF's, its type there, and the least and most that make sense.
_SAMPLING = {
    "top_k": ("top_k", int, 0, 2**31 - 1),
    "top_p": ("top_p", float, 0, 1),
    "min_p": ("min_p", float, 0, 1),
    "temperature": ("temp", float, 0, 1e6),
    "repetition_penalty": ("penalty_repeat", float, 1e-6, 1e6),
}
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# A model card's key, and GGUF's.
_CARD_TEXTS = {
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
}
_CARD_LISTS = {"tags": ("tags", "pipeline_tag"), "languages": ("languages", "language")}


def general_metadata(checkpoint: Checkpoint, tensors: Sequence[TensorPlan]) -> dict[str, Any]:
    """The `general.*` keys of a checkpoint, in llama.cpp's names, without the prefix."""
    n_parameters = sum(t.n_elements for t in tensors)
    card = _model_card(checkpoint.path / "README.md")
    name = _model_name(checkpoint)
    parts = name_parts(name.rsplit("/", 1)[-1], n_parameters)
    organization = name.rsplit("/", 1)[0] if "/" in name else None
    known: dict[str, Any] = {
        **_sampling(checkpoint.path),
        "name": title(name.rsplit("/", 1)[-1]),
        "organization": title(organization) if organization else None,
        **parts,
        "size_label": parts.get("size_label") or size_label((t.name, t.shape) for t in tensors),
        **{target: _text(card.get(source)) for source, target in _CARD_TEXTS.items()},
        **dict(_base_models(card, n_parameters)),
        **{target: _list(card, sources) for target, sources in _CARD_LISTS.items()},
    }
    return {key: value for key, value in known.items() if value is not None}


def _model_name(checkpoint: Checkpoint) -> str:
    """The hub id that it was fetched by, or that the config remembers, else the directory's name."""
    if checkpoint.repository:
        return checkpoint.repository
    remembered = checkpoint.config.get("_name_or_path")
    if isinstance(remembered, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", remembered) and remembered[0] != ".":
        return remembered
    # The name that the user gave, not a link's target; a file name need not be text.
    name = os.fsencode(os.path.basename(os.path.abspath(checkpoint.path))).decode("utf-8", "replace")
    return name or "model"


def _sampling(directory: Path) -> dict[str, Any]:
    """The sampling defaults that generation_config.json states as numbers; what no sampler could use is left out."""
    stated = read_object_if_there(directory / "generation_config.json")
    return {
        f"sampling.{target}": kind(stated[source])
        for source, (target, kind, least, most) in _SAMPLING.items()
        if type(stated.get(source)) in (int, float) and least <= stated[source] <= most
    }


def _model_card(path: Path) -> dict[str, Any]:
    """The YAML block at the head of README.md; nothing where it is missing or unreadable, as it is only decoration."""
    import yaml

    try:
        head = read_file(path, MAX_README_NBYTES)[:MAX_CARD_NBYTES].decode("utf-8", "replace")
    except EdgeinferError:
        return {}
    block = re.match(r"---\r?\n(.*?)\r?\n---", head, re.DOTALL)
    # Scalars stay text (the language `no` is not false, a version is not a number), and no tag means anything.
    # The compiled loader is ten times faster.
    loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
    try:
        card = yaml.load(block[1], loader) if block else None
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return card if isinstance(card, dict) else {}


def _text(value: Any) -> str | None:
    return ",".join(_texts(value)) or None


def _texts(value: Any) -> list[str]:
    """The non-empty texts of a scalar or a list; half a surrogate pair is none."""
    candidates = value if isinstance(value, list) else [value]
    return [text for text in candidates if isinstance(text, str) and text and not _LONE_SURROGATE.search(text)]


def _list(card: dict[str, Any], keys: tuple[str, ...]) -> list[str] | None:
    return [text for key in keys for text in _texts(card.get(key))] or None


def _base_models(card: dict[str, Any], n_parameters: int) -> Iterator[tuple[str, Any]]:
    models = _list(card, ("base_model",))
    if models is None:
        return
    yield "base_model.count", len(models)
    for i, model in enumerate(models):
        hub_id = re.fullmatch(r"(?:https?://huggingface\.co/)?(?:([\w.-]+)/)?([\w.-]+)/?", model)
        if hub_id is None:  # of another hub: there is no telling what its addresses mean
            yield (f"base_model.{i}.repo_url" if "://" in model else f"base_model.{i}.name"), model
            continue
        organization, name = hub_id.groups()
        yield f"base_model.{i}.name", title(name)
        if version := name_parts(name, n_parameters)["version"]:
            yield f"base_model.{i}.version", version
        if organization:
            yield f"base_model.{i}.organization", title(organization)
            yield f"base_model.{i}.repo_url", f"https://huggingface.co/{organization}/{name}"


def title(name: str) -> str:
    """`smollm2-135M-instruct` as a person would write it; versions and what has capitals stay as they are."""
    words = name.replace("-", " ").split()
    return " ".join(w.title() if w.islower() and not re.match(r"v\d+(\.\d+)*$|\d", w) else w for w in words)
