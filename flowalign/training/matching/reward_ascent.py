"""Move the old policy's clean predictions at a query state along the reward gradient.

rollout -> state at a low noise level -> clean prediction -> ascent and descent of the reward
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.distributed.processes import Processes
from flowalign.functional.reward_ascent import ascend_and_descend
from flowalign.functional.transition import per_row
from flowalign.losses.reward_gradient import Maximise
from flowalign.rewards.composite import Rewards
from flowalign.rewards.latent_gradient import LatentGradient, latent_gradient
from flowalign.training.recipe import RecipePlan
from flowalign.training.reference import conditional
from flowalign.types import Batch, Policy, Request, SharedRows, Trajectory
from flowalign.types.ranges import NonNegativeInt, PositiveFloat, PositiveInt, require_ranges


class Mover(ABC):
    """Mover of latents along the reward gradient, with the state of a run."""

    @abstractmethod
    def move(
        self,
        policy: Policy,
        rewards: Rewards,
        trajectory: Trajectory,
        examples: Batch,
        samples: Int[Tensor, "n"],
    ) -> tuple[Batch, Trajectory, dict[str, float]]:
        """Return the examples of `samples` with their targets, the queried states, and metrics.

        The clean latents of the examples become the clean predictions of the current weights.
        """

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (most have no state)
        """Restore the state of a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Moves(ABC):
    """Settings of a mover of latents, which asks the policy at one state of its rollout."""

    key: ClassVar[str]
    """Key of the settings in a run file."""

    query: NonNegativeInt
    """Index of the denoising step that starts at the query state, at least 1."""
    micro_batch: PositiveInt = 8
    """Number of samples per decode and reward call."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and pure noise as the query."""
        require_ranges(self, self.key)
        if self.query < 1:
            raise ValueError(
                f"{self.key}.query is 0, which is pure noise: choose a late denoising step, such "
                "as the one that starts near noise level 0.28"
            )

    def check_query(self, made: Set[int], key: str) -> None:
        """Raise ValueError unless the query is one of the denoising steps that `key` makes."""
        if self.query not in made:
            raise ValueError(
                f"{self.key}.query is {self.query}, which is not among the denoising steps that "
                f"{key}.sampling makes: choose another step, or another num_steps or tail_ratio"
            )

    @property
    @abstractmethod
    def scores(self) -> tuple[int, int]:
        """Return the numbers per sample of reward gradients, and of other scores, at most."""

    def extend_plan(self, plan: RecipePlan, examples: int, rewards: Rewards) -> RecipePlan:
        """Add the cost of the moves of `examples` samples."""
        gradients, proposals = (examples * each for each in self.scores)
        scored, models = gradients + proposals, len(rewards.weighted().models)
        rows = {"reward gradients per step": f"{gradients}"}
        rows |= {"proposed moves per step": f"at most {proposals}"} if proposals else {}
        work = replace(
            plan.work.plus({"clean predictions": examples}),
            decodes=plan.work.decodes + scored,
            reward_calls=plan.work.reward_calls + scored * models,
            differentiates_rewards=True,
            bounds={"decodes"} if proposals else frozenset(),
        )
        return replace(plan, rows={**plan.rows, **rows}, work=work)

    @abstractmethod
    def open(self, processes: Processes) -> Mover:
        """Return the mover of a run."""


