"""One request's stream, and a chat made of several."""

from dataclasses import replace

import pytest

from edgeinfer.errors import ContextOverflowError, EdgeinferError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import About, AnswerStream, Reply, said
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import BOS, END, EOS, START, FakeBackend, FakeVocabulary, make_fake_sampler
from edgeinfer.runtime.prompt import chat_tokens, raw_tokens
from edgeinfer.runtime.session import ChatSession, TurnSettings
from edgeinfer.runtime.template import ChatTemplate

VOCABULARY = FakeVocabulary()
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|start|>assistant:", bos="<bos>"
)
PARAMS = SamplingParams(temperature=0.8, seed=3)


class Ascii(FakeVocabulary):
    """Bytes folded into printable ASCII, so that answers are text."""

    def piece(self, token, *, special=False):
        return super().piece(token, special=special) if token > 255 else bytes([32 + token % 95])


def stream(engine, prompt="hello", vocabulary=VOCABULARY, **options):
    reply = Reply(engine, vocabulary, raw_tokens(vocabulary, prompt), PARAMS, **options)
    return AnswerStream(engine, reply, About("m.gguf", "fake", 1.5))


def engine(**options):
    return Engine(FakeBackend(n_ctx=2000, max_batch_tokens=512, **options), make_fake_sampler)


def test_the_pieces_are_the_answer():
    answer = stream(engine(), max_tokens=20)
    text = "".join(answer)
    assert answer.answer.text == text
    assert answer.answer.finish_reason == "length"
    assert answer.answer.usage.completion_tokens == 20
    assert answer.answer.usage.prompt_tokens == 6
    assert answer.answer.seed == 3
    assert (answer.answer.model, answer.answer.kernels, answer.answer.timings.load_ms) == ("m.gguf", "fake", 1.5)


def test_times_are_told_apart():
    timings = (lambda s: (list(s), s.answer.timings)[1])(stream(engine(), max_tokens=20))
    assert 0 < timings.prefill_ms <= timings.ttft_ms
    assert timings.decode_ms > 0
    assert timings.decode_tps == pytest.approx(19 / timings.decode_ms * 1e3)


def test_a_stop_string_ends_request_and_text():
    whole = "".join(stream(engine(), vocabulary=Ascii(), max_tokens=60))
    work = engine()
    stopped = stream(work, vocabulary=Ascii(), max_tokens=60, stop=[whole[20:23]])
    assert "".join(stopped) == whole[: whole.index(whole[20:23])]
    assert stopped.answer.finish_reason == "stop"
    assert not work.has_work


def test_a_consumer_that_leaves_ends_the_request():
    work = engine()
    pieces = iter(stream(work, vocabulary=Ascii(), max_tokens=60))
    next(pieces)
    pieces.close()
    assert not work.has_work


def test_an_interrupt_keeps_what_was_said():
    work = engine()
    answer = stream(work, vocabulary=Ascii(), max_tokens=60)
    seen = []
    for piece in answer:
        seen.append(piece)
        if len(seen) == 5:
            work.interrupt()
    assert answer.answer.finish_reason == "interrupted"
    assert answer.answer.text == "".join(seen)
    assert len(seen) == 5


def test_a_control_token_that_the_model_says_is_shown_and_its_end_token_is_not():
    assert [said(VOCABULARY, token) for token in (65, START, BOS, END, EOS)] == [b"A", b"<|start|>", b"<bos>", b"", b""]
    work, hot = engine(), replace(PARAMS, temperature=9.0, ignore_eos=True)
    reply = Reply(work, VOCABULARY, raw_tokens(VOCABULARY, "say"), hot, max_tokens=600)
    answer = AnswerStream(work, reply, About("m.gguf", "fake", 0))
    text = "".join(answer)
    spelled = [VOCABULARY.piece(t, special=True) for t in answer.tokens if t in (START, BOS)]
    assert spelled
    assert sum(text.count(piece.decode()) for piece in set(spelled)) == len(spelled)


