"""Components of the user's own files, next to the run file or in the current folder."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from flowalign.rewards import RewardError, Rewards
from flowalign.rewards.config import load_rewards
from flowalign.runs.config import load
from flowalign.types import MediaBatch
from flowalign.utils import local_modules
from flowalign.utils.errors import ConfigError
from flowalign.utils.strict_yaml import parse_yaml
from tests.fixtures.commands import exit_code
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.run_files import write_pixels

WARMTH = """
import my_shades
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec


class Warmth(RewardModel):
    def __init__(self, scale: float = my_shades.ONE):
        self.scale = scale
        self.spec = RewardSpec("warmth", ("warmth",), "any", (-1.0, 1.0), "Apache-2.0")

    def score(self, batch: MediaBatch) -> RewardOutput:
        red, blue = batch.media[:, :, 0], batch.media[:, :, 2]
        return RewardOutput.build(self.spec, self.scale * (red - blue).mean((1, 2, 3))[:, None])


def redness(images, prompts) -> list[float]:
    return [float(image[0].mean()) + len(prompt) for image, prompt in zip(images, prompts)]


def motion(videos, metadata):
    return (videos[:, 1:] - videos[:, :-1]).abs().mean((1, 2, 3, 4))


def short(images, prompts):
    return [1.0]


def patchy(images):
    return [None, float("nan"), 2.0][: len(images)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with own modules, which Python does not search; the current folder is another."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(local_modules, "_files", {})
    own, elsewhere = tmp_path / "own", tmp_path / "elsewhere"
    own.mkdir()
    elsewhere.mkdir()
    (own / "my_reward.py").write_text(WARMTH)
    (own / "my_shades.py").write_text("ONE = 1.0\n")
    (own / "prompts.txt").write_text("red\n")
    monkeypatch.chdir(elsewhere)
    yield own
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


def write_run(folder: Path, name: str, dim: str) -> Path:
    rewards = [{"class_path": name, "weight": {dim: 1.0}}]
    return write_pixels(folder / "run.yaml", folder / "prompts.txt", rewards=rewards)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("my_reward.Warmth", "warmth"),
        ("my_reward.py:Warmth", "warmth"),
        ("my_reward.py:redness", "redness"),
        ("my_reward.redness", "redness"),
    ],
)
@pytest.mark.parametrize("place", ["run file", "current folder"])
def test_modules_beside_the_run_file_and_in_the_current_folder_are_found(
    folder, tmp_path, monkeypatch, name, dim, place
):
    run = write_run(folder, name, dim)
    if place == "current folder":
        run = run.rename(tmp_path / "elsewhere" / "run.yaml")
        monkeypatch.chdir(folder)
    loaded, text = load(str(run))
    (reward,) = loaded.rewards
    model = reward.model
    red = torch.zeros(1, 1, 3, 4, 4)
    red[:, :, 0] = 0.5
    offset = 3 if dim == "redness" else 0
    assert model.score(MediaBatch(red, ["red"])).values.tolist() == [[0.5 + offset]]
    # Resolved settings name the file, so that they can be loaded from any folder.
    again = tmp_path / "elsewhere" / "config.yaml"
    again.write_text(text)
    assert load(str(again))[1] == text
    assert "my_reward.py:" in text


def test_a_component_of_an_own_file_can_be_an_option(folder, monkeypatch):
    (folder / "my_policy.py").write_text(
        "from tests.fixtures.pixel import PixelPolicy\n\nclass Mine(PixelPolicy):\n    pass\n"
    )
    run = write_run(folder, "tests.fixtures.pixel.Redness", "redness")
    monkeypatch.chdir(folder)
    loaded, _ = load(str(run), ["--policy", "my_policy.py:Mine"])
    assert type(loaded.policy).__name__ == "Mine"
    assert isinstance(loaded.policy, PixelPolicy)
    loaded, _ = load(str(run), ["--rewards", "[{class_path: my_reward.py:redness, weight: 1.0}]"])
    assert loaded.rewards[0].model.spec.dims == ("redness",)


