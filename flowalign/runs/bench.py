"""Time a step by stage, against its floor: the same network evaluations back to back."""

import itertools
import time
from collections.abc import Callable, Iterator

import torch

from flowalign.data.requests import Requests, read_requests
from flowalign.distributed.processes import join
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.sampling.completion import take
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.advantages import build_batch
from flowalign.training.policy_gradient.batches import TrainBatch
from flowalign.training.policy_gradient.loop import PolicyGradientLoop, update
from flowalign.training.policy_gradient.plan import evaluations
from flowalign.training.policy_gradient.settings import CreditedRollouts, credited_rollouts
from flowalign.training.rollouts.advantages import (
    compute_advantages,
    compute_credit,
    gather_credit,
    process_advantages,
)
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.types import Policy, Trajectory
from flowalign.utils.costs import Costs


def measure(run: Run, repeats: int) -> dict[str, float]:
    """Return median seconds of each stage and of the floor, and their quotient `overhead`."""
    recipe, learner, rewards, _ = opened(run)
    requests = Requests(read_requests(recipe.prompts), run.seed, run.dressing)
    loop = PolicyGradientLoop(recipe, learner, rewards, requests, run.seed)
    for _ in loop.run([0]):
        pass
    batch = requests.batch(1, recipe.prompts_per_step)
    times: dict[str, list[float]] = {name: [] for name in ("sample", "reward", "update", "floor")}
    for i in range(1, repeats + 1):
        trajectory = _timed(
            times["sample"], lambda i=i: rollout(recipe, learner, batch, run.seed, i)
        )
        trained = _timed(times["reward"], lambda t=trajectory: credited(recipe, learner, loop, t))
        _timed(
            times["update"],
            lambda b=trained, i=i: update(recipe, learner, b, run.seed, i, loop.steps),
        )
        _timed(times["floor"], lambda t=trajectory: _bare(recipe, run.policy, t))
        learner.optimizer.zero_grad(set_to_none=True)  # the floor's gradients are not used
    result = {f"seconds/{name}": sorted(values)[len(values) // 2] for name, values in times.items()}
    step = sum(result[f"seconds/{name}"] for name in ("sample", "reward", "update"))
    return result | {
        "seconds/step": step,
        "overhead": step / result["seconds/floor"],
        "overhead_without_reward": (step - result["seconds/reward"]) / result["seconds/floor"],
        "images_per_second": recipe.examples_per_step / step,
    }


def opened(run: Run) -> tuple[CreditedRollouts, Learner, Rewards, Costs]:
    """Return the recipe, a learner with loaded weights, loaded rewards, and what they count.

    Raises:
        ValueError: The recipe has no rollouts whose stages could be timed.
    """
    recipe = credited_rollouts(run.recipe)
    if run.threads:
        torch.set_num_threads(run.threads)
    processes = join(run.device)
    costs = Costs()
    rewards = run.build_rewards(costs)
    run.load_rewards(rewards)
    run.load_policy(processes)
    costs.count(run.policy.denoiser)
    learner = Learner(run.policy, run.optimizer, processes, run.num_steps, None)
    return recipe, learner, rewards, costs


def credited(
    recipe: CreditedRollouts, learner: Learner, loop: PolicyGradientLoop, trajectory: Trajectory
) -> TrainBatch:
    """Value, credit and compare a trajectory: the reward stage of a step."""
    values = completion_values(recipe, learner, loop.rewards, trajectory, loop.critic)
    gathered = gather_credit(loop.comparison, values, compute_credit(recipe, values))
    loop.learn(values)
    advantage = compute_advantages(recipe, loop.comparison, gathered.credit)
    process = process_advantages(recipe, loop.comparison, gathered.credit)
    return build_batch(recipe, learner.processes, values, gathered, advantage, process=process)


def _bare(recipe: CreditedRollouts, policy: Policy, trajectory: Trajectory) -> None:
    """Run the denoiser alone: evaluations without gradient, then the trained ones with theirs."""
    sampling = recipe.sampling
    x = trajectory.state(trajectory.num_steps)
    row = torch.arange(len(x), device=x.device) // trajectory.group_size
    cond, sigma = take(trajectory.cond, row), trajectory.sigmas[1]
    inputs = [
        (x[i : i + size], take(cond, torch.arange(i, min(i + size, len(x)), device=x.device)))
        for size in (sampling.micro_batch, recipe.micro_batch)
        for i in range(0, len(x), size)
    ]
    trained = trajectory.trained.any(0).nonzero().flatten().tolist()
    cost = evaluations(recipe, trained)
    num_sampling = -(-len(x) // sampling.micro_batch)
    with torch.no_grad():
        total = cost["sampling"] + cost["completing"] + cost["reference"] + cost["ratios"]
        for part, c in _full(inputs[:num_sampling], total * recipe.prompts_per_step):
            policy.velocity(part, sigma, c)
    for part, c in _full(inputs[num_sampling:], cost["training"] * recipe.prompts_per_step):
        policy.velocity(part, sigma, c).mean().backward()


def _full(inputs: list, num_samples: int) -> Iterator[tuple]:
    """Yield batches of the given inputs, over and over, until `num_samples` have gone through."""
    for x, cond in itertools.cycle(inputs):
        if num_samples <= 0:
            return
        n = min(num_samples, len(x))
        yield x[:n], take(cond, torch.arange(n, device=x.device))
        num_samples -= n


def _timed(into: list[float], work: Callable):
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    into.append(time.perf_counter() - start)
    return result
