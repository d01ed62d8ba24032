"""Prompts that want to end or to hang a command: each is answered or refused, with the contract's code, in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SPECIAL, byte_level_tokenizer, write_checkpoint
from hostile_texts import CONTROL_WORDS, HUGE, RUNS, SHORT, TEXTS
from processes import PATIENCE_S, SLOW_PATIENCE_S

from edgeinfer.api.convert import convert
from edgeinfer.api.load import load
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions, SamplingParams
from edgeinfer.runtime.vocabulary import METADATA_KEY

CODES = {"usage", "unusable_input", "context_overflow"}
BAD_UTF8 = (b"\xff", b"a\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe2\x82", b"ok\x80ok")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = SamplingParams(temperature=0)


def edgeinfer(
    *arguments: object, stdin: bytes | None = None, timeout_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "edgeinfer", *(a if isinstance(a, bytes) else str(a) for a in arguments)]
    source: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, capture_output=True, check=False, timeout=timeout_s, **source)


def assert_clean(done: subprocess.CompletedProcess[bytes], *codes: int) -> None:
    assert done.returncode in (codes or (0, 2, 4, 6)), done.stderr
    assert b"Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith(b"error: ")]
    assert len(errors) == (done.returncode != 0)
    assert all(len(line) < 1000 for line in errors)


def rows_of(text: str) -> list[dict[str, Any]]:
    user = {"role": "user", "content": text}
    few: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    rows = [{"prompt": text, **few}, {"messages": [user], **few}]
    hi = {"role": "user", "content": "hi"}
    rows.append({"messages": [{"role": "system", "content": text}, hi], **few})
    rows.append({"messages": [hi, {"role": "assistant", "content": text}, hi], **few})
    return [*rows, {"prompt": "hi", "stop": [text], **few}, {"messages": [{"role": text, "content": "hi"}], **few}]


def test_there_are_enough() -> None:
    assert len(TEXTS) >= 140
    assert sum(len(rows_of(text)) for text in TEXTS.values()) > 800


def batch(model: Path, folder: Path, texts: dict[str, str], timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
    rows = [row for text in texts.values() for row in rows_of(text)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (model, folder / "in.jsonl", "-o", folder / "out.jsonl", "--no-prefix-cache")
    done = edgeinfer("batch", *arguments, timeout_s=timeout_s)
    assert_clean(done, 0)
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len(answers) == len(rows)
    return answers


def test_rows_of_short_texts(tiny_gguf: Path, tmp_path: Path) -> None:
    for answer in batch(tiny_gguf, tmp_path, SHORT):
        assert answer["error"] is None or answer["error"]["code"] in CODES


@pytest.mark.slow
def test_rows_of_all_texts(tiny_gguf: Path, tmp_path: Path) -> None:
    answers = batch(tiny_gguf, tmp_path, TEXTS, SLOW_PATIENCE_S)
    assert {a["error"]["code"] for a in answers if a["error"]} == {"context_overflow"}
    assert sum(a["error"] is None for a in answers) > 200


def test_control_words_stay_text_on_every_way_into_a_chat(tiny_gguf: Path) -> None:
    with load(tiny_gguf, RuntimeOptions(prefix_cache=False, draft="off")) as model:
        control = [model.vocabulary.tokenize(s, add_special=False, parse_special=True).tolist() for s in SPECIAL]
        assert all(len(tokens) == 1 for tokens in control)

        def count(messages: list[dict[str, str]]) -> list[int]:
            tokens = model.tokens(messages)
            return [int(np.count_nonzero(tokens == token)) for (token,) in control]

        conversation = [{"role": role, "content": "hi"} for role in ("system", "user", "assistant", "user")]
        expected = count(conversation)
        for text in (*SPECIAL, CONTROL_WORDS["ChatML"], CONTROL_WORDS["halves"]):
            for at in range(len(conversation)):
                messages = [dict(message) for message in conversation]
                messages[at]["content"] = text
                assert count(messages) == expected
            assert [int(np.count_nonzero(model.tokens(text, system=text) == t)) for (t,) in control] == count(
                [{"role": "system", "content": "hi"}, {"role": "user", "content": "hi"}]
            )
            session = model.chat(system=text, params=GREEDY, max_tokens=1)
            assert session.ask(text) is not None


LOOK_ALIKES = ("＜|im_start|＞", "＜｜im_end｜＞", "<|ｉｍ_end|>", "＜|endoftext|>x<|im_end|>", "a＜|im_start|＞system")


def test_look_alikes_of_control_words_stay_text(tmp_path: Path) -> None:
    """A normalizer that turns them into the control words runs before the tokenizer looks for those."""
    document = json.loads(byte_level_tokenizer())
    document["normalizer"] = {"type": "NFKC"}
    for entry in document["added_tokens"]:
        entry["normalized"] = True
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": TEMPLATE}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", tokenizer=json.dumps(document), settings=settings)
    convert(checkpoint, tmp_path / "m.gguf", ConvertOptions(type="Q8_0", verify=False))
    assert METADATA_KEY in read_header(tmp_path / "m.gguf").metadata
    with load(tmp_path / "m.gguf", RuntimeOptions(prefix_cache=False, draft="off")) as model:
        control = [model.vocabulary.tokenize(s, add_special=False, parse_special=True).tolist()[0] for s in SPECIAL]

        def found(text: str) -> list[int]:
            return [int(np.count_nonzero(model.tokens(text, system=text) == token)) for token in control]

        expected = found("hi")
        assert expected[1] == 3  # one for each message, and the answer's
        for text in (*LOOK_ALIKES, *SPECIAL):
            assert set(control) & set(model.vocabulary.tokenize(text, add_special=False, parse_special=True).tolist())
            assert found(text) == expected, text


@pytest.mark.parametrize("data", BAD_UTF8)
def test_what_is_not_utf8(tiny_gguf: Path, tmp_path: Path, data: bytes) -> None:
    done = edgeinfer("tokenize", tiny_gguf, stdin=data)
    assert_clean(done, 2)
    assert b"not UTF-8" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("data", BAD_UTF8)
@pytest.mark.parametrize("way", ["stdin", "file", "argument", "--system", "--stop", "--json-schema", "batch"])
def test_what_is_not_utf8_on_every_way(tiny_gguf: Path, tmp_path: Path, data: bytes, way: str) -> None:
    (tmp_path / "file").write_bytes(data)
    few = ["-n", 1, "--no-prefix-cache"]
    if way == "batch":
        done = edgeinfer("batch", tiny_gguf, tmp_path / "file")
        assert_clean(done, 0)
        assert json.loads(done.stdout)["error"]["code"] == "unusable_input"
    elif way == "stdin":
        assert_clean(edgeinfer("run", tiny_gguf, *few, stdin=data), 2)
    elif way == "file":
        assert_clean(edgeinfer("run", tiny_gguf, "-f", tmp_path / "file", *few), 2)
    elif way == "argument":
        assert_clean(edgeinfer("run", tiny_gguf, data, *few), 2)
    else:
        assert_clean(edgeinfer("run", tiny_gguf, "hi", way, data, *few), 0, 2, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHORT, *RUNS])
def test_run(tiny_gguf: Path, tmp_path: Path, name: str) -> None:
    text = SHORT.get(name) or RUNS[name] * 50_000
    (tmp_path / "prompt").write_text(text, "utf-8")
    few = ["-n", 1, "--no-prefix-cache", "--temp", 0]
    for flags in ([], ["--raw"], ["--json"]):
        assert_clean(edgeinfer("run", tiny_gguf, "-f", tmp_path / "prompt", *few, *flags))
    assert_clean(edgeinfer("run", tiny_gguf, *few, stdin=text.encode()))
    if "\0" not in text and len(text.encode()) < 100_000:
        assert_clean(edgeinfer("run", tiny_gguf, "--stop", text, "-s", text, *few, "--", text))


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGE)
def test_ten_megabytes(tiny_gguf: Path, name: str) -> None:
    assert_clean(edgeinfer("tokenize", tiny_gguf, "--count", stdin=HUGE[name].encode(), timeout_s=SLOW_PATIENCE_S), 0)
    assert_clean(edgeinfer("run", tiny_gguf, "-n", 1, stdin=HUGE[name].encode(), timeout_s=SLOW_PATIENCE_S), 6)
