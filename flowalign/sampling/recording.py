"""Record the states, means and log-probabilities of a rollout, for credit and training."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.transition import Gaussian, log_density
from flowalign.sampling.complete_states import CompletionRequest
from flowalign.types import Trajectory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RolloutOutputs:
    """Selection of the tensors that a rollout keeps; it does not change the random draws."""

    states: Collection[int] | None = None
    """Indices of the states to keep. None: all."""
    features: Collection[int] = ()
    """Indices of the states to record denoiser features of."""
    means: bool = False
    """Whether to keep the means of the trained transitions."""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Device and precision of the rollout states that are kept for training."""

    device: Literal["same", "cpu"] = "same"
    """Device of the kept states. same: the policy's device. cpu: main memory, which needs a copy of
    each kept state and of each minibatch."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the kept states. The rollout continues from the rounded states, so training
    evaluates the policy at the same inputs."""

    def round(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a state in float32 after rounding to the stored precision."""
        return x.to(DTYPES[self.dtype]).float()

    def store(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a rounded state in the precision and on the device of kept states."""
        return self.place(x.to(DTYPES[self.dtype]))

    def place(self, x: Float[Tensor, "n *latent"]) -> Float[Tensor, "n *latent"]:
        """Return a tensor on the device of kept states."""
        return x.cpu() if self.device == "cpu" else x


class RolloutRecorder:
    """Recorder of a rollout, which builds its trajectory."""

    def __init__(
        self,
        trajectory: Trajectory,
        steps: Collection[int],
        outputs: RolloutOutputs,
        storage: Storage,
    ):
        self.trajectory, self.outputs, self.storage = trajectory, outputs, storage
        self.mean_steps = steps if outputs.means else ()
        self.states: dict[int, Tensor] = {}
        self.means: dict[int, Tensor] = {}

    def record_state(self, k: int, x: Float[Tensor, "B *latent"]) -> None:
        """Store the distinct rows of state k, if selected."""
        if self.outputs.states is None or k in self.outputs.states:
            self.states[k] = self.storage.store(self.trajectory.rows.select(x, k))

    def record_step(
        self, k: int, distribution: Gaussian, following: Float[Tensor, "B *latent"]
    ) -> None:
        """Store the log-probability of the state after step k, and the mean of the step.

        `distribution` is the policy's distribution without reward guidance.
        """
        # `following` is already rounded and shared, so replay computes the same log-probability.
        logp = log_density(self.trajectory.kernel, following, distribution)
        self.trajectory.logp[:, k] = logp.where(self.trajectory.eta[:, k] > 0, 0.0)
        if k in self.mean_steps:
            self.means[k] = self.storage.place(distribution.mean)

    def finish(
        self, completed: Mapping[CompletionRequest, Tensor], hidden: Mapping[int, Tensor]
    ) -> Trajectory:
        """Return the trajectory, with completed states and the denoiser's features."""
        finished = {request: self.storage.place(x) for request, x in completed.items()}
        return replace(
            self.trajectory,
            states=self.states,
            means=self.means,
            finished=finished,
            hidden=hidden,
        )
