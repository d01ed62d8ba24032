"""The prefix cache as a shell script sees it."""

import json
import os
import subprocess
import sys

import pytest
from processes import PATIENCE_S

COMMAND = [sys.executable, "-m", "edgeinfer"]
SYSTEM = "You answer briefly. " * 60


def run(home, *arguments, **environment):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env={**os.environ, "EDGEINFER_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def info(home):
    return json.loads(run(home, "cache", "info", "--json")[1])


def test_an_empty_cache_is_no_error(tmp_path):
    found = info(tmp_path)
    assert found.pop("budget_bytes") > 0
    assert found == {"path": str(tmp_path / "prefix-cache"), "bytes": 0, "blocks": 0, "models": []}
    assert run(tmp_path, "cache", "info")[0] == 0
    assert run(tmp_path, "cache", "clear") == (0, "cleared 0 B\n", "")
    assert list(tmp_path.iterdir()) == []


def test_the_budget_can_be_set(tmp_path):
    done = run(tmp_path, "cache", "info", "--json", EDGEINFER_PREFIX_CACHE_SIZE="3G")
    assert json.loads(done[1])["budget_bytes"] == 3 << 30
    code, out, err = run(tmp_path, "cache", "info", EDGEINFER_PREFIX_CACHE_SIZE="lots")
    assert (code, out) == (2, "")
    assert "'lots'" in err


@pytest.mark.model
def test_a_second_run_restores_and_says_the_same(tmp_path, smollm2_gguf):
    flags = ["-s", SYSTEM, "-n", 6, "--temp", 0, "--json"]
    code, out, err = run(tmp_path, "run", smollm2_gguf, "Why is the sky blue?", *flags)
    assert (code, err) == (0, "")
    first = json.loads(out)
    prompt = first["usage"]["prompt_tokens"]
    for _ in range(3):  # at its end a process writes for two seconds at most, which a loaded machine may need
        again = json.loads(run(tmp_path, "run", smollm2_gguf, "Why is the sky blue?", *flags)[1])
        if again["usage"]["cached_tokens"] >= prompt - 4:
            break
    other = json.loads(run(tmp_path, "run", smollm2_gguf, "Who are you?", *flags)[1])
    assert first["usage"]["cached_tokens"] == 0
    assert prompt - 4 <= again["usage"]["cached_tokens"] < prompt
    assert 200 < other["usage"]["cached_tokens"] < prompt - 5
    assert again["text"] == first["text"]
    found = info(tmp_path)
    assert found["blocks"] > 1
    assert found["models"][0]["model"] == str(smollm2_gguf.absolute())
    assert found["bytes"] == sum(p.stat().st_size for p in tmp_path.rglob("*.kv"))
    assert json.loads(run(tmp_path, "cache", "clear", "--json")[1]) == {"cleared_bytes": found["bytes"]}
    assert info(tmp_path)["bytes"] == 0


@pytest.mark.model
def test_other_options_do_not_share_it_and_without_it_nothing_is_kept(tmp_path, smollm2_gguf):
    flags = ["-s", SYSTEM[:200], "-n", 2, "--temp", 0, "--json"]

    def cached(*more):
        return json.loads(run(tmp_path, "run", smollm2_gguf, "hi", *flags, *more)[1])["usage"]["cached_tokens"]

    assert cached("--no-prefix-cache") == 0
    assert not (tmp_path / "prefix-cache").exists()
    assert cached() == 0
    assert cached("--cache-type-k", "q8_0") == 0
    assert cached("--flash-attn", "off") == 0
    assert cached("--no-prefix-cache") == 0
    assert any(cached() > 0 for _ in range(3))


@pytest.mark.model
def test_a_cache_that_cannot_be_written_is_mentioned_only_when_asked(tmp_path, smollm2_gguf):
    (tmp_path / "prefix-cache").write_text("in the way")
    arguments = ["run", smollm2_gguf, SYSTEM, "-n", 2, "--temp", 0]
    code, out, err = run(tmp_path, *arguments)
    assert (code, err) == (0, "")
    assert out.strip()
    code, _, err = run(tmp_path, *arguments, "-v")
    assert code == 0
    assert err.count("the prefix cache is not written") == 1
