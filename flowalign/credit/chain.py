"""Credit the steps of a chain: with outcomes, changes of value, latent rewards or completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.functional.advantage import compare_in_groups, group_mean
from flowalign.types import CreditEstimator, LatentReward, StepCredit, Trajectory, ValueFunction
from flowalign.types.trajectory import Completion, prompt_step_ids
from flowalign.utils.ranges import NonNegativeInt, PositiveInt, UnitInterval


def stochastic_steps(trajectory: Trajectory) -> list[int]:
    """Return the indices of a trajectory's trained steps, increasing.

    ODE steps need no separate value. They are deterministic, so state k + 1 has the value of the
    next stochastic state or, if there is none, the outcome. Values at [*steps, T] therefore cover a
    chain. A change of value at an untrained stochastic step is credited to the last trained step
    before it.
    """
    stochastic = trajectory.eta > 0
    stochastic[:, list(trajectory.untrained)] = False
    if (stochastic != stochastic[:1]).any():
        raise ValueError(
            "credit along a chain needs the same stochastic steps in every sample, but "
            "these trajectories branch: set recipe.sampling.branching to flowalign.sampling.Chain"
        )
    return stochastic[0].nonzero().flatten().tolist()


def step_credit(
    trajectory: Trajectory,
    steps: Sequence[int],
    credit: Float[Tensor, "B n R"],
    marked: Bool[Tensor, "B n"] | None = None,
) -> StepCredit:
    """Return credit over all steps, 0 outside `steps`; `marked` flags some of the given steps."""
    value = credit.new_zeros(len(credit), trajectory.num_steps, credit.shape[-1])
    value[:, list(steps)] = credit
    everywhere = None
    if marked is not None:
        everywhere = torch.zeros(value.shape[:2], dtype=torch.bool)
        everywhere[:, list(steps)] = marked
    return StepCredit(value, prompt_step_ids(trajectory), trajectory.trained, marked=everywhere)


def gains(values: Float[Tensor, "B S R"]) -> Float[Tensor, "B S-1 R"]:
    """Return V_{k+1} - V_k. The gains of a trajectory sum to its last value minus its first."""
    return values.diff(dim=1)


@dataclass(frozen=True)
class Gain(CreditEstimator):
    """Each stochastic step earns its gain, the change of value V_{k+1} - V_k.

    Value is the reward of the sample that the ODE completes.
    Sources: DenseGRPO, arXiv:2601.20218v2, normalises each step separately. Stepwise-Flow-GRPO,
    arXiv:2603.28718, normalises all steps of a prompt together (advantages.scale: joint).
    """

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step, and the outcome."""
        steps = stochastic_steps(trajectory)
        return step_credit(trajectory, steps, gains(values([*steps, trajectory.num_steps])))


@dataclass(frozen=True)
class NextValue(CreditEstimator):
    """Each stochastic step earns V_{k+1}, the value of the state that it reached.

    Source: DenseGRPO's ablation "Dense Reward (Baseline)".
    """

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state before each stochastic step but the first, and the outcome."""
        steps = stochastic_steps(trajectory)
        return step_credit(trajectory, steps, values([*steps[1:], trajectory.num_steps]))


@dataclass(frozen=True, kw_only=True)
class Granular(CreditEstimator):
    """Each step earns the sum of its advantages under completions of several granularities.

    G2RPO trains one stochastic step per rollout, and all samples of a prompt share their initial
    noise (window Random(size=1), seeds_per_prompt 1). The method needs advantages.scale: given.

    Source: G2RPO, arXiv:2510.01982v3, and code of bcmi/Granular-GRPO.
    """

    strides: Sequence[PositiveInt] = (1, 2, 3)
    """Stride of each granularity. A completion takes one step, then uses every stride-th point of
    the schedule."""

    def __post_init__(self) -> None:
        """Reject empty strides, strides below 1 and repeated strides."""
        if not self.strides or min(self.strides) < 1 or len(set(self.strides)) < len(self.strides):
            raise ValueError(
                f"credit.strides is {list(self.strides)}; "
                "give different whole numbers of at least 1"
            )

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the state after each stochastic step, once per stride."""
        steps = stochastic_steps(trajectory)
        total = torch.zeros(0)
        for stride in self.strides:
            how = Completion(stride=stride)
            reached = [*steps[1:], trajectory.num_steps] if stride == 1 else [k + 1 for k in steps]
            value = values(reached, how)
            prompt = torch.arange(len(value)) // trajectory.group_size
            advantage = torch.stack([compare_in_groups(v, prompt) for v in value.unbind(1)], 1)
            total = advantage if stride == self.strides[0] else total + advantage
        credit = step_credit(trajectory, steps, total)
        return StepCredit(credit.value, credit.group, credit.mask, normalised=True)


def lambda_returns(values: Float[Tensor, "B S R"], decay: float) -> Float[Tensor, "B S-1 R"]:
    """Return sum_{l >= k} decay^(l - k) (V_{l+1} - V_l).

    With decay 1 the sum is the outcome minus V_k. With decay 0 it is the gain of step k.
    """
    total, sums = torch.zeros_like(values[:, 0]), []
    for gain in reversed(gains(values).unbind(dim=1)):
        total = gain + decay * total
        sums.append(total)
    return torch.stack(sums[::-1], dim=1)


