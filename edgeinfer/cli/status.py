"""What a chat tells of its tokens: a line while one types, a table when asked. Pure."""

from __future__ import annotations

from edgeinfer.types import Answer


def status_line(n_ctx: int, answer: Answer | None, n_columns: int) -> str:
    """The most that fits of: the last answer's tokens, the prompt's that were cached, speed, and the context's rest."""
    left = f"{_left(n_ctx, answer)} of {n_ctx} tokens of context left"
    parts = [left]
    if answer is not None:
        usage = answer.usage
        parts = [
            f"{usage.completion_tokens} tokens",
            f"{usage.cached_tokens} of {usage.prompt_tokens} cached",
            f"{answer.timings.decode_tps:.1f} t/s",
            left,
        ]
    while len(parts) > 1 and len(", ".join(parts)) > n_columns:
        parts.pop(0)
    line = ", ".join(parts)
    return line if len(line) <= n_columns else f"{_left(n_ctx, answer)} left"[:n_columns]


def token_table(n_ctx: int, answer: Answer | None) -> str:
    """Lines about the last answer and the context."""
    if answer is None:
        return f"nothing was said yet; the context holds {n_ctx} tokens"
    usage, timings = answer.usage, answer.timings
    return "\n".join(
        (
            f"prompt     {usage.prompt_tokens} tokens, {usage.cached_tokens} cached, {timings.prefill_ms:.0f} ms",
            f"answer     {usage.completion_tokens} tokens, {timings.decode_tps:.1f} a second, seed {answer.seed}",
            f"context    {_left(n_ctx, answer)} of {n_ctx} tokens left",
        )
    )


def _left(n_ctx: int, answer: Answer | None) -> int:
    used = 0 if answer is None else answer.usage.prompt_tokens + answer.usage.completion_tokens
    return max(0, n_ctx - used)
