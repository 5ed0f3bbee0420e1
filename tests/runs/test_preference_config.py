"""Run files of preference training: errors, plans, and one run of each kind."""

import json
from pathlib import Path

import pytest
import yaml
from PIL import Image

from flowalign.runs.config import load
from flowalign.runs.config.loading import compose
from flowalign.runs.planning import plan
from flowalign.training import Matching
from tests.fixtures.commands import exit_code
from tests.fixtures.preference import painted
from tests.fixtures.run_files import CONFIGS, complaint, write_changed

DPO = "configs/preference/shapes/dpo.yaml"
RECIPE = "recipe/init_args/"
DATA = RECIPE + "data/init_args/"
MATCHING = "flowalign.training.matching."
STORED = MATCHING + "StoredDataset"
ROLLOUTS = {
    "class_path": MATCHING + "Rollouts",
    "init_args": {
        "prompts": "assets/shapes/prompts/seen.txt",
        "prompts_per_step": 3,
        "samples_per_prompt": 5,
        "num_steps": 7,
    },
}
KTO = {"class_path": "flowalign.losses.KTO"}


@pytest.fixture
def written(tmp_path):
    """Writes the run file for painted pairs, with values changed: `a/b` is key b of a."""
    pairs, shown = painted(tmp_path, 4), painted(tmp_path, 2, "shown")

    def write(changes: dict | None = None) -> str:
        own = {
            DATA + "path": pairs,
            DATA + "held_out": shown,
            DATA + "cache": None,
            "output_dir": str(tmp_path / "run"),
        }
        return write_changed(DPO, tmp_path, own | (changes or {}))

    return write


# What is refused ----------------------------------------------------------------------------------


def test_the_class_of_the_recipe_makes_it_a_run_of_preferences(written):
    run, text = load(written())
    assert isinstance(run.recipe, Matching)
    data = yaml.safe_load(text)["recipe"]["init_args"]["data"]
    assert data["class_path"] == STORED
    assert not isinstance(load("configs/shapes.yaml")[0].recipe, Matching)


def test_what_was_resolved_resolves_to_itself(written, tmp_path):
    _, text = load(written())
    again = tmp_path / "resolved.yaml"
    again.write_text(text)
    assert load(str(again))[1] == text


def test_a_loss_of_pairs_is_refused_for_samples(written):
    message = complaint(written({DATA + "kind": "samples"}))
    assert "recipe.loss DPO compares pairs, but recipe.data gives samples" in message
    assert "KTO, RWR or SFT" in message


def test_a_loss_that_compares_rows_needs_a_micro_batch_of_all_of_them(written):
    changes = {RECIPE + "loss": KTO, RECIPE + "micro_batch": 31, DATA + "batch_size": 64}
    message = complaint(written(changes))
    assert "recipe.micro_batch is 31, but KTO compares all of the 64" in message
    load(written(changes | {RECIPE + "updates_per_step": 3}))
    load(written(changes | {RECIPE + "micro_batch": 64, DATA + "kind": "samples"}))


def with_rollouts(stored: str, **changes) -> str:
    """The run file with other data, of other keys."""
    content = yaml.safe_load(Path(stored).read_text())
    if "weight" in changes:
        content["rewards"][0]["weight"] = changes.pop("weight")
    content |= changes
    content["recipe"]["init_args"]["data"] = ROLLOUTS
    file = Path(stored).with_name("rollouts.yaml")
    file.write_text(yaml.safe_dump(content))
    return str(file)


@pytest.mark.slow
def test_rollouts_without_rewards_are_refused(written):
    none = complaint(with_rollouts(written(), rewards=[]))
    assert "rewards is empty; name at least one reward model" in none
    for wrong in ({"weight": {"exact_match": 0.0}}, {}):
        message = complaint(with_rollouts(written(), **wrong))
        assert "no reward has a weight other than 0: set the weight of one of its" in message
    run, _ = load(with_rollouts(written(), weight={"exact_match": 1.0}))
    assert isinstance(run.recipe, Matching)


