"""Measures the table of convert/sensitivity.py: what an error of each kind of tensor does to a model's answers.

One kind of tensor, in the first, the middle or the last layers, is made Q4_0 and all others Q8_0; the mean KL
divergence from the model of Q8_0 alone is divided by the relative errors of what was changed (convert/measure.py), and
multiplied by the number of layers where the tensors belong to a layer. The last line tells whether divergences add up.

Below a divergence of a few thousandths most of it is rounding of activations, which any change of the weights brings.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fetch_model import catalogue
from sample_texts import sample_texts
from target_size import N_CHARACTERS, divergences, prepared
from toolbox import run

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.cli import console
from edgeinfer.convert.kept_errors import KeptErrors
from edgeinfer.convert.measure import measure
from edgeinfer.convert.mixture import may_quantize
from edgeinfer.convert.mixture_rules import category
from edgeinfer.convert.resolve import TensorPlan
from edgeinfer.convert.sensitivity import ENDS
from edgeinfer.ggml_types import GGMLType
from edgeinfer.native.quantize import GGMLQuantizer
from edgeinfer.options import ConvertOptions

MODELS = ("smollm2", "qwen2.5-coder-0.5b", "gemma3-270m")
BASE, CHANGED = "Q8_0", GGMLType.Q4_0


def groups(tensors: list[TensorPlan]) -> Iterator[tuple[str, list[TensorPlan]]]:
    """Tensors that are changed together, with what they are called."""
    n_layers = _n_layers(tensors)
    found: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        layer = _layer(tensor)
        end = n_layers // ENDS
        band = "" if layer is None else " first" if layer < end else " last" if layer >= n_layers - end else " middle"
        found.setdefault(category(tensor.name) + band, []).append(tensor)
    yield from found.items()
    yield "all layers", [t for t in tensors if _layer(t) is not None]


def _layer(tensor: TensorPlan) -> int | None:
    match = re.match(r"blk\.(\d+)\.", tensor.name)
    return int(match[1]) if match else None


def _n_layers(tensors: list[TensorPlan]) -> int:
    return 1 + max(layer for layer in map(_layer, tensors) if layer is not None)


def table(name: str, chunks: int) -> Iterator[str]:
    """The rows for a model."""
    source, matrix = prepared(name, chunks, as_is=False)
    plan = plan_conversion(source, None, ConvertOptions(type=BASE, imatrix=matrix)).plan
    tensors = [t for t in plan.tensors if may_quantize(t.name, t.shape)]
    text = sample_texts(N_CHARACTERS)[0]
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        found = measure(
            [(t, [CHANGED]) for t in tensors], GGMLQuantizer(), 2, KeptErrors(Path(scratch), tensors), _quiet
        )
        errors = {t.name: error[CHANGED] for t, error in zip(tensors, found, strict=True)}
        base, other = Path(scratch, "base.gguf"), Path(scratch, "other.gguf")
        convert(source, base, ConvertOptions(type=BASE, imatrix=matrix, verify=False))
        for what, changed in groups(tensors):
            names = "|".join(re.escape(t.name) for t in changed)
            options = ConvertOptions(
                type=BASE, imatrix=matrix, verify=False, overwrite=True, tensor_type=((f"^(?:{names})$", CHANGED.name),)
            )
            convert(source, other, options)
            (kld,) = divergences([other], base, text, chunks)
            error = sum(errors[t.name] for t in changed)
            factor = kld.value / error * (1 if _layer(changed[0]) is None else _n_layers(tensors))
            yield f"| {name} | {what} | {kld.value:.5f} ± {kld.error:.5f} | {error / len(changed):.5f} | {factor:.2f} |"


def _quiet(done: int, total: int) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(catalogue())} (default: {MODELS})")
    parser.add_argument("--chunks", type=int, default=4, help="passages of 512 tokens (default %(default)s)")
    arguments = parser.parse_args()
    console.result("| model | tensors | divergence | mean relative error | factor |")
    console.result("| --- | --- | --- | --- | --- |")
    for name in arguments.models or MODELS:
        for row in table(name, arguments.chunks):
            console.result(row)


if __name__ == "__main__":
    run(main)
