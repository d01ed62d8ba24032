"""edgeinfer: from a Hugging Face checkpoint to an answer on the machine at hand."""

from typing import Any

__version__ = "0.1.0"

_API = {
    "convert": "edgeinfer.api.convert",
    "evaluate": "edgeinfer.quality.evaluate",
    "imatrix": "edgeinfer.api.imatrix",
    "inspect": "edgeinfer.api.inspect",
    "load": "edgeinfer.api.model",
    "Model": "edgeinfer.api.model",
}


def __getattr__(name: str) -> Any:
    """The public API on first use: importing edgeinfer, as every command does, stays light."""
    if name in _API:
        from importlib import import_module

        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_API]
