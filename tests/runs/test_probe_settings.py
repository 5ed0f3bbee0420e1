"""Settings that a probe compares: every error comes before weights are read."""

import json
import os
import subprocess

import pytest

from flowalign.runs.config import load
from flowalign.studies.probe import probe_settings as module
from flowalign.studies.probe.overlay import difference, write_overlay
from flowalign.studies.probe.probe_settings import (
    Option,
    checkpoints,
    find_checkpoint,
    layouts,
    methods,
    settings,
    vary,
)
from flowalign.utils.errors import ConfigError
from tests.fixtures.commands import exit_code, refusal
from tests.fixtures.small_run import go, new_run
from tests.fixtures.zygote import python

SHAPES, FLOW = "configs/shapes.yaml", "configs/methods/flow_grpo.yaml"
VARIATE = "configs/methods/control_variate.yaml"
WINDOWS = (
    "recipe.sampling.sde_window="
    "{class_path: flowalign.sampling.Fixed, init_args: {start: 0, stop: 2}}, "
    "flowalign.sampling.AllButLast"
)


def test_values_are_yaml_and_named_by_the_last_part_of_their_key():
    assert vary("recipe.sampling.eta=0.5,1e-1") == [
        Option("eta=0.5", overrides=("--recipe.sampling.eta=0.5",)),
        Option("eta=0.1", overrides=("--recipe.sampling.eta=0.1",)),
    ]
    fixed, last = vary(WINDOWS)
    assert fixed.name == "sde_window=Fixed(start=0, stop=2)"
    assert last.overrides == ("--recipe.sampling.sde_window=flowalign.sampling.AllButLast",)


@pytest.mark.slow
def test_settings_are_the_product_of_all_axes_and_weights_come_last_in_their_names():
    found = settings(
        [SHAPES],
        ["--recipe.micro_batch", "96"],
        [Option("start"), Option("later", weights=module.Weights("later", module.Path("x")))],
        [methods([VARIATE]), vary(WINDOWS), layouts(["8x24"]), []],
    )
    assert len(found) == 4
    first, last = found[0], found[-1]
    assert first.method == "control_variate sde_window=Fixed(start=0, stop=2) 8x24"
    assert first.name == f"{first.method} start"
    assert last.name == "control_variate sde_window=flowalign.sampling.AllButLast 8x24 later"
    assert (first.weights, last.weights.name) == (None, "later")
    recipe = last.loaded.run.recipe
    assert (recipe.prompts_per_step, recipe.sampling.samples_per_prompt) == (8, 24)
    assert recipe.micro_batch == 96
    assert type(recipe.credit).__name__ == "ControlVariate"
    assert type(recipe.sampling.sde_window).__name__ == "AllButLast"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--vary", "recipe.sampling.eta"], "it must be KEY=VALUE,VALUE"),
        (["--vary", "recipe.sampling.eta="], "it must be KEY=VALUE,VALUE"),
        (["--vary", "recipe.sampling.eta=[0.5"], "it must be KEY=VALUE,VALUE"),
        (["--vary", "recipe.sampling.etta=0.5,0.7"], "etta"),
        (["--vary", "recipe.sampling.eta=0.5,-1"], "recipe.sampling.eta"),
        (["--vary", "recipe.sampling.eta=0.5,0.5"], "are the same settings"),
        (["--vary", "recipe.sampling.sde_window.stop=2,99"], "outside the schedule of 8 steps"),
        (["--layouts", "16x12", "16"], "--layouts has '16'; it must be PROMPTSxSAMPLES"),
        (["--layouts", "16x0"], "--layouts has '16x0'"),
        (["--layouts", "16x1"], "samples_per_prompt is 1"),
        (["--methods", "configs/methods/none.yaml"], "does not exist"),
        (["--methods", "configs/methods/diffusion_dpo.yaml"], "diffusion_dpo"),
        (["--methods", "configs/methods/dense_grpo_calibrated.yaml"], "recipe.calibration is set"),
        (["--checkpoint", "runs/none"], "--checkpoint runs/none: "),
        (["--weights", "runs/none"], "--weights is 'runs/none'; it must be a folder"),
        (["--weights", "x", "--checkpoint", "y"], "not allowed with"),
        (["--batches", "5"], "--batches is 5; it must be in [6, 10000]"),
        (["--metric", "step"], "invalid choice: 'step'"),
        (["--processes", "17"], "prompts_per_step is 16, fewer than the 17 processes"),
    ],
)
def test_what_cannot_be_probed_is_refused_before_weights_are_read(
    options, told, capsys, monkeypatch
):
    monkeypatch.setattr("flowalign.studies.probe.measure.probes", None)
    assert told in refusal(capsys, "probe", SHAPES, *options)


def test_moments_that_would_be_unknown_are_refused(monkeypatch):
    monkeypatch.setattr("flowalign.studies.probe.sums.MOST_BYTES", 0)
    found = settings([SHAPES], [], [], [])
    with pytest.raises(ConfigError, match=r"--metric is update, but the [\d,]+ trained parameters"):
        module.check_metric(found, 16)
    weights = module.Weights("x", module.Path("x"), module.Path("x/moments"))
    known = settings([SHAPES], [], [Option("x", weights=weights)], [])
    module.check_metric(known, 16)


@pytest.fixture
def trained(tmp_path):
    go(new_run(tmp_path / "run"))
    return tmp_path / "run"


