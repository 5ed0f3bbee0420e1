"""Which samples share which states, worked out by hand, and as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowalign.sampling.branching import BranchLayout, Chain, Comb, Tree, arrange_samples
from flowalign.sampling.inference import generate
from flowalign.sampling.search import Search, search
from flowalign.types import LatentReward, plain_requests
from flowalign.types.trajectory import Completion
from flowalign.utils.costs import Costs
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy

quick = settings(max_examples=80, deadline=None, database=None)


def eta(*levels: float) -> torch.Tensor:
    return torch.tensor(levels)


def test_a_tree_of_two_splits_by_hand():
    """Splits at 0 and 2 of four steps; step 1 is stochastic without a split, step 3 an ODE step."""
    got = Tree(splits=[2, 0]).seed_layout(4, eta(0.5, 0.6, 0.7, 0.0))
    assert got.rows.source_row.tolist() == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 2, 2, 2, 2],
        [0, 2, 2, 3, 3],
    ]
    assert torch.equal(got.eta, eta(0.5, 0.6, 0.7, 0.0).expand(4, -1))


def test_a_comb_by_hand():
    """Two children leave at steps 1 and 2 of four; the last sample carries the spine up to 2."""
    got = Comb(children=2).seed_layout(4, eta(0.0, 0.6, 0.7, 0.0))
    assert got.rows.source_row.tolist() == [
        [3, 3, 0, 0, 0],
        [3, 3, 1, 1, 1],
        [3, 3, 3, 2, 2],
        [3, 3, 3, 3, 3],
    ]
    assert torch.equal(got.eta, torch.tensor([[0, 0.6, 0, 0]] * 2 + [[0, 0, 0.7, 0]] * 2))


def test_chains_from_one_noise_share_what_is_before_the_first_noise():
    got = Chain().seed_layout(3, eta(0.0, 0.6, 0.7))
    assert got.rows.source_row.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 2, 2]]


def test_seeds_repeat_the_arrangement():
    got = arrange_samples(Chain(), 4, 2, eta(0.3, 0.0))
    assert got.rows.source_row.tolist() == [[0, 0, 0], [0, 1, 1], [2, 2, 2], [2, 3, 3]]
    alone = arrange_samples(Chain(), 3, 3, eta(0.3, 0.0))
    assert alone.rows.source_row.tolist() == [[0] * 3, [1] * 3, [2] * 3]


def test_deeper_splits_are_louder_by_the_growth():
    """a (1 + growth depth / 2) at depths 0, 1, 2; steps after the last split keep its level."""
    got = Tree(children=2, growth=0.5, splits=[0, 2, 3]).seed_layout(8, eta(*[0.4] * 5))
    wanted = eta(0.4, 0.5, 0.5, 0.6, 0.6)
    torch.testing.assert_close(got.eta, wanted.expand(8, -1))


ARRANGED = st.one_of(
    st.tuples(st.builds(lambda c: Tree(children=c), st.integers(2, 3)), st.just("tree")),
    st.tuples(st.builds(lambda c: Comb(children=c), st.integers(2, 4)), st.just("comb")),
    st.tuples(st.just(Chain()), st.just("chain")),
)


def prepare_for_loss(branching, window, seeds) -> BranchLayout:
    levels = torch.tensor([0.5 if noisy else 0.0 for noisy in window])
    count = sum(window)
    size = {Tree: lambda b: b.children**count, Comb: lambda b: b.children * count}
    one = size.get(type(branching), lambda _: 3)(branching)
    return arrange_samples(branching, one * seeds, seeds, levels)


@quick
@given(
    ARRANGED,
    st.lists(st.booleans(), min_size=2, max_size=5).filter(any),
    st.integers(1, 3),
)
def test_what_every_arrangement_keeps_to(kind, window, seeds):
    got = prepare_for_loss(kind[0], window, seeds)
    rows = torch.arange(len(got.rows.source_row))
    for k in range(len(window) + 1):
        origin = got.rows.source_row[:, k]
        assert torch.equal(origin[origin], origin), "a holder holds its own state"
        if k:
            earlier = got.rows.source_row[:, k - 1]
            assert torch.equal(earlier[origin], earlier), "who shares a state shared all before"
            shared = origin != rows
            assert torch.equal(got.eta[shared, k - 1], got.eta[origin[shared], k - 1])
    assert len(got.rows.source_row[:, 0].unique()) == seeds
    assert (got.eta.amax(0) > 0).tolist() == window
    own = (got.rows.source_row[:, 1:] == rows[:, None]) & (got.eta > 0)
    assert own.any(1).all() or kind[1] == "tree", "every sample has a transition of its own"


@pytest.mark.parametrize(
    ("branching", "samples", "message"),
    [
        (Tree(), 6, r"has 4 samples .* not 6.\nSet recipe.sampling.samples_per_prompt"),
        (Tree(splits=[0, 3]), 4, r"splits at \[3\], which the window does not make stochastic"),
        (Comb(children=3), 8, r"has 6 samples per initial noise, not 8"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_change(branching, samples, message):
    with pytest.raises(ValueError, match=message):
        arrange_samples(branching, samples, 1, eta(0.5, 0.5, 0.0, 0.0))


def test_seeds_must_divide_the_samples():
    with pytest.raises(ValueError, match="is 5, which seeds_per_prompt 2 does not divide"):
        arrange_samples(Chain(), 5, 2, eta(0.5, 0.0))


# A search keeps the best states of a tree at the stated cost; unpruned it is best-of-N ------------


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
