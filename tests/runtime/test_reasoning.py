"""Reasoning is told apart from the answer, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.runtime.reasoning import ReasoningSplitter, closing_of_open_block, joined, split_reasoning

GPT_OSS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
SAID = [
    ("<think>\nfirst\n\nthen\n</think>\n\nYes.", ("first\n\nthen", "Yes.")),
    ("\n<thinking>a</thinking>b", ("a", "b")),
    ("[THINK]a [/THIN k[/THINK]b", ("a [/THIN k", "b")),
    (GPT_OSS, ("Hm.", "Yes.")),
    ("<|channel|>final<|message|>Yes.", (None, "Yes.")),
    ("<|channel>thought\nHm.<channel|>Yes.", ("Hm.", "Yes.")),
    ("<think>\n\n</think>\n\nYes.", (None, "Yes.")),
    ("<think>cut sho", ("cut sho", "")),
    ("A tag is <think>this</think>.", (None, "A tag is <think>this</think>.")),
    ("<think>a</think> It says <think>b</think>", ("a", "It says <think>b</think>")),
    ("  <thin air>", (None, "  <thin air>")),
    ("<", (None, "<")),
    ("", (None, "")),
]


@pytest.mark.parametrize(("said", "parts"), SAID)
def test_the_block_at_the_beginning_is_the_reasoning(said, parts):
    assert split_reasoning(said, None) == parts


@given(st.sampled_from(SAID), st.data())
def test_the_parts_do_not_depend_on_the_pieces(case, data):
    said, parts = case
    splitter, found, at = ReasoningSplitter(), [], 0
    while at < len(said):
        n_chars = data.draw(st.integers(1, len(said)))
        found += splitter.feed(said[at : at + n_chars])
        at += n_chars
    assert joined([*found, *splitter.finish()]) == parts


def test_a_block_that_the_prompt_has_opened():
    closing = closing_of_open_block("<|im_start|>assistant\n<think>\n")
    assert closing == "</think>"
    assert split_reasoning("hm</think>\n\nYes.", closing) == ("hm", "Yes.")
    assert split_reasoning("hm", closing) == ("hm", "")


@pytest.mark.parametrize("end", ["<|im_start|>assistant\n", "<think>\n\n</think>\n\n", ""])
def test_a_prompt_that_has_opened_none(end):
    assert closing_of_open_block(end) is None
