"""What the tests of the prefix cache share: a cache in a directory, a fake model, texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from edgeinfer.cache.folder import CacheFolder
from edgeinfer.cache.prefix import DiskPrefixCache
from edgeinfer.runtime.fake import FakeBackend
from edgeinfer.types import Row, Tokens

FINGERPRINT = b"f" * 32
BUDGET = 1 << 24


def open_cache(root: Path, *, fingerprint: bytes = FINGERPRINT, budget: int = BUDGET) -> DiskPrefixCache:
    return DiskPrefixCache(CacheFolder(root, budget), fingerprint, "a-model.gguf")


def text(n_tokens: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, n_tokens, np.int32)


def computed(tokens: Tokens) -> FakeBackend:
    """A model whose sequence 0 holds the tokens."""
    backend = FakeBackend(n_ctx=8192, max_batch_tokens=4096)
    backend.forward([Row(0, tokens, 0, len(tokens))])
    return backend


def fresh() -> FakeBackend:
    return FakeBackend(n_ctx=8192, max_batch_tokens=4096)


def store(root: Path, tokens: Tokens, **options: object) -> None:
    """Compute a text and keep it, as a process of its own would."""
    cache = open_cache(root, **options)  # type: ignore[arg-type]
    cache.remember(computed(tokens), 0, tokens)
    cache.close(30)


def restored(root: Path, tokens: Tokens, **options: object) -> tuple[int, FakeBackend]:
    """What a new process gets of a text, and its model."""
    backend = fresh()
    return open_cache(root, **options).restore(backend, 0, tokens, 0), backend  # type: ignore[arg-type]


def is_true(backend: FakeBackend, tokens: Tokens, length: int) -> bool:
    """Whether sequence 0 holds exactly what computing `tokens[:length]` would have left: same tokens, same logits."""
    if backend.held(0) != tokens[:length].tolist():
        return False
    probe = np.array([7], np.int32)
    expected = computed(tokens[:length]) if length else fresh()
    mine, cold = (b.forward([Row(0, probe, length, 0)]) for b in (backend, expected))
    return bool(np.array_equal(mine, cold))


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))
