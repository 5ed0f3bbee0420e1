"""Take the steps of a rollout: velocities, completions, noise, features, a second-order tail."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flowalign.functional.solver import second_order_step
from flowalign.functional.transition import Gaussian, sample_next, transition
from flowalign.sampling.reward_guidance import GuidedTransition, compute_pushes
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.sde_windows import draw_frame_windows, share_outside_windows
from flowalign.types import Cond, Policy, Trajectory, VelocityField
from flowalign.types.trajectory import CompletionRequest, take_rows
from flowalign.utils.costs import stage

LAST_LAYERS = ("proj_out", "conv_out", "final_layer")
"""Names of the last layer in denoisers of diffusers."""


class FeatureRecorder(VelocityField):
    """Velocity of a policy that also records the input of the denoiser's last layer.

    The input is averaged over tokens or spatial positions. Guidance evaluates a sample twice; the
    features then concatenate both evaluations.

    Raises:
        ValueError: The denoiser has no layer with a name in `LAST_LAYERS`, or the policy evaluates
            the samples of a batch separately.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.layers = last_layers(policy.denoiser)
        self.rows: list[Tensor] = []
        """Features of each call since the last `take`, one row per sample."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the policy's dx / dsigma."""
        seen: list[Tensor] = []
        with ExitStack() as stack:
            for layer in self.layers:  # a pre-hook does not depend on the type of the output
                hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
                stack.enter_context(hook)
            v = self.policy.velocity(x, sigma, cond)
        if any(len(hidden) % len(x) for hidden in seen):
            raise ValueError(
                f"a critic reads features of whole batches, and {type(self.policy).__name__} "
                "evaluates samples of different lengths separately: choose credit without a critic"
            )
        each = torch.cat([average_places(hidden) for hidden in seen]).unflatten(0, (-1, len(x)))
        self.rows.append(each.transpose(0, 1).flatten(1))
        return v

    def take(self, count: int) -> Float[Tensor, "n D"]:
        """Return the features of the first `count` samples since the last call; clear the rest."""
        features, self.rows = torch.cat(self.rows)[:count], []
        return features


class GraphRecorder(VelocityField):
    """Velocity without gradient that keeps the graph of each call."""

    def __init__(self, field: VelocityField):
        self.field = field
        self.calls: list[Tensor] = []
        """Velocities of each call, with gradient."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the field's dx / dsigma."""
        with torch.enable_grad():
            self.calls.append(self.field.velocity(x, sigma, cond))
        return self.calls[-1].detach()


def last_layers(denoiser: nn.Module) -> list[nn.Module]:
    """Return the last layer of a network, or of each sub-network that it combines.

    Raises:
        ValueError: No layer has a name in `LAST_LAYERS`.
    """
    layers = [
        layer
        for name, layer in denoiser.named_modules()
        if name.rpartition(".")[2] in LAST_LAYERS and name.count(".") <= 1
    ]
    if not layers:
        raise ValueError(
            f"a critic reads the input of a denoiser's last layer; {type(denoiser).__name__} has "
            f"none that is called {' or '.join(LAST_LAYERS)}"
        )
    return layers


def average_places(hidden: Tensor) -> Float[Tensor, "n D"]:
    """Return the mean over tokens [n, tokens, D] or positions [n, D, *positions], in float32."""
    hidden = hidden.detach().float()
    if hidden.ndim == 2:
        return hidden
    return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)


