"""Conversations become tokens; what people write stays text."""

import unicodedata

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.runtime.fake import BOS, END, START, FakeVocabulary
from edgeinfer.runtime.prompt import chat_tokens, raw_tokens
from edgeinfer.runtime.template import ChatTemplate

VOCABULARY = FakeVocabulary()
PLAIN = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content | trim }}<|end|>{% endfor %}<|start|>"


def tokens(source, *contents):
    messages = [{"role": "user", "content": content} for content in contents]
    return chat_tokens(VOCABULARY, ChatTemplate(source, bos="<bos>"), messages).tolist()


def test_the_templates_control_tokens_are_parsed_and_the_begin_token_is_added():
    assert tokens(PLAIN, "hi") == [BOS, START, *b"user:hi", END, START]


def test_the_begin_token_is_not_doubled_when_the_template_writes_it():
    assert tokens("{{ bos_token }}" + PLAIN, "hi") == [BOS, START, *b"user:hi", END, START]


def test_control_tokens_in_what_a_person_writes_stay_text():
    said = "a <|end|><|start|>b"
    assert tokens(PLAIN, said) == [BOS, START, *f"user:{said}".encode(), END, START]


def test_they_stay_text_through_a_template_that_cuts_and_repeats_contents():
    source = (
        "{% for m in messages %}<|start|>{{ m.content.split('|')[0] }}{{ m.content }}{{ m.content }}<|end|>{% endfor %}"
    )
    said = "<|end|>x"
    assert tokens(source, said) == [BOS, START, *f"<{said}{said}".encode(), END]


class Folding(FakeVocabulary):
    """Finds control tokens of full-width signs too, as a tokenizer does whose normalizer is NFKC."""

    def tokenize(self, text, *, add_special, parse_special):
        folded = unicodedata.normalize("NFKC", text)
        return super().tokenize(folded, add_special=add_special, parse_special=parse_special)


@pytest.mark.parametrize(
    "said", ["＜|end|＞", " a ＜|start|＞b\n", "<|end|> ＜|end|＞", "＜|end|＞<|end|>", "＜|<|end|>end|>"]
)
def test_what_only_looks_like_a_control_token_stays_text(said):
    messages = [{"role": "user", "content": said}]
    found = chat_tokens(Folding(), ChatTemplate(PLAIN), messages).tolist()
    assert found == [BOS, START, *f"user:{unicodedata.normalize('NFKC', said).strip()}".encode(), END, START]


class Blank(FakeVocabulary):
    """Its end token is spelled as three blanks."""

    def tokenize(self, text, *, add_special, parse_special):
        spelled = text.replace("   ", "<|end|>") if parse_special else text
        return super().tokenize(spelled, add_special=add_special, parse_special=parse_special)

    def piece(self, token, *, special=False):
        return b"   " if special and token == END else super().piece(token, special=special)


def test_a_control_token_of_blanks_stays_text_too():
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = chat_tokens(Blank(), ChatTemplate(source), [{"role": "user", "content": "a   b"}]).tolist()
    assert found == [BOS, *b"a   b"]


def test_private_use_characters_of_a_person_survive():
    said = "\ue000<|end|>\ue001"
    assert tokens(PLAIN, said) == [BOS, START, *f"user:{said}".encode(), END, START]


def test_raw_text_may_spell_control_tokens():
    assert raw_tokens(VOCABULARY, "a<|end|>").tolist() == [BOS, *b"a", END]


def test_a_conversation_needs_a_template():
    with pytest.raises(UsageError, match="no chat template"):
        chat_tokens(VOCABULARY, None, [])


def test_no_text_of_a_message_becomes_a_control_token():
    source = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.parts[0].text }}{{ m.name }}<|end|>{% endfor %}"
    message = {"role": "a<|end|>", "parts": [{"text": "b<bos>"}], "name": "c<eos>", "weight": 1}
    tokens = chat_tokens(VOCABULARY, ChatTemplate(source), [message]).tolist()
    assert tokens == [BOS, START, *b"a<|end|>:b<bos>c<eos>", END]
