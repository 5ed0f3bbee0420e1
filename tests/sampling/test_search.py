"""A search keeps the best states of a tree at the stated cost; unpruned it is best-of-N."""

import pytest
import torch
from torch import Tensor

from flowalign.sampling.inference import generate
from flowalign.sampling.search import Search, search
from flowalign.types import LatentReward, plain_requests
from flowalign.types.trajectory import Completion
from flowalign.utils.costs import Costs
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy

PROMPTS = ("aaaa", "b", "cc")


class Bluish(LatentReward):
    """Says how blue a noisy latent is, at a quarter of an evaluation."""

    dims, evaluation_share = ("redness",), 0.25

    def attach(self, policy):
        pass

    def score(self, x, sigma, cond):
        return x[:, 2:]


def red(x: Tensor, requests) -> Tensor:
    return x[:, 0]


def new_policy() -> PixelPolicy:
    policy = PixelPolicy()
    torch.manual_seed(2)
    torch.nn.init.normal_(policy.denoiser[-1].weight, std=0.4)
    return policy


def seeds(purpose="sample"):
    return [generator(3, purpose, i) for i in range(len(PROMPTS))]


def found(cfg: Search, costs: Costs | None = None, rate=None, size: int = 7) -> Tensor:
    policy = new_policy()
    if costs:
        costs.count(policy.denoiser)
    asked = plain_requests(PROMPTS)
    return search(policy, red, asked, cfg, 6, seeds(), size, rate)


def test_without_pruning_the_best_of_independent_samples_is_returned():
    policy, each = new_policy(), 5
    noise = torch.cat([policy.noise(each, one) for one in seeds()])
    x, cond = noise, policy.encode([r for r in plain_requests(PROMPTS) for _ in range(each)])
    sigmas = policy.schedule(6)
    for k in range(6):
        x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond).detach()
    table = x.unflatten(0, (3, each))
    best = table[torch.arange(3), table[..., 0].argmax(1)]
    torch.testing.assert_close(found(Search(width=each)), best)


def test_a_search_of_width_one_is_the_pipelines_own_sample():
    policy = new_policy()
    plain = generate(policy, plain_requests(PROMPTS), 6, seeds(), 4)
    torch.testing.assert_close(found(Search(width=1)), plain)


def test_pruning_by_whole_completions_without_branches_finds_the_best_noise():
    """The completion is the sample that the kept state leads to, so nothing is lost."""
    cfg = Search(width=6, prune=[2], keep=1, value=Completion())
    torch.testing.assert_close(found(cfg), found(Search(width=6)))


def test_branches_of_a_kept_state_differ_and_the_best_of_them_wins():
    narrow = Search(width=8, prune=[2], keep=1, value=Completion())
    wide = Search(width=8, prune=[2], keep=1, branches=8, eta=0.9, value=Completion())
    one, many = found(narrow)[:, 0], found(wide)[:, 0]
    assert not torch.equal(one, many)
    assert many.mean() > one.mean()


def test_a_latent_reward_prunes_states_as_they_are():
    cfg = Search(width=6, prune=[1], keep=1, value=Bluish())
    rated: list[Tensor] = []

    def rate(x, sigma, cond):
        rated.append(x.clone())
        return Bluish().score(x, sigma, cond)[:, 0]

    blue = found(cfg, rate=rate, size=100)
    kept = torch.cat(rated).unflatten(0, (3, 6))
    policy, sigmas = new_policy(), new_policy().schedule(6)
    x = kept[torch.arange(3), kept[..., 2].argmax(1)]
    cond = policy.encode(plain_requests(PROMPTS))
    for k in range(1, 6):
        x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond).detach()
    torch.testing.assert_close(blue, x)


def test_the_size_of_micro_batches_changes_nothing():
    cfg = Search(width=6, prune=[2, 4], keep=2, branches=3)
    torch.testing.assert_close(found(cfg, size=3), found(cfg, size=100))


def test_a_requests_tree_does_not_depend_on_the_others():
    cfg = Search(width=4, prune=[2], keep=2, branches=2)
    alone = search(new_policy(), red, plain_requests(PROMPTS[1:2]), cfg, 6, seeds()[1:2], 5)
    torch.testing.assert_close(found(cfg)[1:2], alone)


@pytest.mark.parametrize(
    ("cfg", "evaluations", "scored"),
    [
        (Search(width=5), 5 * 6, 5),
        (Search(width=8, prune=[2], keep=2), 8 * 3 + 2 * 3, 8 + 2),  # the third velocity is shared
        (Search(width=8, prune=[2], keep=2, value=Completion()), 8 * 6 + 2 * 3, 8 + 2),
        (Search(width=8, prune=[2, 4], keep=2, branches=3), 8 * 3 + 6 * 3, 8 + 6 + 6),
        (Search(width=8, prune=[2], keep=2, branches=3, value=Bluish()), 8 * 2 + 2 + 6 * 3, 6),
    ],
)
def test_a_search_costs_what_was_planned(cfg, evaluations, scored):
    costs, shown, rated = Costs(), [], []

    def score(x, requests):
        assert len(x) == len(requests)
        shown.append(len(x))
        return x[:, 0]

    def rate(x, sigma, cond):
        rated.append(len(x))
        return x[:, 2]

    policy = new_policy()
    costs.count(policy.denoiser)
    latent = isinstance(cfg.value, LatentReward)
    asked = plain_requests(PROMPTS)
    search(policy, score, asked, cfg, 6, seeds(), 5, rate if latent else None)
    planned = cfg.cost(6, 1)
    assert (planned.evaluations, planned.scored) == (evaluations, scored)
    assert costs.network_evaluations == 3 * evaluations
    assert sum(shown) == 3 * scored
    assert sum(rated) == 3 * planned.rated == (24 if latent else 0)
    assert planned.samples(6, 1) == pytest.approx((evaluations + latent * 8 * 0.25) / 6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prune": [4, 2]}, "rising"),
        ({"prune": [2], "keep": 8}, "keeps 8 of 8"),
        ({"prune": [2], "keep": 3, "branches": 3}, "no more branches"),
        ({"prune": [2, 4], "keep": 2}, "second pruning drops nothing"),
        ({"keep": 2}, "prune is empty"),
        ({"prune": [2], "value": Completion(weights="ema")}, "leave out weights and guidance"),
    ],
)
def test_trees_that_prune_nothing_or_grow_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Search(width=8, **settings)


def test_prunings_beyond_the_sampler_are_refused():
    with pytest.raises(ValueError, match="after 1 to 5 steps"):
        Search(width=8, prune=[6]).check(6)
