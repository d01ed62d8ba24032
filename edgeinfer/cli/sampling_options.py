"""The options that say how tokens are chosen; llama.cpp's flags, the fields of `options.SamplingParams`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from edgeinfer.options import SamplingParams, parse_logit_bias

_DEFAULTS = SamplingParams()


def _option(flag: str, text: str, field: str) -> Any:
    """None means that it was not given, and the model's own recommendation counts."""
    usual = f"the model's, then {getattr(_DEFAULTS, field)}"
    return typer.Option(flag, metavar="N", help=f"{text} [default: {usual}]", show_default=False)


def sampling(
    temperature: Annotated[float | None, _option("--temp", "Temperature; 0 is greedy.", "temperature")] = None,
    top_k: Annotated[int | None, _option("--top-k", "Keep the k likeliest tokens; 0 keeps all.", "top_k")] = None,
    top_p: Annotated[float | None, _option("--top-p", "Keep this much probability.", "top_p")] = None,
    min_p: Annotated[float | None, _option("--min-p", "Drop tokens below this part of the likeliest.", "min_p")] = None,
    typical_p: Annotated[float | None, _option("--typical-p", "Locally typical sampling.", "typical_p")] = None,
    repeat_penalty: Annotated[
        float | None, _option("--repeat-penalty", "Penalty for repeated tokens; 1 is none.", "repeat_penalty")
    ] = None,
    repeat_last_n: Annotated[
        int | None, _option("--repeat-last-n", "Tokens that the penalties look back on.", "repeat_last_n")
    ] = None,
    presence_penalty: Annotated[
        float | None, _option("--presence-penalty", "Penalty for tokens that occurred.", "presence_penalty")
    ] = None,
    frequency_penalty: Annotated[
        float | None, _option("--frequency-penalty", "Penalty per occurrence.", "frequency_penalty")
    ] = None,
    dry_multiplier: Annotated[
        float | None, _option("--dry-multiplier", "DRY penalty for repeated phrases; 0 is off.", "dry_multiplier")
    ] = None,
    xtc_probability: Annotated[
        float | None, _option("--xtc-probability", "Chance to drop the likeliest tokens (XTC).", "xtc_probability")
    ] = None,
    xtc_threshold: Annotated[
        float | None, _option("--xtc-threshold", "What counts as likely for XTC.", "xtc_threshold")
    ] = None,
    mirostat: Annotated[int | None, _option("--mirostat", "Mirostat version 1 or 2; 0 is off.", "mirostat")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", help="Random seed [default: a fresh one, reported].")
    ] = None,
    logit_bias: Annotated[
        list[str] | None, typer.Option("--logit-bias", metavar="ID(+|-)BIAS", help="Favour a token (repeatable).")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Never end by an end token.")] = False,
) -> dict[str, Any]:
    """What was given, by the field's name. Raises UsageError for a value that cannot be."""
    options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repeat_penalty": repeat_penalty,
        "repeat_last_n": repeat_last_n,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "dry_multiplier": dry_multiplier,
        "xtc_probability": xtc_probability,
        "xtc_threshold": xtc_threshold,
        "mirostat": mirostat,
        "seed": None if seed == -1 else seed,
        "logit_bias": tuple(map(parse_logit_bias, logit_bias)) if logit_bias else None,
        "ignore_eos": ignore_eos or None,
    }
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    SamplingParams(**given)
    return given
