"""Which library runs a model: what the fork cannot do, what a trial says, a package that is missing or broken."""

import fcntl
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from gguf_parts import take_apart, u32
from processes import PATIENCE_S

import edgeinfer
from edgeinfer.api import fork_limits
from edgeinfer.api import kernels as kernels_module
from edgeinfer.api import trials as trials_module
from edgeinfer.api.files import checked_header
from edgeinfer.api.fork_limits import reason_against
from edgeinfer.api.kernels import Choice, choose
from edgeinfer.api.load import load
from edgeinfer.api.memory import plan_run
from edgeinfer.api.trials import Trial, _run_trial  # as it is before conftest.py replaces it
from edgeinfer.errors import NotFoundError, ResourceError, UnusableInputError, UsageError
from edgeinfer.ggml_types import GGMLType
from edgeinfer.gguf_file.header import read_header
from edgeinfer.native import ik_library, ik_package
from edgeinfer.options import RuntimeOptions
from edgeinfer.types import Placement

GOOD = Trial(0.003, 1.5, 2.0)


@pytest.fixture
def header(tiny_gguf):
    return checked_header(tiny_gguf)


@pytest.fixture
def trials(monkeypatch, tmp_path):
    """The fork as if it were installed; a list of what its trials say, one for each, and an empty memory of them."""
    said = []
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ik_package, "is_installed", lambda: True)
    monkeypatch.setattr(ik_package, "version", lambda: ik_package.VERSION)
    monkeypatch.setattr(ik_package, "identity", lambda: "these files")
    monkeypatch.setattr(trials_module, "_run_trial", lambda path: said.pop(0))
    monkeypatch.setattr(trials_module, "cores_are_shared", lambda: False)
    return said


def chosen(header, *, placement=None, adapters=(), max_sequences=1, **options):
    made = RuntimeOptions(ctx_size=128, **options)
    plan = plan_run(header, replace(made, draft="auto"))
    if placement is not None:
        plan = replace(plan, placement=placement)
    return choose(header, made, plan, adapters, max_sequences=max_sequences)


def test_the_faster_library_runs_a_model_and_the_trial_is_remembered(header, trials):
    trials.append(GOOD)
    assert chosen(header) == chosen(header) == Choice("ik")
    assert chosen(header, kernels="ik") == Choice("ik")
    assert chosen(header, kernels="llama.cpp") == Choice()


def test_another_library_or_another_file_begins_anew(header, trials, monkeypatch, tmp_path):
    trials += [GOOD, Trial(math.inf), GOOD]
    assert chosen(header).name == "ik"
    monkeypatch.setattr(ik_package, "identity", lambda: "other files")
    assert chosen(header).name == "llama.cpp"
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(header.path.read_bytes())
    assert chosen(checked_header(copy)).name == "ik"
    assert not trials


