"""Whatever happens to the directory, at worst something is computed again: never a wrong token, never an exception."""

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cache_parts import FINGERPRINT, computed, files, fresh, is_true, open_cache, restored, store, text
from processes import PATIENCE_S, watched

from edgeinfer.cache import store as store_module
from edgeinfer.cache.block import (
    BLOCK_TOKENS,
    Block,
    Place,
    chain,
    child_key,
    file_nbytes,
    root_key,
    write_block,
)
from edgeinfer.cache.folder import CacheFolder

TOKENS = text(3 * BLOCK_TOKENS + 40)


def check(root, tokens=TOKENS):
    """Whatever is restored is right; returns how much it was."""
    got, backend = restored(root, tokens)
    assert is_true(backend, tokens, got)
    return got


def path_of(root, index):
    place = list(chain(TOKENS, FINGERPRINT))[index]
    (path,) = root.rglob(place.name)
    return path


@pytest.mark.parametrize("index", range(4))
def test_a_flipped_bit_anywhere_is_a_miss_and_the_block_is_stored_again(tmp_path, index):
    random.seed(index)
    store(tmp_path, TOKENS)
    path = path_of(tmp_path, index)
    whole = path.read_bytes()
    for position in [*range(0, 96, 5), len(whole) - 1, *random.sample(range(len(whole)), 25)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << random.randrange(8)
        path.write_bytes(damaged)
        assert check(tmp_path) <= index * BLOCK_TOKENS
        path.write_bytes(whole)
    path.write_bytes(damaged)
    check(tmp_path)
    store(tmp_path, TOKENS)
    assert check(tmp_path) == len(TOKENS)


@pytest.mark.parametrize("keep", [0, 1, 50, 96, 200, -1])
def test_a_truncated_or_longer_block_is_a_miss(tmp_path, keep):
    store(tmp_path, TOKENS)
    path = path_of(tmp_path, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    assert check(tmp_path) == BLOCK_TOKENS
    path.write_bytes(whole + b"x")
    assert check(tmp_path) == BLOCK_TOKENS


def test_a_block_of_another_model_under_the_right_name_is_a_miss(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    store(ours, TOKENS)
    store(theirs, TOKENS, fingerprint=b"g" * 32)
    foreign = next(p for p in files(theirs) if p.stat().st_size == path_of(ours, 1).stat().st_size)
    path_of(ours, 1).write_bytes(foreign.read_bytes())
    assert check(ours) <= BLOCK_TOKENS


@pytest.mark.parametrize("index", [0, 2])
def test_a_block_of_another_text_after_the_same_beginning_under_the_right_name_is_a_miss(tmp_path, index):
    """Whole, of this model, with the right parent: only its tokens are not those of its name."""
    other = TOKENS.copy()
    other[index * BLOCK_TOKENS + 10 :] ^= 1
    store(tmp_path, TOKENS)
    store(tmp_path, other)
    foreign = next(p for p in list(chain(other, FINGERPRINT)) if p.p0 == index * BLOCK_TOKENS)
    (source,) = tmp_path.rglob(foreign.name)
    path_of(tmp_path, index).write_bytes(source.read_bytes())
    assert check(tmp_path) <= index * BLOCK_TOKENS + 10
    store(tmp_path, TOKENS)
    assert check(tmp_path) == len(TOKENS), "it was deleted, and is stored again"


def test_a_block_of_another_model_that_pretends_to_follow_ours_is_a_miss(tmp_path):
    """Even when it is whole and its name is its own: its key is not the one that our model gives these tokens."""
    store(tmp_path, TOKENS[:BLOCK_TOKENS])
    (path,) = files(tmp_path)
    parent, tokens = root_key(FINGERPRINT), TOKENS[:BLOCK_TOKENS]
    place = Place(parent, child_key(parent, tokens, b"g" * 32), tokens, 0)
    path.unlink()
    with open(path.with_name(place.name), "wb") as file:
        write_block(file, Block(place, bytes(8 * BLOCK_TOKENS)))
    assert open_cache(tmp_path).match(tokens) == BLOCK_TOKENS
    assert check(tmp_path, tokens) == 0


def test_a_block_is_read_only_for_the_tokens_that_it_holds(tmp_path):
    store(tmp_path, TOKENS)
    cache = open_cache(tmp_path)
    found = cache._store.find(TOKENS)[1]
    other = TOKENS.copy()
    other[found.p1 - 1] ^= 1
    assert cache._store.read(found, other) is None
    assert cache._store.read(found, TOKENS) is not None


def test_tokens_that_a_file_only_pretends_to_hold_are_a_miss(tmp_path):
    """Its header is believed until the block is read."""
    store(tmp_path, TOKENS[:100])
    (path,) = files(tmp_path)
    data = bytearray(path.read_bytes())
    wanted = TOKENS[:100].copy()
    wanted[50:] ^= 1
    data[84 : 84 + 400] = wanted.astype("<i4").tobytes()
    path.write_bytes(data)
    assert open_cache(tmp_path).match(wanted) == 100
    assert check(tmp_path, wanted) == 0


def test_a_block_of_another_place_under_the_right_name_is_a_miss(tmp_path):
    store(tmp_path, TOKENS)
    path_of(tmp_path, 2).write_bytes(path_of(tmp_path, 1).read_bytes())
    assert check(tmp_path) == 2 * BLOCK_TOKENS


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "sparse"])
def test_what_is_no_file_of_ours_is_a_miss(tmp_path, kind):
    store(tmp_path, TOKENS)
    path = path_of(tmp_path, 1)
    whole = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        with open(path, "wb") as file:
            file.write(whole[:100])
            file.truncate(1 << 40)
    assert check(tmp_path) == BLOCK_TOKENS


def test_a_full_disk_is_a_miss_and_noted_and_leaves_no_part_behind(tmp_path, monkeypatch):
    written = []

    def write(file, block):
        if written:
            file.write(block.payload[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(block)
        return real(file, block)

    real = store_module.write_block
    monkeypatch.setattr(store_module, "write_block", write)
    cache = open_cache(tmp_path)
    cache.remember(computed(TOKENS), 0, TOKENS)
    cache.close(30)
    assert cache.problem == "the prefix cache is not written: No space left on device"
    assert list(tmp_path.rglob("*.part")) == []
    assert check(tmp_path) == BLOCK_TOKENS
    cache.remember(computed(text(300, seed=3)), 0, text(300, seed=3))  # nothing is tried again
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_directory_that_can_only_be_read_still_gives_what_it_has(tmp_path, monkeypatch, error):
    store(tmp_path, TOKENS)
    real = os.open

    def read_only(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(error, os.strerror(error), path)
        return real(path, flags, *rest, **options)

    def refuse(*_, **__):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "unlink", refuse)
    assert check(tmp_path) == len(TOKENS)
    cache = open_cache(tmp_path)
    cache.remember(computed(text(300, seed=3)), 0, text(300, seed=3))
    cache.close(30)
    assert os.strerror(error) in cache.problem


def test_a_place_that_cannot_be_a_directory_is_an_empty_cache(tmp_path):
    (tmp_path / "file").write_text("")
    cache = open_cache(tmp_path / "file")
    assert cache.match(TOKENS) == 0
    assert cache.restore(fresh(), 0, TOKENS, 0) == 0
    cache.remember(computed(TOKENS), 0, TOKENS)
    cache.close(30)
    assert "not written" in cache.problem


def test_a_directory_of_another_user_is_neither_read_nor_written(tmp_path, monkeypatch):
    store(tmp_path, TOKENS)
    before = files(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    cache = open_cache(tmp_path)
    assert cache.restore(fresh(), 0, TOKENS, 0) == 0
    cache.remember(computed(text(300, seed=3)), 0, text(300, seed=3))
    cache.close(30)
    assert files(tmp_path) == before
    assert "another user" in cache.problem


def test_a_block_that_vanishes_between_finding_and_reading_is_a_miss(tmp_path, monkeypatch):
    store(tmp_path, TOKENS)
    cache = open_cache(tmp_path)
    assert cache.match(TOKENS) == len(TOKENS)
    found = cache._store.find(TOKENS)
    path_of(tmp_path, 2).unlink()
    monkeypatch.setattr(cache._store, "find", lambda tokens: found)
    backend = fresh()
    assert cache.restore(backend, 0, TOKENS, 0) == 2 * BLOCK_TOKENS
    assert is_true(backend, TOKENS, 2 * BLOCK_TOKENS)


def test_the_budget_is_kept_and_the_least_recently_used_goes_first(tmp_path):
    texts = [text(300, seed=seed) for seed in range(6)]
    store(tmp_path, texts[0])
    one = sum(p.stat().st_size for p in files(tmp_path))
    budget = one * 4
    for tokens in texts[1:4]:
        store(tmp_path, tokens, budget=budget)
    assert restored(tmp_path, texts[0], budget=budget)[0] == 300  # used now, so no longer the oldest
    for tokens in texts[4:]:
        store(tmp_path, tokens, budget=budget)
        assert sum(p.stat().st_size for p in files(tmp_path)) <= budget
    held = [restored(tmp_path, tokens)[0] for tokens in texts]
    assert held[0] == held[4] == held[5] == 300
    assert 300 not in held[1:3]


def test_a_chain_is_evicted_from_its_end(tmp_path):
    long = text(10 * BLOCK_TOKENS)
    store(tmp_path, long)
    size = sum(p.stat().st_size for p in files(tmp_path))
    store(tmp_path, text(3 * BLOCK_TOKENS, seed=1), budget=size)
    left = check(tmp_path, long)
    assert 4 * BLOCK_TOKENS <= left <= 7 * BLOCK_TOKENS
    assert left // BLOCK_TOKENS + 3 == len(files(tmp_path))


def test_a_block_larger_than_the_budget_is_not_stored(tmp_path):
    store(tmp_path, TOKENS, budget=500)
    assert files(tmp_path) == []
    assert open_cache(tmp_path, budget=500).problem is None


def test_a_sum_that_is_lost_or_nonsense_is_counted_anew(tmp_path):
    store(tmp_path, TOKENS)
    size = sum(p.stat().st_size for p in files(tmp_path))
    for nonsense in (b"", b"-5", b"99999999999999999999", b"\xff\x00"):
        (tmp_path / "total").write_bytes(nonsense)
        tokens = text(BLOCK_TOKENS, seed=random.randrange(10**6))
        store(tmp_path, tokens, budget=10 * size)
        assert check(tmp_path, tokens) == BLOCK_TOKENS
        assert int((tmp_path / "total").read_text()) == sum(p.stat().st_size for p in files(tmp_path))


def test_the_default_budget_is_a_tenth_of_what_is_free_and_no_more_than_4_gib(tmp_path, monkeypatch):
    for free, expected in ((10**9, 10**8), (10**12, 4 << 30)):
        monkeypatch.setattr("shutil.disk_usage", lambda path, free=free: os.terminal_size((0, free)) and _Usage(free))
        assert CacheFolder(tmp_path).budget_nbytes() == expected


class _Usage:
    def __init__(self, free):
        self.free = free


def test_clearing_leaves_other_files_alone(tmp_path):
    store(tmp_path, TOKENS)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    folder = CacheFolder(tmp_path)
    (usage,) = folder.usage()
    assert (usage.model, usage.blocks) == ("a-model.gguf", 4)
    assert folder.clear() == usage.bytes == sum([file_nbytes(n, 8 * n) for n in (128, 128, 128, 40)])
    assert folder.usage() == []
    assert (tmp_path / "notes" / "mine.txt").read_text() == "mine"
    assert check(tmp_path) == 0
    store(tmp_path, TOKENS)
    assert check(tmp_path) == len(TOKENS)


def make_large(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


KINDS = {
    "directory": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to(path.parent / "nothing"),
    "loop": lambda path: path.symlink_to(path),
    "empty": lambda path: path.touch(),
    "large": make_large,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["lock", "total", "model", "block", "part", "shard"])
def test_whatever_stands_in_a_files_place_nothing_hangs_and_nothing_is_wrong(tmp_path, name, kind):
    store(tmp_path, TOKENS)
    block = path_of(tmp_path, 1)
    path = {
        "lock": tmp_path / "lock",
        "total": tmp_path / "total",
        "model": block.parent.parent / "model",
        "block": block,
        "part": block.with_name(block.name + ".part"),
        "shard": block.parent,
    }[name]
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if name == "part":
        block.unlink()
    KINDS[kind](path)
    n_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        length, backend = restored(tmp_path, TOKENS)
        assert is_true(backend, TOKENS, length)
        store(tmp_path, TOKENS)
        store(tmp_path, text(200, seed=5), budget=sum(p.lstat().st_size for p in files(tmp_path)) + 1)
    folder = CacheFolder(tmp_path)
    assert all(usage.blocks >= 1 for usage in folder.usage())
    folder.budget_nbytes()
    assert len(os.listdir("/proc/self/fd")) == n_open
    if name != "lock":
        folder.clear()
        assert files(tmp_path) == []


def test_clearing_nothing_is_no_error(tmp_path):
    assert CacheFolder(tmp_path / "none").clear() == 0
    assert CacheFolder(tmp_path / "none").usage() == []


CHURN = """
import sys
seed, budget, *sys.path[:0] = sys.argv[1:]
import pathlib, random
from cache_parts import is_true, restored, store, text
root, rng = pathlib.Path.cwd(), random.Random(int(seed))
for _ in range(25):
    tokens = text(128 * rng.randint(1, 4) + 30, seed=rng.randrange(6))
    store(root, tokens, budget=int(budget))
    got, backend = restored(root, tokens, budget=int(budget))
    assert is_true(backend, tokens, got)
"""
IMPORTS = [str(Path(__file__).parent.parent), *filter(None, sys.path)]


def test_processes_that_write_and_evict_at_once_agree(tmp_path):
    block = file_nbytes(BLOCK_TOKENS, 8 * BLOCK_TOKENS)
    commands = [[sys.executable, "-c", CHURN, str(seed), str(12 * block), *IMPORTS] for seed in range(2)]
    deadline_s = time.monotonic() + PATIENCE_S
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(watched(subprocess.Popen(command, cwd=tmp_path))) for command in commands]
        while any(worker.poll() is None for worker in workers):
            assert time.monotonic() < deadline_s
            sizes = []
            for path in files(tmp_path):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            assert sum(sizes) <= 14 * block  # a listing is not one moment
            time.sleep(0.02)
    assert [worker.wait(PATIENCE_S) for worker in workers] == [0, 0]
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 12 * block
    assert list(tmp_path.rglob("*.part")) == []


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
import itertools, pathlib
from cache_parts import store, text
print("ready", flush=True)
for seed in itertools.count(int(sys.argv[1])):
    store(pathlib.Path.cwd(), text(500, seed=seed), budget=1 << 16)
"""


def kill_while_writing(root, n_kills):
    """Start a process that writes, kill -9 it at a random moment, look at what it left; `n_kills` times."""
    rng = random.Random(n_kills)
    for number in range(n_kills):
        first = 1000 * number
        command = [sys.executable, "-c", WRITER, str(first), *IMPORTS]
        with watched(subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE)) as process:
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        for seed in range(first, first + 60):
            check(root, text(500, seed=seed))
        store(root, TOKENS, budget=1 << 16)
        assert check(root) == len(TOKENS), "the next process finds nothing in its way"
        assert sum(p.stat().st_size for p in files(root)) <= 1 << 16


def test_kill_9_at_a_random_moment_of_writing_is_at_worst_a_miss(tmp_path):
    kill_while_writing(tmp_path, 4)


@pytest.mark.slow
def test_kill_9_two_hundred_times(tmp_path):
    kill_while_writing(tmp_path, 200)


def test_readers_never_see_half_a_block(tmp_path):
    """One thread stores and clears without end, another restores."""
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            store(tmp_path, TOKENS)
            CacheFolder(tmp_path).clear()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        lengths = {check(tmp_path) for _ in range(60)}
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    assert lengths <= {0, 128, 256, 384, 424}


def test_a_dead_writers_remains_are_removed_by_the_next_eviction(tmp_path):
    store(tmp_path, TOKENS)
    part = path_of(tmp_path, 0).with_name("x.kv.part")
    part.write_bytes(b"half")
    (tmp_path / "total").unlink()
    store(tmp_path, text(200, seed=5))
    assert not part.exists()


def test_a_block_says_how_large_its_file_is(tmp_path):
    store(tmp_path, TOKENS)
    place = next(iter(chain(TOKENS, FINGERPRINT)))
    assert path_of(tmp_path, 0).stat().st_size == Block(place, bytes(8 * BLOCK_TOKENS)).nbytes
