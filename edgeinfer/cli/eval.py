"""`edgeinfer eval`: perplexity on a text, and the divergence from a reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer.cli import console, progress, table
from edgeinfer.cli.option_groups import with_groups
from edgeinfer.cli.runtime_options import DEFAULTS, MODEL_HELP, Threads, fixed_cache_types, loading
from edgeinfer.errors import CheckFailedError, UsageError
from edgeinfer.options import RuntimeOptions

if TYPE_CHECKING:
    from edgeinfer.quality.evaluate import Evaluation


@with_groups(options=loading)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    file: Annotated[Path, typer.Option("-f", "--file", metavar="FILE", help="Text file to predict.")],
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="REF.gguf", help="The model to compare with, as a rule unquantized."),
    ] = None,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx", "--ctx-size", metavar="N", min=8, help="Tokens of a passage.")
    ] = 512,
    chunks: Annotated[
        int | None, typer.Option("--chunks", metavar="N", min=1, help="Use only so many passages [default: all].")
    ] = None,
    max_kld: Annotated[
        float | None,
        typer.Option("--max-kld", metavar="X", help="Fail (exit code 7) if the mean KL divergence is above this."),
    ] = None,
    threads: Threads = DEFAULTS.threads,
    *,
    options: Callable[[], RuntimeOptions],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure how well a model predicts a text and, with a reference, how far it is from that."""
    if max_kld is not None and not (reference and max_kld >= 0):
        raise UsageError("--max-kld is a limit for the divergence from --reference", "give both, and a number from 0")
    from edgeinfer.quality.evaluate import evaluate

    run_options = dataclasses.replace(fixed_cache_types(options()), threads=threads)
    with progress.steps() as advance:
        result = evaluate(
            model, file, reference=reference, ctx_size=ctx_size, chunks=chunks, options=run_options, progress=advance
        )
    failed = max_kld is not None and result.divergence is not None and result.divergence.kld_mean > max_kld
    if not as_json:
        console.result(_text(result))
    elif not failed:
        console.result_json(dataclasses.asdict(result))
    if failed:
        assert result.divergence
        raise CheckFailedError(
            f"{model}: mean KL divergence {result.divergence.kld_mean:.6f}, more than --max-kld {max_kld:g}",
            "choose a larger type, or an importance matrix",
            found=dataclasses.asdict(result),
        )


def _text(result: Evaluation) -> str:
    rows = [("perplexity", f"{result.perplexity:.4f}", f"± {result.perplexity_error:.5f}")]
    if d := result.divergence:
        rows += [
            ("  of the reference", f"{d.reference_perplexity:.4f}", f"± {d.reference_perplexity_error:.5f}"),
            ("  ln of the ratio", f"{d.log_perplexity_ratio:.6f}", f"± {d.log_perplexity_ratio_error:.6f}"),
            ("KL divergence", f"{d.kld_mean:.6f}", f"± {d.kld_mean_error:.6f}"),
            ("  median", f"{d.kld_median:.6f}", ""),
            ("  90%", f"{d.kld_p90:.6f}", ""),
            ("  99%", f"{d.kld_p99:.6f}", ""),
            ("  maximum", f"{d.kld_max:.6f}", ""),
            ("same top token", f"{100 * d.same_top:.3f} %", f"± {100 * d.same_top_error:.3f} %"),
            ("change of probability", f"{100 * d.delta_p_mean:.3f} %", f"± {100 * d.delta_p_mean_error:.3f} %"),
            ("  root mean square", f"{100 * d.delta_p_rms:.3f} %", f"± {100 * d.delta_p_rms_error:.3f} %"),
        ]
    scored = f"{result.tokens} tokens scored in {result.chunks} passages of {result.ctx_size}"
    return table.render((result.model, "", ""), rows, "<><") + f"\n{scored}, {result.seconds:.1f} s"