@pytest.mark.slow
def test_attributes_and_a_teacher_come_together(written, tmp_path):
    one = {"expert": {"path": str(tmp_path)}}
    without = complaint(written({DATA + "kind": "attributes"}))
    assert "names 0 teachers; recipe.data.kind attributes is matched to one" in without
    pairs = complaint(written({RECIPE + "teachers": one}))
    assert "StoredDataset with kind pairs are matched to noise - latents" in pairs
    load(written({DATA + "kind": "attributes", RECIPE + "teachers": one}))


@pytest.mark.slow
def test_losses_of_parts_are_refused_for_samples_of_the_policy(written):
    rewarded = {"weight": {"exact_match": 1.0}}
    for loss, part in (("DenseDPO", "segments"), ("LocalDPO", "region, region_strength")):
        changes = {RECIPE + "loss": {"class_path": f"flowalign.extra.{loss}"}}
        message = complaint(with_rollouts(written(changes), **rewarded))
        assert f"needs {part}, which data of class Rollouts does not give" in message
        load(written(changes))
        guarded = {
            RECIPE + "loss": {
                "class_path": "flowalign.losses.Safeguard",
                "init_args": {"inner": changes[RECIPE + "loss"]},
            }
        }
        assert f"needs {part}" in complaint(with_rollouts(written(guarded), **rewarded))
    load(with_rollouts(written({RECIPE + "loss": KTO, RECIPE + "micro_batch": 64}), **rewarded))


def test_held_out_pairs_that_nobody_evaluates_are_refused(written):
    assert "but evaluation, which reads it, is null: set held_out to null" in complaint(
        written({"evaluation": None})
    )
    load(written({"evaluation": None, DATA + "held_out": None}))


@pytest.mark.slow
def test_a_reference_that_nobody_looks_at_is_refused(written):
    average = {"class_path": MATCHING + "EMAReference"}
    changes = {
        RECIPE + "loss": {"class_path": "flowalign.losses.SFT"},
        DATA + "kind": "samples",
        RECIPE + "reference": average,
    }
    message = complaint(written(changes))
    assert "recipe.reference is EMAReference, but SFT needs none" in message
    load(written(changes | {RECIPE + "kl": 0.5}))
    load(written({RECIPE + "reference": average}))


@pytest.mark.slow
def test_stored_pairs_are_refused_for_a_policy_whose_states_hold_more_than_media(written):
    arguments = {
        "path": "nowhere",
        "video": {"height": 32, "width": 32, "num_frames": 9, "fps": 24.0},
        "lora": None,
    }
    sounding = {"class_path": "pipelines.LTX2", "init_args": arguments}
    plain = {"rewards": [], "evaluation": None, DATA + "held_out": None}
    message = complaint(written({"policy": sounding} | plain))
    assert "recipe.data: LTX2 denoises clips with sound, but stored clips" in message


# What is planned ----------------------------------------------------------------------------------


def test_the_plan_counts_pairs_and_both_networks_by_hand(written):
    changes = {
        DATA + "batch_size": 10,
        RECIPE + "epochs_per_step": 3,
        RECIPE + "updates_per_step": 2,
        "num_steps": 7,
    }
    rows = plan(load(written(changes))[0])
    assert rows["loss"] == "DPO, reference FrozenBase"
    assert rows["pairs per step"] == "10"
    assert rows["network evaluations per step"] == "60 training + 60 reference"
    assert rows["updates per step"].startswith("6, 42 in the whole run")
    assert any(row.startswith("memory of ") and "latents" in row for row in rows)


def test_a_loss_without_reference_is_planned_so_until_a_kl_needs_one(written):
    sft = {"class_path": "flowalign.losses.SFT"}
    changes = {RECIPE + "loss": sft, DATA + "kind": "samples", DATA + "batch_size": 10}
    rows = plan(load(written(changes))[0])
    assert (rows["loss"], rows["samples per step"]) == ("SFT, no reference", "10")
    assert rows["network evaluations per step"] == "10 training"
    rows = plan(load(written(changes | {RECIPE + "kl": 0.5}))[0])
    assert rows["network evaluations per step"] == "10 training + 10 reference"


