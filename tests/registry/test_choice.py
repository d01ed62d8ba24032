"""Which file of a repository is meant, by names as they are on the Hub, and by names that nobody should act on."""

from __future__ import annotations

import pytest

from edgeinfer.errors import NotFoundError
from edgeinfer.registry.choice import candidates, choose, is_safe

QWEN = [
    ".gitattributes",
    "README.md",
    "qwen2.5-0.5b-instruct-fp16.gguf",
    "qwen2.5-0.5b-instruct-q2_k.gguf",
    "qwen2.5-0.5b-instruct-q4_0.gguf",
    "qwen2.5-0.5b-instruct-q4_k_m.gguf",
    "qwen2.5-0.5b-instruct-q8_0.gguf",
]
BARTOWSKI = [
    "Llama-3.2-1B-Instruct-IQ3_M.gguf",
    "Llama-3.2-1B-Instruct-Q4_0.gguf",
    "Llama-3.2-1B-Instruct-Q4_0_4_8.gguf",
    "Llama-3.2-1B-Instruct-Q4_K_L.gguf",
    "Llama-3.2-1B-Instruct-Q8_0.gguf",
    "Llama-3.2-1B-Instruct-f16.gguf",
    "Llama-3.2-1B-Instruct.imatrix",
]
UNSLOTH = [
    "UD-Q4_K_XL/big-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD-Q4_K_XL/big-UD-Q4_K_XL-00002-of-00002.gguf",
    "Q8_0/big-Q8_0-00001-of-00003.gguf",  # the others are missing
    "imatrix_unsloth.gguf",
    "mmproj-F16.gguf",
]


def chosen(names: list[str], quant: str = "") -> str:
    return choose("org/name", candidates(names), quant).files[0]


@pytest.mark.parametrize(
    ("names", "quant", "expected"),
    [
        (QWEN, "", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (QWEN, "Q4_K_M", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        (QWEN, "q8_0", "qwen2.5-0.5b-instruct-q8_0.gguf"),
        (BARTOWSKI, "", "Llama-3.2-1B-Instruct-Q8_0.gguf"),
        (BARTOWSKI, "Q4_0", "Llama-3.2-1B-Instruct-Q4_0.gguf"),
        (BARTOWSKI, "F16", "Llama-3.2-1B-Instruct-f16.gguf"),
        (BARTOWSKI[:2], "", "Llama-3.2-1B-Instruct-IQ3_M.gguf"),
        (UNSLOTH, "", UNSLOTH[0]),
        (UNSLOTH, "ud-q4_k_xl", UNSLOTH[0]),
    ],
)
def test_a_type_or_its_absence_means_one_file(names: list[str], quant: str, expected: str) -> None:
    assert chosen(names, quant) == expected


@pytest.mark.parametrize(("names", "quant"), [(QWEN, "Q4_K"), (QWEN, "Q5_K_M"), (UNSLOTH, "Q8_0"), (UNSLOTH, "F16")])
def test_a_type_that_is_not_there_is_told_with_those_that_are(names: list[str], quant: str) -> None:
    with pytest.raises(NotFoundError, match=f"no file of type {quant}") as caught:
        chosen(names, quant)
    assert "Q4_K" in caught.value.hint


def test_shards_are_one_model_in_their_order() -> None:
    (found,) = candidates(UNSLOTH)
    assert found.files == (UNSLOTH[0], UNSLOTH[1])
    assert found.quant == "UD-Q4_K_XL"


def test_no_file_is_an_error() -> None:
    with pytest.raises(NotFoundError, match="no GGUF file"):
        chosen(["README.md", "model.safetensors", "mmproj-F16.gguf"])


@pytest.mark.parametrize(
    "name",
    [
        "../a.gguf",
        "/etc/a.gguf",
        "a/../../b.gguf",
        "..gguf",
        ".hidden.gguf",
        "a/.git/b.gguf",
        "a\\b.gguf",
        "C:a.gguf",
        "a\n.gguf",
        "a .gguf",
        "a//b.gguf",
        "x" * 300 + ".gguf",
        "a\0.gguf",
        "ä.gguf",
    ],
)
def test_names_that_could_lead_elsewhere_are_not_models(name: str) -> None:
    assert not is_safe(name)
    assert candidates([name]) == []


def test_a_name_that_claims_many_shards_costs_nothing() -> None:
    assert candidates(["a-00001-of-99999.gguf", "a-00000-of-00000.gguf", "b-00001-of-00000.gguf"]) == []