def test_reasoning_is_apart_unless_the_text_is_raw():
    class Thinker(FakeVocabulary):
        def piece(self, token, *, special=False):
            return b"hm</think>yes" if token < 256 and not special else super().piece(token, special=special)

    opened = stream(engine(), "x<think>\n", Thinker(), max_tokens=1)
    assert "".join(opened) == "hm</think>yes"
    assert (opened.answer.reasoning, opened.answer.text) == ("hm", "yes")
    work = engine()
    reply = Reply(work, Thinker(), raw_tokens(VOCABULARY, "x<think>\n"), PARAMS, max_tokens=1)
    raw = AnswerStream(work, reply, About("m.gguf", "fake", 0), raw=True)
    list(raw)
    assert (raw.answer.reasoning, raw.answer.text) == (None, "hm</think>yes")


def test_the_answer_is_not_there_early():
    with pytest.raises(EdgeinferError):
        _ = stream(engine()).answer


def test_two_streams_share_the_engine():
    expected = ["".join(stream(engine(), prompt, Ascii(), max_tokens=20)) for prompt in ("one", "two")]
    work = engine()
    streams = [stream(work, prompt, Ascii(), max_tokens=20) for prompt in ("one", "two")]
    assert ["".join(s) for s in streams] == expected


def chat(work, vocabulary, **options):
    def start(tokens, turn):
        reply = Reply(work, vocabulary, tokens, turn.params, max_tokens=turn.max_tokens)
        return AnswerStream(work, reply, About("m.gguf", "fake", 0))

    settings = TurnSettings(PARAMS, max_tokens=15)
    return ChatSession(start, vocabulary, TEMPLATE, n_ctx=2000, settings=settings, system="be brief", **options)


def test_a_turn_computes_only_what_is_new():
    backend = FakeBackend(n_ctx=2000, max_batch_tokens=512)
    session = chat(Engine(backend, make_fake_sampler), Ascii())
    first = session.ask("hello")
    list(first)
    before = backend.computed_tokens
    second = session.ask("and now?")
    list(second)
    usage = second.answer.usage
    assert usage.cached_tokens >= first.answer.usage.prompt_tokens + first.answer.usage.completion_tokens - 1
    assert backend.computed_tokens - before == usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens - 1
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert session.messages[2]["content"] == first.answer.text


def test_a_chat_with_byte_for_byte_tokens_is_the_conversation_tokenized_anew():
    session = chat(engine(), VOCABULARY)
    first = session.ask("hello")
    list(first)
    second = session.ask("and now?")
    list(second)
    conversation = chat_tokens(VOCABULARY, TEMPLATE, session.messages[:-1])
    assert second.answer.usage.prompt_tokens == len(conversation) or "\ufffd" in first.answer.text


def test_the_same_answer_again_with_the_same_seed():
    session = chat(engine(), Ascii())
    first = session.ask("hello")
    text = "".join(first)
    again = session.regenerate()
    assert "".join(again) == text
    assert again.answer.usage.cached_tokens == again.answer.usage.prompt_tokens - 1
    assert len(session.messages) == 3


def test_there_is_nothing_to_regenerate_at_first():
    with pytest.raises(UsageError):
        chat(engine(), Ascii()).regenerate()


def test_a_turn_that_does_not_fit_is_not_part_of_the_chat():
    session = chat(engine(), Ascii())
    list(session.ask("hello"))
    with pytest.raises(ContextOverflowError):
        session.ask("x" * 3000)
    assert len(session.messages) == 3
    list(session.ask("and now?"))
    assert len(session.messages) == 5


def test_clearing_forgets_the_conversation_and_keeps_the_system_prompt():
    session = chat(engine(), Ascii())
    list(session.ask("hello"))
    session.clear()
    assert session.messages == [{"role": "system", "content": "be brief"}]
    session.clear("be long")
    assert session.messages == [{"role": "system", "content": "be long"}]
    session.clear("")
    assert session.messages == []


def test_an_answer_that_nobody_reads_is_empty_and_ends():
    work = engine()
    session = chat(work, Ascii())
    session.ask("hello")
    list(session.ask("are you there?"))
    assert [m["content"] for m in session.messages][1:4] == ["hello", "", "are you there?"]
    assert not work.has_work
