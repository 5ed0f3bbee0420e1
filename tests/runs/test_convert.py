"""Run files and run directories of version 0.1."""

import json
from pathlib import Path

import pytest
import yaml

from flowalign.runs import convert
from flowalign.runs.compose import read_mapping
from flowalign.runs.convert import MATCHING, POLICY_GRADIENT, convert_path, converted, is_old
from flowalign.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
OLD_FILES = json.loads((ROOT / "assets/golden/run_files_0.1.json").read_text())

ONLINE = {
    "policy": {"class_path": "pipelines.wan.Wan", "init_args": {"path": "here"}},
    "num_steps": 7,
    "rewards": [{"class_path": "reward_models.chat.panel.Panel", "init_args": {"clip": 3}}],
    "reward_weights": {"window": 0.3, "clip": 0.7},
    "prompts": "prompts.txt",
    "recipe": {
        "prompts_at_once": 2,
        "credit": {"class_path": "flowalign.credit.gain.Gain"},
        "sampling": {
            "eta": 0.9,
            "kernel": {"class_path": "flowalign.functional.transition.FlowSDE"},
            "window": {"class_path": "flowalign.windows.Fixed", "init_args": {"start": 1}},
            "clip": {"class_path": "flowalign.clips.Random", "init_args": {"length": 4}},
            "branching": {"class_path": "flowalign.branching.Tree", "init_args": {"spread": 5.0}},
        },
        "algorithm": {
            "class_path": "flowalign.algorithms.grpo.GRPO",
            "init_args": {
                "surrogate": {
                    "class_path": "flowalign.algorithms.surrogates.PPOClip",
                    "init_args": {"clip": 0.1},
                }
            },
        },
    },
    "calibration": {"rule": "damped"},
    "seed": 11,
}
ONLINE_TODAY = {
    "policy": {"class_path": "pipelines.wan.Wan", "init_args": {"path": "here"}},
    "num_steps": 7,
    "rewards": [
        {"class_path": "reward_models.chat.judge_ensemble.JudgeEnsemble", "init_args": {"clip": 3}}
    ],
    "reward_weights": {"window": 0.3, "clip": 0.7},
    "recipe": {
        "class_path": "flowalign.training.PolicyGradient",
        "init_args": {
            "prompts": "prompts.txt",
            "calibration": {"rule": "damped"},
            "rollout_batch_prompts": 2,
            "credit": {"class_path": "flowalign.credit.Gain"},
            "sampling": {
                "eta": 0.9,
                "kernel": {"class_path": "flowalign.functional.FlowSDE"},
                "sde_window": {"class_path": "flowalign.sampling.Fixed", "init_args": {"start": 1}},
                "frame_window": {
                    "class_path": "flowalign.sampling.RandomFrames",
                    "init_args": {"length": 4},
                },
                "branching": {
                    "class_path": "flowalign.sampling.Tree",
                    "init_args": {"sibling_noise_scale": 5.0},
                },
            },
            "algorithm": {
                "class_path": "flowalign.losses.GRPO",
                "init_args": {
                    "surrogate": {
                        "class_path": "flowalign.losses.PPOClip",
                        "init_args": {"clip": 0.1},
                    }
                },
            },
        },
    },
    "seed": 11,
}
PREFERENCE = {
    "num_steps": 13,
    "data": {
        "class_path": "flowalign.preference.stored.Stored",
        "init_args": {"path": "pairs.jsonl", "batch_size": 17},
    },
    "recipe": {
        "loss": {"class_path": "flowalign.algorithms.dpo.DPO", "init_args": {"beta": 19.0}},
        "reference": {"class_path": "flowalign.preference.references.Average"},
        "alarm": 23,
    },
    "device": "cpu",
}
PREFERENCE_TODAY = {
    "num_steps": 13,
    "recipe": {
        "class_path": "flowalign.training.Matching",
        "init_args": {
            "data": {
                "class_path": "flowalign.training.matching.StoredDataset",
                "init_args": {"path": "pairs.jsonl", "batch_size": 17},
            },
            "loss": {"class_path": "flowalign.losses.DPO", "init_args": {"beta": 19.0}},
            "reference": {"class_path": "flowalign.training.matching.EMAReference"},
            "displacement_patience": 23,
        },
    },
    "device": "cpu",
}


