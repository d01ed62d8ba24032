"""WordPiece (BERT and what descends from it): llama.cpp's `bert` tokenizer.

BERT marks the pieces that continue a word (`##ing`), llama.cpp those that begin one (`▁go`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.convert.tokenizer.vocabulary import TokenType, token_table


def wordpiece_vocabulary(path: Path, parsed: dict[str, Any], vocab_size: int, pre: str) -> dict[str, Any]:
    """The vocabulary keys of a WordPiece tokenizer; `pre` is only a name, llama.cpp always splits as BERT does."""
    texts, types = token_table(path, parsed, vocab_size)
    prefix = str(parsed["model"].get("continuing_subword_prefix") or "##")
    marked = [_marked(text, kind, prefix) for text, kind in zip(texts, types, strict=True)]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        **_normalizing(parsed.get("normalizer")),
    }


def _marked(text: str, kind: int, prefix: str) -> str:
    if kind == TokenType.CONTROL:
        return text
    return text[len(prefix) :] if text.startswith(prefix) and len(text) > len(prefix) else f"▁{text}"


def _normalizing(section: Any) -> dict[str, bool]:
    """What the file does to letters, where it says so; llama.cpp does both by default."""
    match section:
        case {"type": "Lowercase"}:
            return {"tokenizer.ggml.normalizer.lowercase": True}
        case {"type": "StripAccents"}:
            return {"tokenizer.ggml.normalizer.strip_accents": True}
        case {"type": "BertNormalizer", **options}:
            stated = {key: options.get(key) for key in ("lowercase", "strip_accents")}
            return {f"tokenizer.ggml.normalizer.{key}": flag for key, flag in stated.items() if isinstance(flag, bool)}
        case {"type": "Sequence", "normalizers": [*steps]}:
            return {key: value for step in steps for key, value in _normalizing(step).items()}
    return {}
