"""Combs with common noise, and mixtures of outcome and sibling advantages, by hand."""

import pytest
import torch
from torch.testing import assert_close

from flowalign.credit.branch import Branch, MixedAdvantage, least_variance_share
from flowalign.credit.chain import Outcome
from flowalign.functional.advantage import advantages, compare_in_groups
from flowalign.functional.transition import FlowSDE
from flowalign.sampling import AllButLast, Chain, Comb, Sampling
from flowalign.sampling.rollout import RolloutOutputs, empty_trajectory, sample
from flowalign.types import plain_requests
from flowalign.utils.seeds import generator
from tests.fixtures.credited import Given
from tests.fixtures.pixel import PixelPolicy

COMB = Comb(children=2, common_noise=True)


def settings(branching, samples, seeds=None, steps=4) -> Sampling:
    return Sampling(
        num_steps=steps,
        samples_per_prompt=samples,
        seeds_per_prompt=seeds,
        branching=branching,
        sde_window=AllButLast(),
        kernel=FlowSDE(),
    )


def empty(cfg, prompts=("a",)):
    window = tuple(range(cfg.num_steps - 1))
    return empty_trajectory(
        cfg, window, plain_requests(prompts), torch.linspace(1, 0, cfg.num_steps + 1)
    )


def outcomes(*values: float) -> Given:
    return Given(torch.tensor(values)[:, None, None].expand(-1, 9, 1))


def test_a_comb_with_common_noise_by_hand():
    """One branch leaves the stochastic trunk, sample 3, at each of steps 0, 1 and 2."""
    rows = empty(settings(COMB, 4)).rows
    assert rows.source_row.tolist() == [
        [3, 0, 0, 0, 0],
        [3, 3, 1, 1, 1],
        [3, 3, 3, 2, 2],
        [3, 3, 3, 3, 3],
    ]
    assert rows.noise_row.tolist() == [[0, 3, 3, 3], [3, 1, 3, 3], [3, 3, 2, 3], [3, 3, 3, 3]]
    trajectory = empty(settings(COMB, 4))
    assert torch.equal(trajectory.eta > 0, torch.tensor([[True, True, True, False]] * 4))
    assert trajectory.trained.int().tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [1] * 3 + [0],
    ]


def test_a_comb_that_branches_late_trains_its_trunk_everywhere():
    """One branch at step 2; the trunk has siblings there only, and outcomes elsewhere."""
    comb = Comb(children=2, common_noise=True, splits=[2])
    trajectory = empty(settings(comb, 4, seeds=2))
    assert trajectory.trained.int().tolist() == [[0, 0, 1, 0], [1, 1, 1, 0]] * 2
    credit = MixedAdvantage(share=1.0)(trajectory, outcomes(1.0, 3.0, 4.0, 8.0)).value[..., 0]
    assert credit.tolist() == [[0, 0, -2, 0], [-5, -5, 2, 0], [0, 0, -4, 0], [5, 5, 4, 0]]


def test_branches_are_compared_with_siblings_and_trunks_elsewhere_with_each_other():
    """Two trunks, samples 1 and 3, with a branch each at step 2. Elsewhere each has the mean."""
    comb = Comb(children=2, common_noise=True, splits=[2])
    trajectory = empty(settings(comb, 4, seeds=2))
    got = Branch(compare="mixed")(trajectory, outcomes(1.0, 3.0, 4.0, 8.0))
    lead = compare_in_groups(got.value[got.mask], got.group[got.mask], "none")[:, 0]
    trained = [[0, 2], [1, 0], [1, 1], [1, 2], [2, 2], [3, 0], [3, 1], [3, 2]]
    assert got.mask.nonzero().tolist() == trained
    assert lead.tolist() == [-1, -2, -2, 1, -2, 2, 2, 2]


def test_copies_of_a_comb_use_their_own_noise():
    rows = empty(settings(COMB, 8, seeds=2)).rows
    assert rows.noise_row[4:].tolist() == (rows.noise_row[:4] + 4).tolist()


def test_wrong_counts_are_refused_with_the_right_one():
    with pytest.raises(ValueError, match="has 7 samples per initial noise, not 9"):
        settings(Comb(children=3, common_noise=True), 9).layout((0, 1, 2))


