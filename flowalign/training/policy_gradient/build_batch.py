"""Build the batch of a step: transitions of rollouts with their advantages and weights."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from flowalign.distributed.processes import Processes
from flowalign.functional.surrogate import step_weights
from flowalign.training.policy_gradient.batches import RolloutBatch
from flowalign.training.policy_gradient.chunks import prepare_for_loss
from flowalign.training.policy_gradient.measured import Averages
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.rollouts.advantages import AdvantageEstimate
from flowalign.training.rollouts.state_values import CompletionValues
from flowalign.types import Batch, StepCredit, Trajectory


@dataclass(frozen=True)
class StepResult:
    """Samples, values and credit of this rank in one step, before the update."""

    batch: RolloutBatch
    """Transitions with their advantages."""
    credit: StepCredit
    """Credit before normalisation."""
    values: CompletionValues
    """Values of the states, with their trajectories."""


class StepObserver(ABC):
    """Observer of each step before its update."""

    @abstractmethod
    def __call__(self, step: int, result: StepResult) -> None:
        """Observe a step; the time is attributed to the reward stage."""

    @abstractmethod
    def draw(self) -> float:
        """Write the figures of the last step, if any, and return the seconds spent."""


def build_batch(
    cfg: PolicyGradientSettings,
    processes: Processes,
    values: CompletionValues,
    estimate: AdvantageEstimate,
    averages: Averages | None = None,
) -> RolloutBatch:
    """Return this rank's transitions with advantages, in pairs or chunks if the loss needs them.

    `averages` determine measured step weights. If None, the starting weights are used.
    """
    trajectory, mask, local = values.trajectory, estimate.train_mask, estimate.gathered.local
    everyone = estimate.gathered.outcome
    advantage = estimate.advantage[local]
    samples = {"advantage": advantage, "mask": mask[local]}
    if cfg.kl_gate:
        gate = cfg.kl_gate(everyone, values.rewards, values.rewards.weights)
        samples |= {"has_kl": gate[local]}
    if cfg.spatial and cfg.spatial.blend:
        samples |= {"places": cfg.spatial(advantage, values)}
    if estimate.process is not None:
        samples |= {"process": estimate.process[local]}
    steps = {"weight": _weights_of_steps(cfg, trajectory, averages)}
    batch = RolloutBatch(trajectory, Batch(samples), Batch(steps), mask, local.start)
    return prepare_for_loss(batch, cfg.algorithm, processes)


def _weights_of_steps(
    cfg: PolicyGradientSettings, trajectory: Trajectory, averages: Averages | None
) -> Float[Tensor, "T"]:
    eta = trajectory.eta.amax(0)
    trained = trajectory.trained.any(0).to(eta.device)
    weight = step_weights(cfg.step_rule, trajectory.kernel, trajectory.sigmas, eta, trained)
    if cfg.measured is None:
        return weight
    return cfg.measured.weights(averages or Averages.none(len(weight)), weight, trained)
