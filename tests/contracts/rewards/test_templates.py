"""Prompts of judges come from files, the hub or packages; bundled ones name the official text."""

import sys
from pathlib import Path

import pytest

from flowalign.cli.main import main
from flowalign.runs.config import load
from flowalign.runs.planning import plan
from reward_models import (
    ArtefactMap,
    Checklist,
    EditScore,
    Gated,
    MagicAssessor,
    PerFrame,
    QwenYesNo,
    RegionReward,
    ServedYesNo,
    ShapesDetector,
    UnifiedRewardPair,
    UnifiedRewardPoint,
    VQAScore,
    WinRate,
)
from reward_models.chat import template
from reward_models.chat.chat_client import Server
from reward_models.chat.template import OFFICIAL, read_template

SERVER = Server("http://127.0.0.1:1/v1", "judge")
TEXT = "Be strict.\n=== user ===\nRate {media} for {prompt}."
OWN = {"yes_no", "levels", "one_reward"}
"""Bundled prompts without a published text."""


def test_a_template_can_be_a_file_of_the_hub(tmp_path, monkeypatch):
    asked = []
    (tmp_path / "point.txt").write_text(TEXT)

    def file_of(model, name):
        asked.append((model, name))
        return tmp_path / "point.txt"

    monkeypatch.setattr(template, "file_of", file_of)
    found = read_template("hub:owner/judge/prompts/point.txt", ("media", "prompt"))
    assert asked == [("owner/judge", "prompts/point.txt")]
    assert (found.system, found.user) == ("Be strict.", "Rate {media} for {prompt}.")
    assert found.official == ""
    with pytest.raises(ValueError, match="must be hub:owner/repository/path"):
        read_template("hub:owner/judge", ("media", "prompt"))


def test_a_template_can_be_a_file_of_an_installed_package(tmp_path, monkeypatch):
    folder = tmp_path / "my_judge" / "prompts"
    folder.mkdir(parents=True)
    (tmp_path / "my_judge" / "__init__.py").write_text("")
    (folder / "point.txt").write_text(TEXT)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = read_template("package:my_judge/prompts/point.txt", ("media", "prompt"))
    assert found.user == "Rate {media} for {prompt}."
    sys.modules.pop("my_judge", None)


@pytest.mark.parametrize(
    "source", ["nowhere.txt", "package:not_installed/a.txt", "package:flowalign/a.txt", "."]
)
def test_a_template_that_cannot_be_read_is_refused_with_all_forms(source):
    with pytest.raises(ValueError, match="hub:owner/repository/path, package:name/path"):
        read_template(source, ("media",))


def test_every_bundled_prompt_names_its_official_text_or_has_none():
    bundled = {path.stem for path in Path(template.__file__).parent.glob("prompts/*.txt")}
    assert bundled == OFFICIAL.keys() | OWN


@pytest.mark.parametrize(
    ("judge", "place"),
    [
        (EditScore(SERVER), "editscore/vie_prompts.py"),
        (MagicAssessor(SERVER), "get_prompt of base_info.py"),
        (UnifiedRewardPoint(SERVER), "CodeGoat24/UnifiedReward"),
        (WinRate(UnifiedRewardPair(SERVER)), "CodeGoat24/UnifiedReward"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_judge_in_our_wording_says_where_the_official_one_is(judge, place):
    assert place in judge.caveat
    assert "not those of its paper" in judge.caveat


def test_wrappers_forward_the_caveat_and_the_answers_of_their_judges():
    assessor, yes_no = MagicAssessor(SERVER), ServedYesNo(SERVER)
    mapped = ArtefactMap(assessor, ShapesDetector())
    assert mapped.caveat == assessor.caveat
    assert mapped.judge_calls([24] * 48) == (1152, 1152 * 2048)
    assert VQAScore(yes_no).judge_calls([3, 2]).answers == 5
    regions = RegionReward(yes_no, ShapesDetector(), max_regions=4)
    assert regions.judge_calls([3, 2]).answers == 5 * (1 + 4)
    questions = Checklist(yes_no, "vision_reward_video")
    assert questions.judge_calls([2]).answers == 2 * len(questions.question_set.questions)
    gated = Gated(VQAScore(yes_no), assessor, "normal", 0.5)
    assert (gated.judge_calls([2]).answers, gated.caveat) == (4, assessor.caveat)
    assert PerFrame(VQAScore(yes_no), frames=3).judge_calls([2]).answers == 6
    local = QwenYesNo("no/where")
    assert (local.calls(7).answers, local.caveat) == (0, "")


def test_a_judge_in_given_wording_has_no_caveat(tmp_path):
    file = tmp_path / "point.txt"
    file.write_text("Rate {media} for {prompt}.")
    assert MagicAssessor(SERVER, template=str(file)).caveat == ""


def test_the_plan_warns_once_of_a_judge(tmp_path):
    (tmp_path / "prompts.txt").write_text("red\n")
    server = "{url: 'http://127.0.0.1:1/v1', model: judge}"
    judge = f"{{class_path: reward_models.MagicAssessor, init_args: {{server: {server}}}}}"
    spec = MagicAssessor(SERVER).spec
    weight = f"--rewards.0.weight={{{spec.dims[0]}: 1.0}}"
    rows = plan(load("configs/shapes.yaml", [f"--rewards=[{judge}]", weight])[0])
    assert "get_prompt of base_info.py" in rows[f"warning: {spec.name}"]


def test_the_table_of_scores_warns_of_a_judge(tmp_path, capsys, monkeypatch):
    from PIL import Image

    (tmp_path / "images").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a.png")
    (tmp_path / "images" / "metadata.jsonl").write_text('{"file_name": "a.png", "prompt": "x"}\n')
    monkeypatch.setattr("reward_models.signals.jpeg.JpegSize.caveat", "ask elsewhere")
    out = str(tmp_path / "out")
    words = ["score", str(tmp_path / "images"), "--rewards", "reward_models.JpegSize"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--out", out, "--format", "jsonl"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    assert "ask elsewhere" in " ".join((said.out + said.err).split())


def test_a_device_is_no_template():
    """Reading it would fill the memory."""
    with pytest.raises(ValueError, match=r"template '/dev/zero' cannot be read"):
        read_template("/dev/zero", ("prompt",))
