"""Credit of trees, combs and coarse completions against arithmetic by hand and recordings."""

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from flowalign.credit.branch import Branch, LeafAdvantage, fuse_branches, mask_extremes
from flowalign.credit.chain import ControlVariate, Granular, estimate_slope
from flowalign.credit.contrast import Contrast, contrast
from flowalign.functional.advantage import group_center
from flowalign.functional.transition import FlowSDE, log_density, sample_next, transition
from flowalign.sampling import AllButLast, Chain, Comb, Fixed, Sampling, Tree
from flowalign.sampling.rollout import empty_trajectory
from flowalign.training.rollouts.rollout_settings import CreditRequirements
from flowalign.types import PastOutcomes, Trajectory, ValueFunction, plain_requests
from flowalign.types.trajectory import Completion
from tests.fixtures.credited import Given
from tests.fixtures.golden import GOLDEN, load

NAN = float("nan")
HAND = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 2, 2, 2], [0, 2, 3, 3]])
"""Two splits: 0 and 1 part at step 1, 2 and 3 as well, the pairs at step 0; step 2 changes none."""


def trajectory(branching=None, prompts=("a",), window=None, **sampling) -> Trajectory:
    cfg = Sampling(
        **{"num_steps": 3, "branching": branching or Chain(), "sde_window": window or AllButLast()}
        | sampling
    )
    steps = cfg.sde_window.steps(cfg.num_steps, 0, torch.Generator())
    return empty_trajectory(
        cfg, steps, plain_requests(prompts), torch.linspace(1, 0, cfg.num_steps + 1)
    )


def outcomes(*values: float) -> Given:
    return Given(lambda ks: torch.tensor(values).float()[:, None, None].expand(-1, len(ks), 1))


# Fusion -------------------------------------------------------------------------------------------


def test_uniform_fusion_by_hand():
    got = fuse_branches(torch.tensor([[1.0], [3.0], [4.0], [8.0]]), HAND, torch.zeros(4, 3))[..., 0]
    assert got.tolist() == [[2, 1, 1], [2, 3, 3], [6, 4, 4], [6, 8, 8]]


def test_fusion_by_probability_by_hand():
    """The transitions of step 1 have log-probabilities ln 1, ln 3, and ln 2, ln 2 times beta 1."""
    logp = torch.zeros(4, 3)
    logp[:, 1] = torch.tensor([1.0, 3.0, 2.0, 2.0]).log()
    got = fuse_branches(torch.tensor([[1.0], [3.0], [4.0], [8.0]]), HAND, logp, beta=1.0)[..., 0]
    assert_close(got, torch.tensor([[2.5, 1, 1], [2.5, 3, 3], [6, 4, 4], [6, 8, 8]]))
    squared = fuse_branches(torch.tensor([[1.0], [3.0], [4.0], [8.0]]), HAND, logp, beta=2.0)[
        ..., 0
    ]
    assert_close(squared[:2, 0], torch.tensor([2.8, 2.8]))


def recorded_tree(i: int):
    """The recording in our layout: its holder by leaf and state, and the reached node by leaf and
    step."""
    t = load_file(GOLDEN / "E_branchgrpo.safetensors")
    t = {k.removeprefix(f"tree{i}."): v for k, v in t.items() if k.startswith(f"tree{i}.")}
    paths = []
    for leaf in t["leaf"].tolist():
        path = [leaf]
        while t["parent"][path[0]] >= 0:
            path.insert(0, int(t["parent"][path[0]]))
        paths.append(path)
    nodes = torch.tensor(paths)
    origin = torch.stack(
        [
            torch.tensor([column.tolist().index(node) for node in column.tolist()])
            for column in nodes.unbind(1)
        ],
        1,
    )
    return t, nodes, origin


