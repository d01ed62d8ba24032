"""Holds `convert --target-size` against llama.cpp's mixtures: the mean KL divergence at their sizes.

MODEL is a name of models/catalogue.toml. Both sides get the same importance matrix; it is computed from one text and
the divergence measured on another (scripts/sample_texts.py), as `edgeinfer eval --reference` does it.

The models come quantized. Their weights lie on a coarse grid, which the quantizers would find again without loss, and
that would say nothing about a model as it is trained. So each weight is moved to a random place within half a step of
its grid first; that BF16 model is source and reference. `--as-is` leaves that out.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from fetch_model import catalogue, fetch
from numpy.typing import NDArray
from safetensors_writer import to_bf16
from sample_texts import sample_texts
from toolbox import cache_dir, run

from edgeinfer.api.convert import convert
from edgeinfer.api.imatrix import imatrix
from edgeinfer.api.load import load
from edgeinfer.cli import console
from edgeinfer.gguf_file.header import TensorInfo, read_header
from edgeinfer.options import ConvertOptions, RuntimeOptions
from edgeinfer.runtime import passages, scores

MODELS = ("smollm2", "qwen2.5-coder-0.5b")
TYPES = ("Q3_K_M", "Q4_K_M", "Q5_K_M")
CTX_SIZE = 512
N_CHARACTERS = 150_000
"""Of each text."""
SLAB_ELEMENTS = 1 << 20
_STEPS = {"Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q5_0": 31, "Q5_1": 31, "Q5_K": 31, "Q6_K": 63, "Q8_0": 254}
"""Between the smallest and the largest value of a block, or between it and its negative where zero is in the middle."""
_SYMMETRIC = ("Q4_0", "Q5_0", "Q6_K", "Q8_0")


def spread(model: Path, output: Path) -> None:
    """Write a quantized model as BF16, each weight somewhere within half a step of its grid; always the same bytes."""
    convert(model, output, ConvertOptions(type="BF16", allow_requantize=True, verify=False, overwrite=True))
    types = {tensor.name: tensor.type.name for tensor in read_header(model).tensors}
    random = np.random.default_rng(0)
    for tensor in read_header(output).tensors:
        if types[tensor.name] in _STEPS:
            _spread(output, tensor, types[tensor.name], random)


def _spread(path: Path, tensor: TensorInfo, source_type: str, random: np.random.Generator) -> None:
    data = np.memmap(path, np.uint16, "r+", tensor.offset, (tensor.n_elements,))
    for start in range(0, len(data), SLAB_ELEMENTS):
        slab = data[start : start + SLAB_ELEMENTS]
        weights: NDArray[np.float32] = (slab.astype(np.uint32) << 16).view(np.float32)
        blocks = weights.reshape(-1, 16 if source_type == "Q6_K" else 32)
        width = 2 * np.abs(blocks).max(1) if source_type in _SYMMETRIC else blocks.max(1) - blocks.min(1)
        step = width[:, None] / _STEPS[source_type]
        moved = blocks + step * random.uniform(-0.5, 0.5, blocks.shape).astype(np.float32)
        slab[:] = to_bf16(moved.astype(np.float32)).ravel()
    data.flush()


def divergences(models: Sequence[Path], reference: Path, text: str, chunks: int) -> list[scores.Mean]:
    """The mean divergence of each model from the reference, over the second halves of the passages."""
    options = RuntimeOptions(ctx_size=CTX_SIZE, batch_size=passages.MAX_PASS_TOKENS, prefix_cache=False)
    found: list[list[scores.Values]] = [[] for _ in models]
    with contextlib.ExitStack() as stack:
        expected, *others = (stack.enter_context(load(path, options)) for path in (reference, *models))
        for passage in passages.cut(expected.vocabulary, text, CTX_SIZE, chunks):
            first = CTX_SIZE // 2
            ((_, logits),) = passages.run(expected.backend, passage, first)
            logits = logits.copy()
            for values, model in zip(found, others, strict=True):
                ((_, ours),) = passages.run(model.backend, passage, first)
                values.append(scores.compare(ours[:-1], logits[:-1], passage[first + 1 :]).divergences)
            console.note(", ".join(f"{scores.mean(np.concatenate(values)).value:.5f}" for values in found))
    return [scores.mean(np.concatenate(values)) for values in found]


def prepared(name: str, chunks: int, *, as_is: bool) -> tuple[Path, Path]:
    """The source of a model and its importance matrix, made now unless they are in the cache folder."""
    folder = cache_dir("target-size")
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / f"{name}{'-as-is' if as_is else ''}.gguf"
    matrix = source.with_suffix(".imatrix")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not source.exists():
            partial = Path(scratch, source.name)
            if as_is:
                convert(fetch(name), partial, ConvertOptions(type="BF16", allow_requantize=True, verify=False))
            else:
                spread(fetch(name), partial)
            partial.rename(source)
        if not matrix.exists():
            small, text = Path(scratch, "q8.gguf"), Path(scratch, "calibration.txt")
            text.write_text(sample_texts(N_CHARACTERS)[0], "utf-8")
            convert(source, small, ConvertOptions(type="Q8_0", verify=False))
            imatrix(small, text, matrix, chunks=chunks)
    return source, matrix


def compare(name: str, types: Sequence[str], chunks: int, *, as_is: bool) -> Iterator[str]:
    """The rows of the table for a model."""
    source, matrix = prepared(name, chunks, as_is=as_is)
    with tempfile.TemporaryDirectory(dir=source.parent) as scratch:
        files = [file for type_ in types for file in _pair(source, matrix, type_, Path(scratch))]
        found = divergences(files, source, sample_texts(N_CHARACTERS)[1], chunks)
        for i, type_ in enumerate(types):
            (theirs, ours), (their_kld, our_kld) = files[2 * i : 2 * i + 2], found[2 * i : 2 * i + 2]
            yield (
                f"| {name} | {type_} | {theirs.stat().st_size:,} | {ours.stat().st_size:,} | {_text(their_kld)} "
                f"| {_text(our_kld)} | {our_kld.value / their_kld.value:.2f} |"
            )


def _pair(source: Path, matrix: Path, type_: str, folder: Path) -> tuple[Path, Path]:
    """The mixture, and what a target of its size gives."""
    theirs, ours = folder / f"{type_}.gguf", folder / f"{type_}-size.gguf"
    options = ConvertOptions(imatrix=matrix, verify=False)
    convert(source, theirs, replace(options, type=type_))
    converted = convert(source, ours, replace(options, target_size=theirs.stat().st_size))
    console.note(f"at the size of {type_}: {converted.tensor_types}")
    return theirs, ours


def _text(mean: scores.Mean) -> str:
    return f"{mean.value:.5f} ± {mean.error:.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(catalogue())} (default: {MODELS})")
    parser.add_argument("--chunks", type=int, default=20, help="passages of 512 tokens of each text (default 20)")
    parser.add_argument("--type", action="append", dest="types", help=f"a mixture (repeatable; default: {TYPES})")
    parser.add_argument("--as-is", action="store_true", help="take the weights as they come, on their grid")
    arguments = parser.parse_args()
    console.result("| model | mixture | its bytes | ours | its divergence | ours | ratio |")
    console.result("| --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.models or MODELS:
        for row in compare(name, arguments.types or TYPES, arguments.chunks, as_is=arguments.as_is):
            console.result(row)


if __name__ == "__main__":
    run(main)