def test_siblings_differ_by_the_noise_of_one_step_only():
    """In a linear chain later common noise cancels: differences grow by the same factor."""
    cfg = settings(Comb(children=3, common_noise=True), 7)
    keep = RolloutOutputs(states=tuple(range(5)), features=(), means=False)
    requests = plain_requests(["a"])
    found = sample(PixelPolicy(), requests, cfg, (0, 1, 2), [generator(0, "noise", 0)], keep=keep)
    for k in range(3):
        branches = [2 * k, 2 * k + 1]
        ratio = [
            (found.state(end)[branches] - found.state(end)[6]) for end in (k + 1, cfg.num_steps)
        ]
        factor = ratio[1] / ratio[0]
        assert_close(factor, factor.flatten()[0].expand_as(factor), rtol=1e-3, atol=1e-4)
        assert ratio[0].abs().min() > 0


def test_common_noise_keeps_the_distribution_of_outcomes():
    """Trunk and branches are draws of the stochastic policy; ODE combs vary less."""
    spread = {}
    for name, branching, size in (
        ("chain", Chain(), 7),
        ("common", Comb(children=3, common_noise=True), 7),
        ("ode", Comb(children=3), 9),
    ):
        cfg = settings(branching, size)
        many = plain_requests(["a"] * 3000)
        seeds = [generator(1, "noise", i) for i in range(3000)]
        last = sample(PixelPolicy(), many, cfg, (0, 1, 2), seeds).state(4)
        spread[name] = last.unflatten(0, (-1, size))[:, 0].var()
    assert_close(spread["common"], spread["chain"], rtol=0.05, atol=0)
    assert spread["ode"] < 0.9 * spread["chain"]


def test_both_advantages_and_their_mixture_by_hand():
    """Two combs of one branch and a trunk; step 0: branches 0 and 2, trunks 1 and 3."""
    trajectory = empty(settings(COMB, 4, seeds=2, steps=2))
    value = outcomes(1.0, 3.0, 4.0, 8.0)
    prompt = torch.tensor([1 - 5, 3 - 13 / 3, 4 - 4, 8 - 8 / 3])
    siblings = torch.tensor([-2.0, 2.0, -4.0, 4.0])
    for share in (0.0, 0.25, 1.0):
        credit = MixedAdvantage(share=share)(trajectory, value)
        assert credit.normalised
        assert_close(credit.value[:, 0, 0], (1 - share) * prompt + share * siblings)
        assert not credit.value[:, 1].any()


def test_the_share_of_least_variance_by_hand():
    """The other prompt has A = (1, -1), S = (3, -3): d = (-2, 2), sum(A d) / sum(d^2) = -1/2 -> 0;
    reversed, A = (3, -3), S = (1, -1): d = (2, -2), 12 / 8 -> 1. A = (2, 0), S = (0, 1): 4 / 5."""
    prompt = torch.tensor([[1.0], [-1], [3], [-3], [2], [0]])
    siblings = torch.tensor([[3.0], [-3], [1], [-1], [0], [1]])
    group = torch.tensor([0, 0, 5, 5, 10, 10])

    def share(*rows):
        chosen = torch.tensor(rows)
        return least_variance_share(prompt[chosen], siblings[chosen], group[chosen], 5)[:, 0]

    assert_close(share(0, 1, 2, 3), torch.tensor([1.0, 1, 0, 0]))
    assert_close(share(0, 1, 4, 5), torch.tensor([0.8, 0.8, 0, 0]))
    assert_close(share(4, 5), torch.tensor([0.8, 0.8]), msg="a single prompt measures itself")


def test_share_0_is_flow_grpo_bit_for_bit():
    trajectory = empty(settings(Chain(), 5), ("a", "b", "c"))
    value = outcomes(*torch.rand(15, generator=torch.Generator().manual_seed(0)).tolist())
    mixed, outcome = MixedAdvantage(share=0.0)(trajectory, value), Outcome()(trajectory, value)
    one = torch.ones(1)
    found = advantages(mixed.value, mixed.group, mixed.mask, one, scale="given")
    wanted = advantages(outcome.value, outcome.group, outcome.mask, one, scale="leave_one_out")
    assert found.any()
    assert torch.equal(found, wanted)


def test_a_failed_reward_stays_with_its_sample():
    trajectory = empty(settings(COMB, 4, seeds=2, steps=2))
    credit = MixedAdvantage(share=0.5)(trajectory, outcomes(1.0, float("nan"), 4.0, 8.0))
    assert credit.value[:, 0, 0].isnan().tolist() == [False, True, False, False]


def test_chains_have_no_siblings():
    with pytest.raises(ValueError, match="drawn from the same state"):
        MixedAdvantage()(empty(settings(Chain(), 4)), outcomes(1, 2, 3, 4))
