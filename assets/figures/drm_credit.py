"""Compare DRM with completions, another latent reward and outcomes on Shapes, without training.

    python assets/figures/drm_credit.py runs/shapes_drm/model    # minutes on one core

The folders hold rewards from `configs/reward/shapes_drm.yaml`, one per seed. The value of a state
is the verifier's mean over stochastic completions, which no method sees; the true credit of a step
is its change. Writes `drm_credit.*` next to this script; without folders it draws stored numbers.

Predictions, written before any measurement: within a prompt, DRM's value correlates with the true
one by less than 0.2 at sigma 0.9 and by 0.4 to 0.6 below 0.5, more than the reward on three blocks.
Its gain correlates with the true credit by 0.1 to 0.2, like outcomes and less than completions;
among siblings it loses to outcomes, which see the finished image.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import words_credit as words
from jaxtyping import Float
from latent_reward import DIMS, held_out, loaded, total
from torch import Tensor

from flowalign.credit import Branch, Gain, LatentGain, NextLatent, Outcome
from flowalign.distributed.processes import Processes
from flowalign.functional.advantage import group_center
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.training.rollouts.rollout_settings import CreditRequirements
from flowalign.types import CreditEstimator
from flowalign.types.trajectory import Completion
from pipelines.families.sd3 import SD3
from reward_models.verifiers.shapes import ShapesVerifier
from reward_models.wrappers.trained import TrainedLatentReward

FILE, PROMPTS, COPIES = Path(__file__).with_suffix(".json"), 16, 6
STATES, TRAINED = range(words.STEPS + 1), range(words.STEPS - 1)


class Benchmark:
    """Rollouts of one arrangement, with the true value of every state."""

    def __init__(self, policy: SD3, arrangement: str):
        self.policy, self.arrangement = policy, arrangement
        learner = Learner(policy, Optimizer(), Processes(0, 1, torch.device("cpu")), 1)
        self.rewards = Rewards([ShapesVerifier()], dict.fromkeys(DIMS, 1 / len(DIMS)))
        self.rewards.load()
        self.cfg = words.settings(arrangement, PROMPTS, Completion())
        self.trajectory = rollout(self.cfg, learner, held_out(PROMPTS), 0, 0)
        self.given = completion_values(self.cfg, learner, self.rewards, self.trajectory)
        self.truth = torch.stack([self.true_value(k) for k in STATES])

    def true_value(self, k: int) -> Float[Tensor, "B C"]:
        """Return the scores of C stochastic completions; equal where no noise follows."""
        eta = words.settings("chains", 1, Completion()).empty_trajectory(TRAINED).eta[0]
        if not eta[k:].any():
            return self.weighted(self.given([words.STEPS])).expand(-1, COPIES)
        of, size = self.trajectory, words.MICRO_BATCH
        x, rows = words.complete_stochastically(self.policy, of, k, eta, COPIES)
        asked = [of.prompts[i] for i in rows.tolist()]
        found = [
            total(ShapesVerifier(), self.policy.decode(x[i : i + size]), asked[i : i + size])
            for i in range(0, len(x), size)
        ]
        return of.rows.expand(torch.cat(found).unflatten(0, (-1, COPIES)), k)

    def weighted(self, values: Tensor) -> Tensor:
        """Return the mean of the five dimensions."""
        return values.nan_to_num() @ self.rewards.weights

    def credit(self, label: str, method: CreditEstimator) -> dict[str, Any]:
        """Return the agreement of credit with the true credit, and the costs per sample."""
        found = method(self.trajectory, self.given)
        value, truth = self.weighted(found.value), words.true_credit(self.truth)
        credit = words.centred_credit(value, found.group, found.mask, found.normalised)
        agreed = words.compare(credit, truth, found.mask, self.trajectory)
        spent = words.costs(words.Method(label, method), self.cfg)
        empty = self.cfg.empty_trajectory(TRAINED)
        for reward, k in CreditRequirements(method, empty, Completion()).scored:
            rows = len(empty.rows.unique_rows(k))
            spent["evaluations"] += reward.evaluation_share * rows / len(empty.logp)
        return {"method": label, "arrangement": self.arrangement} | agreed | spent

    def value(self, label: str, values: Float[Tensor, "B S"]) -> dict[str, Any]:
        """Return the correlation of values with the true ones within prompts, for each state."""
        prompt = self.trajectory.prompt
        pair = (group_center(v, prompt, "none").unbind(1) for v in (values, self.truth.mean(2).T))
        found = [words.correlation(a, b, prompt) for a, b in zip(*pair, strict=True)]
        return {"method": label, "states": found}

    def ceiling(self) -> float:
        """Return the largest correlation that the noise of the true credit permits."""
        halves, mask = self.truth.chunk(2, dim=2), self.trajectory.trained
        return round(words.reliability(*(words.true_credit(h)[mask] for h in halves)), 4)


def measured(folders: list[str]) -> dict[str, Any]:
    """Return the agreement of values and credit with the true ones, for DRM in some folders."""
    policy, start = loaded(), time.process_time()
    places = {"DRM" + f", seed {i}" * (i > 0): place for i, place in enumerate(folders)}
    places |= {"three blocks": "assets/shapes/latent"}
    rewards = {name: TrainedLatentReward(place, "calibrated") for name, place in places.items()}
    chains, comb = (Benchmark(policy, name) for name in ("chains", "comb"))
    outcome = chains.weighted(chains.given([words.STEPS])).expand(-1, len(STATES))
    values = {"outcome": outcome, "completions": chains.weighted(chains.given(STATES))}
    values |= {n: chains.weighted(chains.given.scored(STATES, r)) for n, r in rewards.items()}
    rows = [chains.credit("outcome", Outcome()), chains.credit("completions, gain", Gain())]
    rows += [chains.credit(f"{n}, gain", LatentGain(reward=r)) for n, r in rewards.items()]
    rows.append(comb.credit("outcome, siblings", Branch()))
    rows += [comb.credit(f"{n}, siblings", NextLatent(reward=r)) for n, r in rewards.items()]
    return {
        "sigmas": [round(v, 4) for v in chains.trajectory.sigmas.tolist()],
        "values": [chains.value(name, value) for name, value in values.items()],
        "credit": rows,
        "ceiling": {one.arrangement: one.ceiling() for one in (chains, comb)},
        "cpu_seconds": round(time.process_time() - start),
    }


def draw(content: dict[str, Any]) -> None:
    """Draw the correlation of values by noise level, and of credit by step."""
    fig, panels = plt.subplots(1, 2, figsize=(13, 5), dpi=100, layout="constrained")
    for row in content["values"]:
        value, *ends = zip(*row["states"], strict=True)
        panels[0].plot(content["sigmas"], value, "o-", ms=4, label=row["method"])
        panels[0].fill_between(content["sigmas"], *ends, alpha=0.08)
    panels[0].set(xlabel="noise level sigma", title="value of states, within prompts")
    for row in content["credit"]:
        line = "o-" if row["arrangement"] == "chains" else "s--"
        panels[1].plot(row["steps"], line, ms=4, label=row["method"])
    panels[1].set(xlabel="denoising step", title="credit of steps (dashed: siblings)")
    for panel in panels:
        panel.set_ylabel("rank correlation with the truth")
        panel.legend(fontsize=8)
        panel.grid(alpha=0.3)
    fig.savefig(FILE.with_suffix(".png"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        FILE.write_text(json.dumps(measured(sys.argv[1:]), indent=1) + "\n")
    draw(json.loads(FILE.read_text()))
