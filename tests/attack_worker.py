"""Runs `edgeinfer` many times, each in a forked child with limits, as fast as hostile input allows.

A job is a line of JSON on stdin: the arguments and the directory to stand in. The answer is a line of JSON: how the
child ended and what it wrote. Everything heavy is imported once; a child is otherwise a start of the command, with its
own standard streams, and what ends it (a signal, a limit, an assertion in C) ends nothing else.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
from typing import Any, NoReturn

from edgeinfer.__main__ import main
from edgeinfer.api import batch, convert, model  # noqa: F401 - what the commands import when they need it
from edgeinfer.api.embed import load_encoder
from edgeinfer.cli import console
from edgeinfer.errors import EdgeinferError, last_words
from edgeinfer.runtime.template import preload

MAX_MEMORY_NBYTES = 12_000_000_000
HANG_S = 60
_SLICE_S = 0.002


def _child(job: dict[str, Any], streams: list[int]) -> NoReturn:
    try:
        os.chdir(job["folder"])
        for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
            os.dup2(stream, number)
        os.closerange(3, 256)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_NBYTES, MAX_MEMORY_NBYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["edgeinfer", *job["arguments"]]
        try:
            _embed(job["arguments"][1]) if job["arguments"][0] == "embed" else main()
        except SystemExit as ending:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.code if isinstance(ending.code, int) else 1)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _embed(path: str) -> None:
    """What no command does yet: an encoder's vector."""
    console.prepare_streams()
    last_words.append(lambda error: console.fail_at_once(error, as_json=False))
    try:
        with load_encoder(path) as encoder:
            encoder.embed(["hi"])
    except EdgeinferError as error:
        console.fail(error)
    raise SystemExit(0)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """How a child ends: `code`, the `signal` that ended it if one did, whether it `hangs`, what it wrote."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            _child(job, [out.fileno(), err.fileno()])
        # Slices of waiting are counted, not wall time, in which this process might have been stopped with the child.
        waited_s, hangs = 0.0, False
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            pause = min(0.1, _SLICE_S + waited_s / 20)
            time.sleep(pause)
            waited_s += pause
            if waited_s > HANG_S and not hangs:
                hangs = True
                os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(ended[1])
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read(1 << 16).decode("utf-8", "replace"))
        ended_by = -code if code < 0 and not hangs else 0
        return {"code": code, "signal": ended_by, "hangs": hangs, "out": texts[0], "err": texts[1], "s": waited_s}


if __name__ == "__main__":
    preload()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(run(json.loads(line))) + "\n")
        sys.stdout.flush()