@pytest.fixture
def harmful(folder, monkeypatch):
    """A module next to the run file and in the current folder that notes its import."""
    (folder / "my_harm.py").write_text("from pathlib import Path\nPath('harm').touch()\n")
    monkeypatch.chdir(folder)
    return folder / "harm"


@pytest.mark.parametrize("name", ["my_harm.Thing", "my_harm.py:Thing"])
@pytest.mark.parametrize(
    "options",
    [
        "output_dir: NAME",
        "notify: [NAME]",
        "policy: {class_path: tests.fixtures.pixel.PixelPolicy, init_args: {transport: NAME}}",
        "recipe: {class_path: flowalign.training.PolicyGradient, init_args: {prompts: NAME}}",
        "--output_dir NAME",
        "--notify [NAME]",
        "--recipe.prompts NAME",
    ],
)
def test_a_text_that_names_no_component_imports_nothing(harmful, name, options):
    run, more = write_run(harmful.parent, "tests.fixtures.pixel.Redness", "redness"), []
    if options.startswith("--"):
        more = options.replace("NAME", name).split()
    else:
        settings = yaml.safe_load(run.read_text()) | yaml.safe_load(options.replace("NAME", name))
        run.write_text(yaml.safe_dump(settings))
    with suppress(ConfigError):
        load(str(run), more)
    assert not harmful.exists()
    assert "my_harm" not in sys.modules


def test_a_text_of_a_component_may_name_an_own_file(folder, monkeypatch):
    (folder / "my_window.py").write_text(
        "from flowalign.sampling import AllButLast\n\nclass Mine(AllButLast):\n    pass\n"
    )
    run = write_run(folder, "tests.fixtures.pixel.Redness", "redness")
    monkeypatch.chdir(folder)
    given = "--recipe.sampling.sde_window"
    for name in ("my_window.py:Mine", "my_window.Mine"):
        loaded, text = load(str(run), [given, name])
        assert type(loaded.recipe.sampling.sde_window).__name__ == "Mine"
    settings = yaml.safe_load(run.read_text())
    settings["recipe"]["init_args"]["sampling"]["sde_window"] = "my_window.py:Mine"
    run.write_text(yaml.safe_dump(settings))
    assert load(str(run))[1] == text


def test_a_text_that_equals_a_component_stays_in_the_settings(folder, monkeypatch):
    """The settings name user files by their paths; the value of another setting is no component."""
    monkeypatch.chdir(folder)
    run = write_run(folder, "my_reward.Warmth", "warmth")
    settings = parse_yaml(load(str(run), ["--output_dir", "my_reward.Warmth"])[1])
    assert settings["output_dir"] == "my_reward.Warmth"
    assert settings["rewards"][0]["class_path"] == "my_reward.py:Warmth"


