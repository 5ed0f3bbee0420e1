"""Take the steps of a rollout: velocities, noise, reward guidance and a second-order tail."""

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.functional.solver import second_order_step
from flowalign.functional.transition import Gaussian, sample_next, transition
from flowalign.sampling.complete_states import BatchedCompletion, CompletionRequest
from flowalign.sampling.features import FeatureRecorder
from flowalign.sampling.frame_windows import draw_frame_windows, share_outside_windows
from flowalign.sampling.reward_guidance import GuidedTransition, compute_pushes
from flowalign.sampling.sampling_settings import Sampling
from flowalign.types import Policy, Trajectory


class RolloutVelocities:
    """Velocities of a rollout's states, with completions and features from the same calls.

    Samples that share a state share its evaluation.
    """

    def __init__(
        self,
        policy: Policy,
        trajectory: Trajectory,
        finish: Collection[CompletionRequest],
        features: Collection[int],
        micro_batch: int,
    ):
        self.policy, self.trajectory, self.micro_batch = policy, trajectory, micro_batch
        self.completion = BatchedCompletion(trajectory, finish)
        self.recorders = dict.fromkeys(features, FeatureRecorder(policy)) if features else {}
        self.features: dict[int, Tensor] = {}
        """Recorded features, one row per distinct state."""

    def evaluate(self, k: int, x: Float[Tensor, "B *latent"]) -> Float[Tensor, "B *latent"]:
        """Return the velocities of states k."""
        rows, recorder = self.trajectory.rows, self.recorders.get(k)
        distinct, samples = rows.select(x, k), rows.unique_rows(k)
        field = recorder or self.policy
        v = self.completion.step(field, k, distinct, samples, self.micro_batch)
        if recorder:
            # The rows of completions come after those of the rollout and are dropped.
            self.features[k] = recorder.take(len(samples)).cpu()
        return rows.expand(v, k)


class Stepper:
    """Stepper of a rollout, with stochastic draws inside the window and ODE steps elsewhere."""

    def __init__(
        self,
        noise: "RolloutNoise",
        policy: Policy,
        cfg: Sampling,
        steps: Sequence[int],
        trajectory: Trajectory,
    ):
        self.policy, self.cfg, self.trajectory, self.noise = policy, cfg, trajectory, noise
        self.stochastic = frozenset(cfg.stochastic(steps))
        self.ode = ODEStepper(cfg, steps)

    def start(self) -> Float[Tensor, "B *latent"]:
        """Return state 0 of every sample, rounded to the stored precision."""
        return self.cfg.states.round(self.noise.start)

    def step(
        self, k: int, x: Float[Tensor, "B *latent"], v: Float[Tensor, "B *latent"]
    ) -> tuple[Gaussian, Float[Tensor, "B *latent"]]:
        """Return the policy's distribution of the state after step k, and the state."""
        trajectory = self.trajectory
        sigmas = trajectory.sigmas
        distribution = transition(self.cfg.kernel, x, v, sigmas, k, trajectory.eta[:, k])
        guided = self._guide(k, x, distribution)
        # Stochastic steps also call it: a second-order tail needs the last one's prediction.
        following = self.ode.step(k, x, v, sigmas, guided.mean)
        if k in self.stochastic:
            following = sample_next(guided, self.noise.draw(k))
        return distribution, self.cfg.states.round(trajectory.rows.share(following, k + 1))

    def _guide(self, k: int, x: Float[Tensor, "B *latent"], plain: Gaussian) -> Gaussian:
        """Return the guided distribution of step k, computed for distinct states."""
        guidance, trajectory = self.cfg.reward_guidance, self.trajectory
        if guidance is None or not guidance.active(trajectory.sigmas, k):
            return plain
        rows = trajectory.rows
        eta = rows.select(trajectory.eta[:, k], k)
        step = GuidedTransition(trajectory.sigmas, k, self.cfg.kernel, eta)
        prompts = (rows.unique_rows(k) // trajectory.group_size).to(x.device)
        states = rows.select(x, k), step, trajectory.cond, prompts
        push = compute_pushes(guidance, self.policy, *states, self.cfg.micro_batch)
        return Gaussian(plain.mean + rows.expand(push, k), plain.std)


class ODEStepper:
    """Deterministic stepper of a rollout: second order in a shorter tail, Euler elsewhere."""

    def __init__(self, cfg: Sampling, steps: Sequence[int]):
        self.tail = cfg.num_steps + 1 if cfg.tail_ratio is None else cfg.tail(steps)[0]
        """Index of the first state of the tail; larger than all indices if there is no tail."""
        self.before: tuple[Tensor, Tensor] | None = None
        """Sigma and predicted clean latents of the previous step."""

    def step(self, k: int, x: Tensor, v: Tensor, sigmas: Tensor, euler: Tensor) -> Tensor:
        """Return the state after step k; `euler` is the result of the Euler step."""
        if k + 1 < self.tail:
            return euler
        before, x0_hat = self.before, x - sigmas[k] * v
        self.before = sigmas[k], x0_hat
        if k < self.tail or before is None:
            return euler
        return second_order_step(x, x0_hat, before[1], before[0], sigmas[k], sigmas[k + 1])


class RolloutNoise:
    """Random numbers of a rollout, on the policy's device.

    Recorded runs depend on the order of draws from each generator: initial noises, frame window,
    then for each stochastic step the individual noises before the noise that siblings share.
    """

    def __init__(
        self,
        policy: Policy,
        cfg: Sampling,
        steps: Sequence[int],
        trajectory: Trajectory,
        generators: Sequence[torch.Generator],
    ):
        x = torch.cat([policy.noise(cfg.num_starts(steps), generator) for generator in generators])
        self.branching, self.trajectory, self.generators = cfg.branching, trajectory, generators
        self.shape, self.device = (cfg.samples_per_prompt, *x.shape[1:]), x.device
        window = cfg.frame_window
        self.windows = draw_frame_windows(window, x.shape[1:], generators) if window else []
        self.start: Tensor = trajectory.rows.expand(self._share_frames(x), 0)
        """State 0 of every sample."""

    def draw(self, k: int) -> Float[Tensor, "B *latent"]:
        """Return the noise of step k; samples with the same previous state share a part of it."""
        noise, scale = self._draw_each(), self.branching.sibling_noise_scale
        if scale is not None:
            common = self.trajectory.rows.share(self._draw_each(), k)
            noise = (common + scale * noise) / (1 + scale**2) ** 0.5
        return self._share_frames(noise).to(self.device)

    def _draw_each(self) -> Tensor:
        # Drawn on the CPU, where a seed gives the same numbers on every machine.
        return torch.cat(
            [torch.randn(self.shape, generator=g, dtype=torch.float32) for g in self.generators]
        )

    def _share_frames(self, noise: Tensor) -> Tensor:
        return share_outside_windows(noise, self.windows) if self.windows else noise
