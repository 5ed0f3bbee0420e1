"""Arms of the study of step-level credit, and the law that predicts their gains.

`credit_pays.py` uses them in the tiny worlds, and `credit_pays_toys.py` on the toy models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from credit_pays_world import ETA, STEPS
from torch import Tensor

from flowalign.credit import MixedAdvantage
from flowalign.functional.advantage import group_mean
from flowalign.functional.signal import inner_products, moments, sibling_gain
from flowalign.runs.session import compute_batch
from flowalign.sampling import Chain, Comb
from flowalign.studies.probe.measure import gradients_of_steps
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.rollouts.collecting import rollout
from flowalign.types import Trajectory
from flowalign.types.trajectory import sibling_ids

CHILDREN = 4
ODE, COMMON = "comb, ODE", "comb, common noise"


@dataclass(frozen=True)
class Arm:
    """Credit with its layout. Arms that are compared make about as many evaluations per update."""

    prompts: int
    trunks: int
    """Initial noises per prompt."""
    samples: int
    """Samples per trunk."""
    branching: Chain | Comb
    share: float | None
    """Share of the siblings in the credit, see `MixedAdvantage`."""

    @property
    def evaluations(self) -> int:
        """Return the evaluations of an update: all sampled states, and one per trained state."""
        layout = self.branching.seed_layout(self.samples, torch.tensor([ETA] * 7 + [0.0]))
        window, rows = range(STEPS - 1), layout.rows
        made = rows.owned & (layout.eta > 0)
        sampled = sum(len(rows.unique_rows(k)) for k in range(STEPS))
        trained = sum(len({*rows.source_row[made[:, k], k].tolist()}) for k in window)
        return self.prompts * self.trunks * (sampled + trained)

    @property
    def splits(self) -> Sequence[int]:
        """Return the steps with siblings."""
        if isinstance(self.branching, Chain):
            return ()
        return range(STEPS - 1) if self.branching.splits is None else self.branching.splits

    @property
    def step_weight(self) -> list[float]:
        """Return weights that give steps with more transitions no more weight in the loss."""
        uniform = len(self.splits) == STEPS - 1
        return [1 / CHILDREN if k in self.splits and not uniform else 1.0 for k in range(STEPS)]

    @property
    def credit(self) -> MixedAdvantage:
        """Return the credit."""
        return MixedAdvantage(share=self.share)


def sibling_variances(found: Trajectory, reward: Tensor) -> tuple[Tensor, float]:
    """Return the variance among siblings of each step, and among independent samples of a prompt.

    Samples of different trunks are independent.
    """
    group, mask, each = sibling_ids(found), found.trained, torch.zeros(STEPS - 1)
    for k in range(STEPS - 1):
        value, index = reward[mask[:, k], None], group[mask[:, k], k].unique(return_inverse=True)[1]
        freedom = len(value) - int(index.max()) - 1
        each[k] = (value - group_mean(value, index)).square().sum() / max(freedom, 1)
    return each, float(reward.view(-1, found.group_size).var(1).mean())


def step_noise(loop: PolicyGradientLoop, batches: int) -> dict[str, list[float]]:
    """Return signal and noise of each step's gradient, without an update."""
    cfg, rows = loop.cfg, []
    for i in range(batches):
        asked = loop.requests.batch(i, cfg.prompts_per_step)
        drawn = rollout(cfg.rollouts, loop.learner, asked, 0, i)
        batch = compute_batch(cfg, loop.learner, loop, drawn)
        rows.append([g for _, g in gradients_of_steps(cfg, loop.learner, batch)])
    found = moments(inner_products(rows, [1] * batches))
    return {"signal": found.signal.diagonal().tolist(), "noise": found.noise.diagonal().tolist()}


def law(arm: Arm, own: Mapping[str, Tensor], total: float, s: float) -> Tensor:
    """Return the predicted variance of each step's gradient of an update, up to a factor per step.

    `own` are variances among siblings with ODE completions and with common noise, `total` that of a
    prompt's samples, without the reward noise s^2. The squared error of the own outcome, w + s, is
    not centred at the truth, so the outcome's own part w counts twice.
    """
    k, chains = CHILDREN, arm.prompts * arm.trunks
    outcome = (total + s + own[COMMON]) / chains
    if isinstance(arm.branching, Chain):
        return outcome
    w = own[COMMON if arm.branching.common_noise else ODE]
    variance = (w + s) * k / (k - 1) + w
    if arm.share is None:
        rest = (total - w).clamp(min=0)
        best = rest / (rest + (w + s) / (k - 1))
        variance = (w + s) * (1 + best**2 / (k - 1)) + (1 - best) ** 2 * rest + w
    split = torch.isin(torch.arange(STEPS - 1), torch.tensor(list(arm.splits)))
    return torch.where(split, variance / chains / k, outcome)


def predicted_gains(
    arms: Mapping[str, Arm],
    own: Mapping[str, Tensor],
    total: float,
    noise_of_outcome: Sequence[float],
    noises: Sequence[float],
) -> dict[str, Any]:
    """Return the gain of each arm over outcomes, and that of siblings per step, by reward noise.

    The factor per step, the squared score, comes from the gradient noise of outcomes. `noises` are
    in deviations of the reward.
    """
    score_norm = torch.tensor(noise_of_outcome) / law(arms["outcome"], own, total, 0)
    more = {"children": CHILDREN, "num_steps": STEPS, "ahead": torch.arange(STEPS - 2, -1, -1.0)}
    gain, per_step = {}, {}
    for s in noises:
        extra = s**2 * total
        summed = {
            n: float((score_norm * law(arm, own, total, extra)).sum()) for n, arm in arms.items()
        }
        gain[str(s)] = {name: summed["outcome"] / v for name, v in summed.items()}
        per_step[str(s)] = {
            f"training costs {c:g}": sibling_gain(
                own[COMMON], total, extra, training=c, **more
            ).tolist()
            for c in (1.0, 3.0)
        }
    return {
        "variance of outcomes": total,
        "variance of siblings": {name: value.tolist() for name, value in own.items()},
        "gain of siblings per step": per_step,
        "predicted gain": gain,
    }
