"""What one process computed is what the next one finds, token for token; everything else is a miss."""

import os
import stat
import threading
import time

import numpy as np
import pytest
from cache_parts import computed, files, fresh, is_true, open_cache, restored, store, text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.cache.block import BLOCK_TOKENS, MIN_TOKENS, chain
from edgeinfer.cache.folder import CacheFolder
from edgeinfer.cache.writer import MAX_QUEUED_NBYTES, BackgroundWriter
from edgeinfer.runtime.fake import FakeBackend
from edgeinfer.types import KVOp, Row


@pytest.mark.parametrize("length", [MIN_TOKENS, BLOCK_TOKENS, BLOCK_TOKENS + MIN_TOKENS, 3 * BLOCK_TOKENS + 50])
def test_a_whole_text_comes_back(tmp_path, length):
    tokens = text(length)
    store(tmp_path, tokens)
    got, backend = restored(tmp_path, tokens)
    assert got == length
    assert is_true(backend, tokens, length)


@pytest.mark.parametrize("length", [0, 1, MIN_TOKENS - 1])
def test_what_is_shorter_than_a_block_is_not_kept(tmp_path, length):
    tokens = text(length)
    cache = open_cache(tmp_path)
    cache.remember(computed(text(MIN_TOKENS)), 0, tokens)
    cache.close(30)
    assert files(tmp_path) == []
    assert cache.match(tokens) == 0


@pytest.mark.parametrize("agreed", [MIN_TOKENS, 100, BLOCK_TOKENS, BLOCK_TOKENS + 1, 300, 399])
def test_a_longer_text_is_used_up_to_where_it_agrees(tmp_path, agreed):
    stored, other = text(400), text(500, seed=1)
    other[:agreed] = stored[:agreed]
    other[agreed] = stored[agreed] ^ 1
    store(tmp_path, stored)
    # A block that begins with fewer tokens in common is not looked at.
    expected = agreed if agreed % BLOCK_TOKENS >= MIN_TOKENS else agreed - agreed % BLOCK_TOKENS
    assert open_cache(tmp_path).match(other) == expected
    got, backend = restored(tmp_path, other)
    assert got == expected
    assert is_true(backend, other, expected)


@pytest.mark.parametrize("start", [0, 1, 150])
def test_a_model_with_a_window_gets_as_much_of_a_block_and_can_go_on_there(tmp_path, start):
    stored, other = text(400), text(400, seed=1)
    other[:200] = stored[:200]
    store(tmp_path, stored)
    backend = FakeBackend(n_ctx=1024, max_batch_tokens=1024, window=16)
    if start:
        backend.forward([Row(0, other[:start], 0, start)])
    assert open_cache(tmp_path).restore(backend, 0, other, start) == 200
    assert is_true(backend, other, 200)


def test_a_text_that_goes_on_is_stored_from_where_it_was_and_replaces_the_short_end(tmp_path):
    tokens = text(BLOCK_TOKENS * 3)
    store(tmp_path, tokens[: BLOCK_TOKENS + 50])
    assert len(files(tmp_path)) == 2
    first = files(tmp_path)
    store(tmp_path, tokens)
    assert len(files(tmp_path)) == 3
    assert len(set(first) & set(files(tmp_path))) == 1
    assert is_true(restored(tmp_path, tokens)[1], tokens, len(tokens))
    store(tmp_path, tokens[: BLOCK_TOKENS + 50])  # nothing that is not there already
    assert len(files(tmp_path)) == 3


def test_a_sequence_that_holds_a_part_gets_the_rest(tmp_path):
    tokens = text(400)
    store(tmp_path, tokens)
    for start in (1, 100, BLOCK_TOKENS, 399, 400):
        backend = computed(tokens[:start])
        before = backend.computed_tokens
        assert open_cache(tmp_path).restore(backend, 0, tokens, start) == 400
        assert is_true(backend, tokens, 400)
        assert backend.computed_tokens == before + 1  # the probe


def test_what_agrees_less_than_the_sequence_holds_changes_nothing(tmp_path):
    tokens, other = text(400), text(400)
    other[200:] ^= 1
    store(tmp_path, tokens)
    backend = computed(other[:300])
    assert open_cache(tmp_path).restore(backend, 0, other, 300) == 300
    assert is_true(backend, other, 300)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_was_stored_what_comes_back_is_the_longest_beginning_and_true(tmp_path_factory, data):
    """Against a plain list of texts. Texts share beginnings: a binary alphabet of runs."""
    root = tmp_path_factory.mktemp("cache")
    runs = [text(n, seed=n) for n in (40, 130, 200)]
    texts = [
        np.concatenate([runs[i] for i in choice])
        for choice in data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=5))
    ]
    for stored in texts[:-1]:
        store(root, stored)
    wanted = texts[-1]

    def common(a):
        most = min(len(a), len(wanted))
        return next((i for i in range(most) if a[i] != wanted[i]), most)

    best = max(map(common, texts[:-1]))
    got, backend = restored(root, wanted)
    assert best - MIN_TOKENS < got <= best
    assert is_true(backend, wanted, got)


