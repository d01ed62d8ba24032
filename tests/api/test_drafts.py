"""What passes cost is kept from one process to the next; a file that is damaged is none."""

import dataclasses
import json

import pytest

import edgeinfer
from edgeinfer.api.drafts import CostFile, draft_notes
from edgeinfer.errors import UsageError
from edgeinfer.options import RuntimeOptions, SamplingParams
from edgeinfer.runtime.drafting import Drafting
from edgeinfer.runtime.fake import FakeBackend
from edgeinfer.speculation.cost import CostCurve
from edgeinfer.speculation.lookup import Lookup

GREEDY = SamplingParams(temperature=0, ignore_eos=True)
REPETITIVE = "one two three four five six seven eight nine ten, " * 6


def learned():
    curve = CostCurve()
    for rows in (1, 8, 1, 8):
        curve.observe(rows, 0.01 * rows)
    return curve


def test_a_curve_comes_back(tmp_path):
    file = CostFile(tmp_path / "deep" / "x.json")
    assert file.read() == {}
    curve = learned()
    file.write(curve)
    assert CostCurve(file.read()).shape == curve.shape
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_what_nobody_learned_is_not_written(tmp_path):
    CostFile(tmp_path / "x.json").write(CostCurve())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"cost": []}',
        '{"cost": {"x": 1}}',
        '{"cost": {"1": "nan"}}',
        '{"cost": {"1": -1}}',
        '{"cost": {"8": Infinity}}',
        '{"cost": {"8": null}}',
        "[" * 4000,
        '{"cost": {"8": 2.0}}' + " " * 5000 + "x",
    ],
)
def test_a_damaged_file_is_none(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    shape = CostFile(path).read()
    assert shape == {} or text.startswith('{"cost": {"8": 2.0}}')
    CostCurve(shape)


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    CostFile(tmp_path / "file" / "x.json").write(learned())


@pytest.mark.parametrize("options", [{"draft": "what"}, {"draft_max": 0}, {"draft_max": 64}])
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(UsageError, match="draft"):
        RuntimeOptions(**options)


def test_memory_that_cannot_be_trimmed_is_named():
    backend = FakeBackend(can_trim=False)
    (line,) = draft_notes(Drafting([Lookup()], 10, float), backend.capabilities)
    assert "cannot take tokens back" in line
    assert list(draft_notes(Drafting([Lookup()], 10, float), FakeBackend().capabilities)) == []


def test_a_real_answer_with_drafts_says_what_they_brought(smollm2_gguf, tmp_path, monkeypatch, kernels):
    monkeypatch.setenv("EDGEINFER_HOME", str(tmp_path))
    options = RuntimeOptions(prefix_cache=False, ctx_size=512, kernels=kernels)
    usage = {}
    for draft in ("off", "lookup", "auto"):
        with edgeinfer.load(smollm2_gguf, dataclasses.replace(options, draft=draft)) as model:
            answer = model.generate(REPETITIVE, raw=True, params=GREEDY, max_tokens=60)
            usage[draft] = answer.usage
            notes = list(model.notes())
        assert answer.usage.completion_tokens > 20
        assert any("lookup" in note for note in notes) == (draft != "off")
    assert usage["off"].drafted_tokens == usage["off"].accepted_tokens == 0
    for draft in ("lookup", "auto"):
        assert usage[draft].drafted_tokens >= usage[draft].accepted_tokens > 10
    (kept,) = (tmp_path / "speculation").iterdir()
    assert all(cost > 0.9 for cost in json.loads(kept.read_text())["cost"].values())