@dataclass(frozen=True, kw_only=True)
class LambdaReturn(CreditEstimator):
    """Each stochastic step earns the lambda return of the critic's values.

    The method needs `recipe.critic` and completes no states.

    Source: generalised advantage estimation, arXiv:1506.02438, with gamma 1 and only a terminal
    reward. The critic is our choice.
    """

    decay: UnitInterval = 1.0
    """Lambda of generalised advantage estimation. 1: the outcome minus the critic's prediction
    before the step, unbiased for any critic. Lower values replace later steps by the critic's
    prediction, which reduces noise but adds the critic's bias."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Predict the value before each stochastic step, and append the outcome."""
        steps = stochastic_steps(trajectory)
        before, outcome = values.predicted(steps), values([trajectory.num_steps])
        return step_credit(
            trajectory, steps, lambda_returns(torch.cat([before, outcome], 1), self.decay)
        )


@dataclass(frozen=True, kw_only=True)
class LatentGain(CreditEstimator):
    """Each stochastic step earns its change of the latent reward.

    The last value is the latent reward of the clean latent. The outcome is only logged.

    Sources: DenseGRPO, arXiv:2601.20218v2, with another value function: the noise-aware latent
    rewards of DiNa-LRM, arXiv:2602.11146, and PRFL, arXiv:2511.21541.
    """

    reward: LatentReward
    """Reward model of noisy latents; it must return the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Score the state before each stochastic step, and the last state."""
        steps = stochastic_steps(trajectory)
        scores = values.scored([*steps, trajectory.num_steps], self.reward)
        return step_credit(trajectory, steps, gains(scores))


@dataclass(frozen=True, kw_only=True)
class ProcessOutcome(CreditEstimator):
    """Each stochastic step earns the outcome and the latent reward of the state it reached.

    The two get separate advantages within prompt and step, and separate clipped losses that are
    summed.

    Source: Euphonium, arXiv:2602.04928. The process reward scores the state after the step, because
    the step's noise acts on this state. This choice is our reconstruction.
    """

    reward: LatentReward
    """Reward model of noisy latents; it must return the weighted reward dimensions."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Value the last state, and score the state after each stochastic step."""
        steps = stochastic_steps(trajectory)
        reached = values.scored([k + 1 for k in steps], self.reward)
        process = step_credit(trajectory, steps, reached).value
        return replace(Outcome()(trajectory, values), process=process)


@dataclass(frozen=True)
class Outcome(CreditEstimator):
    """Every stochastic step earns the terminal reward: the sparse baseline of dense methods.

    Source: Flow-GRPO, arXiv:2505.05470v5.
    """

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Credit every stochastic transition with the value of the last state."""
        final = values([trajectory.num_steps])
        return StepCredit(
            value=final.expand(-1, trajectory.num_steps, -1),
            group=prompt_step_ids(trajectory),
            mask=trajectory.trained,
        )


def estimate_slope(
    before: Float[Tensor, "n R"], after: Float[Tensor, "n R"], group: Int[Tensor, "n"]
) -> Float[Tensor, "R"]:
    """Return the slope of `after` on `before` within groups, clamped to [0, 1].

    It is 0 if `before` is constant. Samples with a missing value are ignored.
    """
    known = (before.isfinite() & after.isfinite()).all(1)
    index = group[known].unique(return_inverse=True)[1]
    x, y = (v[known] - group_mean(v[known], index) for v in (before, after))
    variation = (x * x).sum(0)
    return ((x * y).sum(0) / torch.where(variation > 0, variation, 1.0)).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class ControlVariate(CreditEstimator):
    """Each stochastic step earns V_{k+1} - c_k V_k, c_k fitted to the samples of this process.

    States outside `steps` are not evaluated: their c_k is 0, and the next evaluated state or the
    outcome stands for V_{k+1}.

    The method is our own; it is not published. V_k does not depend on the noise that step k draws,
    so any multiple of it may be subtracted from V_{k+1} without biasing the policy gradient. A gain
    subtracts all of V_k. This adds the noise of V_k if the step changes much of the image. The
    regression coefficient is the multiple with the least variance.
    """

    steps: Sequence[NonNegativeInt] | None = None
    """Indices of the states to evaluate; states before ODE steps are skipped. An early state costs
    the most network evaluations and explains the least variance. Null: all."""

    def __call__(self, trajectory: Trajectory, values: ValueFunction) -> StepCredit:
        """Evaluate the selected states before stochastic steps, and the outcome."""
        steps, last = stochastic_steps(trajectory), trajectory.num_steps - 1
        if any(k > last for k in self.steps or ()):
            raise ValueError(
                f"credit.steps is {list(self.steps or ())}; the denoising steps are 0 to {last}"
            )
        bought = steps if self.steps is None else [k for k in steps if k in self.steps]
        v = values([*bought, trajectory.num_steps])
        group, credit = prompt_step_ids(trajectory)[:, 0], []
        for k in steps:
            after = v[:, sum(state <= k for state in bought)]
            if k in bought:
                before = v[:, bought.index(k)]
                after = after - estimate_slope(before, after, group) * before
            credit.append(after)
        return step_credit(trajectory, steps, torch.stack(credit, 1))