@pytest.mark.parametrize(
    ("old", "new"),
    [(ONLINE, ONLINE_TODAY), (PREFERENCE, PREFERENCE_TODAY)],
    ids=["online", "pairs"],
)
def test_an_old_run_file_gets_todays_names_and_no_others(old, new):
    assert is_old(old)
    assert converted(old) == new
    assert list(converted(old)) == list(new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("flowalign.algorithms.kto.KTO", "flowalign.losses.KTO"),
        ("flowalign.algorithms.links.Sigmoid", "flowalign.losses.Sigmoid"),
        ("flowalign.windows.AllButLast", "flowalign.sampling.AllButLast"),
        ("flowalign.branching.Comb", "flowalign.sampling.Comb"),
        ("flowalign.clips.Fixed", "flowalign.sampling.FixedFrames"),
        ("flowalign.functional.transition.CPS", "flowalign.functional.CPS"),
        ("flowalign.functional.tail.Completion", "flowalign.functional.Completion"),
        ("flowalign.preference.rollouts.Rollouts", "flowalign.training.matching.Rollouts"),
        ("flowalign.preference.references.Base", "flowalign.training.matching.FrozenBase"),
        ("flowalign.preference.references.Refreshed", "flowalign.training.matching.PeriodicCopy"),
        ("flowalign.preference.references.Teacher", "flowalign.training.matching.Teacher"),
        ("flowalign.preference.times.SamplerGrid", "flowalign.training.matching.SamplerGrid"),
        ("flowalign.preference.rules.BestWorst", "flowalign.data.BestWorst"),
        ("flowalign.preference.weighting.GapWeights", "flowalign.data.GapWeights"),
        ("flowalign.clip_pairs.dense_dpo.DensePairs", "flowalign.curation.DensePairs"),
        ("flowalign.credit.tree.LeafAdvantage", "flowalign.credit.LeafAdvantage"),
        ("flowalign.reward_training.losses.VoteFraction", None),
        ("pipelines.sd3.SD3", None),
        ("mine.flowalign.windows.Fixed", None),
        ("flowalign.algorithms/dpo.DPO", None),
    ],
)
def test_every_class_is_found_where_it_is_today(old, new):
    settings = {"prompts": "p.txt", "recipe": {"x": [{"class_path": old}], "short": old}}
    arguments = converted(settings)["recipe"]["init_args"]
    assert arguments["x"] == [{"class_path": new or old}]
    assert arguments["short"] == (new or old)


def test_a_calibration_stays_null_and_stays_away():
    assert converted({**ONLINE, "calibration": None})["recipe"]["init_args"]["calibration"] is None
    without = {key: value for key, value in ONLINE.items() if key != "calibration"}
    assert "calibration" not in converted(without)["recipe"]["init_args"]


def test_data_without_a_recipe_becomes_one():
    without = {key: value for key, value in PREFERENCE.items() if key != "recipe"}
    assert list(converted(without)) == ["num_steps", "recipe", "device"]
    assert list(converted(without)["recipe"]["init_args"]) == ["data"]


def test_converting_leaves_the_old_settings_as_they_are():
    before = json.dumps(ONLINE)
    converted(ONLINE)
    assert json.dumps(ONLINE) == before


def test_a_second_conversion_changes_nothing():
    for path, old in OLD_FILES.items():
        once = converted(old)
        assert is_old(old), path
        assert not is_old(once), path
        assert converted(once) == once, path


def test_no_file_of_today_is_taken_for_an_old_one():
    files = sorted((ROOT / "configs").rglob("*.yaml"))
    assert len(files) > 90
    assert [file for file in files if is_old(read_mapping(str(file)))] == []


