"""A chat of `edgeinfer run` with a model whose answers are scripted: what test_chat.py drives through a terminal.

The script is a JSON file: {"answers": [...], "n_ctx": 2000, "hold": FILE}. Each request is answered by the next of the
answers, byte by byte; the byte \\x01 waits until the file HOLD is there, or the answer is interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.api.sessions import SessionFile
from edgeinfer.cli import chat, console
from edgeinfer.cli.interrupt import Terminated, prepare_signals
from edgeinfer.cli.talk import Talk
from edgeinfer.options import SamplingParams
from edgeinfer.runtime.answer import About, AnswerStream, Reply
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.fake import END, FakeBackend, FakeVocabulary, make_fake_sampler
from edgeinfer.runtime.session import ChatSession, OnOverflow, TurnSettings
from edgeinfer.runtime.template import ChatTemplate
from edgeinfer.types import Logits, Refusal, Row, Tokens

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|end|>{% endfor %}<|start|>assistant:", bos="<bos>"
)
HOLD = b"\x01"


class Actor(FakeBackend):
    """Says its lines. A prompt that holds the word `endless` takes until it is interrupted."""

    def __init__(self, script: dict[str, Any]) -> None:
        super().__init__(n_ctx=script.get("n_ctx", 2000), max_batch_tokens=512, max_sequences=1)
        self._lines = [line.encode() for line in script["answers"]]
        self._hold = Path(script.get("hold", "/nonexistent"))
        self._rest = b""

    def next_line(self) -> None:
        self._rest = self._lines.pop(0) if self._lines else b"nothing more to say"

    def forward(self, rows: Sequence[Row]) -> Logits | Refusal:
        result = super().forward(rows)
        if b"endless" in bytes(t for t in self.held(0) if t < 256)[-20:] or self._rest.startswith(HOLD):
            while not self._aborting and not self._hold.exists():
                time.sleep(0.005)
            if self._aborting:
                return Refusal.ABORTED
        self._rest = self._rest.removeprefix(HOLD)
        if isinstance(result, Refusal) or not len(result):
            return result
        logits = np.full_like(result, -100)
        logits[:, self._rest[0] if self._rest else END] = 100
        self._rest = self._rest[1:]
        return logits


def main() -> None:
    script = json.loads(Path(sys.argv[1]).read_text())
    prepare_signals()
    actor = Actor(script)
    engine = Engine(actor, make_fake_sampler)
    vocabulary = FakeVocabulary()

    def start(tokens: Tokens, turn: TurnSettings) -> AnswerStream:
        reply = Reply(engine, vocabulary, tokens, turn.params, max_tokens=turn.max_tokens, stop=turn.stop)
        actor.next_line()
        return AnswerStream(engine, reply, About("scripted.gguf", "fake", 0.0))

    params = SamplingParams(temperature=0)
    overflow: OnOverflow = script.get("on_overflow", "error")
    session = ChatSession(
        start, vocabulary, TEMPLATE, n_ctx=actor.n_ctx, settings=TurnSettings(params), on_overflow=overflow
    )
    file = SessionFile(script["session"]) if "session" in script else None
    try:
        chat.run(Talk(session, params, {}, model="scripted.gguf", file=file), engine.interrupt)
    except Terminated as error:
        os._exit(int(error.code or 0))
    console.leave(0)


if __name__ == "__main__":
    main()
