"""`edgeinfer.load`: a model that is ready to run.

Only what must come before the weights is imported with this module; the rest is while the C library reads them.
"""

from __future__ import annotations

import threading
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.api.adapters import open_adapters
from edgeinfer.api.draft_plan import DraftPlan
from edgeinfer.api.files import checked_header, resolve
from edgeinfer.api.kernels import open_native
from edgeinfer.api.memory import plan_run
from edgeinfer.api.vocabulary import begin_vocabulary
from edgeinfer.errors import UnusableInputError
from edgeinfer.gguf_file.describe import is_encoder
from edgeinfer.native import library
from edgeinfer.native.context import check_sequences
from edgeinfer.options import RuntimeOptions

if TYPE_CHECKING:
    from edgeinfer.api.model import Model


def load(
    model: str | Path,
    options: RuntimeOptions | None = None,
    *,
    max_sequences: int = 1,
    latency_target_ms: float | None = None,
    max_request_tokens: int | None = None,
    remember_shared_only: bool = False,
    default_ctx_size: int | None = None,
    must_fit: bool = True,
    verbose: bool = False,
) -> Model:
    """Load a GGUF model, ready to run. Close it, or use it in a `with` statement.

    `max_sequences` is how many requests can run at a time, `max_request_tokens` how many tokens one of them may have of
    the context that they share, `latency_target_ms` how long a step may take while answers are being written (None: a
    few times what it takes without prompts). With `remember_shared_only` the prefix cache keeps of the prompts what two
    of them begin with, and nothing else. Where the options leave it open, context (`default_ctx_size` at most), KV type
    and offload are fitted to the machine: `Model.plan` tells how. Without `must_fit`, weights that memory does not hold
    are read from the disk again and again. With edgeinfer[fast] a model runs on both libraries the first time, which
    takes some seconds more. Raises NotFoundError, UnusableInputError for a file that is damaged or not a language
    model, ResourceError when memory does not suffice.
    """
    started_s = time.perf_counter()
    library.set_verbose(verbose)
    check_sequences(max_sequences)
    header = checked_header(resolve(model))
    if is_encoder(header):
        raise UnusableInputError(
            f"{header.path}: an encoder, which writes no text",
            "use a text generation model, or `edgeinfer.load_encoder`",
        )
    options = options or RuntimeOptions()
    adapters = open_adapters(header, options.lora) if options.lora else ()
    draft = DraftPlan.of(header, options)
    plan = plan_run(
        header,
        options,
        default_ctx_size=default_ctx_size,
        max_sequences=max_sequences,
        must_fit=must_fit,
        draft=draft,
        adapters=adapters,
    )
    options = plan.applied(options)
    vocabulary_over = begin_vocabulary(header)
    threading.Thread(target=import_module, args=("edgeinfer.api.model",), daemon=True).start()
    native, choice = open_native(header, options, plan, adapters, max_sequences=max_sequences)
    options = choice.applied(options, max_sequences)
    from edgeinfer.api.model import open_model
    from edgeinfer.scheduling.policy import Limits

    return open_model(
        native,
        header,
        plan,
        options,
        adapters=adapters,
        vocabulary_over=vocabulary_over,
        draft=draft,
        limits=Limits(max_sequences, max_request_tokens=max_request_tokens, latency_target_ms=latency_target_ms),
        remember_shared_only=remember_shared_only,
        kernels_note=choice.note,
        started_s=started_s,
    )
