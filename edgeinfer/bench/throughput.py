"""The throughput suite: every model by every test, each in a fresh context, as rows with llama-bench's fields."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from edgeinfer.api.load import load
from edgeinfer.api.model import Model
from edgeinfer.bench import machine, roofline
from edgeinfer.bench.measure import Runner, Samples, Trial
from edgeinfer.bench.report import FIELDS, JSON_ONLY_FIELDS, Row
from edgeinfer.errors import UsageError
from edgeinfer.gguf_file.header import Header
from edgeinfer.native.devices import peak_rss_bytes
from edgeinfer.native.kernels import LLAMA_CPP
from edgeinfer.options import RuntimeOptions

_LOAD_MODES = {(True, False): "mmap", (True, True): "mmap+mlock", (False, True): "mlock", (False, False): "none"}
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class Suite:
    """What to measure: every prompt length and every generation length at every depth, with every thread count."""

    n_prompt: tuple[int, ...] = (512,)
    n_gen: tuple[int, ...] = (128,)
    n_depth: tuple[int, ...] = (0,)
    threads: tuple[int | None, ...] = (None,)
    repetitions: int = 5

    def __post_init__(self) -> None:
        """Refuse with a UsageError what cannot be measured."""
        if self.repetitions < 1:
            raise UsageError(f"{self.repetitions} repetitions", "measure at least once")
        if min((*self.n_prompt, *self.n_gen, *self.n_depth), default=0) < 0:
            raise UsageError("a negative number of tokens", "give numbers from 0 on; 0 leaves a test out")
        if not any((*self.n_prompt, *self.n_gen)):
            raise UsageError("neither prompts nor answers to measure", "give -p or -n a number above 0")

    def tests(self) -> Iterator[Trial]:
        """In llama-bench's order; lengths of 0 are left out."""
        for depth in self.n_depth:
            yield from (Trial(n, 0, depth) for n in self.n_prompt if n)
            yield from (Trial(0, n, depth) for n in self.n_gen if n)


def run(models: Sequence[str | Path], suite: Suite, options: RuntimeOptions) -> Iterator[Row]:
    """Measure, and give each row as soon as it is known. Raises what `load` raises."""
    bandwidths: dict[int, float] = {}
    for model in models:
        for threads in suite.threads:
            for test in suite.tests():
                yield _measure(model, test, replace(options, threads=threads), suite.repetitions, bandwidths)


def _measure(
    path: str | Path, test: Trial, options: RuntimeOptions, repetitions: int, bandwidths: dict[int, float]
) -> Row:
    test_time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    machine.reset_peak_rss()
    with load(path, replace(options, ctx_size=test.n_ctx, prefix_cache=False)) as model:
        bos = model.vocabulary.bos if model.vocabulary.adds_bos else None
        samples = Runner(model.backend, bos=bos).run(test, repetitions)
        peak = peak_rss_bytes() or None
        header, threads, load_ms = model.header, model.backend.threads, model.load_ms
        about = machine_and_model(path, model) | _settings(model)
    if threads not in bandwidths:
        bandwidths[threads] = roofline.memory_bandwidth_gbps(threads)
    ours: Row = {
        **_latency(test, samples),
        "peak_rss_bytes": peak,
        "load_ms": round(load_ms, 3),
        **_roofline(test, samples, header, bandwidths[threads]),
    }
    shape: Row = {
        "n_threads": threads,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": test_time,
    }
    found = about | shape | _rates(test, samples) | ours
    return {name: found[name] for name in (*FIELDS, *JSON_ONLY_FIELDS)}


def machine_and_model(path: str | Path, model: Model) -> Row:
    """What every suite's rows begin with."""
    return {
        "build_commit": machine.library_build(model.kernels),
        "build_number": 0,
        "cpu_info": machine.cpu_name(),
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": str(path),
        "model_type": model.native.description,
        "model_size": model.header.tensor_nbytes,
        "model_n_params": model.header.n_parameters,
    }


def _settings(model: Model) -> Row:
    """What it ran with, and the library's defaults for the rest, as llama-bench writes them."""
    options = model.options
    is_mapped = options.mmap and model.kernels == LLAMA_CPP.name
    return {
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "cpu_mask": "0x0",
        "cpu_strict": False,
        "poll": 50,
        "type_k": options.type_k,
        "type_v": options.type_v,
        "n_gpu_layers": -1 if options.gpu_layers in ("auto", "all") else options.gpu_layers,
        "n_cpu_moe": 0,
        "split_mode": options.split_mode,
        "main_gpu": options.main_gpu,
        "no_kv_offload": False,
        "flash_attn": _FLASH_ATTN[options.flash_attn],
        "devices": "auto",
        "tensor_split": "0.00",
        "tensor_buft_overrides": "none",
        "load_mode": _LOAD_MODES[is_mapped, options.mlock],
        "lazy_mode": "auto",
        "embeddings": False,
        "no_op_offload": 0,
        "no_host": False,
        "repack": True,
        "fit_target": 0,
        "fit_min_ctx": 0,
    }


def _rates(test: Trial, samples: Samples) -> Row:
    """llama-bench's statistics: the mean of the repetitions' rates, the sample's standard deviation."""
    rates = [test.n_tokens * 1e9 / ns for ns in samples.total_ns]
    return {
        "avg_ns": round(statistics.mean(samples.total_ns)),
        "stddev_ns": round(_stddev(samples.total_ns)),
        "avg_ts": round(statistics.mean(rates), 6),
        "stddev_ts": round(_stddev(rates), 6),
        "samples_ns": list(samples.total_ns),
        "samples_ts": [round(rate, 4) for rate in rates],
    }


def _latency(test: Trial, samples: Samples) -> Row:
    """Time to the first token belongs to prompts, time between tokens to generations; None in the other's rows."""
    between = np.array(samples.between_tokens_ns)
    return {
        "ttft_ms": round(statistics.median(samples.prompt_ns) / 1e6, 3) if test.n_prompt else None,
        "itl_p50_ms": round(float(np.percentile(between, 50)) / 1e6, 4) if between.size else None,
        "itl_p95_ms": round(float(np.percentile(between, 95)) / 1e6, 4) if between.size else None,
    }


def _roofline(test: Trial, samples: Samples, header: Header, bandwidth_gbps: float) -> Row:
    """Prefill computes more than it reads: the share of the bandwidth means something for single tokens only."""
    fraction = None
    if not test.n_prompt:
        tokens_per_s = statistics.mean(test.n_gen * 1e9 / ns for ns in samples.total_ns)
        fraction = round(roofline.weight_nbytes_per_token(header) * tokens_per_s / (bandwidth_gbps * 1e9), 4)
    return {"memory_bandwidth_gbps": round(bandwidth_gbps, 3), "fraction_of_bandwidth": fraction}


def _stddev(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
