"""`general.*`: what the model card, the config and the name tell; nothing that they hold can do harm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
from checkpoints import change_json, write_checkpoint

from edgeinfer.convert.checkpoint import open_checkpoint
from edgeinfer.convert.metadata import general_metadata
from edgeinfer.convert.model_name import count_label, name_parts, size_label
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.writer import encode_header
from edgeinfer.errors import UnusableInputError
from edgeinfer.ggml_types import GGMLType


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny-llama-1M-instruct")


def _general(folder: Path) -> dict[str, Any]:
    metadata = general_metadata(open_checkpoint(folder), [TensorPlan("x", (1_000_000,), GGMLType.F32, ())])
    encode_header(metadata, [])  # whatever it is, it can be written
    return metadata


def _card(folder: Path, text: str | bytes) -> dict[str, Any]:
    data = text if isinstance(text, bytes) else text.encode()
    (folder / "README.md").write_bytes(b"---\n" + data + b"\n---\n# Model\n")
    return _general(folder)


def test_a_model_card(folder: Path) -> None:
    found = _card(
        folder,
        "license: apache-2.0\nlicense_name: n\nlicense_link: l\nlanguage: [en, no]\ntags:\n- chat\n- 1.0\n"
        "pipeline_tag: text-generation\nbase_model: org/some-base-7B\n",
    )
    assert found["license"] == "apache-2.0"
    assert found["license.link"] == "l"
    assert found["languages"] == ["en", "no"]  # Norwegian, not false
    assert found["tags"] == ["chat", "1.0", "text-generation"]
    assert found["base_model.count"] == 1
    assert found["base_model.0.organization"] == "Org"
    assert found["base_model.0.repo_url"] == "https://huggingface.co/org/some-base-7B"


ALIASES = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
MERGES = "".join(f"a{i}: &a{i} {{!!merge <<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 40))
CARDS = {
    "laughs": "a0: &a0 [x, x]\n" + ALIASES + "tags: *a39\nlicense: *a39\nbase_model: *a39",
    "merged laughs": "a0: &a0 {k: v}\n" + MERGES + "tags: *a39",
    "tags that construct": "license: !!python/object/apply:os.system ['exit 1']",
    "a false bool": "license: !!bool x",
    "a false date": "license: !!timestamp x",
    "an empty int": 'license: !!int ""',
    "itself": "tags: &a [*a]",
    "a list for a key": "? [a]\n: b",
    "nested deeply": "tags: " + "[" * 5000,
    "no YAML": "a: b: c: [",
    "a list": "- a\n- b",
    "half a surrogate pair": 'license: "\\uD800"\ntags: ["\\uDC00"]\nbase_model: ["\\uD800/x"]',
    "other types": "license: {a: b}\ntags: {}\nbase_model: [1, {}, [], /, '']\nlanguage: [[]]",
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_a_hostile_card_gives_plain_texts_at_most(folder: Path, card: str) -> None:
    found = _card(folder, card)
    texts = [text for value in found.values() for text in (value if isinstance(value, list) else [value])]
    assert all(isinstance(text, str | int) and len(str(text)) < 100 for text in texts)


@pytest.mark.parametrize("kind", ["fifo", "endless", "directory", "dangling", "no text", "not closed"])
def test_a_readme_is_only_decoration(folder: Path, kind: str) -> None:
    path = folder / "README.md"
    {
        "fifo": lambda: os.mkfifo(path),
        "endless": lambda: path.symlink_to("/dev/zero"),
        "directory": path.mkdir,
        "dangling": lambda: path.symlink_to("/nowhere"),
        "no text": lambda: path.write_bytes(b"---\nlicense: \xff\xfe\n"),
        "not closed": lambda: path.write_text("---\nlicense: mit\n"),
    }[kind]()
    assert "license" not in _general(folder)


def test_sampling_defaults_of_the_model(folder: Path) -> None:
    stated = {"top_k": 20, "top_p": 0.8, "min_p": 0, "temperature": 0.7, "repetition_penalty": 1.05, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    found = {k: v for k, v in _general(folder).items() if k.startswith("sampling")}
    assert found == {
        "sampling.top_k": 20,
        "sampling.top_p": 0.8,
        "sampling.min_p": 0.0,
        "sampling.temp": 0.7,
        "sampling.penalty_repeat": 1.05,
    }
    assert type(found["sampling.min_p"]) is float


@pytest.mark.parametrize("value", ["-1", "1e400", "NaN", "-Infinity", "1e300", "1" * 50, "true", '"x"', "[]", "null"])
def test_impossible_sampling_defaults_are_left_out(folder: Path, value: str) -> None:
    keys = ("top_k", "top_p", "min_p", "temperature", "repetition_penalty")
    (folder / "generation_config.json").write_text("{" + ", ".join(f'"{key}": {value}' for key in keys) + "}")
    assert not any(key.startswith("sampling") for key in _general(folder))


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe"])
def test_a_broken_generation_config_is_refused(folder: Path, content: bytes) -> None:
    (folder / "generation_config.json").write_bytes(content)
    with pytest.raises(UnusableInputError, match=r"generation_config\.json"):
        _general(folder)


def test_the_name_is_the_directory_s_unless_the_config_remembers_a_hub_id(folder: Path) -> None:
    found = _general(folder)
    assert found["name"] == "Tiny Llama 1M Instruct"
    assert "organization" not in found
    assert (found["basename"], found["size_label"], found["finetune"]) == ("tiny-llama", "1M", "instruct")
    change_json(folder / "config.json", {"_name_or_path": "some-org/Big-Model-7B-v0.3"})
    found = _general(folder)
    assert (found["name"], found["organization"], found["version"]) == ("Big Model 7B v0.3", "Some Org", "v0.3")


@pytest.mark.parametrize("value", ["../../etc/passwd", "/abs/path", "./x", "a/b/c", "org/\x1b[31m", 5, ["a/b"], ""])
def test_a_path_of_somebody_s_machine_is_no_hub_id(folder: Path, value: Any) -> None:
    change_json(folder / "config.json", {"_name_or_path": value})
    assert _general(folder)["name"] == "Tiny Llama 1M Instruct"


@pytest.mark.parametrize(
    ("name", "parts"),
    [  # of a model with half a billion parameters
        ("Qwen2.5-Coder-0.5B-Instruct-v2", ("Qwen2.5-Coder", "0.5B", "Instruct", "v2")),
        ("SmolLM2-135M", ("SmolLM2", "135M", None, None)),
        ("mistral-0.4b-v0.3", ("mistral", "0.4B", None, "v0.3")),
        ("Phi-128K-Instruct", ("Phi", None, "128k-Instruct", None)),
        ("plain", (None, None, None, None)),
        ("", (None, None, None, None)),
        ("---", (None, None, None, None)),
    ],
)
def test_parts_of_a_name(name: str, parts: tuple[str | None, ...]) -> None:
    found = name_parts(name, 500_000_000)
    assert tuple(found[key] for key in ("basename", "size_label", "finetune", "version")) == parts


@pytest.mark.parametrize("name", ["٣B-²K-5", "a-७B-instruct", "x-" + "9" * 400 + "B", "a-1\u212a"])
def test_odd_digits_in_a_name_do_no_harm(name: str) -> None:
    assert set(name_parts(name, 1000)) == {"basename", "size_label", "finetune", "version"}


@pytest.mark.parametrize(
    ("count", "label"),
    [(0, "0.00K"), (999, "1.0K"), (82_240, "82K"), (1_100_048_384, "1.1B"), (134_515_008, "135M"), (7e13, "70T")],
)
def test_size_labels_have_two_digits(count: int, label: str) -> None:
    assert count_label(int(count)) == label


NAMES = """Mixtral-8x7B-Instruct-v0.1 Qwen3-30B-A3B-Instruct-2507 Qwen1.5-MoE-A2.7B Phi-3-mini-4k-instruct phi-4
gemma-2-2b-it granite-3.1-1b-a400m-instruct gpt-oss-20b DeepSeek-V2-Lite-Chat GLM-4-9B-0414 OLMo-2-0425-1B-Instruct
starcoder2-3b gpt2-medium bert-base-uncased all-MiniLM-L6-v2 nomic-embed-text-v1.5 bge-small-en-v1.5 SmolLM3-3B
Meta-Llama-3.1-8B-Instruct TinyLlama-1.1B-Chat-v1.0 DeepSeek-R1-Distill-Qwen-1.5B Qwen2.5-7B-Instruct-1M Yi-34B-200K
bloom-7b1 stablelm-2-1_6b Phi-3-mini-3.8B-128k x-q4_0-7B Mixtral-8x22B Kimi-K2-Instruct llama-2-7b-chat-hf"""


@pytest.mark.parametrize("name", NAMES.split())
def test_names_are_read_as_gguf_py_reads_them(name: str) -> None:
    for n_parameters in (10**6, 135 * 10**6, 10**9, 3_800_000_000, 7 * 10**9, 46_700_000_000):
        _, _, base, finetune, version, size = gguf.Metadata.get_model_id_components(name, n_parameters)
        assert name_parts(name, n_parameters) == {
            "basename": base, "finetune": finetune, "version": version, "size_label": size,
        }  # fmt: skip


def test_the_size_label_of_experts() -> None:
    dense = [("a.weight", (1000, 1000)), ("b.bias", (1000,))]
    assert size_label(dense) == "1.0M"
    stack = [("ffn_up_exps.weight", (1000, 1000, 8)), ("ffn_up_exps.bias", (1000, 8))]
    assert size_label([*dense, *stack]) == "8x2.0M" == gguf.size_label(9_009_000, 1_009_000, 1_000_000, 8)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/small-1B-v2", {"name": "Small 1B v2", "version": "v2", "organization": "Org"}),
        ("https://huggingface.co/org/small", {"name": "Small", "organization": "Org"}),
        ("small", {"name": "Small"}),
        ("https://example.org/a/b/c", {"repo_url": "https://example.org/a/b/c"}),
    ],
)
def test_the_model_that_it_was_made_from(folder: Path, model: str, expected: dict[str, str]) -> None:
    (folder / "README.md").write_text(f"---\nbase_model: {model}\n---\n")
    general = _general(folder)
    found = {key.rpartition(".")[2]: value for key, value in general.items() if key.startswith("base_model.0.")}
    if "organization" in expected:
        expected = {**expected, "repo_url": f"https://huggingface.co/org/{model.rpartition('/')[2]}"}
    assert found == expected