def test_a_file_that_was_replaced_begins_anew_whatever_its_time_says(header, trials, tmp_path):
    """As large, and as old: archives keep times, and what is derived from one model is of one size."""
    trials += [GOOD, Trial(math.inf)]
    path = tmp_path / "copy.gguf"
    path.write_bytes(header.path.read_bytes())
    status = path.stat()
    assert chosen(checked_header(path)).name == "ik"
    path.write_bytes(header.path.read_bytes()[:-4] + bytes(4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert chosen(checked_header(path)).name == "llama.cpp"


def test_a_later_shard_that_was_replaced_begins_anew(header, trials, tmp_path):
    trials += [GOOD, Trial(math.inf)]
    parts = take_apart(header.path)
    shards = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, (shard, tensors) in enumerate(zip(shards, (parts.tensors[:5], parts.tensors[5:]), strict=True)):
        numbers = {"split.no": u32(number), "split.count": u32(2), "split.tensors.count": u32(len(parts.tensors))}
        shard.write_bytes(replace(parts.changed(numbers), tensors=tensors).encoded())
    first = checked_header(shards[0])
    assert chosen(first) == chosen(first) == Choice("ik")
    shards[1].write_bytes(shards[1].read_bytes() + bytes(32))
    assert chosen(first).name == "llama.cpp"


def test_rows_that_the_fork_computes_wrongly_are_never_that_many(header, trials):
    trials.append(Trial(0.003, 1.5, 2.0, ubatch_size=24))
    choice = chosen(header)
    assert choice.applied(RuntimeOptions()).ubatch_size == 24
    assert choice.applied(RuntimeOptions(ubatch_size=8)).ubatch_size == 8
    assert Choice().applied(RuntimeOptions()) == RuntimeOptions()


def test_what_the_fork_does_not_load_after_all_runs_on_llama_cpp(tiny_gguf, trials, monkeypatch):
    """Memory that was there for the trial is gone, say."""
    trials.append(GOOD)

    def load_nothing(*arguments, **options):
        raise ResourceError("no memory for copies of the weights", "")

    monkeypatch.setattr("edgeinfer.native.ik.IkModel", load_nothing)
    with load(tiny_gguf, RuntimeOptions(ctx_size=128)) as model:
        assert (model.kernels, model.kernels_note) == ("llama.cpp", "no memory for copies of the weights")
    with pytest.raises(ResourceError, match="no memory"):
        load(tiny_gguf, RuntimeOptions(ctx_size=128, kernels="ik"))


def test_several_requests_at_a_time_are_for_llama_cpp_unless_one_asks(header, trials, monkeypatch):
    """The fork has no flash attention for them: with many cells it is half as fast."""
    trials.append(GOOD)
    monkeypatch.setattr(kernels_module, "AUTO_MAX_SEQUENCES", 1)  # `--kernels ik` of the tests makes it more
    assert "several requests" in chosen(header, max_sequences=2).note
    assert chosen(header, kernels="ik", max_sequences=2) == Choice("ik")


def test_flash_attention_is_for_one_sequence():
    """What a cell holds depends on it, so the prefix cache must know."""
    choice = Choice("ik")
    assert [choice.applied(RuntimeOptions(), n).flash_attn for n in (1, 2)] == ["on", "off"]
    assert choice.applied(RuntimeOptions(flash_attn="off"), 1).flash_attn == "off"


def test_a_trial_that_came_to_no_end_says_nothing_for_later(header, trials):
    trials += [None, None, GOOD]
    assert "could not be tried to the end" in chosen(header).note
    with pytest.raises(UnusableInputError, match="could not be tried"):
        chosen(header, kernels="ik")
    assert chosen(header).name == "ik"


def test_weights_that_would_not_fit_once_more_stay_with_llama_cpp(header, trials):
    plan = plan_run(header, RuntimeOptions(ctx_size=128))
    short = replace(plan, available_nbytes=plan.needs.total)
    assert "in the memory that there is" in choose(header, RuntimeOptions(), short).note
    with pytest.raises(ResourceError, match="in the memory that there is"):
        choose(header, RuntimeOptions(kernels="ik"), short)


@pytest.mark.parametrize(
    ("trial", "note"),
    [
        (Trial(math.inf), "cannot run it on this machine"),
        (Trial(1.5, 9, 9), "computes something else (divergence 1.500)"),
    ],
)
def test_a_library_that_computes_something_else_is_not_used(header, trials, trial, note):
    trials.append(trial)
    choice = chosen(header)
    assert choice.name == "llama.cpp"
    assert note in choice.note
    with pytest.raises(UnusableInputError, match=r"ik_llama.cpp (cannot|computes)"):
        chosen(header, kernels="ik")


def test_a_slower_library_is_used_only_where_it_is_asked_for(header, trials):
    trials.append(Trial(0.003, 0.9, 1.1))
    assert chosen(header).name == "llama.cpp"
    assert "0.99 times as fast" in chosen(header).note
    assert chosen(header, kernels="ik").name == "ik"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"flash_attn": "on", "max_sequences": 2}, "with flash attention for several sequences"),
        ({"cache_type_k": "q8_0"}, "with a KV cache that is not f16"),
        ({"cache_type_v": "bf16"}, "with a KV cache that is not f16"),
        ({"draft": "layers"}, "with a draft of its own layers"),
        ({"adapters": ("one",)}, "with adapters"),
        ({"placement": Placement(gpu_layers=2)}, "with layers on a GPU"),
    ],
)
def test_what_the_fork_cannot_do_never_gets_as_far_as_a_trial(header, trials, settings, reason):
    choice = chosen(header, **settings)
    assert choice == Choice(note=f"ik_llama.cpp cannot run it {reason}")
    with pytest.raises(UsageError, match=reason):
        chosen(header, kernels="ik", **settings)


def test_an_architecture_that_was_not_compared_is_not_tried(header, trials, monkeypatch):
    monkeypatch.setattr(fork_limits, "ARCHITECTURES", frozenset(("other",)))
    assert "as a llama model" in chosen(header).note


