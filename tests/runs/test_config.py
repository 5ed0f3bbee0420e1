"""User errors give a few lines that name the setting, before weights are read."""

import re
import resource
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from functools import cache

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flowalign.cli.check import join_ranges
from flowalign.cli.options import read_settings
from flowalign.runs.config import LoadedRun, load, load_with_origins
from flowalign.runs.planning import plan
from flowalign.sampling.sde_windows import Fixed
from flowalign.utils.errors import ConfigError
from flowalign.utils.strict_yaml import dump_yaml, parse_yaml
from pipelines import SD3, Lora
from tests.fixtures.commands import exit_code, refusal
from tests.fixtures.run_files import complaint, write_changed

SHAPES = "configs/shapes.yaml"


@pytest.fixture
def written(tmp_path):
    """Writes the demo's run file with one value changed: `a/b` is key b of a."""
    return lambda path, value: write_changed(SHAPES, tmp_path, {path: value})


WORDS = ["note:", "- item", "#", "'", '"', "\n", " ", "word", "key: value", "|", "\u2028"]
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=20)).map("".join)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
def test_settings_with_origins_are_the_settings(texts, file):
    """PyYAML folds long texts, and a line of a text may look like a setting."""
    texts = [text * 8 for text in texts]
    known = {"notify": texts, "policy": {"path": texts[0], "none": {}}, "a": []}
    text = dump_yaml(known | {"output_dir": texts[-1]})
    origins = {"policy.path": file, "notify": "command line"}
    shown = replace(_load_shapes(), text=text, origins=origins).annotate()
    assert parse_yaml(shown) == parse_yaml(text) == known | {"output_dir": texts[-1]}
    assert "notify:  # command line\n" in shown
    assert "  none: {}  # default\na: []  # default\n" in shown


@cache
def _load_shapes() -> LoadedRun:
    return load_with_origins(SHAPES)


def test_a_long_text_keeps_its_origin_and_its_words(written):
    words = "a note: of several words # and more " * 10
    file = written("output_dir", words)
    loaded = load_with_origins(file)
    assert parse_yaml(loaded.annotate())["output_dir"] == words
    assert re.search(rf"and more '  # {file}$", loaded.annotate(), re.MULTILINE)


def test_a_misspelt_key_is_laid_to_the_one_file_that_has_it(written, tmp_path):
    method = tmp_path / "method.yaml"
    method.write_text("recipe: {sampling: {etta: 0.5}, micro_batch: 8}")
    with pytest.raises(ConfigError) as caught:
        load([SHAPES, str(method)])
    assert str(caught.value).startswith(f"{method}: recipe: ")
    assert "did you mean recipe.sampling.eta?" in str(caught.value)


def test_settings_beside_a_class_path_are_told_where_they_belong(written):
    message = complaint(written("recipe/micro_batch", 3))
    assert "recipe: Not a valid subclass of Recipe" in message
    assert "put the settings of a component under its init_args" in message


def test_a_method_without_a_model_is_told_to_go_behind_one():
    message = complaint("configs/methods/dense_grpo.yaml")
    assert "names no policy: layer it on the run file of a model" in message


def test_fp16_on_the_cpu_is_refused():
    message = complaint(SHAPES, "--policy.precision", "fp16", "--device", "cpu")
    assert "fp16 needs a GPU" in message


@pytest.mark.slow
def test_three_forms_of_override_mean_the_same(written):
    forms = [
        ["--recipe.sampling.eta", "0.25"],
        ["--recipe.sampling.eta=0.25"],
        ["recipe.sampling.eta=0.25"],
    ]
    assert [load(SHAPES, form)[0].recipe.sampling.eta for form in forms] == [0.25] * 3
    assert load(SHAPES)[0].recipe.sampling.eta != 0.25


def test_a_run_file_may_lie_in_a_folder_with_an_equals_sign(tmp_path):
    folder = tmp_path / "lr=1e-4"
    folder.mkdir()
    words = [str(shutil.copy(SHAPES, folder)), "num_steps=3"]
    files, options = read_settings(Namespace(config=words, overrides=["--seed", "2"]))
    assert (files, options) == (words[:1], ["num_steps=3", "--seed", "2"])


def test_overrides_reach_into_components_and_can_switch_them_off():
    overrides = ["--policy.lora.rank=5", "--policy.guidance", "2.5", "--ema", "null"]
    run, _ = load(SHAPES, overrides)
    assert isinstance(run.policy, SD3)
    assert isinstance(run.policy.lora, Lora)
    assert (run.policy.lora.rank, run.policy.guidance, run.ema) == (5, 2.5, None)
    run, _ = load(SHAPES, ["--policy.lora", "null"])
    assert run.policy.lora is None


