"""What hostile files are thrown at, and what counts as an answer to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import SLOW_PATIENCE_S

WORKER = Path(__file__).with_name("attack_worker.py")
CLEAN_CODES = {0: "an answer", 3: "not found", 4: "unusable", 5: "not enough memory", 6: "does not fit", 7: "failed"}
"""Exit codes that a hostile file may lead to; 1 is a bug of ours, 2 would blame the command line."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    signal: int
    hangs: bool
    out: str
    err: str
    s: float

    @property
    def fault(self) -> str:
        """What is wrong with it, "" if nothing."""
        lines = self.err.splitlines()
        if self.hangs:
            return "hangs"
        if self.signal:
            return f"ended by signal {self.signal}"
        if self.code not in CLEAN_CODES:
            return f"exit code {self.code}"
        if "Traceback" in self.err or "panicked" in self.err:
            return "prints a traceback"
        if self.code and not (lines and lines[-1].startswith("error: ")):
            return "no error line"
        if self.code and (strange := [line for line in lines[:-1] if not line.startswith("note: ")]):
            return f"prints {strange[0]!r}"
        return ""

    @property
    def kind(self) -> str:
        """The class that it is counted in."""
        if "llama.cpp gave up" in self.err:
            return "caught assertion in C"
        return CLEAN_CODES[self.code]


class Attacker:
    """Runs commands in the children of one worker process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.kinds: Counter[str] = Counter()
        self.faults: dict[str, str] = {}

    def run(self, folder: Path, *arguments: object) -> Outcome:
        """Run `edgeinfer` with these arguments in `folder`."""
        assert self._process.stdin
        assert self._process.stdout
        job = {"folder": str(folder), "arguments": [str(argument) for argument in arguments]}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        watch = threading.Timer(SLOW_PATIENCE_S, self._process.kill)
        watch.daemon = True
        watch.start()
        answer = self._process.stdout.readline()
        watch.cancel()
        return Outcome(**json.loads(answer))

    def attack(self, name: str, folder: Path, *arguments: object) -> Outcome:
        """The same, and note under `name` what came of it."""
        outcome = self.run(folder, *arguments)
        if outcome.fault:
            self.faults[name] = f"{outcome.fault}: {outcome.err.strip()[-400:]!r}"
        else:
            self.kinds[outcome.kind] += 1
        return outcome


@contextmanager
def attacker(home: Path) -> Iterator[Attacker]:
    """An attacker whose commands keep what they keep in `home`."""
    environment = {**os.environ, "EDGEINFER_HOME": str(home), "OMP_WAIT_POLICY": "passive", "TMPDIR": str(home)}
    with subprocess.Popen(
        [sys.executable, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield Attacker(process)
        finally:
            process.kill()


def spread(cases: Sequence[str], count: int) -> list[str]:
    """So many of the cases, evenly."""
    return [cases[i * len(cases) // count] for i in range(min(count, len(cases)))]
