"""`--all-types`: compare the data of every type, not only of what isn't quantized, and every table of types."""

from __future__ import annotations

import pytest

QUICK_TYPES = ("BF16",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long unless it was asked for."""
    if config.getoption("--all-types"):
        return
    kept, left_out = [], []
    for item in items:
        file_type = getattr(getattr(item, "callspec", None), "params", {}).get("file_type", QUICK_TYPES[0])
        slow = item.path.parent.name == "conformance" and file_type not in QUICK_TYPES
        (left_out if slow else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
