"""Time the values of all intermediate states: computed together, and one after another."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from flowalign.data.requests import Requests, read_requests
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import Run
from flowalign.runs.session.opening import open_run
from flowalign.sampling.complete_states import complete
from flowalign.sampling.rollout import sample
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.policy_gradient_settings import (
    PolicyGradientSettings,
    require_policy_gradient,
)
from flowalign.training.rollouts.collecting import finish_states
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Trajectory
from flowalign.types.completion import Completion
from flowalign.utils.seeds import generator

EVERY = Completion()
"""Completion by every remaining step."""


def measure_values(run: Run, repeats: int) -> dict[str, float]:
    """Return seconds for the values of states 0 to T of a step's samples, without the rollout.

    together: completions batched with the rollout, then decoder and rewards in chunks of
    sampling.micro_batch. by_state: after the rollout, one state of all samples after another, as
    TP-GRPO's released code does. one_by_one: one state of one sample after another.
    """
    recipe, parts = require_policy_gradient(run.recipe), open_run(run)
    costs, setting = parts.costs, _Setting(run, recipe, parts.learner, parts.rewards)
    setting.together()  # warm up
    ways: dict[str, Callable[[], object]] = {
        "rollout": setting.rollout,
        "with_values": setting.together,
        "by_state": lambda: setting.after(recipe.sampling.micro_batch),
    }
    result: dict[str, float] = {}
    for name, work in ways.items():
        seconds, spent = [], costs.network_evaluations
        for _ in range(repeats):
            seconds.append(_time(work))
        result[f"seconds/{name}"] = sorted(seconds)[len(seconds) // 2]
        result[f"evaluations/{name}"] = (costs.network_evaluations - spent) / repeats
    spent = costs.network_evaluations
    result["seconds/one_by_one"] = _time(lambda: setting.after(1))
    result["evaluations/one_by_one"] = costs.network_evaluations - spent
    together = result["seconds/with_values"] - result["seconds/rollout"]
    return result | {
        "seconds/together": together,
        "share_of_by_state": together / result["seconds/by_state"],
        "share_of_one_by_one": together / result["seconds/one_by_one"],
    }


class _Setting:
    """Prompts and noise of one step, drawn identically on each call."""

    def __init__(
        self, run: Run, recipe: PolicyGradientSettings, learner: Learner, rewards: Rewards
    ):
        self.seed, self.learner, self.rewards = run.seed, learner, rewards
        self.cfg, self.policy = recipe.sampling, learner.policy
        requests = Requests(read_requests(recipe.prompts), run.seed, run.conditioning)
        self.asked = requests.batch(0, recipe.prompts_per_step)
        self.kept = self.rollout()

    def rollout(self, finish: bool = False) -> Trajectory:
        steps = self.cfg.sde_window.steps(self.cfg.num_steps, 0, generator(self.seed, "window", 0))
        requests = [(k, EVERY) for k in range(self.cfg.num_steps)] if finish else []
        seeds = [generator(self.seed, "noise", 0, i) for i in range(len(self.asked))]
        return sample(self.policy, self.asked, self.cfg, steps, seeds, finish=requests)

    def together(self) -> None:
        self._values(self.rollout(finish=True), self.cfg.micro_batch)(range(self.cfg.num_steps + 1))

    def after(self, batch: int) -> None:
        """Value the states of the stored rollout, one state and `batch` samples at a time."""
        start = replace(self.kept, finished={})
        for k in range(self.cfg.num_steps + 1):
            self._values(start, batch)([k])

    def _values(self, trajectory: Trajectory, batch: int) -> CompletionValues:
        if trajectory.finished:
            finish = lambda requests: finish_states(self.learner, trajectory, requests, batch)  # noqa: E731
        else:
            finish = lambda requests: complete(self.policy, trajectory, requests, batch)  # noqa: E731
        return CompletionValues(self.policy, self.rewards, trajectory, finish, EVERY, batch)


def _time(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start
