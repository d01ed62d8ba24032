"""What a model's name tells; the expectations are llama.cpp's own (gguf-py, get_model_id_components)."""

from __future__ import annotations

import pytest

from edgeinfer.convert.metadata import name_parts


@pytest.mark.parametrize(
    ("name", "billions", "expected"),
    [
        ("Qwen2.5-Coder-0.5B-Instruct-v2", 0.5, ("Qwen2.5-Coder", "Instruct", "v2", "0.5B")),
        ("SmolLM2-135M-Instruct", 0.135, ("SmolLM2", "Instruct", None, "135M")),
        ("GLM-4-9B-0414", 8, ("GLM-4", None, "0414", "9B")),
        ("GLM-4.5-Air", 8, (None, None, None, None)),
        ("DeepSeek-V2", 8, ("DeepSeek", None, "V2", None)),
        ("DeepSeek-V2-Lite", 8, (None, None, None, None)),
        ("LFM2-1.2B", 1.2, ("LFM2", None, None, "1.2B")),
        ("all-MiniLM-L6-v2", 8, ("all-MiniLM-L6", None, "v2", None)),
        ("x-8x7b-Instruct", 8, ("x", "Instruct", None, "8x7B")),
        ("Meta-Llama-3.1-8B-Instruct-128K", 8, ("Meta-Llama-3.1", "Instruct-128k", None, "8B")),
        ("7B-x", 8, (None, "7B-x", None, None)),
        ("2", 8, (None, None, "2", None)),
    ],
)
def test_the_parts_of_a_name(name: str, billions: float, expected: tuple[str | None, ...]) -> None:
    parts = name_parts(name, int(billions * 1e9))
    assert tuple(parts[key] for key in ("basename", "finetune", "version", "size_label")) == expected