def test_other_models_and_options_have_caches_of_their_own(tmp_path):
    tokens = text(300)
    store(tmp_path, tokens)
    assert restored(tmp_path, tokens, fingerprint=b"g" * 32)[0] == 0
    assert restored(tmp_path, tokens)[0] == 300


def test_a_memory_that_cannot_give_ranges_is_not_cached(tmp_path):
    tokens = text(300)
    backend = FakeBackend(n_ctx=1000, max_batch_tokens=1000, can_trim=False)
    backend.forward([Row(0, tokens, 0, 300)])
    cache = open_cache(tmp_path)
    cache.remember(backend, 0, tokens)
    cache.remember(backend, 0, tokens)
    cache.close(30)
    assert files(tmp_path) == []
    assert cache.problem is None

    store(tmp_path, tokens)
    unable = FakeBackend(n_ctx=1000, can_trim=False)
    assert open_cache(tmp_path).restore(unable, 0, tokens, 0) == 0
    assert unable.held(0) == []


def test_without_room_what_fits_is_taken(tmp_path):
    tokens = text(300)
    store(tmp_path, tokens)
    backend = FakeBackend(n_ctx=BLOCK_TOKENS + 20, max_batch_tokens=300)
    assert open_cache(tmp_path).restore(backend, 0, tokens, 0) == BLOCK_TOKENS
    assert backend.held(0) == tokens[:BLOCK_TOKENS].tolist()


def test_only_the_owner_can_read_it(tmp_path):
    root = tmp_path / "cache"
    previous = os.umask(0)
    try:
        store(root, text(300))
    finally:
        os.umask(previous)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert {stat.S_IMODE(p.stat().st_mode) for p in [root, *root.rglob("*")] if p.is_dir()} == {0o700}


def test_a_directory_that_others_could_read_is_closed_to_them(tmp_path):
    tmp_path.chmod(0o755)
    store(tmp_path, text(300))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_the_blocks_are_copied_at_once_and_written_later(tmp_path):
    """What happens to the sequence after `remember` changes nothing in what is stored."""
    tokens = text(300)
    backend = computed(tokens)
    cache = open_cache(tmp_path)
    with CacheFolder(tmp_path).locked():  # the writer has to wait
        cache.remember(backend, 0, tokens)
        backend.apply(KVOp("remove", 0, 0, 0, -1))
        time.sleep(0.2)
        assert files(tmp_path) == []
    cache.close(30)
    assert is_true(restored(tmp_path, tokens)[1], tokens, 300)


def test_closing_waits_no_longer_than_it_is_told(tmp_path):
    cache = open_cache(tmp_path)
    with CacheFolder(tmp_path).locked():
        cache.remember(computed(text(300)), 0, text(300))
        cache.close(0.05)
    cache.remember(computed(text(300, seed=1)), 0, text(300, seed=1))  # after the end: ignored


def test_a_queue_that_is_full_refuses():
    class Huge:
        nbytes = MAX_QUEUED_NBYTES

    may_write = threading.Event()
    writer = BackgroundWriter(lambda blocks: may_write.wait(30), lambda error: None)
    accepted = [writer.submit(Huge()) for _ in range(4)]
    may_write.set()
    writer.close(30)
    assert accepted[0]
    assert not accepted[-1]


def test_a_failure_in_the_background_is_noted_once_and_ends_the_writing():
    failures = []

    def write(blocks):
        raise OSError(28, "No space left on device")

    class Small:
        nbytes = 1

    writer = BackgroundWriter(write, failures.append)
    while writer.submit(Small()):
        pass
    writer.close(30)
    assert len(failures) == 1


def test_the_chain_of_a_text_is_the_chain_of_its_beginning():
    tokens = text(BLOCK_TOKENS * 2 + 40)
    whole, beginning = (list(chain(t, b"f" * 32)) for t in (tokens, tokens[: BLOCK_TOKENS + 20]))
    assert [(p.p0, p.p1) for p in whole] == [(0, 128), (128, 256), (256, 296)]
    assert whole[0].key == beginning[0].key
    assert whole[1].parent == beginning[1].parent
    assert whole[1].key != beginning[1].key
    assert len({p.key for p in [*whole, *chain(tokens, b"g" * 32)]}) == 6


def test_nothing_is_restored_over_a_fresh_start_of_another_text(tmp_path):
    store(tmp_path, text(300))
    backend = fresh()
    assert open_cache(tmp_path).restore(backend, 0, text(300, seed=9), 0) == 0
    assert backend.held(0) == []
