"""Pairs of denoising steps: who is paired where, with which weight, and what is trained."""

from dataclasses import replace

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.credit import Branch, Gain
from flowalign.data.preference.preference_data import BestWorst, Dominance, Gap
from flowalign.functional.noise_matching import step_at
from flowalign.sampling import Comb, Fixed, NoSteps
from flowalign.sampling.sampling_settings import StochasticSampling
from flowalign.training.matching import Rollouts, SamplerGrid
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.rollouts import count_pairs, pair_steps, weigh_gaps
from flowalign.training.matching.source import StreamContext
from flowalign.training.rollouts.collecting import compute_credit
from flowalign.types.trajectory import Completion
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import recipe
from tests.fixtures.training import PROMPTS, new_learner, new_rewards

COMB = StochasticSampling(
    eta=0.8,
    seeds_per_prompt=1,
    sde_window=Fixed(0, 2),
    branching=Comb(children=2),
)
CHAIN = StochasticSampling(eta=0.8, sde_window=Fixed(0, 2))


def rollouts(folder, sampling=COMB, **changes) -> Rollouts:
    """Three prompts of four samples, four denoising steps with noise at the first two."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    given = {"prompts": str(prompts), "prompts_per_step": 3, "samples_per_prompt": 4}
    own = {"num_steps": 4, "credit": Branch(), "sampling": sampling}
    return Rollouts(**given | own | changes)


def opened(cfg: Rollouts, seed: int = 0):
    return cfg.open(new_learner(), StreamContext(new_rewards(), seed))


# Pairs of steps -----------------------------------------------------------------------------------

ADVANTAGE = tensor([[3.0, 0.0], [1.0, 5.0], [-1.0, 4.0], [-2.0, 7.0]])
EVERYONE = torch.ones(4, 2, dtype=torch.bool)
STEPS = torch.arange(2).expand(4, 2)


def pairs_of(rule, group=STEPS, mask=EVERYONE, advantage=ADVANTAGE):
    found = pair_steps(rule, advantage[..., None], advantage, group, mask)
    named = zip(found.winner.tolist(), found.loser.tolist(), found.gap.tolist(), strict=True)
    return {(winner, loser): gap for winner, loser, gap in named}


def test_each_step_pairs_the_best_with_the_worst_of_its_group():
    assert pairs_of(BestWorst()) == {(0, 3): [5.0, 0.0], (3, 0): [0.0, 7.0]}
    siblings = tensor([[0, 2], [0, 3], [1, 2], [1, 3]])
    assert pairs_of(BestWorst(), siblings) == {
        (0, 1): [2.0, 0.0],
        (2, 3): [1.0, 0.0],
        (2, 0): [0.0, 4.0],
        (3, 1): [0.0, 2.0],
    }


def test_samples_that_meet_in_the_same_order_at_several_steps_are_one_pair():
    found = pairs_of(Gap(min_gap=2.0))
    assert found[1, 2] == [2.0, 0.0]  # at step 1 the lead is below the least gap
    assert found[1, 0] == [0.0, 5.0]
    assert pairs_of(Gap(), advantage=ADVANTAGE[:, :1].expand(4, 2))[0, 3] == [5.0, 5.0]


def test_masked_transitions_and_ties_are_not_paired():
    mask = EVERYONE.clone()
    mask[0, 0] = mask[3, :] = False
    assert pairs_of(BestWorst(), mask=mask) == {(1, 2): [2.0, 0.0], (1, 0): [0.0, 5.0]}
    nobody = pairs_of(BestWorst(), advantage=torch.ones(4, 2))
    assert nobody == {}
    empty = pair_steps(BestWorst(), torch.ones(4, 2, 1), torch.ones(4, 2), STEPS, EVERYONE)
    assert empty.gap.shape == (0, 2)


def test_dominance_compares_the_credit_of_every_dimension():
    credit = tensor([[[2.0, 1.0]], [[1.0, 3.0]], [[0.0, 0.0]]])
    found = pair_steps(Dominance(), credit, credit.sum(-1), STEPS[:3, :1], EVERYONE[:3, :1])
    assert sorted(zip(found.winner.tolist(), found.loser.tolist(), strict=True)) == [(0, 2), (1, 2)]


def test_weights_are_gaps_over_their_mean_or_equal():
    gap = tensor([[5.0, 0.0], [0.0, 7.0]])
    assert_close(weigh_gaps(gap, 6.0, "gap"), tensor([[5 / 6, 0.0], [0.0, 7 / 6]]))
    assert weigh_gaps(gap, 6.0, "equal").tolist() == [[1, 0], [0, 1]]
    assert weigh_gaps(torch.zeros(0, 2), 0.0, "gap").shape == (0, 2)


def test_the_largest_number_of_pairs_counts_every_step_and_group():
    siblings = tensor([[0, 2], [0, 3], [1, 2], [1, 3]])
    assert count_pairs(BestWorst(), siblings, EVERYONE) == 4
    assert count_pairs(Gap(), STEPS, EVERYONE) == 12
    mask = EVERYONE.clone()
    mask[:, 1] = False
    assert count_pairs(Gap(), STEPS, mask) == 6


# Batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sampling", "credit"), [(COMB, Branch()), (CHAIN, Gain())])
def test_a_batch_has_the_winners_and_losers_of_each_step(tmp_path, sampling, credit):
    cfg = rollouts(tmp_path, sampling, credit=credit)
    stream = opened(cfg)
    batch = stream.batch(0)
    values = opened(cfg).rollouts.sample(stream.requests.batch(0, 3), 0)
    earned = compute_credit(cfg.rollouts, values)
    total = earned.value[..., 0].masked_fill(~earned.mask, torch.nan)
    wanted = {}
    for k in range(2):
        for label in earned.group[earned.mask[:, k], k].unique():
            rows = (earned.mask[:, k] & (earned.group[:, k] == label)).nonzero()[:, 0]
            best, worst = rows[total[rows, k].argmax()], rows[total[rows, k].argmin()]
            wanted[int(best), int(worst), k] = float(total[best, k] - total[worst, k])
    latents, count = values.trajectory.state(4), batch.total
    same = (batch.examples["latents"][:, None] == latents).all(-1).float().argmax(1)
    found = {
        (int(same[i]), int(same[i + count]), k): float(batch.steps.weight[i, k])
        for i, k in batch.steps.trained.nonzero().tolist()
    }
    assert found.keys() == wanted.keys()
    mean = sum(wanted.values()) / len(wanted)
    for key, gap in wanted.items():
        assert found[key] == pytest.approx(gap / mean, rel=1e-4)
    assert len(wanted) == cfg.examples_per_step == 6
    assert batch.metrics["pair_gap"] == pytest.approx(mean, rel=1e-4)
    assert "pair" in batch.examples
    assert batch.examples["desirable"].tolist() == [True] * count + [False] * count
    lengths = batch.examples["cond"]["length"][:, 0]
    assert torch.equal(lengths[:count], lengths[count:])


def test_a_pair_of_a_comb_shares_the_prefix_of_its_step_only(tmp_path):
    stream = opened(rollouts(tmp_path))
    values = stream.rollouts.sample(stream.requests.batch(0, 3), 0)
    credit = compute_credit(stream.cfg, values)
    pairs = stream._pairs(credit, stream.rollouts.estimate(values, credit))
    for winner, loser, gap in zip(pairs.winner, pairs.loser, pairs.gap, strict=True):
        (k,) = gap.nonzero()[:, 0].tolist()
        source = values.trajectory.rows.source_row
        assert (source[winner] == source[loser]).tolist() == [j <= k for j in range(5)]


def test_pairs_have_only_the_noise_levels_of_their_steps_with_their_weights(tmp_path):
    batch = opened(rollouts(tmp_path)).batch(0)
    steps = batch.steps
    cfg = recipe(times=SamplerGrid(num_steps=4, distinct=True), times_per_sample=4)
    levels = noise_for(cfg, PixelPolicy(), batch.examples, 0, (0, 0, 0), steps)
    data = levels.all()
    k = step_at(levels.sigma, steps.sigmas)
    assert len(levels) == int(steps.trained.sum()) == 6
    assert bool(steps.trained[levels.index, k].all())
    expected = steps.weight[levels.index, k]
    assert_close(data["weight"], torch.cat([expected, expected]))
    assert len(expected.unique()) == 6
    assert "advantage" not in data


def test_equal_weights_and_a_least_gap_select_steps_instead(tmp_path):
    gaps = opened(rollouts(tmp_path)).batch(0)
    mean = gaps.metrics["pair_gap"]
    leads = gaps.steps.weight[gaps.steps.trained] * mean
    least = float(leads.sort().values[2:4].mean())
    few = rollouts(tmp_path, step_weight="equal", rule=BestWorst(min_gap=least))
    batch = opened(few).batch(0)
    assert int(batch.steps.trained.sum()) == 3
    assert batch.steps.weight[batch.steps.trained].tolist() == [1.0] * 3


# Settings -----------------------------------------------------------------------------------------


def test_settings_that_credit_needs_or_does_not_read_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"sampling is StochasticSampling, but recipe\.data\.credit"
    ):
        rollouts(tmp_path, credit=None)
    quiet = replace(COMB, branching=CHAIN.branching, sde_window=NoSteps())
    with pytest.raises(ValueError, match=r"sampling\.sde_window has none: choose"):
        rollouts(tmp_path, quiet)
    with pytest.raises(ValueError, match="Branch compares samples that were drawn"):
        rollouts(tmp_path, CHAIN)
    with pytest.raises(ValueError, match=r"eta has 3 levels for 4 steps"):
        rollouts(tmp_path, replace(CHAIN, eta=[0.1, 0.2, 0.3]), credit=Gain())
    rollouts(tmp_path, replace(CHAIN, eta=[0.1, 0.2, 0.3, 0.4]), credit=Gain())
    assert rollouts(tmp_path, None, credit=Gain()).rollouts.window(0) == (0, 1, 2)


def test_completions_of_the_credit_method_are_planned(tmp_path):
    cfg = rollouts(tmp_path, CHAIN, credit=Gain(), completion=Completion(max_steps=1))
    assert {k for k, _ in cfg.rollouts.requested((0, 1))} == {0, 1, 4}
