"""The real model and its checkpoint, fetched and made once per machine. Unable to get them is a failure, not a skip."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import SPECIAL, write_checkpoint
from fetch_model import fetch
from golden_embeddings import unpack_checkpoint
from hypothesis import HealthCheck, settings
from make_checkpoint import cached_checkpoint
from processes import do_not_ignore_signals

import edgeinfer
from edgeinfer.api.trials import Trial
from edgeinfer.native import ik_package

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: a thread that waits for another must not keep one busy.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# How fast examples come says nothing on a loaded machine.
settings.register_profile("edgeinfer", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("edgeinfer")
do_not_ignore_signals()
# Hypothesis draws from the constants of what is imported, and calls a test flaky during which another module is.
for module in pkgutil.walk_packages(edgeinfer.__path__, "edgeinfer."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return fetch("smollm2")


@pytest.fixture(scope="session")
def smollm2_checkpoint() -> Path:
    """The Hugging Face checkpoint directory made from `smollm2_gguf`; BF16, one file."""
    return cached_checkpoint("smollm2")


@pytest.fixture(scope="session")
def minilm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2, a sentence encoder, as sentence-transformers has it."""
    return unpack_checkpoint(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama of random weights with a chat template that refuses the role `odd`; 512 tokens of context."""
    from edgeinfer.api.convert import plan_conversion, run_conversion
    from edgeinfer.options import ConvertOptions

    folder = tmp_path_factory.mktemp("tiny")
    template = (
        "{% for m in messages %}{% if m.role == 'odd' %}{{ raise_exception('odd role') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2], "chat_template": template}
    options = ConvertOptions(type="F16", verify=False)
    checkpoint = write_checkpoint(folder / "checkpoint", settings=settings)
    run_conversion(plan_conversion(checkpoint, folder / "tiny.gguf", options), options)
    return folder / "tiny.gguf"


@pytest.fixture(
    scope="session",
    params=[
        "llama.cpp",
        pytest.param("ik", marks=pytest.mark.skipif(not ik_package.is_installed(), reason="needs edgeinfer[fast]")),
    ],
)
def kernels(request: pytest.FixtureRequest) -> str:
    """Each of the compiled libraries that can run a model."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def chosen_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `auto` takes, whatever is faster here: that the fork runs a test's model is taken for granted."""
    is_fork = request.config.getoption("--kernels") == "ik"
    speed_up = 2.0 if is_fork else 0.0
    with pytest.MonkeyPatch.context() as patch:
        if is_fork:
            patch.setattr("edgeinfer.api.kernels.AUTO_MAX_SEQUENCES", 256)
        patch.setattr("edgeinfer.api.trials._run_trial", lambda path: Trial(0.0, speed_up, speed_up, 24))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What edgeinfer keeps goes into a directory of the tests', not into that of whoever runs them."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGEINFER_HOME", str(home))
        yield home


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever uses the real model is marked so, whether its author thought of it or not; slow ones are asked for."""
    for item in items:
        if {"smollm2_gguf", "smollm2_checkpoint", "minilm_checkpoint"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.model)
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(0))
    if "slow" not in config.option.markexpr:
        slow = [item for item in items if item.get_closest_marker("slow")]
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make conformance` adds."""
    parser.addoption("--all-types", action="store_true", help="tests/conformance: the data of every type")
    parser.addoption("--kernels", choices=("llama.cpp", "ik"), default="llama.cpp", help="what runs where both can")
