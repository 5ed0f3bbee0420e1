"""Ratios of chunks in the loop: the update is that of the mean over chunks."""

import math
from dataclasses import dataclass, replace

import pytest
import torch

from flowalign.functional.surrogate import ppo_clip
from flowalign.functional.transition import log_density
from flowalign.losses.policy_gradient.grpo import GRPO, DivergenceMask, LogHinge, PPOClip, RatioNorm
from flowalign.training.policy_gradient.batches import join_chunks, minibatches
from flowalign.training.policy_gradient.policy_gradient_loop import update
from flowalign.types import CreditEstimator, StepCredit
from flowalign.types.trajectory import prompt_step_ids
from tests.fixtures.credited import judged
from tests.fixtures.training import ALONE, new_learner, new_recipe, rise, train

THREE = ["a", "bb", "ccc"]


@dataclass(frozen=True)
class Own(CreditEstimator):
    """Every step of every sample earns something else."""

    def __call__(self, trajectory, values):
        final = values([trajectory.num_steps])
        generator = torch.Generator().manual_seed(3)
        value = torch.randn(len(final), 4, 1, generator=generator) ** 3
        value = value.expand(-1, -1, final.shape[-1])
        return StepCredit(value, prompt_step_ids(trajectory), trajectory.trained)


def made(algorithm, **recipe):
    learner, cfg = new_learner(), new_recipe(algorithm=algorithm, credit=Own(), **recipe)
    return learner, cfg, judged(cfg, learner)[0]


def gradients(learner, cfg, batch):
    """Gradients of each update of a step; between updates the weights change by equal amounts."""
    got, generator = [], torch.Generator().manual_seed(7)

    def step():
        got.append(torch.cat([p.grad.flatten() for p in learner.parameters]))
        learner.num_updates += 1
        with torch.no_grad():
            for p in learner.parameters:
                p.grad = None
                p.add_(0.03 * torch.randn(p.shape, generator=generator))
        return {}

    learner.step = step
    update(cfg, learner, batch, 0, 0)
    return got


def log_ratios(policy, batch):
    """[12, 3], with gradient."""
    fields = batch.fields(policy, policy)
    columns = [
        log_density(fields.kernel, part["x_next"], fields.transition(policy, part))
        - part["logp_old"]
        for part in minibatches(batch, torch.arange(12), 100)
    ]
    return torch.stack(columns, 1)


@pytest.mark.parametrize("micro_batch", [5, 64])
def test_each_update_is_the_gradient_of_the_mean_over_chunks(micro_batch):
    """Steps 0 and 1 are one chunk, step 2 is another; clips bind in the second update."""
    clip = 0.02
    algorithm = GRPO(PPOClip(clip), chunk_sizes=[2, 1])
    learner, cfg, batch = made(algorithm, epochs_per_step=2, micro_batch=micro_batch)
    _, _, single = made(GRPO(PPOClip(clip)))
    advantage = torch.stack([single.advantage[:, :2].mean(1), single.advantage[:, 2]], 1)
    wanted, bound = [], []
    twin = new_learner()

    def recorded():
        log_ratio = log_ratios(twin.policy, batch)
        joined = torch.stack([log_ratio[:, :2].mean(1), log_ratio[:, 2]], 1).flatten()
        loss = ppo_clip(joined, advantage.flatten(), clip).mean()
        grads = torch.autograd.grad(loss, twin.parameters)
        wanted.append(torch.cat([g.flatten() for g in grads]))
        bound.append(int(((joined.exp() - 1).abs() > clip).sum()))

    got = gradients(learner, cfg, batch)
    generator = torch.Generator().manual_seed(7)
    recorded()
    with torch.no_grad():
        for p in twin.parameters:
            p.add_(0.03 * torch.randn(p.shape, generator=generator))
    recorded()
    assert bound[0] == 0
    assert 0 < bound[1] < 24
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_the_log_ratios_of_others_are_computed_only_once_weights_have_moved():
    def calls(algorithm, epochs):
        learner, cfg, batch = made(algorithm, epochs_per_step=epochs)
        count, velocity = [], learner.policy.velocity
        learner.policy.velocity = lambda x, s, c: count.append(len(x)) or velocity(x, s, c)
        update(cfg, learner, batch, 0, 0)
        return sum(count)

    chunks = GRPO(PPOClip(0.2), chunk_sizes=[2])
    assert calls(chunks, 1) == calls(GRPO(PPOClip(0.2)), 1) == 36
    assert calls(chunks, 3) == (3 + 2) * 36


def test_what_is_not_trained_is_no_part_of_a_chunk():
    _, _, single = made(GRPO(PPOClip(0.2)))
    mask = single.mask.clone()
    mask[4, 0] = False
    batch = join_chunks(single.with_samples(mask=mask), [3], ALONE)
    k1 = list(minibatches(batch, torch.arange(12), 100))[1]
    assert k1["chunk_size"].tolist() == [3] * 4 + [2] + [3] * 7
    mean = single.advantage[:, :3].mean(1)
    mean[4] = single.advantage[4, 1:3].mean()
    torch.testing.assert_close(k1["advantage"], mean)
    assert batch.advantage[4, 0] == 0


def test_boundaries_come_from_the_states_of_everyone():
    """States grow by 1/2, 1/4, 3/4 of themselves on average, then by 1/8."""
    _, _, single = made(GRPO(PPOClip(0.2)))
    size = torch.tensor([1.0, 1.5, 1.875, 3.28125, 3.69140625])
    states = size[:, None].expand(12, 5, 3).clone()
    kept = dict(enumerate(states.unbind(1)))
    single = replace(single, trajectory=replace(single.trajectory, states=kept))
    assert join_chunks(single, "latent_change", ALONE).steps["chunk"].tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize("surrogate", [PPOClip(0.2), LogHinge(0.2)])
@pytest.mark.parametrize("sizes", [[1, 2], "latent_change"], ids=str)
@pytest.mark.slow
def test_chunks_raise_a_reward_that_can_be_learned(surrogate, sizes):
    cfg = new_recipe(
        {"samples_per_prompt": 8}, algorithm=GRPO(surrogate, chunk_sizes=sizes), epochs_per_step=2
    )
    metrics = train(cfg, new_learner(learning_rate=3e-2), steps=12)
    assert rise(metrics) > 0.3
    assert all(math.isfinite(v) for m in metrics for v in m.values())


@pytest.mark.parametrize("surrogate", [RatioNorm(), DivergenceMask()])
def test_chunks_are_refused_where_the_trust_region_looks_at_single_steps(surrogate):
    with pytest.raises(ValueError, match=type(surrogate).__name__):
        GRPO(surrogate, chunk_sizes=[2])


@pytest.mark.parametrize("sizes", [[], [2, 0], [-1]])
def test_chunks_of_nothing_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        GRPO(PPOClip(), chunk_sizes=sizes)