def test_rollouts_are_planned_with_what_sampling_and_scoring_cost(written):
    guided = written({"policy/init_args/guidance": 3.0})
    rows = plan(load(with_rollouts(guided, weight={"exact_match": 1.0}))[0])
    assert rows["samples per step"] == "15 = 3 prompts x 5"
    assert rows["pairs per step"] == "at most 3"
    counted = f"{15 * 7 * 2} sampling + 6 training + 6 reference"
    assert rows["network evaluations per step"] == counted
    assert rows["reward calls per step"] == "15"


def test_fewer_pairs_than_processes_are_refused(written):
    run, _ = load(written({DATA + "batch_size": 3}))
    with pytest.raises(ValueError, match="3 pairs or samples per step, fewer than the 4"):
        plan(run, world=4)


def test_check_prints_loss_and_evaluations_without_reading_weights(written, capsys):
    assert exit_code("check", written({DATA + "batch_size": 64}), "--full") == 0
    printed = capsys.readouterr().out
    assert "DPO, reference FrozenBase" in printed
    assert "128 training + 128 reference" in printed
    assert "trainable parameters" in printed


# A run --------------------------------------------------------------------------------------------

SMALL = {
    "rewards": [],
    DATA + "batch_size": 4,
    DATA + "max_dropped_fraction": 0.0,
    "num_steps": 2,
    "policy/init_args/lora": {"rank": 2, "alpha": 4},
    "checkpoints": {"every": 2},
    "evaluation/num_prompts": 4,
    "evaluation/num_steps": 1,
    "evaluation/grid": 4,
}


@pytest.mark.slow
def test_without_any_reward_a_run_trains_evaluates_reports_and_resumes(written, tmp_path):
    folder, config = tmp_path / "run", written(SMALL)
    assert exit_code("train", config) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["reward_calls"]) == ("finished", 2, 0)
    assert summary["before"]["pairs/implicit_accuracy"] == 0.5
    assert (
        set(summary["before"])
        == set(summary["after"])
        == {
            "diversity",
            "pixel_distance",
            "sharpness",
            "pairs/implicit_accuracy",
            "pairs/accuracy_per_draw",
            "pairs/drift_chosen",
            "pairs/drift_rejected",
        }
    )
    # Two steps of four pairs: both media through both networks.
    assert summary["network_evaluations"] == 2 * 4 * 2 * 2
    assert Image.open(folder / "samples" / "step-000002.png").size == (4 * 34 + 2, 36)
    assert "implicit" in (folder / "report.html").read_text()
    weights = folder / "checkpoints" / "step-000002"
    assert (weights / "pytorch_lora_weights.safetensors").is_file()
    assert exit_code("train", config, "--resume", "--num_steps", "3") == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 3)
    assert summary["network_evaluations"] == 3 * 4 * 2 * 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["policy_loss"] for row in rows if "policy_loss" in row}
    assert sorted(losses) == [0, 1, 2]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.slow
def test_data_that_cannot_be_used_are_a_message_and_no_traceback(written, tmp_path, capsys):
    for file in tmp_path.glob("data_red*.png"):
        file.unlink()
    assert exit_code("train", written(SMALL)) == 2
    assert "4 of the 4 pairs" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_times_the_stages_of_online_runs(written, capsys):
    assert exit_code("bench", written(), "--repeats", "1") == 0
    assert "overhead" in capsys.readouterr().out


RUN_FILES = sorted((CONFIGS / "preference").rglob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("file", RUN_FILES, ids=[file.stem for file in RUN_FILES])
def test_every_run_file_is_read_and_says_where_it_writes(file, tmp_path):
    """Their data are made by other commands or downloaded: any folder stands for them here."""
    known = compose([str(file)]).values["recipe"]["init_args"]["data"]["init_args"]
    names = [name for name in ("path", "held_out") if name in known]
    run, _ = load(str(file), [f"recipe.data.{name}={tmp_path}" for name in names])
    assert isinstance(run.recipe, Matching)
    assert run.output_dir.startswith("runs/")
    assert run.recipe.updates == 1
