"""Keeps measured errors in a file: a search that was interrupted, or has another target, measures nothing twice.

A line per tensor: a hash of what was measured (the sampled values and the importance of their columns), and the errors
by type. So a changed checkpoint, or another matrix, finds nothing of the old one's. Lines are written as they come: a
process that is killed leaves all but perhaps its last one, and that is passed over.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.ggml_types import GGMLType

_FORMAT = 1
"""To be raised when something else is measured."""
_QUANTIZER = "llama-cpp-python"


class KeptErrors:
    """The errors of one model's tensors, safe to use from several threads and processes."""

    def __init__(self, folder: Path, tensors: Iterable[TensorPlan]) -> None:
        """Read what is there. A folder that cannot be written to keeps nothing."""
        model = json.dumps([(t.name, t.shape) for t in tensors])
        name = hashlib.sha256(f"{_FORMAT} {version(_QUANTIZER)} {model}".encode()).hexdigest()[:32]
        self._path = folder / f"{name}.jsonl"
        self._lock = threading.Lock()
        self._errors: dict[str, dict[GGMLType, float]] = {}
        with suppress(OSError), open(self._path, "rb") as file:
            for line in file:
                with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    self._take(line)

    def of(self, key: str) -> Mapping[GGMLType, float]:
        """What is known of the values with this hash."""
        return self._errors.get(key, {})

    def add(self, key: str, errors: Mapping[GGMLType, float]) -> None:
        """Keep what was measured of the values with this hash."""
        if not errors:
            return
        line = json.dumps({"key": key, "errors": {t.name: error for t, error in errors.items()}})
        with self._lock, suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab", buffering=0) as file:
                file.write(f"\n{line}\n".encode())  # the last line may have been cut off

    def _take(self, line: bytes) -> None:
        entry = json.loads(line)
        errors = {GGMLType[name]: float(error) for name, error in entry["errors"].items()}
        if not all(0 <= error < math.inf for error in errors.values()):
            raise ValueError("not what was written")
        self._errors.setdefault(str(entry["key"]), {}).update(errors)
