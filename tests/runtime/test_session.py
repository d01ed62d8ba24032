"""A chat that another process goes on with, and one that no longer fits the context."""

from dataclasses import replace

import pytest
from cache_parts import open_cache

from edgeinfer.errors import ContextOverflowError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import About, AnswerStream, Reply
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, FakeVocabulary, make_fake_sampler
from edgeinfer.runtime.session import ChatSession, TurnSettings
from edgeinfer.runtime.template import ChatTemplate

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|start|>assistant:", bos="<bos>"
)
SETTINGS = TurnSettings(SamplingParams(temperature=0.8, seed=3, ignore_eos=True), max_tokens=40, keep_answer=True)


class TwoSpellings(FakeVocabulary):
    """What tokens from 128 on spell has other tokens when it is tokenized, as it is with real vocabularies."""

    def piece(self, token, *, special=False):
        return bytes([32 + token % 95]) if 128 <= token < 256 else super().piece(token, special=special)


class Process:
    """What a process has of a chat."""

    def __init__(self, root=None, *, n_ctx=2000, vocabulary=None, system="be brief", **options):
        self.backend = FakeBackend(n_ctx=n_ctx, max_batch_tokens=512)
        self.cache = open_cache(root) if root else None
        engine = Engine(self.backend, make_fake_sampler, self.cache)
        vocabulary = vocabulary or TwoSpellings()

        def start(tokens, turn):
            kept = {"max_tokens": turn.max_tokens, "keep_answer": turn.keep_answer}
            return AnswerStream(engine, Reply(engine, vocabulary, tokens, turn.params, **kept), About("m", "fake", 0))

        options = {"n_ctx": n_ctx, "settings": SETTINGS, "system": system, **options}
        self.chat = ChatSession(start, vocabulary, TEMPLATE, **options)

    def ask(self, text):
        stream = self.chat.ask(text)
        list(stream)
        return stream.answer

    def close(self):
        if self.cache:
            self.cache.close(30)


def test_another_process_goes_on_with_the_same_tokens_and_their_kv_state(tmp_path):
    first = Process(tmp_path)
    answers = [first.ask("hello"), first.ask("and now?")]
    state = first.chat.state()
    first.close()
    second = Process(tmp_path)
    second.chat.resume(state)
    third_answer = second.ask("go on")
    used = answers[1].usage
    assert third_answer.usage.cached_tokens >= used.prompt_tokens + used.completion_tokens - 1
    assert third_answer.text == first.ask("go on").text
    assert [m["content"] for m in second.chat.messages] == [m["content"] for m in first.chat.messages]


def test_tokens_that_do_not_spell_the_text_are_not_used():
    first = Process()
    first.ask("hello")
    state = first.chat.state()
    assert state.tokens
    tampered = [replace(state, tokens=state.tokens[:-1]), replace(state, tokens=(*state.tokens[:-1], 10**6))]
    for wrong in (*tampered, replace(state, tokens=())):
        second = Process()
        second.chat.resume(wrong)
        answer = second.ask("x")
        canonical = TwoSpellings().tokenize(first.chat.messages[2]["content"], add_special=False, parse_special=False)
        assert answer.usage.prompt_tokens == len("systembe briefuserhelloassistantuserxassistant") + 5 + (
            len(canonical) + 4 + 5 + 1  # colons, ends, starts, and the begin token
        )


def test_turns_that_no_longer_fit_are_dropped_whole_and_the_system_prompt_stays():
    process = Process(n_ctx=500, on_overflow="truncate")
    dropped = []
    for turn in range(12):
        process.ask(f"question {turn} " + "x" * 30)
        if process.chat.dropped:
            dropped.append(process.chat.dropped)
    assert dropped
    assert all(d.n_turns >= 1 and d.n_tokens > 0 for d in dropped)
    state = process.chat.state()
    assert len(state.messages) == 24  # what is dropped is not forgotten
    assert state.messages[state.n_dropped]["role"] == "user"
    assert state.text.startswith("<|start|>system:be brief<|end|><|start|>user:question")
    assert len(dropped) < 6  # room is made for several turns at a time


def test_the_last_message_alone_is_never_dropped():
    process = Process(n_ctx=300, on_overflow="truncate")
    process.ask("hello")
    with pytest.raises(ContextOverflowError, match=r"has \d+ tokens, the context holds 300"):
        process.ask("x" * 400)
    assert process.chat.state().n_dropped == 0
    process.ask("and now?")


def test_by_default_a_full_context_is_an_error_that_names_the_ways_out():
    process = Process(n_ctx=300)
    process.ask("hello " * 10)
    with pytest.raises(ContextOverflowError) as raised:
        process.ask("hello " * 30)
    assert "the conversation has" in raised.value.message
    assert "-c " in raised.value.hint
    assert "--on-overflow truncate" in raised.value.hint


def test_reasoning_is_kept_apart_from_what_is_said_again():
    class Thinker(FakeVocabulary):
        def piece(self, token, *, special=False):
            return b"<think>hm</think>yes" if token < 256 and not special else super().piece(token, special=special)

    process = Process(vocabulary=Thinker())
    process.chat.settings = replace(SETTINGS, max_tokens=1)
    answer = process.ask("why?")
    assert (answer.reasoning, answer.text) == ("hm", "yes")
    assert process.chat.state().messages[-1] == {"role": "assistant", "content": "yes", "reasoning": "hm"}
    again = process.ask("and?")
    spelled = "systembe briefuserwhy?assistantyesuserand?assistant"
    assert again.usage.prompt_tokens == len(spelled) + 5 + 9 + 1
