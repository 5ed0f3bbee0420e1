from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flowalign.credit.chain import Gain
from flowalign.sampling import AllButLast, Comb, Fixed, Sampling, Tree, complete, sample
from flowalign.training.reference import unguided
from flowalign.training.rollouts.collecting import finish_states, rollout
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFunction, plain_requests
from flowalign.types.trajectory import Completion, take_rows
from flowalign.utils.costs import Costs
from tests.fixtures.credited import judged
from tests.fixtures.embedded import new_sd3
from tests.fixtures.pixel import PixelPolicy, moving_policy
from tests.fixtures.training import new_learner, new_recipe, new_rewards

T = 5
EVERY = Completion()
COARSE, ONE = Completion(stride=2), Completion(max_steps=1)


def trajectory_of(policy: PixelPolicy, finish=(), steps=range(T - 1), **sampling) -> Trajectory:
    seeds = [torch.Generator().manual_seed(i) for i in range(2)]
    cfg = Sampling(**({"num_steps": T, "samples_per_prompt": 3, "eta": 0.6} | sampling))
    return sample(policy, plain_requests(["a", "bbb"]), cfg, steps, seeds, finish=finish)


def one_after_another(policy, trajectory: Trajectory, k: int, how: Completion) -> torch.Tensor:
    rows = trajectory.rows.unique_rows(k)
    x, path = trajectory.state(k, rows), how.path(k, T)
    for j, i in pairwise(path):
        cond = take_rows(trajectory.cond, rows // trajectory.group_size)
        v = policy.velocity(x, trajectory.sigmas[j], cond)
        x = x + (trajectory.sigmas[i] - trajectory.sigmas[j]) * v
    return x


LAYOUTS = {
    "chain": {},
    "shared": {"seeds_per_prompt": 1, "steps": (2, 3)},
    "tree": {"samples_per_prompt": 8, "branching": Tree(splits=[0, 1, 3]), "seeds_per_prompt": 1},
    "comb": {"samples_per_prompt": 16, "branching": Comb(children=2), "seeds_per_prompt": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("micro_batch", [4, 100])
@torch.no_grad()
def test_tails_that_walk_with_the_rollout_end_where_each_alone_ends(layout, micro_batch):
    policy = moving_policy()
    finish = [(4, EVERY), (0, COARSE), (2, EVERY), (1, ONE), (1, EVERY), (3, COARSE), (0, EVERY)]
    trajectory = trajectory_of(policy, finish, micro_batch=micro_batch, **layout)
    plain = trajectory_of(policy, (), micro_batch=micro_batch, **layout)
    torch.testing.assert_close(trajectory.states, plain.states, atol=1e-6, rtol=1e-6)
    after = complete(policy, trajectory, finish, micro_batch)
    assert set(trajectory.finished) == set(after) == set(finish)
    for tail in finish:
        expected = one_after_another(policy, trajectory, *tail)
        torch.testing.assert_close(trajectory.finished[tail], expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(after[tail], expected, atol=1e-6, rtol=1e-6)


def counted(finish, **layout) -> tuple[int, int]:
    policy, costs, calls = moving_policy(), Costs(), []
    costs.count(policy.denoiser)
    policy.denoiser.register_forward_pre_hook(lambda *_: calls.append(1))
    trajectory_of(policy, finish, micro_batch=1000, **layout)
    return costs.sampling_evaluations, len(calls)


def test_dense_values_cost_half_of_t_squared_evaluations_and_no_further_call():
    """T(T-1)/2 evaluations beyond the T of the rollout, all in the T calls of the rollout."""
    assert counted([]) == (6 * T, T)
    assert counted([(k, EVERY) for k in range(T)]) == (6 * (T + T * (T - 1) // 2), T)


def test_a_start_that_a_prompt_shares_is_valued_once_for_all_its_samples():
    alone, shared = (counted([(0, EVERY)], seeds_per_prompt=s)[0] for s in (3, 1))
    assert alone == 6 * T + 6 * (T - 1)
    assert shared == 2 + 6 * (T - 1) + 2 * (T - 1)  # two prompts: one first step, one tail each


def test_evaluations_of_a_comb_are_those_of_tempflow():
    """(T - 1) + K T (T - 1) / 2 per initial noise."""
    layout = {"samples_per_prompt": 24, "branching": Comb(children=3), "seeds_per_prompt": 2}
    assert counted([], **layout)[0] == 2 * 2 * ((T - 1) + 3 * T * (T - 1) // 2)


def test_evaluations_of_a_tree_are_its_nodes():
    """Splits at 0, 1, 3: 1 root, then 2, 4, 4, 8 states at the five points."""
    layout = {"samples_per_prompt": 8, "branching": Tree(splits=[0, 1, 3])}
    assert counted([], **layout)[0] == 2 * (1 + 2 + 4 + 4 + 8)


def test_sixteen_leaves_cost_branchgrpos_203_evaluations():
    recipe = new_recipe(
        {
            "num_steps": 20,
            "samples_per_prompt": 16,
            "sde_window": AllButLast(),
            "branching": Tree(splits=[0, 3, 6, 9]),
        }
    )
    empty_trajectory = recipe.rollouts.empty_trajectory(range(19))
    # 1 root; 2 states at points 1-3, 4 at 4-6, 8 at 7-9, 16 at 10-19
    assert sum(len(empty_trajectory.rows.unique_rows(k)) for k in range(20)) == 203


@torch.no_grad()
def test_one_step_completion_is_the_prediction_of_the_data():
    policy = moving_policy()
    trajectory = trajectory_of(policy, [(1, ONE)])
    x, sigma = trajectory.state(1), trajectory.sigmas[1]
    v = policy.velocity(x, sigma, take_rows(trajectory.cond, torch.arange(6) // 3))
    torch.testing.assert_close(trajectory.finished[1, ONE], x - sigma * v)


@pytest.mark.parametrize(
    ("how", "k", "path"),
    [
        (Completion(), 2, [2, 3, 4, 5, 6, 7, 8]),
        (Completion(stride=3), 2, [2, 3, 6, 8]),
        (Completion(stride=4), 3, [3, 4, 8]),
        (Completion(max_steps=1), 0, [0, 8]),
        (Completion(max_steps=3), 1, [1, 3, 6, 8]),
        (Completion(max_steps=5), 6, [6, 7, 8]),
        (Completion(), 8, [8]),
    ],
)
def test_paths_by_hand(how, k, path):
    assert how.path(k, 8) == path


@pytest.mark.parametrize("name", ["stride", "max_steps"])
def test_a_completion_of_no_step_is_refused(name):
    with pytest.raises(ValueError, match=rf"completion\.{name} is 0; it must be at least 1"):
        Completion(**{name: 0})


class Asking(CreditEstimator):
    def __init__(self, *ks: int):
        self.ks = ks

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        v = torch.cat([values(self.ks), values(self.ks[:1], ONE)], 1)
        size = trajectory.logp.shape
        return StepCredit(
            v.new_zeros(*size, 1), torch.zeros(size, dtype=torch.long), trajectory.trained
        )


def test_the_states_that_a_credit_method_asks_for_are_known_beforehand():
    recipe = new_recipe({"num_steps": T, "sde_window": Fixed(0, 2)}, credit=Asking(4, 1))
    assert set(recipe.rollouts.requested((0, 1))) == {(1, EVERY), (4, EVERY), (4, ONE)}


@pytest.mark.parametrize("k", [-1, T + 1])
def test_a_state_that_is_not_there_is_refused_before_anything_is_sampled(k):
    with pytest.raises(ValueError, match=f"Asking asks for the value of state {k}; .* 0 to {T}"):
        new_recipe({"num_steps": T, "sde_window": Fixed(0, 2)}, credit=Asking(2, k))


def test_nothing_that_values_states_takes_more_samples_at_once_than_the_budget():
    """Network, decoder and rewards, for 12 samples with all states valued and a budget of 5."""
    recipe = new_recipe(
        {"num_steps": T, "sde_window": AllButLast(), "micro_batch": 5}, credit=Gain()
    )
    learner, rewards, sizes = new_learner(moving_policy()), new_rewards(), []
    learner.policy.denoiser.register_forward_pre_hook(lambda _, x: sizes.append(len(x[0])))
    decode, score = learner.policy.decode, rewards.models[0].score
    learner.policy.decode = lambda x: sizes.append(len(x)) or decode(x)
    rewards.models[0].score = lambda batch: sizes.append(len(batch.prompts)) or score(batch)
    judged(recipe, learner, rewards)
    assert max(sizes) == 5
    assert sum(sizes) == 12 * (T + T * (T - 1) // 2 + 2 * T)


@pytest.mark.parametrize("weights", ["policy", "ema", "reference"])
@torch.no_grad()
def test_tails_may_follow_averaged_or_untrained_weights(weights):
    """The pixel policy's reference and EMA are copies of its start, which then moved."""
    learner = new_learner(PixelPolicy(), ema=(0.9, 1))
    torch.nn.init.normal_(learner.policy.denoiser[-1].weight)
    how = Completion(weights=weights)
    recipe = new_recipe({"num_steps": T, "sde_window": Fixed(0, 3)}, credit=Gain(), completion=how)
    trajectory = rollout(recipe.rollouts, learner, plain_requests(["a", "bb", "ccc"]), 0, 0)
    assert bool(trajectory.finished) == (weights == "policy")
    got = finish_states(learner, trajectory, [(1, how)], 100)[1, how]
    field = learner.policy if weights == "policy" else learner.reference
    expected = one_after_another(field, trajectory, 1, EVERY)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
@torch.no_grad()
def test_tails_without_guidance_cost_half_and_are_those_of_the_unguided_policy():
    guided, plain = new_sd3(guidance=2.5), new_sd3(guidance=1.0)
    learner, how = new_learner(guided), Completion(guidance="off")
    recipe = new_recipe(
        {"num_steps": 3, "samples_per_prompt": 2, "sde_window": Fixed(0, 2)},
        credit=Gain(),
        completion=how,
    )
    prompts = ["a red circle", "two blue squares"]
    trajectory = rollout(recipe.rollouts, learner, plain_requests(prompts), 0, 0)
    costs = Costs()
    costs.count(guided.denoiser)
    got = finish_states(learner, trajectory, [(1, how)], 100)[1, how]
    assert costs.sampling_evaluations == 4 * 2, "two steps, one evaluation each"
    wanted = complete(
        plain, replace(trajectory, cond=plain.encode(plain_requests(prompts))), [(1, EVERY)], 100
    )
    torch.testing.assert_close(got, wanted[1, EVERY], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="samples without classifier-free guidance"):
        unguided(plain)
