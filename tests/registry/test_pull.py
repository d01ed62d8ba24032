"""Models by name, against a server on loopback that speaks the Hub's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ggufs import write_gguf
from hub_server import COMMIT, Hub
from huggingface_hub import constants
from processes import PATIENCE_S, watched

from edgeinfer.api.files import resolve
from edgeinfer.api.models import default_model, list_models, pull_model, remove_model
from edgeinfer.errors import EdgeinferError, NotFoundError, ResourceError, UnusableInputError, UsageError

NAMES = ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    for i, name in enumerate(NAMES):
        write_gguf(folder / name, extra={"test.filler": "x" * (5000 * i + 30_000)})
    (folder / "README.md").write_text("nothing that is needed")
    (folder / "mmproj-F16.gguf").write_bytes(b"no model")
    return folder


def _refused(kind: type[EdgeinferError], model: str = "org/tiny") -> str:
    with pytest.raises(kind) as caught:
        resolve(model)
    assert "org/" in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value.message + " " + caught.value.hint


def test_a_name_on_the_hub_is_fetched_once_and_only_that_file(hub: Hub, repository: Path, tmp_path: Path) -> None:
    path = resolve("org/tiny")
    assert path == tmp_path / "home" / "models" / "org" / "tiny" / NAMES[0]
    assert path.read_bytes() == (repository / NAMES[0]).read_bytes()
    assert hub.fetched() == {NAMES[0]}
    hub.requests.clear()
    assert resolve("org/tiny") == resolve("org/tiny:q4_k_m") == path
    assert hub.requests == []
    assert resolve("org/tiny:Q8_0").name == NAMES[1]
    assert [m.name for m in list_models()] == ["org/tiny:Q4_K_M", "org/tiny:Q8_0"]


def test_a_path_and_a_name_of_the_store_come_before_the_hub(hub: Hub, tmp_path: Path) -> None:
    own = write_gguf(tmp_path / "own.gguf")
    assert pull_model(str(own), "mine").path == str(own)
    assert resolve("mine") == own
    (tmp_path / "mine").mkdir()
    assert resolve(str(write_gguf(tmp_path / "mine" / "a.gguf"))).name == "a.gguf"
    assert resolve("mine") == Path("mine/a.gguf")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    write_gguf(tmp_path / "org" / "tiny" / "b.gguf")
    assert resolve("org/tiny") == Path("org/tiny/b.gguf")
    assert hub.requests == []


def test_what_another_program_fetched_is_used_where_it_is(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download

    there = hf_hub_download("org/tiny", NAMES[1])
    hub.requests.clear()
    assert str(resolve("org/tiny:Q8_0")) == str(resolve("org/tiny")) == there
    assert hub.requests == []
    assert not (tmp_path / "home").exists()


def test_nothing_is_fetched_where_that_is_not_wanted(hub: Hub) -> None:
    with pytest.raises(NotFoundError, match="not on this machine"):
        resolve("org/tiny", fetch=False)
    assert hub.requests == []


def test_a_type_that_is_not_there(hub: Hub) -> None:
    assert "Q4_K_M, Q8_0" in _refused(NotFoundError, "org/tiny:Q6_K")
    assert hub.fetched() == set()


def test_no_such_repository_and_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "neither a path here nor a repository" in _refused(NotFoundError, "org/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in _refused(NotFoundError)


@pytest.mark.parametrize("text", ["tiny", "a/b/c", "org/tiny:../x", "org/../tiny", "./org/x", "org/tiny:a b", ""])
def test_what_is_no_name_is_not_looked_up(hub: Hub, text: str) -> None:
    with pytest.raises((NotFoundError, UsageError)):
        resolve(text)
    assert hub.requests == []


def test_a_damaged_transfer_leaves_nothing(hub: Hub) -> None:
    hub.damage = True
    assert "damaged" in _refused(UnusableInputError)
    assert list_models() == []
    hub.damage = False
    assert resolve("org/tiny").exists()


def test_an_interrupted_download_is_resumed(hub: Hub, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    hub.cut_after, hub.down_after_cut = 10_000, True
    assert "HTTP 503" in _refused(NotFoundError)
    assert list_models() == []
    hub.fail, hub.cut_after = {}, None
    path = resolve("org/tiny")
    assert path.read_bytes() == (repository / NAMES[0]).read_bytes()
    first, second = filter(None, hub.weights_sent)
    assert (first, second) == (10_000, path.stat().st_size - 10_000)


PULL = """
import sys
from huggingface_hub import constants
from edgeinfer.api.models import pull_model
constants.ENDPOINT, constants.HF_HUB_CACHE = sys.argv[1:3]
constants.HUGGINGFACE_CO_URL_TEMPLATE = sys.argv[1] + "/{repo_id}/resolve/{revision}/{filename}"
constants.DOWNLOAD_CHUNK_SIZE = 1000
pull_model("org/tiny:F16", "mine")
"""


@pytest.mark.parametrize("n_sent", [0, 10_000])
def test_a_kill_in_the_middle_loses_nothing_and_leaves_no_half_of_a_model(
    hub: Hub, repository: Path, tmp_path: Path, n_sent: int
) -> None:
    names = [f"tiny-F16-{i:05}-of-00002.gguf" for i in (1, 2)]
    shards = [
        write_gguf(repository / name, extra={"test.filler": "x" * 20_000, "split.count": 2, "split.no": i}).read_bytes()
        for i, name in enumerate(names)
    ]
    hub.stall = names[1], n_sent
    command = [sys.executable, "-c", PULL, hub.url, str(tmp_path / "cache")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))}
    with watched(subprocess.Popen(command, env=env)) as process:
        assert hub.stalled.wait(PATIENCE_S)
        n_looks = 0
        while n_sent and not _begun(tmp_path):
            n_looks += 1
            assert process.poll() is None
            assert n_looks * 0.02 < PATIENCE_S
            time.sleep(0.02)
        process.kill()
    n_begun = _begun(tmp_path)
    assert bool(n_begun) == bool(n_sent)
    assert list_models() == []
    with pytest.raises(NotFoundError):
        resolve("mine")
    hub.stall, hub.weights_sent[:] = None, []
    hub.go_on.set()
    path = resolve("org/tiny:F16")
    assert [path.with_name(name).read_bytes() for name in names] == shards
    assert hub.weights_sent == [len(shards[1]) - n_begun], "only what is missing is sent"


def _begun(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.edgeinfer.incomplete"))


def test_pull_again_fetches_only_what_has_changed(hub: Hub, repository: Path) -> None:
    first = pull_model("org/tiny")
    assert first.fetched_bytes == first.bytes == Path(first.path).stat().st_size
    assert pull_model("org/tiny").fetched_bytes == 0
    data = bytearray((repository / NAMES[0]).read_bytes())
    data[-1] ^= 1  # another version of the same size
    (repository / NAMES[0]).write_bytes(data)
    assert pull_model("org/tiny").fetched_bytes == first.bytes
    assert Path(first.path).read_bytes() == data


def test_too_little_space_is_said_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "the disk has 1000 free" in _refused(ResourceError)
    assert not any(request.startswith("GET /org") for request in hub.requests)


def test_names_that_lead_elsewhere_are_not_acted_on(hub: Hub, repository: Path, tmp_path: Path) -> None:
    for name in NAMES:
        (repository / name).unlink()
    hub.answer = {
        "siblings": [{"rfilename": "../../../evil-Q4_K_M.gguf", "size": 5}, {"rfilename": "/a.gguf", "size": 5}]
    }
    assert "no GGUF file" in _refused(NotFoundError)
    assert not list(tmp_path.rglob("evil*"))


def test_what_is_no_model_is_told_when_it_is_pulled(hub: Hub, repository: Path) -> None:
    (repository / NAMES[0]).write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(UnusableInputError):
        pull_model("org/tiny", "default")
    with pytest.raises(NotFoundError, match="alias 'default'"):
        default_model()


def test_a_revision_is_apart(hub: Hub) -> None:
    assert resolve(f"org/tiny@{COMMIT}:Q8_0").parent.name == f"tiny@{COMMIT}"
    assert "'v9'" in _refused(NotFoundError, "org/tiny@v9")


def test_removed_is_removed(hub: Hub, tmp_path: Path) -> None:
    pulled = pull_model("org/tiny:Q8_0", "default")
    assert default_model() == "default"
    removed = remove_model("org/tiny")
    assert (removed.path, removed.freed_bytes) == (pulled.path, pulled.bytes)
    assert list_models() == []
    assert not (tmp_path / "home" / "models" / "org").exists()
    with pytest.raises(NotFoundError):
        remove_model("org/tiny")


def test_from_the_command_line(hub: Hub, tmp_path: Path) -> None:
    def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
        return subprocess.run(
            [sys.executable, "-m", "edgeinfer", *options],
            env={
                **os.environ,
                "PYTHONPATH": paths,
                "HF_HOME": str(tmp_path / "hf"),
                "HF_ENDPOINT": hub.url,
                **environment,
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    done = run("models", "pull", "org/tiny", "--as", "default", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    path = json.loads(done.stdout)["path"]
    assert json.loads(run("models", "list", "--json").stdout) == [
        {
            "name": "org/tiny:Q4_K_M",
            "aliases": ["default"],
            "path": path,
            "files": 1,
            "bytes": Path(path).stat().st_size,
        }
    ]
    assert json.loads(run("inspect", "org/tiny:Q4_K_M", "--json", HF_HUB_OFFLINE="1").stdout)["path"] == path
    assert "org/tiny:Q4_K_M" in run("models", "list").stdout
    assert run("models", "rm", "default").returncode == 0
    nothing = run("run", "--json")
    assert nothing.returncode == 3
    assert "models pull" in json.loads(nothing.stdout)["error"]["hint"]
    absent = run("models", "rm", "nonsense")
    assert (absent.returncode, len(absent.stderr.splitlines())) == (3, 1)