def test_a_file_for_pairs_of_clips_changes_its_class_alone():
    method = {"class_path": "flowalign.clip_pairs.local_dpo.LocalPairs", "init_args": {"share": 1}}
    new = {"class_path": "flowalign.curation.LocalPairs", "init_args": {"share": 1}}
    assert converted({"clips": "here", "method": method}) == {"clips": "here", "method": new}


def test_the_data_of_a_reward_model_are_no_preference_run():
    settings = {"data": [{"path": "votes.jsonl", "schema": "generic"}], "test": 0.1}
    assert not is_old(settings)
    assert converted(settings) == settings


def test_a_file_is_converted_in_place_beside_what_it_was(tmp_path):
    file = tmp_path / "mine.yaml"
    text = "# a comment\n" + yaml.safe_dump(ONLINE)
    file.write_text(text)
    assert convert_path(file) == [file]
    assert read_mapping(str(file)) == ONLINE_TODAY
    assert (tmp_path / "mine.0.1.yaml").read_text() == text
    written = file.read_bytes()
    assert convert_path(file) == []
    assert file.read_bytes() == written
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mine.0.1.yaml", "mine.yaml"]


def old_run(folder: Path, settings: dict, **state: object) -> Path:
    """Write a run directory of 0.1 with two checkpoints."""
    for step in (20, 40):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        (checkpoint / "state").mkdir(parents=True)
        (checkpoint / "weights.safetensors").write_bytes(b"w" * step)
        (checkpoint / "config.yaml").write_text(yaml.safe_dump(settings))
        counters = {"step": step, "num_updates": 3 * step, "scaler": {}, "seconds": 1.5, **state}
        (checkpoint / "state/loop.json").write_text(json.dumps(counters, indent=1))
        files = [file for file in checkpoint.rglob("*") if file.is_file()]
        sizes = {file.relative_to(checkpoint).as_posix(): file.stat().st_size for file in files}
        (checkpoint / "manifest.json").write_text(json.dumps(sizes, indent=1))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def wrong_sizes(folder: Path) -> list[str]:
    """Return files whose size the manifest of their checkpoint does not hold."""
    return [
        f"{manifest.parent.name}/{name}"
        for manifest in sorted(folder.glob("checkpoints/*/manifest.json"))
        for name, size in json.loads(manifest.read_text()).items()
        if (manifest.parent / name).stat().st_size != size
    ]


@pytest.mark.parametrize(
    ("settings", "new", "loop"),
    [
        (ONLINE, ONLINE_TODAY, {"multipliers": {"motion": 0.25}}),
        (PREFERENCE, PREFERENCE_TODAY, {"loss_state": {"typical_margin": 0.5}}),
    ],
    ids=["online", "pairs"],
)
def test_a_run_directory_is_converted_with_its_checkpoints(tmp_path, settings, new, loop):
    state = {"carried": {"typical_margin": 0.5}, "multipliers": {"motion": 0.25}}
    run = old_run(tmp_path / "run", settings, **state)
    changed = [file.relative_to(run).as_posix() for file in convert_path(run)]
    parts = ["config.yaml", "state/loop.json", "manifest.json"]
    steps = ["checkpoints/step-000020/", "checkpoints/step-000040/"]
    assert changed == [step + part for step in steps for part in parts] + ["config.yaml"]
    assert wrong_sizes(run) == []
    assert read_mapping(str(run / "config.yaml")) == new
    assert read_mapping(str(run / steps[1] / "config.yaml")) == new
    assert json.loads((run / steps[1] / "state/loop.json").read_text()) == {
        "step": 40,
        "num_updates": 120,
        "scaler": {},
        "seconds": 1.5,
        "loop": loop,
    }
    assert new["recipe"]["class_path"] == (POLICY_GRADIENT if settings is ONLINE else MATCHING)


