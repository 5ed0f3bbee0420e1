"""Levels of rewards in the prompt: those of scores at training, the best ones at sampling."""

import json
from dataclasses import replace
from math import nan

import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from flowalign.extra import RewardLevels, RewardWords
from flowalign.sampling.inference import generate
from flowalign.training.matching.source import StreamContext
from flowalign.training.matching.stored import StoredDataset
from flowalign.training.rollouts.advantages import mask_unused_rewards
from flowalign.types import ConditionedPrompt, PromptGuidance, Request
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.scored import batch_of, groups
from tests.fixtures.training import context, new_learner, new_rewards

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
    run = context(conditioning=RewardLevels(thresholds={"blue": [0.5]}))
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
    cfg.check(context(conditioning=SHORT))
    (batch,) = cfg.open(new_learner(), StreamContext(new_rewards(), 0, conditioning=SHORT)).batches(
        [0]
    )
    scores = batch.examples["scores"]["redness"]
    wanted = torch.where(scores > 0, 1.0 + len(", yyyyyyy"), 2.0 + len(", x"))
    assert torch.equal(batch.examples["cond"]["length"][:, 0], wanted)
    other = RewardLevels(thresholds={"green": [0.5]})
    with pytest.raises(ValueError, match="names green, which no reward gives; there are redness"):
        cfg.check(context(conditioning=other))


def test_the_sampler_asks_as_a_user_does():
    policy = PixelPolicy(seed=4)
    torch.nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1))

    def drawn(prompt, conditioning=None):
        seeds = [generator(0, "x", 0)]
        return generate(policy, [Request(prompt)], 4, seeds, 2, conditioning=conditioning)

    assert torch.equal(drawn("tea", SHORT), drawn("tea, yyyyyyy"))
    assert not torch.equal(drawn("tea", SHORT), drawn("tea"))


# A word per reward: one at a time in rollouts, where its reward alone counts; all in --------------


WORDS = RewardWords(words={"redness": "<r>", "green": "<green>"})


def test_rollouts_take_the_words_in_turn_and_sampling_takes_all():
    asked = [WORDS.for_rollout(Request("a cup"), position) for position in (6, 7, 8)]
    assert [r.policy_prompt for r in asked] == ["<r> a cup", "<green> a cup", "<r> a cup"]
    assert [r.conditioned.dims for r in asked] == [("redness",), ("green",), ("redness",)]
    everything = WORDS.for_inference(Request("a cup"))
    assert everything.policy_prompt == "<r> <green> a cup"
    assert everything.conditioned.dims == ("redness", "green")


def test_rollouts_are_learned_as_they_were_asked_and_stored_samples_with_all_words():
    rollout = WORDS.for_rollout(Request("a cup"), 1)
    assert WORDS.for_training(rollout, {"redness": 1.0}).policy_prompt == "<green> a cup"
    assert WORDS.for_training(Request("a cup"), {}).policy_prompt == "<r> <green> a cup"


def test_credit_of_other_rewards_is_nothing_by_hand():
    value = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0]]])
    asked = [
        Request("a", conditioned=ConditionedPrompt("x a", dims=d)) for d in (("b",), ("c", "a"))
    ]
    found = mask_unused_rewards(value, ["a", "b", "c"], [*asked, Request("a")])
    assert found.tolist() == [[[0, 2, 0]], [[4, 0, 6]], [[7, 8, 9]]]
    assert mask_unused_rewards(value, ["a", "b", "c"], [Request("a")] * 3) is value


@pytest.mark.parametrize("combine", ["sum_of_advantages", "advantage_of_sum"])
def test_each_prompt_is_compared_by_the_reward_of_its_word(tmp_path, combine):
    cfg = groups(tmp_path, advantages={"combine": combine})
    rewards = new_rewards(redness=1.0, green=0.5)
    stream = cfg.open(new_learner(), StreamContext(rewards, 0, conditioning=WORDS))
    examples = batch_of(stream).examples
    own = {"redness": 1.0, "green": 0.5}
    for place, dim in enumerate(["redness", "green", "redness"]):
        rows = slice(4 * place, 4 * place + 4)
        value = examples["scores"][dim][rows]
        scale = own[dim] if combine == "advantage_of_sum" else 1.0
        centred = scale * (value - value.mean())
        expected = centred / (scale * value.std(correction=0) + 1e-4)
        if combine == "sum_of_advantages":
            expected = own[dim] * expected
        assert_close(examples["advantage"][rows], expected, atol=1e-4, rtol=1e-3)
    asked = stream.requests.batch(0, 3)
    lengths = [float(len(r.policy_prompt)) for r in asked for _ in range(4)]
    assert examples["cond"]["length"][:, 0].tolist() == lengths


def test_a_reward_without_weight_has_no_word(tmp_path):
    with pytest.raises(ValueError, match="names green, which no reward with a weight gives"):
        groups(tmp_path).check(context(conditioning=WORDS))


@pytest.mark.parametrize("scale", ["batch", "pooled"])
def test_a_comparison_across_prompts_is_refused(tmp_path, scale):
    run = context(rewards=new_rewards(redness=1.0, green=1.0), conditioning=WORDS)
    with pytest.raises(ValueError, match=f"recipe.data.advantages.scale {scale} compares prompts"):
        groups(tmp_path, advantages={"scale": scale}).check(run)


@pytest.mark.parametrize(
    ("words", "told"),
    [({}, "give each"), ({"green": " "}, "give each"), ({"a": "good", "b": "GOOD"}, "twice")],
)
def test_words_that_tell_no_rewards_apart_are_refused(words, told):
    with pytest.raises(ValueError, match=told):
        RewardWords(words=words)


# Guidance -----------------------------------------------------------------------------------------


class Shift(PixelPolicy):
    """A velocity that is the length of the prompt, guided like a pipeline's own guidance."""

    guidance = 3.0
    evaluations_per_velocity = 2

    def velocity(self, x, sigma, cond):
        own = cond["length"].expand(-1, 3)
        return own if self.guidance == 1 else own * self.guidance


def drawn(conditioning):
    seeds = [generator(0, "x", i) for i in range(2)]
    requests = [Request("tea"), Request("coffee")]
    policy = Shift()
    start = torch.cat([policy.noise(1, generator(0, "x", i)) for i in range(2)])
    return generate(policy, requests, 5, seeds, 2, conditioning=conditioning) - start


def test_guidance_weighs_the_prompt_with_and_without_words_by_hand():
    """The velocity moves data by -v. Words add 12; with nothing, the length is 0."""
    moved = drawn(replace(WORDS, guidance=PromptGuidance(original=5.0, conditioned=2.0)))
    expected = [-(5.0 * n + 2.0 * (n + len("<r> <green> "))) for n in (3, 6)]
    assert_close(moved, torch.tensor(expected)[:, None].expand(2, 3), rtol=1e-5, atol=1e-4)


def test_without_guidance_of_its_own_the_policy_s_acts_on_the_conditioned_prompt():
    moved = drawn(replace(WORDS, guidance=None))
    expected = [-3.0 * (n + len("<r> <green> ")) for n in (3, 6)]
    assert_close(moved, torch.tensor(expected)[:, None].expand(2, 3), rtol=1e-5, atol=1e-4)