@pytest.mark.parametrize("tree", [0, 1, 2])
@pytest.mark.parametrize(("name", "beta"), [("uniform", None), ("prob", 1.0)])
def test_fusion_and_depth_wise_advantages_are_branchgrpos(tree, name, beta):
    t, nodes, origin = recorded_tree(tree)
    reached = nodes[:, 1:]
    got = fuse_branches(t["leaf_reward"][:, None], origin, t["log_prob"][reached], beta)
    assert_close(got[..., 0], t[f"{name}.value"][reached], rtol=1e-5, atol=1e-6)
    for k in range(reached.shape[1]):
        own = (origin[:, k + 1] == torch.arange(len(origin))).nonzero().flatten()
        depth = torch.zeros(len(own), dtype=torch.long)
        advantage = group_center(got[own, k], depth, "group", eps=1e-8, correction=1)
        wanted = t[f"{name}.advantage"][reached[own, k]]
        assert_close(advantage[:, 0], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("k", [0, 4, 8])
def test_the_children_of_a_comb_are_tempflows_branches(k):
    t = load("E_tempflow_branch", f"k{k}.")
    x, v = (t[name].expand(6, -1, -1, -1) for name in ("x", "v"))
    noisy = transition(FlowSDE(), x, v, t["sigmas"], k, torch.full((6,), 0.7))
    children = sample_next(noisy, t["eps"])
    assert_close(children, t["branches"], rtol=1e-5, atol=1e-5)
    assert_close(log_density(FlowSDE(), children, noisy), t["logp"], rtol=1e-5, atol=2e-5)
    spine = transition(FlowSDE(), x[:1], v[:1], t["sigmas"], k, torch.zeros(1))
    assert_close(spine.mean, t["anchor"], rtol=1e-5, atol=1e-5)


# Branch -------------------------------------------------------------------------------------------


def test_in_a_comb_every_step_earns_the_outcome_of_its_own_children():
    comb = trajectory(Comb(children=2), samples_per_prompt=8, seeds_per_prompt=2)
    got = Branch()(comb, outcomes(1, 2, 3, 4, 5, 6, 7, 8))
    assert got.mask.nonzero().tolist() == [[b, b // 2 % 2] for b in range(8)]
    assert got.value[got.mask].flatten().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    groups = got.group[got.mask].tolist()
    assert [groups[i] == groups[i ^ 1] for i in range(8)] == [True] * 8
    assert len(set(groups)) == 4, "two initial noises, two steps"
    deep = Branch(compare="depth")(comb, outcomes(*range(8)))
    assert len(deep.group[deep.mask].unique()) == 2, "with all of the prompt at that step"


def test_in_a_tree_a_shared_transition_is_trained_once_with_the_mean_below_it():
    tree = trajectory(Tree(), samples_per_prompt=4)
    got = Branch(compare="depth")(tree, outcomes(1, 3, 4, 8))
    assert got.mask.nonzero().tolist() == [[0, 0], [0, 1], [1, 1], [2, 0], [2, 1], [3, 1]]
    assert got.value[..., 0][got.mask].tolist() == [2, 1, 3, 6, 4, 8]


def test_width_pruning_keeps_the_extremes_of_each_comparison():
    value = torch.tensor([5.0, 1.0, 3.0, 2.0, 9.0, 7.0])[:, None, None]
    group = torch.tensor([0, 0, 0, 0, 1, 1])[:, None]
    mask = torch.tensor([True, True, True, True, True, False])[:, None]
    got = mask_extremes(value, group, mask, 1).flatten().tolist()
    assert got == [True, True, False, False, True, False]


def test_depth_pruning_trains_the_named_steps_only():
    tree = trajectory(Tree(), samples_per_prompt=4)
    got = Branch(compare="depth", depths=[1])(tree, outcomes(1, 3, 4, 8))
    assert got.mask.any(0).tolist() == [False, True, False]


@pytest.mark.parametrize("credit", [Branch(), LeafAdvantage(), Contrast()], ids=str)
def test_samples_that_share_nothing_are_refused_with_the_line_to_change(credit):
    with pytest.raises(ValueError, match=r"recipe\.sampling\.(branching|seeds_per_prompt)"):
        credit(trajectory(samples_per_prompt=4), outcomes(1, 2, 3, 4))


def test_steps_from_one_shared_noise_can_be_compared_as_siblings():
    shared = trajectory(samples_per_prompt=4, seeds_per_prompt=1, sde_window=Fixed(0, 1))
    got = Branch()(shared, outcomes(1, 2, 3, 4))
    assert got.value[got.mask].flatten().tolist() == [1, 2, 3, 4]


# Tree ---------------------------------------------------------------------------------------------


def test_leaf_advantages_are_averaged_upwards_by_hand():
    """Outcomes 1, 3, 4, 8: mean 4, std sqrt(6.5)."""
    got = LeafAdvantage()(trajectory(Tree(), samples_per_prompt=4), outcomes(1, 3, 4, 8))
    assert got.normalised
    wanted = torch.tensor([-2.0, -3.0, -1.0, 2.0, 0.0, 4.0]) / (6.5**0.5 + 1e-4)
    assert_close(got.value[..., 0][got.mask], wanted)


# Contrast -----------------------------------------------------------------------------------------


def test_contrast_by_hand():
    score = torch.tensor([0.4, 0.7, -0.6, -0.2, 0.3, 0.9, 0.9])[:, None]
    group = torch.tensor([3, 3, 3, 3, 1, 1, 1])
    got = contrast(score, group, 0.5).flatten()
    assert_close(got, torch.tensor([0, 0.7, -0.6, 0, 0, 0.9, 0]))


def test_contrast_compares_siblings_and_scores_within_the_prompt():
    two = trajectory(samples_per_prompt=4, seeds_per_prompt=2, prompts=("a", "b"))
    got = Contrast()(two, outcomes(0, 1, 2, 5, 4, 4, 4, 4))
    assert got.normalised
    assert got.mask[:, 0].tolist() == [True, False, False, True, False, False, False, False]
    std = 3.5**0.5 + 1e-4  # of 0, 1, 2, 5
    assert_close(got.value[[0, 3], 1, 0], torch.tensor([-2.0, 3.0]) / std)


class Remembering(Given):
    """Values that know outcomes of earlier steps."""

    earlier: PastOutcomes
    asked = 0

    def past(self, num_steps):
        self.asked = num_steps
        return self.earlier


def test_contrast_counts_earlier_outcomes_of_the_same_prompt():
    """Prompt a: 0, 1, 2, 5 with 12 before, of mean 4; prompt b, of 4s, alone had 0 and 8 before."""
    two = trajectory(samples_per_prompt=4, seeds_per_prompt=2, prompts=("a", "b"))
    values = Remembering(outcomes(0, 1, 2, 5, 4, 4, 4, 4).given)
    values.earlier = PastOutcomes(torch.tensor([[12.0], [0.0], [8.0]]), torch.tensor([0, 1, 1]))
    got = Contrast(threshold=0.1, history=8)(two, values)
    assert values.asked == 8
    std = (16 + 9 + 4 + 1 + 64) ** 0.5 / 5**0.5 + 1e-4
    assert_close(got.value[:4, 1, 0], torch.tensor([-4.0, 0.0, -2.0, 1.0]) / std)
    assert not got.mask[4:].any()  # 4 is the mean of prompt b's past, too
    assert not Contrast(history=0)(two, values).value.equal(got.value)
    assert CreditRequirements(Contrast(history=3), two, Completion()).history == 3
    assert CreditRequirements(Contrast(), two, Completion()).history == 0


# Granular -----------------------------------------------------------------------------------------


def test_advantages_over_granularities_are_g2rpos():
    t = load("E_g2rpo")
    group = torch.arange(12) // 6
    total = sum(
        group_center(t[name][g], group, "group", eps=1e-8, correction=1)
        for name in ("rewards_a", "rewards_b")
        for g in range(3)
    )
    assert_close(total, t["advantages"], rtol=1e-4, atol=1e-5)


def test_completions_visit_the_points_of_g2rpos_schedules():
    import json

    values = json.loads((GOLDEN / "E_g2rpo.json").read_text())["values"]["schedules"]
    sigmas = load("E_g2rpo")["sigmas"].tolist()
    for name, recorded in values.items():
        k, stride = (int(part[-1]) for part in name.split("_"))
        visited = [sigmas[i] for i in Completion(stride=stride).path(k + 1, 8)]
        assert visited == [*recorded["sigmas"][k + 1 :], *([] if recorded["reaches_zero"] else [0])]


class ByStride(ValueFunction):
    """The value of state k is 10 k + stride + sample^stride; the outcome's is that of stride 0."""

    def __call__(self, ks, how=None):
        rows = torch.arange(4.0)[:, None, None]
        strides = torch.tensor([float(how.stride if k < 3 else 1) for k in ks])[None, :, None]
        return rows**strides + 10 * torch.tensor(ks)[None, :, None]

    def past(self, num_steps):
        return None

    def scored(self, ks, reward):
        raise AssertionError("these values know no latent reward")

    def predicted(self, ks):
        raise AssertionError("these values know no critic")


def test_granular_credit_sums_one_advantage_per_stride():
    got = Granular(strides=(1, 2))(
        trajectory(samples_per_prompt=4, sde_window=Fixed(0, 1)), ByStride()
    )
    one, two = torch.arange(4.0), torch.arange(4.0) ** 2
    wanted = sum((v - v.mean()) / (v.std(correction=0) + 1e-4) for v in (one, two))
    assert got.normalised
    assert_close(got.value[:, 0, 0], wanted)


@pytest.mark.parametrize("strides", [(), (0, 1), (2, 2)])
def test_strides_that_are_none_are_refused(strides):
    with pytest.raises(ValueError, match=r"credit.strides is"):
        Granular(strides=strides)


# Control variate ----------------------------------------------------------------------------------


def test_the_slope_is_that_within_groups():
    """Group 0 rises by half of what `before` does, group 1 too, from another level."""
    before = torch.tensor([0.0, 2.0, 10.0, 14.0])[:, None]
    after = torch.tensor([5.0, 6.0, -3.0, -1.0])[:, None]
    group = torch.tensor([0, 0, 1, 1])
    assert_close(estimate_slope(before, after, group), torch.tensor([0.5]))
    steep, opposite = 3 * before, -before
    assert estimate_slope(before, steep, group).item() == 1
    assert estimate_slope(before, opposite, group).item() == 0
    assert estimate_slope(torch.ones(4, 1), after, group).item() == 0
    missing = torch.tensor([0.0, 2.0, NAN, 14.0])[:, None]
    assert_close(estimate_slope(missing, after, group), torch.tensor([0.5]))


def test_a_value_that_explains_nothing_is_not_taken_off_and_one_that_explains_all_is():
    values = torch.tensor(
        [
            [[1.0], [1.0], [4.0]],
            [[2.0], [2.0], [4.0]],
            [[1.0], [1.0], [6.0]],
            [[2.0], [2.0], [6.0]],
        ]
    )
    chain = trajectory(samples_per_prompt=4, num_steps=2, sde_window=Fixed(0, 2))
    got = ControlVariate()(chain, Given(values)).value[..., 0]
    assert_close(got, torch.tensor([[0.0, 4.0], [0.0, 4.0], [0.0, 6.0], [0.0, 6.0]]))


# Missing outcomes ---------------------------------------------------------------------------------


def test_a_missing_outcome_takes_no_other_sample_with_it():
    four = trajectory(samples_per_prompt=4, seeds_per_prompt=1, prompts=("a",))
    got = Contrast(threshold=0.0)(four, outcomes(1.0, NAN, 3.0, 8.0))
    best_and_worst = (torch.tensor([1.0, 8.0]) - 4) / (26 / 3) ** 0.5
    assert_close(got.value[[0, 3], 0, 0], best_and_worst, atol=1e-3, rtol=1e-3)
    assert got.mask.any(1).tolist() == [True, False, False, True]
