"""How long a step takes, by stage, against its floor: the same network evaluations back to back."""

import itertools
import time
from collections.abc import Callable, Iterator

import torch

from flowalign.sampling.completion import take
from flowalign.runs.config import Run
from flowalign.utils.costs import Costs
from flowalign.data.prompts import Prompts, read_prompts
from flowalign.distributed.processes import join
from flowalign.training.policy_gradient.advantages import judge
from flowalign.training.policy_gradient.rollouts import rollout, state_values
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.loop import train_online, update
from flowalign.runs.plan import evaluations


def measure(run: Run, repeats: int) -> dict[str, float]:
    """Median seconds of each stage and of the floor, and their quotient `overhead`."""
    if run.threads:
        torch.set_num_threads(run.threads)
    processes = join(run.device)
    run.policy.load(processes.device)
    learner = Learner(run.policy, run.optimizer, processes, run.num_steps, None)
    costs = Costs()
    costs.watch(run.policy.denoiser)
    rewards = run.judges(costs)
    rewards.load()
    prompts = Prompts(read_prompts(run.prompts), run.seed)
    for _ in train_online(run.recipe, learner, rewards, prompts, run.seed, [0]):
        pass
    batch = prompts.batch(1, run.recipe.prompts_per_step)
    times: dict[str, list[float]] = {name: [] for name in ("sample", "reward", "update", "floor")}
    for i in range(1, repeats + 1):
        trajectory = _timed(
            times["sample"], lambda i=i: rollout(run.recipe, learner, batch, run.seed, i)
        )
        judged, _ = _timed(
            times["reward"],
            lambda t=trajectory: judge(
                run.recipe, learner, state_values(run.recipe, learner, rewards, t)
            ),
        )
        _timed(times["update"], lambda j=judged, i=i: update(run.recipe, learner, j, run.seed, i))
        _timed(times["floor"], lambda t=trajectory: _bare(run, t))
        learner.optimizer.zero_grad(set_to_none=True)  # the floor's gradients teach nothing
    result = {f"seconds/{name}": sorted(values)[len(values) // 2] for name, values in times.items()}
    samples = run.recipe.prompts_per_step * run.recipe.sampling.samples_per_prompt
    step = sum(result[f"seconds/{name}"] for name in ("sample", "reward", "update"))
    return result | {
        "seconds/step": step,
        "overhead": step / result["seconds/floor"],
        "overhead_without_reward": (step - result["seconds/reward"]) / result["seconds/floor"],
        "images_per_second": samples / step,
    }


def _bare(run: Run, trajectory) -> None:
    """The denoiser alone: all evaluations without gradient, then the trained ones with theirs."""
    sampling, policy = run.recipe.sampling, run.policy
    x = trajectory.state(trajectory.num_steps)
    row = torch.arange(len(x), device=x.device) // trajectory.group_size
    cond, sigma = take(trajectory.cond, row), trajectory.sigmas[1]
    inputs = [
        (x[i : i + size], take(cond, torch.arange(i, min(i + size, len(x)), device=x.device)))
        for size in (sampling.micro_batch, run.recipe.micro_batch)
        for i in range(0, len(x), size)
    ]
    trained = (trajectory.eta.amax(0) > 0).nonzero().flatten().tolist()
    cost = evaluations(run.recipe, trained)
    num_sampling = -(-len(x) // sampling.micro_batch)
    with torch.no_grad():
        total = cost["sampling"] + cost["completing"] + cost["reference"]
        for part, c in _full(inputs[:num_sampling], total * run.recipe.prompts_per_step):
            policy.velocity(part, sigma, c)
    for part, c in _full(inputs[num_sampling:], cost["training"] * run.recipe.prompts_per_step):
        policy.velocity(part, sigma, c).mean().backward()


def _full(inputs: list, num_samples: int) -> Iterator[tuple]:
    """Batches of the given inputs, over and over, until that many samples have gone through."""
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
