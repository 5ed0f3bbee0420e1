"""A regulariser on stored samples: no effect at weight 0, otherwise gradients add up."""

from dataclasses import replace

import pytest
import torch

from flowalign.gradient_paths import DRaFT
from flowalign.losses import DPO, NFT, SFT
from flowalign.rewards.composite import Rewards
from flowalign.training.matching import StoredDataset, Uniform
from flowalign.training.matching.matching_loop import MatchingLoop
from flowalign.training.matching.regulariser import Regulariser
from flowalign.training.matching.source import StreamContext
from flowalign.training.recipe import RunContext
from flowalign.training.reward_gradient import FromRollouts, RewardGradient
from tests.fixtures.pixel import PixelPolicy, SmoothRedness
from tests.fixtures.preference import painted
from tests.fixtures.training import PROMPTS, flat, new_learner, trained_policy

SEED = 5


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Six pairs; a step takes four."""
    return StoredDataset(path=painted(tmp_path), batch_size=4)


def recipe(prompts, regulariser=None, **changes):
    given = {"prompts_per_step": 3, "micro_batch": 8, "start": FromRollouts(num_steps=4)}
    return RewardGradient(
        prompts=prompts, gradient_path=DRaFT(), regulariser=regulariser, **given | changes
    )


def opened(cfg, tmp_path, learner=None):
    learner = learner or new_learner(trained_policy(3, std=0.3))
    rewards = Rewards([SmoothRedness()], {"redness": 1.5})
    run = RunContext(policy=learner.policy, rewards=rewards, num_steps=3, seed=SEED)
    cfg.check(run)
    return learner, cfg.open(run, learner, tmp_path, lambda _: None)


def gradients(cfg, tmp_path):
    """Gradients before the first update, and the logged metrics."""
    learner, loop = opened(cfg, tmp_path)
    learner.step = dict
    metrics = next(iter(loop.run([0])))
    return of(learner), metrics


def of(learner):
    return torch.cat([p.grad.flatten() for p in learner.parameters])


def sft_alone(regulariser):
    """The gradient of the preference loop's own first update on these data."""
    learner = new_learner(trained_policy(3, std=0.3))
    stream = regulariser.data.open(learner, StreamContext(Rewards([], {}), SEED))
    learner.step = dict
    loop = MatchingLoop(regulariser.matching, learner, stream, SEED)
    metrics = next(iter(loop.run([0])))
    return of(learner), metrics["policy_loss"]


def test_at_weight_0_a_run_is_what_it_is_without_to_the_bit(prompts, data, tmp_path):
    weights = []
    for regulariser in (None, Regulariser(data=data, weight=0.0)):
        learner, loop = opened(recipe(prompts, regulariser), tmp_path)
        assert not any("regulariser" in metrics for metrics in loop.run(range(3)))
        weights.append(flat(learner.policy.denoiser))
    assert torch.equal(*weights)


