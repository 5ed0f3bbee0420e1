"""Warnings of a run about changes in its images, and their places."""

import json

import pytest
import torch

from flowalign.distributed.processes import ALONE
from flowalign.training.divergence import SampleBounds
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from tests.fixtures.commands import exit_code
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.run_files import write_pixels
from tests.fixtures.training import new_rewards

BEFORE = {"eval/diversity": 1.25, "eval/sharpness": 0.02}


def after(diversity, sharpness):
    return {"eval/diversity": diversity, "eval/sharpness": sharpness}


@pytest.mark.parametrize(
    ("diversity", "sharpness", "raised"),
    [
        (1.25, 0.02, []),
        (0.625, 0.02, []),
        (0.62, 0.02, ["diversity"]),
        (9.0, 0.02, []),
        (1.25, 0.0141, []),
        (1.25, 0.0139, ["sharpness"]),
        (1.25, 0.0299, []),
        (1.25, 0.0301, ["sharpness"]),
        (0.1, 0.1, ["diversity", "sharpness"]),
        (float("nan"), 0.02, ["diversity"]),
        (1.25, None, ["sharpness"]),
    ],
)
def test_the_bounds_are_shares_of_what_was_before(diversity, sharpness, raised):
    assert list(SampleBounds().warnings(BEFORE, after(diversity, sharpness))) == raised


def test_a_warning_says_the_value_its_share_and_the_bounds():
    found = SampleBounds(least_diversity=0.8).warnings(BEFORE, after(0.5, 0.05))
    assert found["diversity"].startswith(
        "diversity is 0.5, 0.40 of the 1.25 before training; expected at least 0.8 of it"
    )
    assert "2.50 of the 0.02 before training; expected 0.7 to 1.5 of it" in found["sharpness"]


@pytest.mark.parametrize("before", [{}, {"eval/sharpness": None}, {"eval/sharpness": 0.0}])
def test_what_was_not_measured_before_raises_nothing(before):
    assert SampleBounds().warnings(before, after(0.1, 9.0)) == {}


def test_the_last_warning_of_each_quantity_is_kept_though_it_has_passed():
    rows = [
        {"step": 0, "evaluated_after": 0.0, **BEFORE},
        {"step": 5, "loss": 1.0},
        {"step": 9, "evaluated_after": 10.0, **after(0.5, 0.02)},
        {"step": 19, "evaluated_after": 20.0, **after(0.4, 0.02)},
        {"step": 29, "evaluated_after": 30.0, **after(1.0, 0.02)},
    ]
    found = SampleBounds().last_warnings(rows)
    assert list(found) == ["diversity"]
    assert found["diversity"].startswith("after 20 steps diversity is 0.4")
    assert SampleBounds().last_warnings(rows[1:]) == {}, "nothing was measured before training"


@pytest.mark.parametrize("bounds", [{"most_sharpness": 0.9}, {"least_diversity": 1.5}])
def test_bounds_that_no_run_keeps_are_refused(bounds):
    with pytest.raises(ValueError, match=f"evaluation.bounds.{next(iter(bounds))} is"):
        SampleBounds(**bounds)


class Squares(PixelPolicy):
    """Shows each pixel as the middle of a black image, so that brightness is sharpness."""

    def decode(self, x):
        media = torch.zeros(len(x), 1, 3, 3, 3)
        media[..., 1, 1] = super().decode(x)[..., 0, 0]
        return media


@pytest.fixture
def cfg(tmp_path):
    (tmp_path / "held_out.txt").write_text("a\nbb")
    prompts = {"held_out": str(tmp_path / "held_out.txt")}
    return Evaluation(prompts=prompts, num_prompts=7, num_steps=2, micro_batch=3, grid=7)


def test_an_evaluation_averages_the_sharpness_of_all_its_samples(cfg):
    """20 / 9 of the squared brightness of each; 7 samples in batches of 3, 3 and 1."""
    found = evaluate(Squares(), new_rewards(), cfg, ALONE)
    luma = (found.grid[:, 0, :, 1, 1] * torch.tensor([0.299, 0.587, 0.114])).sum(1)
    expected = float((20 / 9 * luma.square()).mean())
    assert found.metrics["eval/sharpness"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_run_warns_as_it_goes_and_in_its_files(tmp_path, cfg, capfd):
    """The policy is trained so fast that bounds around 1 cannot hold."""
    bounds = {"least_diversity": 1.0, "least_sharpness": 1.0, "most_sharpness": 1.0}
    held_out = {"prompts": dict(cfg.prompts), "num_prompts": 6, "num_steps": 2, "every": 1}
    run_file = write_pixels(
        tmp_path / "run.yaml",
        cfg.prompts["held_out"],
        {
            "prompts_per_step": 2,
            "sampling": {"num_steps": 4, "samples_per_prompt": 4, "eta": 0.8},
        },
        policy={"class_path": "tests.training.test_sample_bounds.Squares"},
        num_steps=2,
        optimizer={"learning_rate": 1e-1},
        evaluation=held_out | {"bounds": bounds},
        output_dir=str(tmp_path / "run"),
    )
    assert exit_code("train", run_file) == 0
    told = json.loads((tmp_path / "run/summary.json").read_text())["warnings"]
    assert told["sharpness"].startswith("after 2 steps sharpness is")
    assert told["sharpness"].removeprefix("after 2 steps ")[:60] in capfd.readouterr().err
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.index("Warning: after 2 steps sharpness") < page.index("Curves")