def with_last(parts, **changes):
    return replace(parts, tensors=(*parts.tensors[:-1], replace(parts.tensors[-1], **changes)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda parts: parts.changed({"llama.expert_count": u32(8)}), "with experts of this kind"),
        (lambda parts: parts.changed({"llama.attention.sliding_window": u32(64)}), "with a sliding window"),
        (lambda parts: parts.changed({"llama.rope.scaling.yarn_beta_fast": u32(32)}), "with bounds of yarn"),
        (lambda parts: parts.changed({"tokenizer.ggml.tokens": None}), "without a vocabulary"),
        (lambda parts: with_last(parts, name=b"rope_freqs.weight"), "with factors for its positions"),
        (lambda parts: with_last(parts, type=GGMLType.MXFP4), "with these types of tensors"),
    ],
)
def test_what_of_a_file_the_fork_cannot_do(tiny_gguf, tmp_path, change, reason):
    plan = plan_run(checked_header(tiny_gguf), RuntimeOptions())
    path = tmp_path / "changed.gguf"
    path.write_bytes(change(take_apart(tiny_gguf)).encoded())
    found = reason_against(read_header(path), RuntimeOptions(), plan, (), is_shared=False)
    assert found is not None
    assert found.startswith(reason)


def test_without_the_package_everything_is_as_it_was(header, monkeypatch):
    monkeypatch.setattr(ik_package, "is_installed", lambda: False)
    assert chosen(header) == Choice()
    with pytest.raises(ResourceError, match="not installed"):
        chosen(header, kernels="ik")


@pytest.mark.parametrize("version", ["0.1.4", ""])
def test_another_version_is_not_used(header, trials, monkeypatch, version):
    monkeypatch.setattr(ik_package, "version", lambda: version)
    assert f"version {version or 'unknown'}, not {ik_package.VERSION}" in chosen(header).note
    with pytest.raises(ResourceError, match="version"):
        chosen(header, kernels="ik")


def test_memory_that_the_system_would_not_hand_out_is_none(header, trials, monkeypatch):
    """Under `ulimit -v` the fork ends the process in the middle of making a context."""
    assert fork_limits._is_granted(1 << 20)
    assert not fork_limits._is_granted(1 << 60)
    monkeypatch.setattr(fork_limits, "_is_granted", lambda nbytes: False)
    assert "in the memory that there is" in chosen(header).note