class BatchedCompletion:
    """Completion of many intermediate states in shared batches.

    All completions at the same sigma are evaluated in one batch, and the first step reuses the
    velocity of the rollout. A completion has one row per distinct state.
    """

    def __init__(self, trajectory: Trajectory, requests: Collection[CompletionRequest]):
        self.trajectory = trajectory
        num_steps = trajectory.num_steps
        paths = {request: request[1].path(request[0], num_steps) for request in requests}
        self.ahead = {request: path for request, path in paths.items() if len(path) > 1}
        """Remaining schedule indices of each completion, starting with the current one."""
        self.at: dict[CompletionRequest, Tensor] = {}
        """Current state of each started completion."""

    def step(
        self,
        field: VelocityField,
        k: int,
        x: Float[Tensor, "n *latent"],
        rows: Int[Tensor, "n"],
        micro_batch: int,
    ) -> Float[Tensor, "n *latent"]:
        """Return the velocities of x, the states k of samples `rows`; advance all completions."""
        active = [request for request in self.at if self.ahead[request][0] == k]
        shared = self.trajectory.rows
        samples = torch.cat([rows, *(shared.unique_rows(request[0]) for request in active)])
        states = torch.cat([x, *(self.at[request] for request in active)])
        if not len(states):
            return x
        prompt = (samples // self.trajectory.group_size).to(states.device)
        sigma, cond = self.trajectory.sigmas[k], self.trajectory.cond
        v = evaluate_velocity(field, states, sigma, cond, prompt, micro_batch)
        own, *others = v.split([len(x), *(len(self.at[request]) for request in active)])
        for request, part in zip(active, others, strict=True):
            self._advance(request, self.at[request], part)
        for request in self.ahead:
            if request[0] == k and request not in self.at:
                # The first step of a completion reuses the velocity of the rollout.
                self._advance(request, x, own)
        return own

    def _advance(self, request: CompletionRequest, x: Tensor, v: Tensor) -> None:
        here, there = self.ahead[request][:2]
        self.ahead[request] = self.ahead[request][1:]
        self.at[request] = x + (self.trajectory.sigmas[there] - self.trajectory.sigmas[here]) * v


@stage("sample")
@torch.no_grad()
def complete(
    field: VelocityField,
    trajectory: Trajectory,
    requests: Collection[CompletionRequest],
    micro_batch: int,
) -> dict[CompletionRequest, Float[Tensor, "n *latent"]]:
    """Return completed states after a rollout, one row per distinct state.

    Use it for velocity fields other than the rollout's. It makes at most T sequential calls and
    evaluates the first velocity of every completion as well.
    """
    completion = BatchedCompletion(trajectory, requests)
    no_states = trajectory.state(trajectory.num_steps, slice(0))
    for k in range(trajectory.num_steps):
        for request in requests:
            if request[0] == k:
                completion.at[request] = trajectory.unique_states(k)
        completion.step(field, k, no_states, torch.empty(0, dtype=torch.long), micro_batch)
    return completion.at


def evaluate_velocity(
    field: VelocityField,
    x: Float[Tensor, "n *latent"],
    sigma: Float[Tensor, "*n"],
    cond: Cond,
    row: Int[Tensor, "n"],
    micro_batch: int,
) -> Float[Tensor, "n *latent"]:
    """Evaluate `field.velocity` in micro-batches; sample i is conditioned on row[i] of cond."""
    parts = x.split(micro_batch)
    sigmas = sigma.split(micro_batch) if sigma.ndim else (sigma,) * len(parts)
    chunks = zip(parts, sigmas, row.split(micro_batch), strict=True)
    return torch.cat([field.velocity(part, s, take_rows(cond, rows)) for part, s, rows in chunks])


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
        kept: Collection[int] = (),
    ):
        self.policy, self.trajectory, self.micro_batch = policy, trajectory, micro_batch
        self.graphs: dict[int, list[Tensor]] = {k: [] for k in kept}
        """Velocities of the steps `kept`, with gradient, one tensor per network call."""
        self.completion = BatchedCompletion(trajectory, finish)
        self.recorders = dict.fromkeys(features, FeatureRecorder(policy)) if features else {}
        self.features: dict[int, Tensor] = {}
        """Recorded features, one row per distinct state."""

    def evaluate(self, k: int, x: Float[Tensor, "B *latent"]) -> Float[Tensor, "B *latent"]:
        """Return the velocities of states k."""
        rows, recorder = self.trajectory.rows, self.recorders.get(k)
        distinct, samples = rows.select(x, k), rows.unique_rows(k)
        field: VelocityField = recorder or self.policy
        if k in self.graphs:
            field = GraphRecorder(field)
            self.graphs[k] = field.calls
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
        self.tail = cfg.num_steps + 1 if cfg.tail_ratio is None else cfg.tail(steps)[0]
        """Index of the first state of a shorter tail; larger than all indices without one."""
        self.before: tuple[Tensor, Tensor] | None = None
        """Sigma and predicted clean latents of the previous step."""

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
        following = self._step_ode(k, x, v, guided.mean)
        if k in self.stochastic:
            following = sample_next(guided, self.noise.draw(k))
        return distribution, self.cfg.states.round(trajectory.rows.share(following, k + 1))

    def _step_ode(self, k: int, x: Tensor, v: Tensor, euler: Tensor) -> Tensor:
        """Return the state after a deterministic step: second order in a tail, Euler elsewhere.

        `euler` is the result of the Euler step.
        """
        if k + 1 < self.tail:
            return euler
        sigmas, before = self.trajectory.sigmas, self.before
        self.before = sigmas[k], x - sigmas[k] * v
        if k < self.tail or before is None:
            return euler
        return second_order_step(x, self.before[1], before[1], before[0], sigmas[k], sigmas[k + 1])

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
        start: Tensor | None = None,
    ):
        count = cfg.num_starts(steps)
        x = torch.cat([policy.noise(count, one) for one in generators]) if start is None else start
        self.branching, self.trajectory, self.generators = cfg.branching, trajectory, generators
        self.shape, self.device = (cfg.samples_per_prompt, *x.shape[1:]), x.device
        window = cfg.frame_window
        self.windows = draw_frame_windows(window, x.shape[1:], generators) if window else []
        self.start: Tensor = trajectory.rows.expand(self._share_frames(x), 0)
        """State 0 of every sample."""

    def draw(self, k: int) -> Float[Tensor, "B *latent"]:
        """Return the noise of step k; samples with the same previous state share a part of it."""
        noise = self.trajectory.rows.share_noise(self._draw_each(), k)
        scale = self.branching.sibling_noise_scale
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
