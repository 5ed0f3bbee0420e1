"""Which samples share which states, worked out by hand, and as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowalign.sampling.branching import BranchLayout, Chain, Comb, Tree, arrange_samples

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
        (Tree(), 6, r"has 4 leaves, but there are 6 .*\nSet recipe.sampling.samples_per_prompt"),
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


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Tree, {"children": 1}, "children is 1; it must be at least 2"),
        (Tree, {"growth": -1.0}, "growth is -1.0; it must be above -1"),
        (Tree, {"sibling_noise_scale": 0.0}, "sibling_noise_scale is 0.0; it must be above 0"),
        (Comb, {"children": 1}, "children is 1; it must be at least 2"),
    ],
)
def test_what_is_no_branching_is_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)