def test_a_mapping_changes_a_group_and_replaces_names():
    held = {"held": "assets/shapes/prompts/train.txt"}
    before = load(SHAPES)[0]
    for option in (f"evaluation={{every: 3, prompts: {held}}}", f"evaluation.prompts={held}"):
        run, _ = load(SHAPES, [option, "optimizer={warmup: 3}", "rewards.0.weight={shape: 2}"])
        assert run.evaluation.prompts == held
        assert run.evaluation.num_prompts == before.evaluation.num_prompts
        assert run.optimizer == replace(before.optimizer, warmup=3)
        assert run.build_rewards().weight_of == {"shape": 2.0}


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        (["--num_stpes", "3"], "did you mean num_steps"),
        (["--recipe.sampling.et", "1"], "did you mean recipe.sampling.eta"),
        (["--recipe.sampling.window.start", "1"], "did you mean recipe.sampling.sde_window"),
        (["--reccipe.micro_batch", "1"], "did you mean recipe?"),
        (["--recipe.sampling.num_ste", "3"], "did you mean recipe.sampling.num_steps"),
        (["--num_steps"], "expected one argument"),
        (["stray"], "stray"),
        (["--num_steps", "1:30"], "1:30 (line 1) is 90 in YAML: write that number"),
        (["optimizer={warmup: 010}"], "010 (line 1) is 8 in YAML: write that number"),
        (
            ["--policy.lora.target_modules", "all-linear"],
            "target_modules is all-linear; it must be a list, such as [all-linear]",
        ),
    ],
)
def test_a_wrong_override_is_refused_and_never_taken_for_an_abbreviation(override, meant):
    assert meant in complaint(SHAPES, *override)


def test_other_rewards_replace_the_weights_of_an_earlier_file(tmp_path):
    file = tmp_path / "run.yaml"
    reward = "{class_path: reward_models.JpegSize, weight: 2}"
    file.write_text(f"extends: {SHAPES}\nrewards: [{reward}]\n")
    run, text = load(str(file))
    assert run.build_rewards().weight_of == {"compressibility": 2.0}
    assert yaml.safe_load(text)["rewards"][0]["weight"] == {"compressibility": 2.0}
    again, same = load(_write(tmp_path / "again.yaml", text))
    assert (same, again.build_rewards().weight_of) == (text, {"compressibility": 2.0})


def _write(file, text):
    file.write_text(text)
    return str(file)


def test_an_option_changes_one_weight_or_all_rewards():
    shape, colour = "--rewards.0.weight.shape=3", "--rewards.0.weight.colour=null"
    assert "rewards.weight is null" in complaint(SHAPES, colour)
    rewards = load(SHAPES, [shape])[0].build_rewards()
    assert rewards.weight_of["shape"] == 3
    assert rewards.weight_of["exact_match"] == 0.5
    jpeg = "[{class_path: reward_models.JpegSize, weight: 1}]"
    options = ["--rewards", jpeg, "--rewards.0.quality=7"]
    model = load(SHAPES, options)[0].rewards[0].model
    assert model.quality == 7


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rewards.1.weight=2", ["--rewards.1.weight", "from 0 to 0", "--rewards.0.weight"]),
        ("rewards.colour=2", ["--rewards.colour", "from 0 to 0"]),
        ("rewards.0.weight=1", ["ShapesVerifier has the weight 1.0", "weight: {colour: 1.0}"]),
        ("rewards.0.weight=loud", ["rewards.weight", "loud"]),
        ("rewards.0.weigt=1", ["weigt"]),
        ("rewards=[", ["--rewards", "no YAML"]),
    ],
)
def test_a_wrong_weight_is_refused_with_its_key(option, words):
    message = complaint(SHAPES, option)
    assert [word for word in words if word not in message] == [], message


def settings_of(policy) -> dict[str, object]:
    """Constructor arguments of a policy and its codec."""
    parts = ("codec", "renderer", "text_encoder")
    settings = {name: value for name, value in vars(policy).items() if name not in parts}
    return settings | vars(policy.codec)


def test_the_resolved_config_reloads_to_itself_and_to_the_same_run(tmp_path):
    overrides = [
        "--recipe.sampling.eta=0.25",
        "--policy.lora.rank=5",
        "--ema",
        "null",
        "--seed",
        "3",
    ]
    run, text = load(SHAPES, overrides)
    file = tmp_path / "resolved.yaml"
    file.write_text(text)
    again, text_again = load(str(file))
    assert text_again == text
    assert settings_of(again.policy) == settings_of(run.policy)
    sampling = again.recipe.sampling
    assert (sampling.eta, sampling.sde_window) == (0.25, Fixed(0, 3))
    assert (again.ema, again.seed) == (None, 3)
    assert vars(again.recipe.algorithm).keys() == vars(run.recipe.algorithm).keys()
    assert again.recipe.algorithm.surrogate == run.recipe.algorithm.surrogate
    assert again.evaluation == run.evaluation
    assert again.optimizer == run.optimizer


@pytest.fixture
def unloadable(monkeypatch):
    """Any attempt to read weights fails the test."""

    def refuse(self, device):
        raise AssertionError("weights were read before the checks were done")

    monkeypatch.setattr(SD3, "load", refuse)