def test_a_checkpoint_is_found_by_run_step_folder_and_average(trained):
    newest = trained / "checkpoints" / "step-000005"
    moments = newest / "state" / "training.safetensors"
    for path in (trained, newest, trained / "checkpoints" / "5"):
        assert find_checkpoint(str(path)) == module.Weights("step-000005", newest, moments)
    averaged = find_checkpoint(str(newest / "ema"))
    assert averaged == module.Weights("step-000005/ema", newest / "ema", moments)
    names = [option.name for option in checkpoints(["start", str(trained), str(newest)])]
    assert names == ["start", str(trained), str(newest)]


def test_a_damaged_checkpoint_is_refused(trained):
    newest = trained / "checkpoints" / "step-000005"
    (newest / "pixel.safetensors").unlink()
    with pytest.raises(ConfigError, match="is damaged"):
        find_checkpoint(str(trained))
    with pytest.raises(ConfigError, match="is no complete checkpoint"):
        find_checkpoint(str(trained / "checkpoints" / "77"))


def test_a_difference_changes_arguments_of_the_recipe_and_whole_components():
    credit = {"class_path": "a", "init_args": {"x": 1, "y": 2}}
    base = {"recipe": {"class_path": "R", "init_args": {"eta": 1, "kept": 0, "credit": credit}}}
    other = {"class_path": "a", "init_args": {"x": 1, "y": 3}}
    wanted = {"recipe": {"class_path": "R", "init_args": {"eta": 2, "kept": 0, "credit": other}}}
    assert difference(base, wanted) == {"recipe": {"init_args": {"eta": 2, "credit": other}}}
    assert difference(base, base) == {}


@pytest.mark.slow
@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0], None])
def test_an_overlay_behind_the_run_file_gives_what_was_probed(tmp_path, weights, capsys):
    """All axes at once, and settings of the command line."""
    (best,) = settings(
        [SHAPES],
        ["--recipe.prompts_per_step=4"],
        [],
        [methods([VARIATE]), vary("recipe.sampling.sde_window.stop=2"), vary("policy.guidance=3")],
    )
    file = tmp_path / "overlay.yaml"
    write_overlay(file, [SHAPES], best, weights)
    run, _ = load([SHAPES, str(file)])
    assert type(run.recipe.credit).__name__ == "ControlVariate"
    assert run.recipe.sampling.sde_window.stop == 2
    assert run.policy.guidance == 3
    assert run.recipe.prompts_per_step == 4
    assert run.recipe.step_weight == (weights or "uniform")
    assert "stop: 2" in file.read_text()
    assert "surrogate" not in file.read_text()
    assert exit_code("check", SHAPES, file) == 0
    assert "64 = 4 prompts x 12" not in capsys.readouterr().out


@pytest.mark.slow
def test_an_overlay_that_changes_nothing_is_refused(tmp_path):
    (best,) = settings([SHAPES], [], [], [])
    with pytest.raises(ConfigError, match="there is nothing to write"):
        write_overlay(tmp_path / "overlay.yaml", [SHAPES], best, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_probe_of_several_settings_writes_figures_a_page_and_an_overlay(tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "overlay.yaml"
    small = ["--recipe.sampling.num_steps=3", "--recipe.sampling.sde_window.stop=2"]
    command = ["probe", "configs/models/toy_shapes.yaml", *small, "--batches", "6"]
    command += ["--methods", FLOW, VARIATE, "--layouts", "2x4", "--metric", "update"]
    assert exit_code(*command, "--out", out, "--overlay", file) == 0
    told = capsys.readouterr()
    found = json.loads((out / "probe.json").read_text())
    assert {row["name"] for row in found["ranking"]} == {"flow_grpo 2x4", "control_variate 2x4"}
    prices = {one["name"]: one["a_batch"]["network_evaluations"] for one in found["settings"]}
    assert prices["control_variate 2x4"] > prices["flow_grpo 2x4"] == 2 * 4 * 5
    assert "signal to noise per 1000 evaluations" in told.out
    assert "control_variate 2x4" in (out / "index.html").read_text()
    run, _ = load(["configs/models/toy_shapes.yaml", str(file)])
    assert run.recipe.prompts_per_step == 2
    assert run.recipe.step_weight == (found["recommended"]["step_weight"] or "uniform")


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two processes need two cores")
def test_two_processes_find_what_one_finds(tmp_path):
    def figures(folder, processes):
        small = ["--recipe.sampling.num_steps=3", "--recipe.sampling.sde_window.stop=2"]
        options = ["--layouts", "3x4", "--batches", "6", "--processes", processes]
        command = [python(), "-m", "flowalign", "probe", "configs/models/toy_shapes.yaml"]
        command += [*small, *options, "--out", str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("run file's weights") == 2  # of both metrics, told once
        return json.loads((tmp_path / folder / "probe.json").read_text())["settings"][0]

    one, two = figures("one", "1"), figures("two", "2")
    for cost in ("network_evaluations", "reward_calls", "decodes"):
        assert one["a_batch"][cost] == two["a_batch"][cost] > 0
    for metric in ("gradient", "update"):
        size = max(step["noise"] for step in one[metric]["steps"])
        for a, b in zip(one[metric]["steps"], two[metric]["steps"], strict=True):
            for name in ("signal", "noise", "signal_error", "noise_error"):
                assert a[name] == pytest.approx(b[name], abs=1e-4 * size)
