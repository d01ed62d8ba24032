"""What a model's name and its tensors tell of it, by the rules that GGUF tools share (gguf-py, metadata.py)."""

from __future__ import annotations

import re
from collections.abc import Iterable

_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE | re.ASCII)
_ENCODING = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE | re.ASCII)
_SIZE = re.compile(r"((A|\d+x)?\d+([._]\d+)?[KMBT]\d?|small|mini|medium|large|x?xl)", re.IGNORECASE | re.ASCII)
_FINETUNE = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE | re.ASCII)
_KINDS = ("finetune", "version", "basename", "size_label")


def name_parts(name: str, n_parameters: int) -> dict[str, str | None]:
    """Split a model's name, as hubs write them, into `finetune`, `version`, `basename` and `size_label`.

    `Qwen2.5-Coder-0.5B-Instruct-v2` is of the base `Qwen2.5-Coder`, size `0.5B`, finetune `Instruct`, version `v2`.
    A name of which nothing but a base can be told gives nothing.
    """
    parts = [_part(i, part, n_parameters) for i, part in enumerate(filter(None, name.split("-")))]
    sizes = [text for text, kind in parts if kind == "size_label"]
    if any(re.search(r"\d", size, re.ASCII) for size in sizes):
        parts = [(text, None if kind == "size_label" and text.isalpha() else kind) for text, kind in parts]
    parts = _with_base(parts)
    joined = {kind: _joined(kind, parts) for kind in _KINDS}
    return joined if any(joined[k] for k in _KINDS if k != "basename") else dict.fromkeys(_KINDS)


def _part(i: int, part: str, n_parameters: int) -> tuple[str, str | None]:
    """A part as it is to be written, and its kind, if its form tells."""
    if _VERSION.fullmatch(part):
        return part, "version"
    if _ENCODING.fullmatch(part):
        return part, "encoding"
    if i > 0 and _SIZE.fullmatch(part):
        part = part.replace("_", ".")
        if part[-1].isdecimal():  # 7b1 is 7.1B
            part = f"{part[:-2]}.{part[-1]}{part[-2]}"
        if part[-2].isdecimal():
            part = part[:-1] + part[-1].upper()
        if _is_context_length(part, n_parameters):
            return part[:-1] + part[-1].lower(), "finetune"
        return part, "size_label"
    return part, "finetune" if i > 0 and _FINETUNE.fullmatch(part) else None


def _with_base(parts: list[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """The words and versions that a name begins with are its base, but versions at the end of it are versions."""
    end = 0
    while end < len(parts) and (parts[end][1] == "version" or (parts[end][1] is None and parts[end][0][0].isalpha())):
        end += 1
    base_end = end
    while base_end > 0 and parts[base_end - 1][1] == "version" and end == len(parts):
        base_end -= 1
    base: list[tuple[str, str | None]] = [(text, "basename") for text, _ in parts[:base_end]]
    return base + [(text, kind or "finetune") for text, kind in parts[base_end:]]


def _joined(kind: str, parts: list[tuple[str, str | None]]) -> str | None:
    texts = [text for text, own in parts if own == kind]
    return "-".join(dict.fromkeys(texts) if kind == "size_label" else texts) or None


def _is_context_length(part: str, n_parameters: int) -> bool:
    """Whether a size (`128K`) is too far from the parameter count to be one."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT])", part, re.ASCII)
    if not number:
        return False
    stated = float(number[1]) * 1000.0 ** " KMBT".index(number[2])
    return abs(stated - n_parameters) > 7 * n_parameters // 8


def count_label(n_parameters: int) -> str:
    """A count of parameters with at least two digits: `1.1B`, `135M`."""
    scales = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    scale, suffix = next((s for s in scales if n_parameters > s[0]), scales[-1])
    scaled = n_parameters / scale
    decimals = max(2 - len(str(round(scaled)).lstrip("0")), 0)
    return f"{scaled:.{decimals}f}{suffix}"


def size_label(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> str:
    """The size of a model by its tensors' names and shapes (row length first): `135M`; with experts `8x7B`.

    The second number of the latter counts what is shared and one expert of each stack.
    """
    counted, experts = 0, list[int]()
    for name, shape in tensors:
        n_elements = 1
        for length in shape:
            n_elements *= length
        if "_exps." in name and len(shape) >= 3:
            experts.append(shape[2])
            n_elements //= shape[2]
        counted += n_elements
    label = count_label(counted)
    n_experts = sum(experts) // len(experts) if experts else 0
    return f"{n_experts}x{label}" if n_experts else label
