"""`flowalign init` writes a run file that `flowalign check` accepts."""

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from flowalign.cli import main as cli
from flowalign.runs.config import load
from flowalign.runs.library import draft_run_file
from tests.fixtures.run_files import METHODS, files_of, loaded

pytestmark = pytest.mark.slow

QUICK = ("flow_grpo", "branch_grpo", "coca")
"""Methods with and without a separate run file for the toy model."""
JPEG, PIPELINE = "reward_models.JpegSize", "assets/golden/I_sd3_pipeline"


def flowalign(capsys, *argv: object) -> tuple[int, str]:
    """The exit code and the terminal output of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(arg) for arg in argv])
    return int(caught.value.code or 0), capsys.readouterr().err


def refusal(capsys, *argv: object) -> str:
    code, said = flowalign(capsys, "init", *argv)
    assert (code, len(said.splitlines()) <= 5) == (2, True), said
    return said


@pytest.fixture
def typed(monkeypatch):
    """Answers at a terminal."""

    def answer(*lines: str) -> None:
        stdin = io.StringIO("".join(f"{line}\n" for line in lines))
        stdin.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stdin)

    return answer


def settings(text: str) -> dict:
    """The settings of a run but for where it writes."""
    return yaml.safe_load(text) | {"output_dir": None}


def marked(method):
    return pytest.param(method, marks=[] if method in QUICK else [pytest.mark.slow])


@pytest.mark.parametrize("method", map(marked, METHODS))
def test_check_accepts_the_embedded_model_with_each_method(tmp_path, capsys, method):
    out = tmp_path / "mine.yaml"
    flags = ["--model", "toy_shapes", "--prompts", "own", "--reward", "own", "--method", method]
    code, said = flowalign(capsys, "init", *flags, "--out", out)
    assert (code, said.splitlines()[-1]) == (0, f"flowalign check {out}")
    assert flowalign(capsys, "check", out)[0] == 0
    expected = loaded(*files_of("toy_shapes", method))[1]
    assert settings(load(str(out))[1]) == settings(expected)


def test_prompts_and_a_reward_of_ones_own_take_the_place_of_the_model_s(tmp_path, capsys):
    prompts, out = tmp_path / "prompts.txt", tmp_path / "run.yaml"
    prompts.write_text("".join(f"prompt {k}\n" for k in range(9)))
    flags = ["--model", "toy_shapes", "--prompts", prompts, "--reward", JPEG, "--out", out]
    assert flowalign(capsys, "init", *flags)[0] == 0
    assert flowalign(capsys, "check", out)[0] == 0
    run, _ = load(str(out))
    assert run.recipe.prompts == str(prompts)
    rewards = run.build_rewards()
    assert (rewards.dims, rewards.weights.tolist()) == (("compressibility",), [1.0])


def test_rewards_of_a_file_are_composed_and_dimensions_of_the_model_s_lose_their_weight(
    tmp_path, capsys
):
    flags = ["--model", "wan21_1_3b", "--prompts", "own", "--reward", "shapes_video"]
    assert flowalign(capsys, "init", *flags, "--out", tmp_path / "run.yaml")[0] == 0
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert [one["class_path"] for one in content["rewards"]] == [
        "reward_models.MovingShapesVerifier"
    ]
    run, _ = load(str(tmp_path / "run.yaml"))
    assert set(run.build_rewards().weights.tolist()) == {1.0}
    assert run.recipe.advantages.thresholds is None
    assert run.policy.video.num_frames == 33


def test_the_family_of_a_folder_is_that_of_its_pipeline(tmp_path, capsys):
    flags = ["--prompts", "own", "--reward", "own", "--out", tmp_path / "run.yaml"]
    assert flowalign(capsys, "init", "--model", PIPELINE, *flags)[0] == 0
    run, _ = load(str(tmp_path / "run.yaml"))
    assert (type(run.policy).__name__, run.policy.path) == ("SD3", PIPELINE)
    wan = ["--model", "assets/golden/I_wan_pipeline", *flags[:-1]]
    said = refusal(capsys, *wan, tmp_path / "wan.yaml")
    assert "give the --family of assets/golden/I_wan_pipeline: wan21_1_3b, wan22_5b" in said
    assert flowalign(capsys, "init", *wan, tmp_path / "wan.yaml", "--family", "wan22_5b")[0] == 0
    assert load(str(tmp_path / "wan.yaml"))[0].policy.video.width == 640


@pytest.mark.parametrize(
    ("pipeline", "family", "policy"),
    [
        ("FluxKontextPipeline", "flux1_kontext", "Flux1Kontext"),
        ("FluxFillPipeline", "flux1_fill", "Flux1Fill"),
        ("QwenImagePipeline", "qwen_image", "QwenImage"),
        ("QwenImageEditPlusPipeline", "qwen_image_edit", "QwenImageEdit"),
    ],
)
def test_folders_of_editing_models_are_known_by_their_pipeline(
    tmp_path, capsys, pipeline, family, policy
):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    assert draft_run_file.families(str(tmp_path)) == [family]
    flags = ["--prompts", "own", "--reward", "own", "--out", tmp_path / "run.yaml"]
    assert flowalign(capsys, "init", "--model", tmp_path, *flags)[0] == 0
    run, _ = load(str(tmp_path / "run.yaml"))
    assert (type(run.policy).__name__, run.policy.path) == (policy, str(tmp_path))


def test_a_hub_id_needs_its_family(tmp_path, capsys):
    flags = ["--model", "me/mine", "--prompts", "own", "--reward", "own"]
    flags += ["--out", tmp_path / "run.yaml"]
    assert "give the --family of me/mine: cogvideox, flux1_dev, flux1_fill" in refusal(
        capsys, *flags
    )
    assert flowalign(capsys, "init", *flags, "--family", "flux1_dev")[0] == 0
    assert load(str(tmp_path / "run.yaml"))[0].policy.path == "me/mine"


# ---------------------------------------------------------------- questions


def test_what_is_missing_is_asked_for_until_it_can_be_used(tmp_path, capsys, typed):
    prompts = tmp_path / "p.txt"
    prompts.write_text("a cat\n")
    typed("toy_shape", "toy_shapes", "nowhere.txt", str(prompts), "jpeg", JPEG)
    code, said = flowalign(capsys, "init", "--out", tmp_path / "run.yaml")
    assert code == 0
    for part in (
        "Model, a folder, a hub id or one of cogvideox, flux1_dev,",
        "did you mean toy_shapes?",
        "prompts file 'nowhere.txt' does not exist",
        "reward 'jpeg' is neither a dotted path",
    ):
        assert part in said
    run, _ = load(str(tmp_path / "run.yaml"))
    assert (run.recipe.prompts, list(run.build_rewards().dims)) == (
        str(prompts),
        ["compressibility"],
    )


def test_an_empty_answer_takes_what_stands_in_brackets(tmp_path, capsys, typed):
    typed("", "", "")
    assert flowalign(capsys, "init", "--out", tmp_path / "run.yaml")[0] == 0
    expected = draft_run_file.draft(draft_run_file.Model("toy_shapes"), "flow_grpo", "own", "own")
    found = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert found == expected | {"output_dir": "runs/run"}


def test_the_family_is_asked_for_too(tmp_path, capsys, typed):
    typed("me/mine", "sd3", "sd35_medium")
    flags = ["--prompts", "own", "--reward", "own", "--out", tmp_path / "run.yaml"]
    code, said = flowalign(capsys, "init", *flags)
    assert (code, "--family 'sd3' does not suit me/mine" in said) == (0, True)
    assert load(str(tmp_path / "run.yaml"))[0].policy.height == 512


def test_answers_that_end_early_write_nothing(tmp_path, capsys, typed):
    typed("toy_shapes")
    assert "no answer to: Prompts" in refusal(capsys, "--out", tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == []


def test_where_nobody_can_answer_the_missing_options_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("toy_shapes\n"))
    said = refusal(capsys, "--prompts", "own", "--out", tmp_path / "run.yaml")
    assert "without a terminal, --model, --reward must be given" in said


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--model", "sd35"], "did you mean sd35_medium?"),
        (["--model", "assets/prompts"], "model_index.json is missing"),
        (["--model", "toy_shapes", "--family", "flux1_dev"], "toy_shapes is a family itself"),
        (["--model", PIPELINE, "--family", "flux1_dev"], "choose from sd35_medium"),
        (["--method", "dpo"], "method is 'dpo'; it must be one of b2_diffurl, branch_grpo"),
        (["--prompts", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["--reward", "image"], "did you mean images?"),
        (["--reward", "reward_models.signals.jpeg.Jpeg"], "reward_models.signals.jpeg.Jpeg"),
        (["--reward", "nowhere.yaml"], "'nowhere.yaml' does not exist"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_answers_that_cannot_be_used_are_refused_by_name(tmp_path, capsys, changed, message):
    flags = {"--model": "toy_shapes", "--prompts": "own", "--reward": "own"}
    flags |= dict(zip(changed[::2], changed[1::2], strict=True))
    given = [word for flag in flags.items() for word in flag]
    assert message in refusal(capsys, *given, "--out", tmp_path / "run.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_be_made_leaves_no_file_and_names_the_one_asked_for(tmp_path, capsys):
    """Verifiers of moving Shapes do not score images."""
    out = tmp_path / "run.yaml"
    flags = ["--model", "toy_shapes", "--prompts", "own", "--reward", "shapes_video", "--out", out]
    said = refusal(capsys, *flags)
    assert (".tmp" in said, list(tmp_path.iterdir())) == (False, [])


def test_an_existing_file_is_never_overwritten(tmp_path, capsys, typed):
    out = Path(tmp_path / "run.yaml")
    out.write_text("mine")
    typed()
    assert "exists and is not overwritten" in refusal(capsys, "--out", out)
    assert out.read_text() == "mine"