def test_the_record_of_a_credit_chart_gets_todays_names(tmp_path):
    folder = old_run(tmp_path / "run", ONLINE, carried={}, multipliers=None)
    (folder / "credit").mkdir()
    (folder / "credit" / "step-000002.png").write_bytes(b"")
    record = folder / "credit" / "step-000002.json"
    record.write_text('{"step": 2, "origin": [[0, 0], [0, 1]]}')
    assert record in convert_path(folder)
    assert json.loads(record.read_text()) == {"step": 2, "source_row": [[0, 0], [0, 1]]}
    assert convert_path(folder) == []


def test_a_run_directory_keeps_every_original_and_is_converted_once(tmp_path):
    run = old_run(tmp_path / "run", PREFERENCE, carried={}, multipliers=None)
    before = contents(run)
    convert_path(run)
    after = contents(run)
    for name, old in before.items():
        stem, _, kind = name.rpartition(".")
        assert old in (after[name], after.get(f"{stem}.0.1.{kind}"))
    assert convert_path(run) == []
    assert contents(run) == after


def test_one_checkpoint_can_be_converted_alone(tmp_path):
    run = old_run(tmp_path / "run", ONLINE, carried={}, multipliers=None)
    checkpoint = run / "checkpoints/step-000040"
    assert len(convert_path(checkpoint)) == 3
    assert wrong_sizes(run) == []
    assert is_old(read_mapping(str(run / "checkpoints/step-000020/config.yaml")))


@pytest.mark.parametrize("writes", range(7))
def test_a_conversion_that_was_killed_is_finished_by_the_next(tmp_path, monkeypatch, writes):
    state = {"carried": {"typical_margin": 0.5}, "multipliers": None}
    whole = old_run(tmp_path / "whole", PREFERENCE, **state)
    convert_path(whole)
    run, left = old_run(tmp_path / "run", PREFERENCE, **state), writes
    real = convert.write_text

    def killed(path, text):
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        real(path, text)

    monkeypatch.setattr(convert, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        convert_path(run)
    assert is_old(read_mapping(str(run / "config.yaml")))
    monkeypatch.setattr(convert, "write_text", real)
    convert_path(run)
    assert contents(run) == contents(whole)
    assert wrong_sizes(run) == []


def test_a_damaged_checkpoint_is_still_damaged_afterwards(tmp_path):
    run = old_run(tmp_path / "run", ONLINE, carried={}, multipliers=None)
    first, last = run / "checkpoints/step-000020", run / "checkpoints/step-000040"
    (first / "config.yaml").write_text(yaml.safe_dump({**ONLINE, "seed": 1234567}))
    (last / "weights.safetensors").write_bytes(b"short")
    convert_path(run)
    assert wrong_sizes(run) == ["step-000020/config.yaml", "step-000040/weights.safetensors"]


def test_a_checkpoint_of_today_stays_as_it_is(tmp_path):
    run = old_run(tmp_path / "run", ONLINE_TODAY, loop={"multipliers": None})
    before = contents(run)
    assert convert_path(run) == []
    assert contents(run) == before


def test_what_cannot_be_converted_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^gone does not exist \(looked in {tmp_path}\)$"):
        convert_path(Path("gone"))
    Path("empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"^empty holds no config\.yaml: name a run file or the f"
    ):
        convert_path(Path("empty"))
    run = old_run(Path("run"), ONLINE, carried={})
    (run / "checkpoints/step-000020/state/loop.json").write_text("{")
    message = (
        r"^run/checkpoints/step-000020/state/loop\.json is not JSON: the checkpoint is damaged"
    )
    with pytest.raises(ConfigError, match=message):
        convert_path(run)


def test_the_config_of_a_run_stands_for_the_whole_run(tmp_path):
    run = old_run(tmp_path / "run", ONLINE, carried={}, multipliers=None)
    assert len(convert_path(run / "config.yaml")) == 2 * 3 + 1
    assert not is_old(read_mapping(str(run / "checkpoints/step-000040/config.yaml")))
