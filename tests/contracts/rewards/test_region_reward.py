"""A global and a local reward: the questions, their scores, and the map that they paint."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from reward_models.backbones.detection import Detection
from reward_models.detection.region_reward import LAYOUT, REGION, RegionReward, paint_rewards
from reward_models.verifiers.truth import ShapesDetector
from tests.fixtures.fake_judge import FakeDetector, FakeJudge
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch

FOUND = [
    Detection("cat", 0.4, (0.0, 0.0, 2.0, 1.0)),
    Detection("dog", 0.9, (1.0, 0.0, 4.0, 2.0)),
    Detection("cup", 0.2, (0.0, 0.0, 4.0, 3.0)),
]


def corners(left, right, top, bottom):
    text = REGION.format(left=left, right=right, top=top, bottom=bottom)
    return text.replace("[[prompt]]", "tea")


def answers():
    """P(yes) of the layout, of the dog and of the cat, by their places in percent."""
    layout = LAYOUT.replace("[[prompt]]", "tea")
    return {layout: 0.9, corners(25, 100, 0, 67): 0.2, corners(0, 50, 0, 33): 0.7}


def pictures(num=1):
    batch = example_batch(num, height=3, width=4)
    return replace(batch, prompts=["tea"] * num)


def test_scores_are_those_of_the_regions_that_the_detector_is_surest_of():
    output = RegionReward(FakeJudge(answers()), FakeDetector(FOUND)).score(pictures())
    assert_close(output.values, torch.tensor([[0.8, (-0.6 + 0.4) / 2]]))
    assert [row["label"] for row in output.extras[0]["regions"]] == ["dog", "cat"]
    assert [row["score"] for row in output.extras[0]["regions"]] == pytest.approx([-0.6, 0.4])
    one = RegionReward(FakeJudge(answers()), FakeDetector(FOUND), max_regions=1).score(pictures())
    assert_close(one.values, torch.tensor([[0.8, -0.6]]))


def test_the_map_by_hand():
    """The dog counts .2, the cat .7 and wins where they overlap, the rest .5; all times .9."""
    extras = RegionReward(FakeJudge(answers()), FakeDetector(FOUND)).score(pictures()).extras[0]
    wanted = torch.tensor([[0.7, 0.7, 0.2, 0.2], [0.5, 0.2, 0.2, 0.2], [0.5, 0.5, 0.5, 0.5]])
    assert_close(paint_rewards(extras, 3, 4), 0.9 * wanted)


def test_boxes_beyond_the_picture_paint_what_is_inside():
    region = {"label": "cat", "box": [-2.0, 1.0, 1.0, 9.0], "score": 1.0}
    found = paint_rewards({"global": 0.0, "regions": [region]}, 2, 3)
    assert_close(found, 0.5 * torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.5, 0.5]]))


def test_without_regions_the_local_reward_is_neutral():
    output = RegionReward(FakeJudge(answers()), FakeDetector([])).score(pictures())
    assert_close(output.values, torch.tensor([[0.8, 0.0]]))
    assert_close(paint_rewards(output.extras[0], 2, 2), torch.full((2, 2), 0.45))


def test_a_judge_that_does_not_answer_is_a_failure():
    silent = answers() | {corners(0, 50, 0, 33): float("nan")}
    output = RegionReward(FakeJudge(silent), FakeDetector(FOUND)).score(pictures())
    assert not output.valid.any()
    assert output.reasons == {0: "the judge gave no answer"}


def test_what_every_reward_promises():
    check_contract(RegionReward(FakeJudge(), FakeDetector(FOUND)), example_batch())
    check_fingerprints(
        [
            RegionReward(FakeJudge(), FakeDetector(FOUND)),
            RegionReward(FakeJudge(), ShapesDetector()),
            RegionReward(FakeJudge(), ShapesDetector(), threshold=0.5),
        ]
    )
