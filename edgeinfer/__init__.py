"""edgeinfer: from a Hugging Face checkpoint to an answer on the machine at hand.

`convert(source)` makes a GGUF file, `load(model)` opens one as a `Model` that answers (`generate`, `stream`),
`load_encoder(model)` as an `Encoder` that makes vectors of texts (`embed`). `inspect(model)` tells what is in a file,
`tokenize(model, text)` how a text is split, `evaluate` what quantizing cost, and `imatrix` computes an importance
matrix. `help(edgeinfer.load)` and so on say more. Options are the commands' flags, as `ConvertOptions`,
`RuntimeOptions` and `SamplingParams` of `edgeinfer.options`; every error is one of `edgeinfer.errors`.
"""

import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_API = {
    "convert": "edgeinfer.api.convert",
    "evaluate": "edgeinfer.quality.evaluate",
    "imatrix": "edgeinfer.api.imatrix",
    "inspect": "edgeinfer.api.inspect",
    "load": "edgeinfer.api.load",
    "load_encoder": "edgeinfer.api.embed",
    "Encoder": "edgeinfer.api.embed",
    "tokenize": "edgeinfer.api.vocabulary",
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


class _Package(ModuleType):
    """Keeps `edgeinfer.convert` the function: whatever imports the package of that name would put that in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _API and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
