"""Sources on the Hub, against a server on loopback that speaks its API."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adapter_files import write_adapter
from checkpoints import llama_config, random_tensors, write_checkpoint, write_shards
from hub_server import COMMIT, Hub
from huggingface_hub import constants
from processes import PATIENCE_S

from edgeinfer.api.convert import convert, plan_conversion
from edgeinfer.errors import EdgeinferError, NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.gguf_file.header import read_header
from edgeinfer.options import ConvertOptions
from edgeinfer.registry import hub as registry
from edgeinfer.registry.hub_id import HubId

QUICK = ConvertOptions(type="Q8_0", verify=False)
WEIGHTS = "model.safetensors"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """What the repository has, with files that no conversion needs."""
    folder = write_checkpoint(tmp_path / "repository")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"onnx")
    (folder / "picture.png").write_bytes(b"png")
    return folder


def _refused(kind: type[EdgeinferError], source: str = "org/tiny") -> str:
    with pytest.raises(kind) as caught:
        plan_conversion(source, options=QUICK)
    assert source in caught.value.message
    assert "\n" not in caught.value.message + caught.value.hint
    return caught.value.message + " " + caught.value.hint


def test_only_what_is_needed_is_fetched(hub: Hub, tmp_path: Path) -> None:
    converted = convert("org/tiny", options=QUICK)
    assert converted.output == "tiny-Q8_0.gguf"
    expected = {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md", WEIGHTS}
    assert hub.fetched() == expected
    metadata = read_header(tmp_path / converted.output).metadata
    assert metadata.text("general.organization") == "Org"
    assert metadata.text("general.name") == "Tiny"
    assert metadata.text("general.license") == "mit"


def test_of_an_adapters_base_only_the_config_is_fetched(hub: Hub, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", Path("org/tiny"), revision="main")
    assert convert(adapter).architecture == "llama"
    assert hub.fetched() == {"config.json"}


def test_an_adapter_on_the_hub(hub: Hub, repository: Path, tmp_path: Path) -> None:
    (hub.folder / "config.json").rename(tmp_path / "config.json")
    (hub.folder / WEIGHTS).unlink()
    write_adapter(hub.folder, tmp_path)
    assert convert("org/tiny").output == "tiny-F32.gguf"
    assert hub.fetched() == {name for name in hub.files() if name.endswith((".json", ".safetensors", ".md"))}
    hub.requests.clear()
    plan_conversion("org/tiny")
    assert hub.requests == []


def test_the_bytes_are_those_of_the_local_checkpoint(hub: Hub, repository: Path, tmp_path: Path) -> None:
    ours = read_header(Path(convert("org/tiny", "a.gguf", QUICK).output))
    local = read_header(Path(convert(repository, "b.gguf", QUICK).output))
    assert ours.path.read_bytes()[ours.data_offset :] == local.path.read_bytes()[local.data_offset :]


def test_what_is_in_the_cache_needs_no_network(hub: Hub) -> None:
    plan_conversion("org/tiny", options=QUICK)
    hub.requests.clear()
    plan_conversion("org/tiny", options=QUICK)
    assert hub.requests == []


def test_offline_the_hub_is_not_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in _refused(NotFoundError)
    assert hub.requests == []


def test_a_cache_that_lacks_a_shard_is_completed(hub: Hub, repository: Path) -> None:
    tensors = random_tensors(llama_config())
    names = list(tensors)
    (repository / WEIGHTS).unlink()
    write_shards(repository, [{n: tensors[n] for n in names[:5]}, {n: tensors[n] for n in names[5:]}])
    (repository / "consolidated.safetensors").write_bytes(b"the same weights in another layout")
    plan_conversion("org/tiny", options=QUICK)
    assert "consolidated.safetensors" not in hub.fetched()
    shard = registry.cached(HubId("org/tiny"))
    assert shard is not None
    second = shard / "model-00002-of-00002.safetensors"
    second.resolve().unlink()
    second.unlink()
    hub.requests.clear()
    plan_conversion("org/tiny", options=QUICK)
    assert hub.fetched() == {second.name}


def test_an_existing_path_wins(hub: Hub, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "org" / "tiny")
    plan_conversion("org/tiny", options=QUICK)
    assert hub.requests == []


def test_a_revision_can_be_chosen(hub: Hub) -> None:
    assert plan_conversion(f"org/tiny@{COMMIT}", options=QUICK).source.name == COMMIT
    assert "'v9'" in _refused(NotFoundError, "org/tiny@v9")


@pytest.mark.parametrize(
    "text", ["tiny", "a/b/c", "../tiny", "./org/tiny", "org/../x", "/org/tiny", "org/", "org/a--b", "o/" + "x" * 100]
)
def test_what_is_no_id_is_not_looked_up(hub: Hub, text: str) -> None:
    with pytest.raises(NotFoundError):
        plan_conversion(text, options=QUICK)
    assert hub.requests == []


def test_no_such_repository(hub: Hub) -> None:
    assert "neither a path here nor a repository" in _refused(NotFoundError, "org/other")


def test_gated(hub: Hub) -> None:
    hub.fail = {"GET /api": (403, {"X-Error-Code": "GatedRepo"})}
    assert "HF_TOKEN" in _refused(NotFoundError)


def test_gated_weights_of_a_repository_that_can_be_listed(hub: Hub) -> None:
    hub.fail = {"resolve": (403, {"X-Error-Code": "GatedRepo"})}
    assert "gated" in _refused(NotFoundError)


@pytest.mark.parametrize("headers", [{}, {"X-Error-Message": "Invalid credentials in Authorization header"}])
def test_a_wrong_token(hub: Hub, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub.fail = {"GET /api": (401, headers)}
    assert "does not accept the token" in _refused(NotFoundError)


def test_a_hub_in_trouble(hub: Hub) -> None:
    hub.fail = {"GET /api": (500, {})}
    assert "HTTP 500" in _refused(NotFoundError)


@pytest.mark.parametrize(
    "change",
    [
        {"sha": None},
        {"sha": 5},
        {"sha": "../../../evil"},
        {"siblings": "x"},
        {"siblings": [{"size": 5}]},
        {"siblings": [{"rfilename": 5, "size": 5}]},
        {"siblings": [{"rfilename": "config.json", "size": "x"}]},
        {"siblings": [{"rfilename": "config.json", "size": -1}]},
        {"safetensors": "x"},
        {"lastModified": "x"},
        "[]",
        "null",
        "<html>",
        "",
        "[" * 100_000,
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_answer_that_is_not_a_hub_s(hub: Hub, change: dict[str, Any] | str) -> None:
    hub.answer = change
    assert "not a Hub's" in _refused(NotFoundError)


def test_a_token_that_cannot_be_sent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "t\N{LATIN SMALL LETTER O WITH DIAERESIS}ken")
    assert "token" in _refused(NotFoundError)


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://localhost", "http://[::1", "http://", "http://localhost:x"])
def test_an_endpoint_that_is_no_address(endpoint: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "edgeinfer", "convert", "org/tiny", "--json"],
        capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path,
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 2
    assert "HF_ENDPOINT" in json.loads(done.stdout)["error"]["message"]
    assert len(done.stderr.splitlines()) == 1


def test_templates_in_a_directory_of_their_own_are_fetched(hub: Hub, repository: Path) -> None:
    (repository / "additional_chat_templates").mkdir()
    (repository / "additional_chat_templates" / "tools.jinja").write_text("a template")
    planned = plan_conversion("org/tiny", options=QUICK)
    assert planned.plan.metadata["tokenizer.chat_template.tools"] == "a template"


def test_an_unreachable_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    assert "cannot be reached" in _refused(NotFoundError)


def test_pickles_are_refused_before_anything_is_fetched(hub: Hub, repository: Path) -> None:
    (repository / WEIGHTS).unlink()
    assert "pytorch_model.bin" in _refused(UnusableInputError)
    assert hub.fetched() == set()


def test_repositories_that_are_no_checkpoint(hub: Hub, repository: Path) -> None:
    (repository / "config.json").unlink()
    assert "config.json" in _refused(UnusableInputError)
    (repository / WEIGHTS).rename(repository / "model.gguf")
    (repository / "pytorch_model.bin").unlink()
    assert "model.gguf" in _refused(UnusableInputError)
    (repository / "model.gguf").unlink()
    assert "no .safetensors" in _refused(UnusableInputError)


def test_a_shard_that_the_repository_lacks(hub: Hub, repository: Path) -> None:
    write_shards(repository, [random_tensors(llama_config())])
    (repository / "model-00001-of-00001.safetensors").unlink()
    assert "model-00001-of-00001.safetensors" in _refused(UnusableInputError)


def test_a_wrong_type_is_said_before_anything_is_fetched(hub: Hub) -> None:
    with pytest.raises(UsageError, match="q9"):
        plan_conversion("org/tiny", options=ConvertOptions(type="q9"))
    assert hub.requests == []


def _with_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=nbytes))


def test_too_little_space_for_the_download_is_said_before_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    _with_free(monkeypatch, 10_000)
    assert "the disk has 10000 free" in _refused(ResourceError)
    assert hub.fetched() == set()


def test_too_little_space_for_the_output_is_said_before_the_download(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.sizes["parameters"] = 10**9
    _with_free(monkeypatch, 10**9)
    assert "needs about 1062" in _refused(ResourceError)  # 34 bytes per 32 parameters, and the download
    assert hub.fetched() == set()


@pytest.fixture
def breaking_off(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's own attempts
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what arrives of a piece that breaks off is lost
    hub.cut_after = 10_000
    return hub


def test_a_transfer_that_breaks_off_goes_on(breaking_off: Hub, repository: Path) -> None:
    plan_conversion("org/tiny", options=QUICK)
    assert len(breaking_off.weights_sent) > 10
    assert sum(breaking_off.weights_sent) < (repository / WEIGHTS).stat().st_size + 10_000


def test_an_interrupted_download_is_resumed_by_the_next_run(breaking_off: Hub, repository: Path) -> None:
    breaking_off.down_after_cut = True
    assert "HTTP 503" in _refused(NotFoundError)
    assert registry.cached(HubId("org/tiny")) is None
    breaking_off.fail, breaking_off.cut_after = {}, None
    assert read_header(Path(convert("org/tiny", options=QUICK).output)).tensors
    first, second = filter(None, breaking_off.weights_sent)
    assert (first, second) == (10_000, (repository / WEIGHTS).stat().st_size - 10_000)


def test_a_transfer_that_is_not_what_was_announced(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.damage = True
    assert "damaged" in _refused(UnusableInputError)
    hub.damage = False
    plan_conversion("org/tiny", options=QUICK)


def test_from_the_command_line(hub: Hub, tmp_path: Path) -> None:
    def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
        return subprocess.run(
            [sys.executable, "-m", "edgeinfer", "convert", *options],
            env={**os.environ, "PYTHONPATH": paths, "HF_HOME": str(tmp_path / "home"), **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )

    done = run("org/tiny", "-t", "q8_0", "--json", "--no-verify", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "tiny-Q8_0.gguf"
    assert len(done.stderr.splitlines()) <= 1  # a hint at fallbacks, no progress bar and no advice
    hub.fail = {"": (503, {})}
    again: Any = run("org/tiny", "-t", "f32", "--no-verify", HF_ENDPOINT=hub.url)
    assert again.returncode == 0, again.stderr
    absent = run("org/other", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert absent.returncode == 3
    assert len(absent.stderr.splitlines()) == 1