def test_nothing_is_tried_where_it_could_not_be_remembered(header, trials, monkeypatch, tmp_path):
    """Every start would be the first."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path / "file"))
    assert "cannot be kept in" in chosen(header).note
    trials.append(GOOD)
    assert chosen(header, kernels="ik").name == "ik"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda path: path.unlink(), NotFoundError),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), UnusableInputError),
    ],
)
def test_a_file_that_was_replaced_while_it_was_tried_is_not_loaded(
    trials, monkeypatch, tmp_path, tiny_gguf, change, error
):
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    monkeypatch.setattr(trials_module, "_run_trial", lambda path: change(path) or GOOD)
    with pytest.raises(error, match=r"model\.gguf: it"):
        chosen(checked_header(path))
    assert list(trials_module.home().glob("kernels/*.json")) == []


def test_a_package_that_was_replaced_while_it_was_tried_was_not_tried(header, trials, monkeypatch):
    names = ["one", "another", "another", "another"]
    monkeypatch.setattr(ik_package, "identity", lambda: names.pop(0))
    trials += [GOOD, GOOD]
    assert "could not be tried to the end" in chosen(header).note
    assert chosen(header).name == "ik"


def test_a_pipe_in_place_of_a_memory_is_not_waited_for(header, trials):
    trials += [GOOD, GOOD]
    chosen(header)
    (path,) = trials_module.home().glob("kernels/*.json")
    path.unlink()
    os.mkfifo(path)
    assert chosen(header).name == "ik"
    assert path.is_file()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A place for packages that comes before all others, with one by the fork's name."""
    folder = tmp_path / "site"
    package = folder / "ik_llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libllama.so").write_text("")
    (package / "__init__.py").write_text("")
    about = folder / f"ik_llama_cpp_python-{ik_package.VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: ik-llama-cpp-python\nVersion: {ik_package.VERSION}\n"
    )
    for name in ("ik_llama_cpp", "ik_llama_cpp._ctypes_api"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    for name in ("ik_llama_cpp", "ik_llama_cpp._ctypes_api"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe"])
def test_metadata_that_is_damaged_tells_no_version(site, data):
    (site / f"ik_llama_cpp_python-{ik_package.VERSION}.dist-info" / "METADATA").write_bytes(data)
    assert ik_package.version() == ""


def test_a_module_by_the_name_of_the_package_is_not_the_package(tmp_path, monkeypatch, header):
    (tmp_path / "ik_llama_cpp.py").write_text("raise SystemExit")
    monkeypatch.delitem(sys.modules, "ik_llama_cpp", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not ik_package.is_installed()
    assert chosen(header) == Choice()


def test_any_file_of_the_package_tells_it_from_another(site, tmp_path, monkeypatch):
    found = [ik_package.identity()]
    (site / "ik_llama_cpp" / "_ctypes_api.py").write_text("")
    found.append(ik_package.identity())
    (site / "ik_llama_cpp" / "lib" / "libllama.so").write_text("x")
    found.append(ik_package.identity())
    (tmp_path / "mine.so").write_text("")
    monkeypatch.setenv("IK_LLAMA_CPP_LIB_PATH", str(tmp_path / "mine.so"))
    found.append(ik_package.identity())
    assert len(set(found)) == len(found)


def test_the_package_is_there_while_it_is_imported(site):
    """To another thread, that loads a model at the same time."""
    (site / "ik_llama_cpp" / "_ctypes_api.py").write_text(
        "from edgeinfer.native import ik_package\nfound = ik_package.is_installed()\n"
    )
    assert ik_library._import_bindings().found


def test_a_trial_is_of_the_package_that_this_process_would_load(site, tiny_gguf):
    """Which it finds in `sys.path`; a program can have changed that."""
    (site / "ik_llama_cpp" / "_ctypes_api.py").write_text(f"open({str(site / 'seen')!r}, 'w')\n")
    trial = _run_trial(tiny_gguf)
    assert trial is not None
    assert "is broken" in trial.fault
    assert (site / "seen").exists()


def test_a_trial_ends_with_the_process_that_waits_for_it(site, tiny_gguf):
    """However that one ends, and whatever the library does."""
    lock = site / "lock"
    (site / "ik_llama_cpp" / "_ctypes_api.py").write_text(
        "import fcntl, time\n"
        f"file = open({str(lock)!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write('x')\n"
        "file.flush()\n"
        "time.sleep(1000)\n"
    )
    program = "import pathlib, sys\nfrom edgeinfer.api import trials\ntrials._run_trial(pathlib.Path(sys.argv[1]))\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program, str(tiny_gguf)], env=environment) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while not (lock.exists() and lock.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits for the other's end


BROKEN = {
    "truncated": (
        "import ctypes, pathlib; _lib = ctypes.CDLL(str(pathlib.Path(__file__).with_name('libllama.so')))",
        "ik-llama-cpp-python is broken: ",
    ),
    "a missing symbol": ("class _lib: pass\n_lib.llama_decode", "ik-llama-cpp-python is broken: "),
    "dies": ("import os; os.abort()", "ik_llama.cpp ended with SIGABRT when it was tried"),
    "says nothing": ("import os; os._exit(3)", "ik_llama.cpp cannot run it on this machine"),
}


@pytest.mark.parametrize(("code", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_runs_nothing_and_is_said_once(tiny_gguf, tmp_path, code, why):
    """In processes of their own, as a user would see it."""
    package = tmp_path / "site" / "ik_llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "_ctypes_api.py").write_text(code)
    (package / "libllama.so").write_bytes(b"\x7fELF\2\1\1" + bytes(9))
    about = tmp_path / "site" / f"ik_llama_cpp_python-{ik_package.VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: ik-llama-cpp-python\nVersion: {ik_package.VERSION}\n"
    )
    program = (
        "import json, sys, edgeinfer\n"
        "from edgeinfer.errors import EdgeinferError\n"
        "from edgeinfer.options import RuntimeOptions\n"
        "found = []\n"
        "for kernels in ('auto', 'ik'):\n"
        "    try:\n"
        "        with edgeinfer.load(sys.argv[1], RuntimeOptions(kernels=kernels)) as model:\n"
        "            answer = model.generate('hi', raw=True, max_tokens=2)\n"
        "        found.append([answer.kernels, model.kernels_note])\n"
        "    except EdgeinferError as error:\n"
        "        found.append([error.code, error.message])\n"
        "print(json.dumps(found))\n"
    )
    root = str(next(iter(edgeinfer.__path__))).rpartition("/")[0]
    folder = tmp_path / "here"
    folder.mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", 'ulimit -c "$(ulimit -H -c)"; exec "$0" "$@"', sys.executable, "-c", program, str(tiny_gguf)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
        env={"PYTHONPATH": f"{tmp_path / 'site'}:{root}", "EDGEINFER_HOME": str(tmp_path), "PATH": ""},
    )
    assert not list(folder.iterdir()), "the memory of a process that died"
    automatic, asked_for = json.loads(done.stdout)
    assert automatic[0] == "llama.cpp"
    assert automatic[1].startswith(why)
    assert asked_for[0] == "unusable_input"
    assert why in asked_for[1]
    # On a busy machine it takes long enough to be spoken of.
    assert [line for line in done.stderr.splitlines() if not line.startswith("note: trying which")] == []
