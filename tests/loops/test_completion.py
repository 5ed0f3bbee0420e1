import pytest
import torch

from flowalign.completion import Completion, asked_states, complete, num_evaluations
from flowalign.costs import Costs
from flowalign.credit.outcome import Outcome
from flowalign.functional.transition import FlowSDE
from flowalign.rollout import Sampling, sample, take
from flowalign.types import CreditEstimator, StepCredit, Trajectory, ValueFn
from tests.pixel import PixelPolicy

T = 5


def trajectory_of(policy: PixelPolicy, keep: tuple[int, ...] = ()) -> Trajectory:
    torch.nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(3))
    seeds = [torch.Generator().manual_seed(i) for i in range(2)]
    cfg = Sampling(num_steps=T, samples_per_prompt=3, eta=0.6)
    return sample(policy, ["a", "bbb"], cfg, range(T - 1), seeds, keep_velocities=keep)


def one_after_another(policy: PixelPolicy, trajectory: Trajectory, k: int) -> torch.Tensor:
    x, row = trajectory.states[:, k], torch.arange(6) // 3
    for j in range(k, T):
        v = policy.velocity(x, trajectory.sigmas[j], take(trajectory.cond, row))
        x = x + (trajectory.sigmas[j + 1] - trajectory.sigmas[j]) * v
    return x


@pytest.mark.parametrize("keep", [(), (0, 1, 2, 3, 4), (1, 3)])
@pytest.mark.parametrize("micro_batch", [4, 100])
@torch.no_grad()
def test_the_wavefront_equals_finishing_states_one_after_another(keep, micro_batch):
    policy = PixelPolicy()
    trajectory = trajectory_of(policy, keep)
    finished = complete(policy, trajectory, [4, 0, 2, 1, 3, 5], Completion(), micro_batch)
    for k in range(T):
        expected = one_after_another(policy, trajectory, k)
        torch.testing.assert_close(finished[k], expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(finished[T], trajectory.states[:, T])


def test_dense_values_cost_half_of_t_squared_evaluations_with_the_rollouts_velocities():
    policy, costs = PixelPolicy(), Costs()
    costs.watch(policy.denoiser)
    trajectory = trajectory_of(policy, keep=tuple(range(T)))
    assert costs.sampling_evaluations == 6 * T
    complete(policy, trajectory, range(T + 1), Completion(), micro_batch=100)
    assert costs.sampling_evaluations == 6 * (T + T * (T - 1) // 2)
    assert num_evaluations(range(T + 1), T, Completion()) == T * (T - 1) // 2


def test_the_number_of_sequential_calls_does_not_grow_with_the_number_of_states():
    policy, calls = PixelPolicy(), []
    trajectory = trajectory_of(policy, keep=tuple(range(T)))
    policy.denoiser.register_forward_pre_hook(lambda *_: calls.append(1))
    complete(policy, trajectory, range(T + 1), Completion(), micro_batch=1000)
    assert len(calls) == T - 1


def test_one_step_completion_is_the_prediction_of_the_data():
    policy = PixelPolicy()
    trajectory = trajectory_of(policy, keep=(1,))
    finished = complete(policy, trajectory, [1], Completion(max_steps=1), 100)[1]
    x, sigma = trajectory.states[:, 1], trajectory.sigmas[1]
    torch.testing.assert_close(finished, x - sigma * trajectory.velocities[1])


@pytest.mark.parametrize(
    ("how", "k", "path"),
    [
        (Completion(), 2, [2, 3, 4, 5, 6, 7, 8]),
        (Completion(stride=3), 2, [2, 5, 8]),
        (Completion(stride=4), 3, [3, 7, 8]),
        (Completion(max_steps=1), 0, [0, 8]),
        (Completion(max_steps=3), 1, [1, 3, 6, 8]),
        (Completion(max_steps=5), 6, [6, 7, 8]),
        (Completion(), 8, [8]),
    ],
)
def test_paths_by_hand(how, k, path):
    assert how.path(k, 8) == path


@pytest.mark.parametrize("bad", [{"stride": 0}, {"max_steps": 0}])
def test_a_completion_of_no_step_is_refused(bad):
    with pytest.raises(ValueError, match="both need at least 1"):
        Completion(**bad)


class Gain(CreditEstimator):
    def __call__(self, trajectory: Trajectory, values: ValueFn) -> StepCredit:
        v = values(range(1, trajectory.num_steps))
        return StepCredit(
            v.new_zeros(2, trajectory.num_steps, 1),
            torch.zeros(2, trajectory.num_steps, dtype=torch.long),
            (trajectory.eta > 0),
        )


def test_the_states_that_a_credit_method_asks_for_are_known_beforehand():
    assert asked_states(Outcome(), FlowSDE(), T, [0, 1]) == (T,)
    assert asked_states(Gain(), FlowSDE(), T, [0, 1]) == (1, 2, 3, 4)