@pytest.mark.parametrize("loss", [SFT(), DPO(beta=20.0)], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("micro_batch", [1, 32])
def test_with_a_weight_the_gradient_is_the_sum(prompts, data, tmp_path, loss, micro_batch):
    regulariser = Regulariser(
        data=data, weight=0.3, loss=loss, times=Uniform(), micro_batch=micro_batch
    )
    rewards, _ = gradients(recipe(prompts), tmp_path)
    alone, mean_loss = sft_alone(regulariser)
    both, metrics = gradients(recipe(prompts, regulariser), tmp_path)
    torch.testing.assert_close(both, rewards + 0.3 * alone, rtol=1e-5, atol=1e-7)
    assert metrics["regulariser"] == pytest.approx(mean_loss, rel=1e-5)
    assert min(float(rewards.abs().max()), float(alone.abs().max())) > 1e-3


def test_media_of_every_step_are_others_and_follow_from_the_seed(prompts, data, tmp_path):
    """A run resumed at step 2 gets the same samples as the whole run at this step."""
    cfg = recipe(prompts, Regulariser(data=data, times=Uniform()), on_failed_check="warn")
    _, loop = opened(cfg, tmp_path, new_learner(trained_policy(3, std=0.3), learning_rate=1e-9))
    seen = [metrics["regulariser"] for metrics in loop.run(range(4))]
    assert len(set(seen)) == 4
    _, later = opened(cfg, tmp_path, new_learner(trained_policy(3, std=0.3), learning_rate=1e-9))
    again = [metrics["regulariser"] for metrics in later.run([2, 3])]
    assert again == pytest.approx(seen[2:], rel=1e-5)


@pytest.mark.slow
def test_it_holds_the_policy_near_the_media(prompts, data, tmp_path):
    """Pairs are red and blue; the reward prefers red, and stored samples of both pull back."""
    errors = []
    for weight in (0.0, 30.0):
        stored = Regulariser(data=data, weight=weight, loss=SFT(on="all"), times=Uniform())
        learner, loop = opened(
            recipe(prompts, stored),
            tmp_path,
            new_learner(trained_policy(3, std=0.3), learning_rate=1e-2),
        )
        list(loop.run(range(20)))
        errors.append(sft_of(learner, stored))
    assert errors[1] < 0.8 * errors[0]


def sft_of(learner, stored):
    stream = stored.data.open(learner, StreamContext(Rewards([], {}), 9))
    learner.step = dict
    return next(iter(MatchingLoop(stored.matching, learner, stream, 9).run([0])))["policy_loss"]


def test_the_plan_counts_the_media_and_their_activations(prompts, data):
    policy = PixelPolicy()
    rewards = Rewards([SmoothRedness()], {"redness": 1.0})
    run = RunContext(policy=policy, rewards=rewards, num_steps=3)
    plain = recipe(prompts).plan(run, policy.plan(), 1)
    stored = recipe(prompts, Regulariser(data=data, micro_batch=16)).plan(run, policy.plan(), 1)
    more = {"training on stored media": 8}
    assert stored.work == plain.work.plus(more)
    assert (plain.evaluations_per_example, stored.evaluations_per_example) == (1, 4)
    added = {part.name: part.num_bytes for part in stored.parts if part not in plain.parts}
    assert added == {"latents": 4 * 8 * 3, "noise": 4 * 4 * 3}


REFUSED = {
    "no such file": ({"path": "nowhere.jsonl"}, {}, "'nowhere.jsonl' does not exist"),
    "pairs for a loss of pairs": (
        {"kind": "samples"},
        {"loss": DPO()},
        "recipe.data gives samples",
    ),
    "advantages that media do not have": ({}, {"loss": NFT()}, "NFT needs advantage, which"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_regularise_is_refused_before_anything_is_loaded(prompts, data, case):
    of_data, changes, message = REFUSED[case]
    cfg = recipe(prompts, Regulariser(data=replace(data, **of_data), **changes))
    rewards = Rewards([SmoothRedness()], {"redness": 1.0})
    with pytest.raises(ValueError, match=message) as caught:
        cfg.check(RunContext(policy=PixelPolicy(), rewards=rewards, num_steps=3))
    assert str(caught.value).startswith("in recipe.regulariser: ")


def test_a_batch_that_does_not_reach_all_processes_is_refused(prompts, data):
    cfg = recipe(prompts, Regulariser(data=replace(data, batch_size=2)))
    rewards = Rewards([SmoothRedness()], {"redness": 1.0})
    run = RunContext(policy=PixelPolicy(), rewards=rewards, num_steps=3)
    with pytest.raises(ValueError, match=r"in recipe\.regulariser: recipe\.data gives 2 pairs"):
        cfg.plan(run, PixelPolicy().plan(), 3)


def test_held_out_pairs_are_refused(data):
    with pytest.raises(ValueError, match=r"regulariser\.data\.held_out is .*never evaluated"):
        Regulariser(data=replace(data, held_out="more.jsonl"))


def test_check_reads_the_stored_rows_and_names_the_regulariser(prompts, tmp_path):
    """Rows of single images do not fit a policy of clips."""
    cfg = recipe(prompts, Regulariser(data=StoredDataset(path=painted(tmp_path), batch_size=4)))
    policy = trained_policy(3, std=0.3)
    rewards = Rewards([SmoothRedness()], {"redness": 1.5})
    run = RunContext(policy=policy, rewards=rewards, num_steps=3, seed=SEED)
    cfg.check_data(run)
    policy.num_frames = 9
    with pytest.raises(ValueError, match=r"in recipe\.regulariser: [\s\S]*1 of 9 frames"):
        cfg.check_data(run)
