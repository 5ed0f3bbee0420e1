"""Make examples from the states that the policy visits, for distillation without rewards.

requests -> trajectories of the student -> states, each with the teacher of its request
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from typing_extensions import override

from flowalign.data.requests import Requests, read_located_requests, read_requests
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.sde_windows import NoSteps
from flowalign.training.learner import Learner
from flowalign.training.matching.source import (
    BatchStream,
    DataSource,
    StepExamples,
    StreamContext,
)
from flowalign.training.recipe import (
    RecipePlan,
    RunContext,
    StepWork,
    TrainingPrompts,
    check_prompts_per_step,
    samples_row,
)
from flowalign.training.rollouts.collecting import rollout
from flowalign.training.rollouts.rollout_plan import rollout_evaluations, rollout_memory
from flowalign.training.rollouts.rollout_settings import SEVERAL, RolloutSettings
from flowalign.types import Batch, ModelPlan, Trajectory
from flowalign.types.losses import STEPS
from flowalign.types.trajectory import take_rows
from flowalign.utils.errors import require_default
from flowalign.utils.ranges import PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class OnPolicyStates(TrainingPrompts, DataSource):
    """Trajectories of the policy; teachers' velocities are the targets at their states.

    Source: Flow-OPD, arXiv:2605.08063. Each request goes to the teacher for its reward.
    """

    key: ClassVar[str] = "recipe.data"

    teacher_field: str | None = None
    """Field of the JSONL file `prompts` with the name of each prompt's teacher. Null: there is one
    teacher."""
    prompts_per_step: PositiveInt = 16
    """Number of prompts per step, over all processes."""
    sampling: Sampling = field(
        default_factory=lambda: Sampling(sde_window=NoSteps(), samples_per_prompt=1)
    )
    """Sampling of the trajectories. Default: one deterministic trajectory per prompt."""

    def __post_init__(self) -> None:
        """Reject invalid settings before any model is loaded."""
        require_ranges(self, self.key)
        unused = "sampling.merge", "sampling.tail_ratio", "sampling.precision"
        require_default(
            self,
            self.key,
            "every state of the schedule is matched, and weighted by its step",
            *unused,
        )
        self.rollouts.empty_trajectory(self.rollouts.window(0))

    @property
    @override
    def gives(self) -> Set[str]:
        return STEPS if self.random_steps else frozenset()

    @property
    @override
    def trajectory_steps(self) -> int:
        return self.sampling.num_steps

    @property
    @override
    def random_steps(self) -> Set[int]:
        steps = [{*self.sampling.stochastic(self.rollouts.window(i))} for i in (0, SEVERAL)]
        return steps[0] & steps[1]

    @property
    @override
    def examples_per_step(self) -> int:
        return self.prompts_per_step * self.sampling.samples_per_prompt

    @override
    def check_teachers(self, names: Sequence[str]) -> None:
        """Raise ValueError if a request has no teacher, or a teacher no request."""
        if not names or (len(names) > 1 and self.teacher_field is None):
            raise ValueError(
                f"recipe.teachers names {len(names)} teachers and {self.key}.teacher_field is "
                f"{self.teacher_field}: name at least one and, where there are several, the field "
                f"of the rows of {self.prompts} that chooses among them"
            )
        if self.teacher_field is None:
            return
        located = read_located_requests(self.prompts)
        found = {where: r.metadata.get(self.teacher_field) for where, r in located}
        for where, name in found.items():
            if name not in names:
                raise ValueError(
                    f"{where}: {self.teacher_field} is {name!r}, and recipe.teachers has "
                    f"{', '.join(names)}: name one of them as {self.teacher_field} in every row of "
                    f"{self.key}.prompts"
                )
        if idle := sorted({*names} - {*found.values()}):
            raise ValueError(
                f"recipe.teachers names {idle[0]}, and no row of {self.prompts} has it as "
                f"{self.teacher_field}: leave it out, or add rows"
            )

    @override
    def check(self, run: RunContext) -> None:
        """Raise ValueError if there are no prompts."""
        read_requests(self.prompts)
        run.check_conditioning()

    @override
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        check_prompts_per_step(self.key, self.prompts_per_step, world)
        cfg, window = self.rollouts, self.rollouts.window(0)
        counts = rollout_evaluations(cfg, window, run.policy.evaluations_per_velocity)
        random = sorted(self.random_steps) or "none"
        return RecipePlan(
            prompts_per_step=self.prompts_per_step,
            rows={
                **samples_row(self.prompts_per_step, self.sampling.samples_per_prompt),
                "denoising steps": f"{self.sampling.num_steps}, random are {random}",
            },
            work=StepWork(evaluations={"sampling": counts["sampling"] * self.prompts_per_step}),
            parts=rollout_memory(cfg, model, world, window),
        )

    @override
    def open(self, learner: Learner, context: StreamContext) -> "OnPolicyStream":
        """Return the stream, which samples each batch at its step."""
        requests = Requests(read_requests(self.prompts), context.seed, context.conditioning)
        return OnPolicyStream(self, learner, requests)

    @property
    def rollouts(self) -> RolloutSettings:
        """Return the rollout settings of a step."""
        return RolloutSettings(
            prompts_per_step=self.prompts_per_step,
            sampling=self.sampling,
            key=self.key,
            keeps="all",
        )


class OnPolicyStream(BatchStream):
    """Stream of trajectories that the current policy samples at each step."""

    def __init__(self, cfg: OnPolicyStates, learner: Learner, requests: Requests):
        self.cfg, self.learner, self.requests = cfg, learner, requests

    @override
    def batch(self, step: int) -> StepExamples:
        cfg = self.cfg
        requests = self.requests.batch(step, cfg.prompts_per_step)
        trajectory = rollout(cfg.rollouts, self.learner, requests, self.requests.seed, step)
        size = cfg.sampling.samples_per_prompt
        first = self.learner.processes.share(range(len(requests)))[0] * size
        total = len(requests) * size
        return StepExamples(self._examples(trajectory), first, total, visited=trajectory)

    def _examples(self, trajectory: Trajectory) -> Batch:
        """Return the samples, with the teacher of each request if there are several."""
        latents, name = trajectory.state(trajectory.num_steps), self.cfg.teacher_field
        rows = Batch(
            {
                "latents": latents,
                "cond": take_rows(trajectory.cond, trajectory.prompt.to(latents.device)),
                "weight": torch.ones(len(latents)),
            }
        )
        if name is None:
            return rows
        return rows.with_columns(teacher=tuple(str(r.metadata[name]) for r in trajectory.requests))