@pytest.mark.usefixtures("unloadable")
@pytest.mark.parametrize("verb", ["check", "train"])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--policy.height", "33"], "size 32x33: both sides must be multiples of"),
        (["--policy.path", "assets/prompts-are-no-model"], "assets/prompts-are-no-model"),
        (
            ["--policy.path", "assets/shapes"],
            "assets/shapes is not a StableDiffusion3Pipeline folder",
        ),
        (["--num_stpes", "3"], "did you mean num_steps?"),
        (["--recipe.sampling.sde_window.stop", "12"], "[0, 12)"),
        (["--recipe.prompts", "nowhere.txt"], "nowhere.txt"),
    ],
    ids=["size", "missing folder", "no model", "unknown", "window", "prompts"],
)
def test_mistakes_end_in_exit_code_2_before_weights_are_read(
    capsys, monkeypatch, tmp_path, verb, overrides, said
):
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _no_network)
    assert said in refusal(capsys, verb, SHAPES, "--output_dir", tmp_path / "run", *overrides)
    assert not (tmp_path / "run").exists()


def _no_network(path, *_, **__):
    raise OSError(f"{path} cannot be reached")


@pytest.mark.usefixtures("unloadable")
def test_fewer_prompts_than_processes_are_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    overrides = ("--recipe.prompts_per_step", "3", "--processes", "4")
    message = refusal(capsys, "check", SHAPES, *overrides)
    assert "recipe.prompts_per_step is 3, fewer than the 4 processes" in message


@pytest.mark.usefixtures("unloadable")
def test_nothing_to_resume_and_a_directory_in_use_are_refused(capsys, tmp_path):
    train, folder = ("train", SHAPES, "--output_dir", tmp_path / "run"), tmp_path / "run"
    folder.mkdir()
    (folder / "mine.txt").write_text("keep")
    assert "nothing to resume" in refusal(capsys, *train, "--resume")
    assert "already holds a run" in refusal(capsys, *train)
    assert "it is no run" in refusal(capsys, *train, "--overwrite")
    assert (folder / "mine.txt").read_text() == "keep"


@pytest.mark.usefixtures("unloadable")
def test_a_folder_that_cannot_be_written_is_a_message_and_no_traceback(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        SD3, "load", lambda self, device: (_ for _ in ()).throw(PermissionError(13, "no"))
    )
    assert exit_code("train", SHAPES, "--output_dir", tmp_path / "run") == 1
    message = capsys.readouterr().err
    assert "no" in message
    assert len(message.splitlines()) <= 5


@pytest.mark.usefixtures("unloadable")
def test_check_prints_the_plan_without_reading_weights(capsys):
    assert exit_code("check", SHAPES) == 0
    told = capsys.readouterr().out
    assert "192 = 16 prompts x 12" in told
    names = [line.split("│")[1].strip() for line in told.splitlines() if line.startswith("│ ")]
    costs = ["trains", "a step", "memory", "smallest GPU"]
    assert list(filter(None, names)) == [*costs, "evaluations of the rollout", "time"]
    assert exit_code("check", SHAPES, "--full") == 0
    assert "memory of activations" in capsys.readouterr().out


def test_long_lists_of_steps_are_ranges():
    assert join_ranges(f"trained {[*range(19)]}") == "trained [0-18]"
    assert join_ranges("trained [0, 1, 2], then [0, 2, 4, 6, 8]") == (
        "trained [0, 1, 2], then [0, 2, 4, 6, 8]"
    )


def test_the_plan_counts_by_hand():
    overrides = [
        "--recipe.prompts_per_step=3",
        "--recipe.sampling.samples_per_prompt=5",
        "--recipe.sampling.num_steps=7",
        "--recipe.sampling.sde_window.stop=4",
        "--num_steps=11",
        "--recipe.updates_per_step=2",
        "--recipe.epochs_per_step=3",
        "--policy.guidance=3",
        "--recipe.algorithm.kl_coef=0.1",
    ]
    rows = plan(load(SHAPES, overrides)[0])
    assert rows["samples per step"] == "15 = 3 prompts x 5"
    # 15 samples, 2 evaluations with guidance; 7 steps sampled, 4 trained three times over.
    evaluations = f"{15 * 7 * 2} sampling + {15 * 4 * 2 * 3} training + {15 * 4 * 2 * 3} reference"
    assert rows["network evaluations per step"] == evaluations
    assert rows["updates per step"].startswith("6, 66 in the whole run")
    assert rows["samples in the whole run"] == "165"


def test_help_is_quick_and_imports_nothing_heavy():
    """In processor time: the wall belongs to whatever else the machine does."""
    code = "import sys; sys.argv = ['flowalign', '--help']\n"
    code += "from flowalign.__main__ import main\n"
    code += "try: main()\nexcept SystemExit as end: assert end.code in (0, None)\n"
    code += "heavy = {'torch', 'diffusers', 'transformers', 'peft', 'numpy', 'jsonargparse'}\n"
    code += "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "flowalign demo" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_an_unknown_verb_is_refused_with_the_known_ones(capsys):
    assert exit_code("trian", SHAPES) == 2
    assert "train" in capsys.readouterr().err
