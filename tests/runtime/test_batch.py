"""Many rows through one engine: order, bounds, errors, interruption."""

import itertools
import threading
import time

import numpy as np
import pytest
from processes import PATIENCE_S

from edgeinfer.errors import UnusableInputError, UsageError
from edgeinfer.options import SamplingParams
from edgeinfer.runtime import batch as batch_module
from edgeinfer.runtime.answer import Reply
from edgeinfer.runtime.batch import Batch, ReadAhead
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import FakeBackend, FakeSampler, FakeVocabulary, make_fake_sampler
from edgeinfer.scheduling.policy import Limits

PARAMS = SamplingParams(temperature=0.7, seed=7)


class Ascii(FakeVocabulary):
    """Bytes folded into printable ASCII, so that answers are text."""

    end_tokens = frozenset()

    def piece(self, token, *, special=False):
        return bytes([32 + token % 95])


def make(rows, *, width=3, size=10, n_ctx=500):
    engine = Engine(FakeBackend(n_ctx=n_ctx, max_sequences=2 * width), make_fake_sampler, limits=Limits(width))

    def start(row):
        prompt, max_tokens, *stop = row
        if not prompt:
            raise UsageError("nothing", "say something")
        tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
        return Reply(engine, Ascii(), tokens, PARAMS, max_tokens=max_tokens, stop=stop)

    return Batch(engine, ReadAhead(rows, size), start)


def alone(row):
    (entry,) = make([row])
    return entry.text


ROWS = [(f"prompt number {i} " * (1 + i % 3), 1 + (7 * i) % 20) for i in range(20)]


def test_answers_come_in_the_order_of_the_rows_and_are_those_alone():
    entries = list(make(ROWS))
    assert [e.row for e in entries] == ROWS
    assert [e.text for e in entries] == [alone(row) for row in ROWS]
    assert all(len(e.text) == e.row[1] for e in entries)


def test_a_row_that_is_wrong_has_its_error_and_the_rest_go_on():
    entries = list(make([ROWS[0], ("", 3), ("x" * 600, 3), ROWS[1]]))
    assert [e.error.code if e.error else None for e in entries] == [None, "usage", "context_overflow", None]
    assert entries[3].text == alone(ROWS[1])


def test_a_stop_string_ends_a_row_and_frees_its_place():
    whole = alone(("some prompt", 20))
    (entry,) = make([("some prompt", 20, whole[8:10])])
    assert entry.text == whole[: whole.index(whole[8:10])]
    assert entry.finish_reason == "stop"


def test_an_endless_input_is_read_only_as_far_as_it_is_needed():
    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield (f"prompt {i}", 4)

    work = make(endless(), width=2, size=5)
    for entry in itertools.islice(work, 30):
        assert len(read) - 1 - int(entry.row[0].split()[1]) <= 2 * 2 + 5 + 2
    work.stop()


def test_a_slow_row_holds_back_only_so_many_others(monkeypatch):
    monkeypatch.setattr(batch_module, "MAX_UNWRITTEN", 6)
    work = make([("slow", 200), *[(f"quick {i}", 1) for i in range(50)]], width=2)
    most = 0

    def watch():
        nonlocal most
        most = max(most, len(work._entries))
        while work._rows._queue.empty() and not work._rows.ended:
            time.sleep(0)  # however slowly the other thread reads

    work.on_step = watch
    assert len(list(work)) == 51
    assert most == 6


def test_waiting_for_input_does_not_stop_what_runs():
    go_on = threading.Event()

    def trickle():
        yield ("first", 10)
        assert go_on.wait(300)
        yield ("second", 3)

    entries = iter(make(trickle()))
    assert next(entries).text == alone(("first", 10))
    go_on.set()
    assert [e.text for e in entries] == [alone(("second", 3))]


def test_stopping_gives_what_is_finished_and_leaves_nothing_behind():
    work = make([("a", 2), ("b", 10_000), ("c", 2)])
    rows = []
    for entry in work:
        rows.append(entry.row[0])
        stopper = threading.Thread(target=work.stop)
        stopper.start()
        stopper.join(PATIENCE_S)
    assert rows == ["a"]
    assert not work._engine.has_work


def test_what_reading_raises_is_raised():
    def broken():
        yield ("a", 2)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(make(broken()))


class Failing(FakeSampler):
    """Of one seed it finds no token any more after a few."""

    def sample(self, logits):
        if self.seed == 13 and len(self._history) >= 12:
            raise UnusableInputError("no token can be chosen")
        return super().sample(logits)


def test_a_row_for_which_no_token_can_be_chosen_has_its_error_and_the_rest_go_on():
    engine = Engine(FakeBackend(n_ctx=500, max_sequences=6), Failing, limits=Limits(3))

    def start(row):
        tokens = np.frombuffer(row[0].encode(), np.uint8).astype(np.int32)
        return Reply(engine, Ascii(), tokens, SamplingParams(temperature=0.7, seed=row[2]), max_tokens=row[1])

    entries = list(Batch(engine, ReadAhead([("a", 30, 7), ("b", 30, 13), ("c", 5, 13), ("d", 30, 7)], 9), start))
    assert [e.error.code if e.error else None for e in entries] == [None, "unusable_input", None, None]
    assert [entries[i].text for i in (0, 3)] == [alone(("a", 30)), alone(("d", 30))]
    assert len(entries[2].text) == 5
    assert engine._residency._tree.n_referenced == 0
