"""Levels of rewards in the prompt: those of scores at training, the best ones at sampling."""

import json
from math import nan

import pytest
import torch
from PIL import Image

from flowalign.extra import RewardLevels
from flowalign.sampling.inference import generate
from flowalign.training.matching.source import StreamContext
from flowalign.training.matching.stored import StoredDataset
from flowalign.training.recipe import RunContext
from flowalign.types import Request
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.training import new_learner, new_rewards

LEVELS = RewardLevels(
    thresholds={"redness": [-0.2, 0.3], "green": [0.5]},
    words={"redness": ["pale", "pink", "scarlet"]},
)
ASKED = Request("a cup", metadata={"n": 1})


def test_scores_say_their_level_and_sampling_asks_for_the_highest():
    said = LEVELS.for_training(ASKED, {"redness": -0.2, "green": 0.49})
    assert said.policy_prompt == "a cup, pink, green 0/1"
    assert LEVELS.for_training(ASKED, {"redness": -0.3, "green": 0.5}).policy_prompt.endswith(
        "pale, green 1/1"
    )
    assert LEVELS.for_inference(ASKED).policy_prompt == "a cup, scarlet, green 1/1"


def test_unknown_scores_say_nothing():
    assert (
        LEVELS.for_training(ASKED, {"redness": nan, "green": 0.9}).policy_prompt
        == "a cup, green 1/1"
    )
    assert LEVELS.for_training(ASKED, {}).policy_prompt == "a cup"


def test_another_level_can_be_asked_for():
    worst = RewardLevels(thresholds={"green": [0.5]}, ask={"green": 0})
    assert worst.for_inference(ASKED).policy_prompt == "a cup, green 0/1"


def test_rewards_see_the_prompt_and_the_request_keeps_its_key():
    conditioned = LEVELS.for_inference(ASKED)
    assert (conditioned.prompt, conditioned.key, conditioned) == ("a cup", ASKED.key, ASKED)
    assert conditioned.input_digest != ASKED.input_digest
    assert conditioned.input_digest == Request("a cup, scarlet, green 1/1").input_digest


def test_the_empty_prompt_of_guidance_stays_empty():
    assert LEVELS.for_inference(Request("")).policy_prompt == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"thresholds": {}}, "is empty"),
        ({"thresholds": {"green": []}}, "increasing"),
        ({"thresholds": {"green": [0.5, 0.5]}}, "increasing"),
        ({"words": {"size": ["a", "b"]}}, "names size"),
        ({"words": {"green": ["a", "b", "c"]}}, "3 words"),
        ({"words": {"green": ["Good", " good "]}}, "twice"),
        ({"ask": {"green": 2}}, "highest level is 1"),
        ({"form": "{prompt}"}, "needs {prompt} and {words}"),
    ],
)
def test_levels_that_say_nothing_are_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        RewardLevels(**{"thresholds": {"green": [0.5]}} | changes)


def test_a_dimension_that_no_reward_gives_is_refused(tmp_path):
    run = RunContext(
        policy=PixelPolicy(),
        rewards=new_rewards(),
        num_steps=1,
        conditioning=RewardLevels(thresholds={"blue": [0.5]}),
    )
    with pytest.raises(ValueError, match="names blue, which no reward gives; there are redness"):
        groups(tmp_path).check(run)


# Training -----------------------------------------------------------------------------------------

SHORT = RewardLevels(thresholds={"redness": [0.0]}, words={"redness": ["x", "yyyyyyy"]})
"""Words of different lengths, which is all that the one-pixel policy reads."""


@pytest.mark.parametrize("rollouts", ["conditioned", "plain"])
def test_samples_of_the_policy_are_learned_under_their_own_levels(tmp_path, rollouts):
    conditioning = RewardLevels(thresholds=SHORT.thresholds, words=SHORT.words, rollouts=rollouts)
    stream = groups(tmp_path).open(
        new_learner(), StreamContext(new_rewards(), 0, conditioning=conditioning)
    )
    asked = [r for r in stream.requests.batch(0, 3) for _ in range(4)]
    extra = len(", yyyyyyy") if rollouts == "conditioned" else 0
    assert [len(r.policy_prompt) - len(r.prompt) for r in asked] == [extra] * 12
    examples = batch_of(stream).examples
    redness = examples["scores"]["redness"]
    assert 0 < (redness >= 0).sum() < 12
    said = torch.where(redness >= 0, float(len(", yyyyyyy")), float(len(", x")))
    lengths = torch.tensor([float(len(r.prompt)) for r in asked])
    assert torch.equal(examples["cond"]["length"][:, 0], lengths + said)


def test_stored_samples_are_learned_under_the_levels_of_their_rows(tmp_path):
    rows = []
    for i, score in enumerate([0.7, -0.4]):
        Image.new("RGB", (4, 4), (40 * i, 9, 90)).save(tmp_path / f"{i}.png")
        rows.append({"prompt": "a" * (i + 1), "image": f"{i}.png", "ratings": {"redness": [score]}})
    file = tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = StoredDataset(path=str(file), kind="samples", batch_size=2)
    run = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1, conditioning=SHORT)
    cfg.check(run)
    (batch,) = cfg.open(new_learner(), StreamContext(new_rewards(), 0, conditioning=SHORT)).batches(
        [0]
    )
    scores = batch.examples["scores"]["redness"]
    wanted = torch.where(scores > 0, 1.0 + len(", yyyyyyy"), 2.0 + len(", x"))
    assert torch.equal(batch.examples["cond"]["length"][:, 0], wanted)
    other = RewardLevels(thresholds={"green": [0.5]})
    wrong = RunContext(policy=PixelPolicy(), rewards=new_rewards(), num_steps=1, conditioning=other)
    with pytest.raises(ValueError, match="names green, which no reward gives; there are redness"):
        cfg.check(wrong)


def test_the_sampler_asks_as_a_user_does():
    policy = PixelPolicy(seed=4)
    torch.nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1))

    def drawn(prompt, conditioning=None):
        seeds = [generator(0, "x", 0)]
        return generate(policy, [Request(prompt)], 4, seeds, 2, conditioning=conditioning)

    assert torch.equal(drawn("tea", SHORT), drawn("tea, yyyyyyy"))
    assert not torch.equal(drawn("tea", SHORT), drawn("tea"))
