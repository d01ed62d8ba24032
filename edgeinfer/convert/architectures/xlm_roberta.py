"""XLM-RoBERTa and the sentence encoders built on it (BGE-M3, multilingual E5): BERT, counting positions differently."""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.convert.architectures import bert

ARCHITECTURE = replace(
    bert.ARCHITECTURE,
    defaults={**bert.ARCHITECTURE.defaults, "model_type": "xlm-roberta", "pad_token_id": 1},
)