@dataclass(frozen=True, kw_only=True)
class RewardAscent(Moves, Mover):
    """Ascent and descent of the weighted reward from one clean prediction per sample.

    Source: DiffusionOPSD, arXiv:2608.24646, and its code. Each sample gives one query state of its
    rollout, at a noise level of about 0.28. It costs one evaluation, one decode and reward, and
    2 * steps - 1 reward gradients.
    """

    key = "recipe.data.ascent"

    steps: PositiveInt = 2
    """Number M of steps in each direction."""
    radius: PositiveFloat = 0.1
    """Radius of the ball around a clean prediction, in units of its norm."""
    share: PositiveFloat = 1.0
    """Length of all steps together, in units of the radius."""

    @property
    @override
    def scores(self) -> tuple[int, int]:
        return 2 * self.steps - 1, 0

    @override
    def open(self, processes: Processes) -> Mover:
        return self

    @override
    def move(
        self,
        policy: Policy,
        rewards: Rewards,
        trajectory: Trajectory,
        examples: Batch,
        samples: Int[Tensor, "n"],
    ) -> tuple[Batch, Trajectory, dict[str, float]]:
        found, states = predict_clean(policy, trajectory, examples, samples, self)
        clean, parts = found["latents"], []
        for rows in torch.arange(len(clean)).split(self.micro_batch):
            asked = [trajectory.requests[int(i)] for i in samples[rows]]
            parts.append(self._displacements(policy, rewards, clean[rows], asked))
        up, down = (torch.cat(side) for side in zip(*parts, strict=True)) if parts else (clean,) * 2
        found = found.with_columns(ascent=up, descent=down)
        return found, with_states(trajectory, states, samples), {}

    def _displacements(
        self,
        policy: Policy,
        rewards: Rewards,
        clean: Float[Tensor, "n *latent"],
        requests: Sequence[Request],
    ) -> tuple[Float[Tensor, "n *latent"], Float[Tensor, "n *latent"]]:
        """Return the displacements of clean predictions up and down the weighted reward."""
        weighted = rewards.weighted()
        where = ", the reward gradient of a clean prediction"

        def gradient(latents: Tensor) -> Tensor:
            return -differentiate(policy, weighted, latents, requests, where).gradient

        return ascend_and_descend(clean, gradient, self.steps, self.radius, self.share)


def differentiate(
    policy: Policy,
    rewards: Rewards,
    latents: Float[Tensor, "n *latent"],
    requests: Sequence[Request],
    where: str = "",
) -> LatentGradient:
    """Return the weighted rewards of latents, and the gradient of their negative sum.

    Raises:
        RewardFailure: A reward failed, and `on_failure` is raise; `where` ends the message.
    """
    score = rewards.score_with_gradient
    found = latent_gradient(policy, rewards, score, Maximise(), latents, requests)
    if rewards.on_failure == "raise":
        rewards.require(found.output, lambda i: f"prompt {requests[i].prompt!r}{where}")
    return found


def predict_clean(
    policy: Policy,
    trajectory: Trajectory,
    examples: Batch,
    samples: Int[Tensor, "n"],
    cfg: Moves,
) -> tuple[Batch, dict[int, Float[Tensor, "n *latent"]]]:
    """Return the examples with their clean predictions, and the states at query and end."""
    sigma = trajectory.sigmas[cfg.query].to(trajectory.device)
    x = trajectory.state(cfg.query, samples)
    clean = torch.empty_like(x)
    for rows in torch.arange(len(x)).split(cfg.micro_batch) if len(x) else ():
        cond, level = examples.take(rows)["cond"], sigma.expand(len(rows))
        with torch.no_grad():
            v = conditional(policy).velocity(x[rows], level, cond)
        clean[rows] = x[rows] - per_row(level, v) * v
    return examples.with_columns(latents=clean), {cfg.query: x, trajectory.num_steps: clean}


def with_states(
    trajectory: Trajectory,
    states: Mapping[int, Float[Tensor, "n *latent"]],
    samples: Int[Tensor, "n"],
) -> Trajectory:
    """Return trajectories with only these states, one row per sample in `samples`."""
    each = torch.arange(len(samples))[:, None].expand(-1, trajectory.num_steps + 1)
    return replace(
        trajectory,
        logp=trajectory.logp[samples.to(trajectory.logp.device)],
        eta=trajectory.eta[samples.to(trajectory.eta.device)],
        states=states,
        requests=[trajectory.requests[int(i)] for i in samples],
        rows=SharedRows(each.contiguous()),
        means={},
        finished={},
        hidden={},
    )