def test_functions_take_images_or_videos_and_their_columns(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (motion,), _ = load_rewards("my_reward.py:motion")
    clip = torch.zeros(1, 3, 3, 2, 2)
    clip[:, 1] = 1.0
    assert motion.score(MediaBatch(clip, ["x"])).values.tolist() == [[1.0]]
    (redness,), _ = load_rewards("my_reward.py:redness")
    with pytest.raises(ValueError, match="not videos"):
        redness.score(MediaBatch(clip, ["x"]))


def test_scores_that_are_missing_fail_and_a_wrong_number_of_them_is_an_error(folder, monkeypatch):
    monkeypatch.chdir(folder)
    images = torch.zeros(3, 1, 3, 2, 2)
    (patchy,), _ = load_rewards("my_reward.py:patchy")
    found = patchy.score(MediaBatch(images, ["a", "b", "c"]))
    assert found.valid.flatten().tolist() == [False, False, True]
    assert set(found.reasons) == {0, 1}
    (short,), _ = load_rewards("my_reward.py:short")
    with pytest.raises(ValueError, match="1 scores for 3 samples"):
        short.score(MediaBatch(images, ["a", "b", "c"]))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.py:Warmth", "there is no file nowhere.py"),
        ("my_reward.py:Warmness", "defines no Warmness; it defines Warmth, redness"),
        ("broken.py:Warmth", "broken.py cannot be imported"),
        ("divides.py:x", r"divides.py cannot be imported: ZeroDivisionError: .*divides.py:2\)"),
        ("leaves.py:x", r"leaves.py cannot be imported: SystemExit: 0 .*leaves.py:2\)"),
        ("unclosed.py:x", r"unclosed.py cannot be imported: SyntaxError: .*unclosed.py, line 1"),
        ("swapped.py:score", r"score\(prompts, images\) is no reward function: its first param"),
        ("json.py:Warmth", "cannot be imported as 'json', which is another module"),
    ],
)
def test_files_that_cannot_be_used_are_refused_by_name(folder, monkeypatch, name, words):
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("import not_installed_at_all\n")
    (folder / "json.py").write_text("class Warmth: pass\n")
    (folder / "divides.py").write_text("x = 0\n1 / x\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "unclosed.py").write_text("x = (\n")
    (folder / "swapped.py").write_text("def score(prompts, images): return []\n")
    with pytest.raises(ConfigError, match=words):
        load_rewards(name)


def test_check_names_the_code_that_a_run_file_imports(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert exit_code("check", write_run(folder, "my_reward.py:redness", "redness")) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "warning: runs code │ my_reward.py" in told


def test_a_file_that_was_edited_is_imported_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    scores = []
    for number in (1, 2):
        Path("my_number.py").write_text(f"def ok(images): return [{number}.0] * len(images)\n")
        (model,), _ = load_rewards("my_number.py:ok")
        scores += model.score(MediaBatch(torch.zeros(1, 1, 3, 2, 2), ["x"])).values.tolist()
    assert scores == [[1.0], [2.0]]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return [0.5, 0.25], {}", [[0.5], [0.25]]),
        ("return numpy.array([[0.5], [0.25]])", [[0.5], [0.25]]),
        ("return torch.tensor([[0.5], [0.25]])", [[0.5], [0.25]]),
        ("raise KeyError('face')", r"raised KeyError: 'face' \(.*my_score.py:3\)"),
        ("sys.exit(3)", r"raised SystemExit: 3 \(.*my_score.py:3\)"),
        ("return torch.zeros(2) @ torch.zeros(3)", r"raised RuntimeError: .*my_score.py:3\)"),
    ],
)
def test_a_function_returns_scores_with_details_or_fails_at_a_line_of_its_file(
    folder, monkeypatch, line, expected
):
    monkeypatch.chdir(folder)
    text = f"import sys, numpy, torch\ndef score(images, prompts):\n    {line}\n"
    Path("my_score.py").write_text(text)
    (model,), _ = load_rewards("my_score.py:score")
    batch = MediaBatch(torch.zeros(2, 1, 3, 2, 2), ["x"] * 2)
    if isinstance(expected, list):
        assert Rewards([model], {"score": 1.0}).score(batch).values.tolist() == expected
    else:
        with pytest.raises(RewardError, match=expected):
            Rewards([model], {"score": 1.0}).score(batch)


def test_settings_with_files_below_a_folder_with_blanks_are_loaded_again(folder, monkeypatch):
    spaced = folder.rename(folder.with_name("my project"))
    monkeypatch.chdir(spaced.parent)
    _, text = load(str(write_run(spaced, "my_reward.py:redness", "redness")))
    (spaced.parent / "config.yaml").write_text(text)
    assert load("config.yaml")[1] == text
    assert "function: my project/my_reward.py:redness" in text


@pytest.mark.slow
def test_a_reward_in_its_own_process_finds_the_file(folder, monkeypatch):
    monkeypatch.chdir(folder)
    settings = {
        "class_path": "reward_models.ScorerProcess",
        "init_args": {"reward": {"class_path": "my_reward.py:redness"}, "device": "cpu"},
    }
    (folder / "rewards.yaml").write_text(yaml.safe_dump({"rewards": [settings]}))
    (scorer,), _ = load_rewards("rewards.yaml")
    scorer.load()
    scores = scorer.score(MediaBatch(torch.ones(1, 1, 3, 4, 4), ["ab"])).values
    assert scores.tolist() == [[3.0]]
