"""What a person sees of a stream of bytes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.runtime.text import TextStream


def shown(pieces, stop=()):
    stream = TextStream(stop)
    parts = []
    for piece in pieces:
        parts.append(stream.feed(piece))
        if stream.stopped:
            break
    parts.append(stream.finish())
    return "".join(parts), stream.stopped


def cut(data, cuts):
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def test_half_a_character_waits_for_its_other_half():
    stream = TextStream()
    euro = "€".encode()
    assert stream.feed(euro[:1]) == ""
    assert stream.feed(euro[1:2]) == ""
    assert stream.feed(euro[2:]) == "€"


def test_half_a_character_at_the_end_is_a_replacement_character():
    assert shown(["ab€".encode()[:-1]])[0] == "ab\ufffd"


def test_a_stop_string_across_pieces_is_found_and_not_shown():
    assert shown([b"one EN", b"D two"], ["END"]) == ("one ", True)


def test_what_might_be_a_stop_string_is_shown_once_it_is_not():
    stream = TextStream(["</s>"])
    assert stream.feed(b"a </") == "a "
    assert stream.feed(b"p>") == "</p>"


def test_an_unfinished_stop_string_is_text_at_the_end():
    assert shown([b"a EN"], ["END"]) == ("a EN", False)


def test_the_stop_string_that_is_complete_first_counts():
    assert shown([b"xabcd"], ["abcd", "bc"]) == ("xa", True)


def test_an_empty_stop_string_stops_nothing():
    assert shown([b"abc"], [""]) == ("abc", False)


@given(st.text(), st.lists(st.integers(0, 1000), max_size=10))
def test_text_survives_any_cutting(text, cuts):
    assert shown(cut(text.encode(), cuts)) == (text, False)


@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=10))
def test_any_bytes_become_what_python_makes_of_them(data, cuts):
    assert shown(cut(data, cuts))[0] == data.decode("utf-8", "replace")


@given(
    st.text("abé", max_size=30),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 1000), max_size=10),
)
def test_stop_strings_end_the_text_where_a_character_by_character_search_would(text, stop, cuts):
    expected = text, False
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            expected = text[: min(starts)], True
            break
    assert shown(cut(text.encode(), cuts), stop) == expected
