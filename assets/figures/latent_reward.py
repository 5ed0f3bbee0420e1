"""Measure a reward of noisy latents: its agreement with image rewards, its credit, its guidance.

    python assets/figures/latent_reward.py assets/shapes/latent    # minutes on one core

The images use held-out prompts that the rewards were not trained on. Writes `latent_reward.json`
and `latent_reward.png` next to this script. Without a folder it draws the stored numbers.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from drawing import percent_axis
from torch import Tensor

from flowalign.credit import Gain, LatentGain
from flowalign.data.requests import read_requests
from flowalign.distributed.processes import Processes
from flowalign.rewards.composite import Rewards
from flowalign.sampling import Fixed, FlowNRG, Sampling
from flowalign.sampling.inference import generate
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.rollouts.collecting import collect_rollouts, compute_credit
from flowalign.types import MediaBatch, Request, RewardModel
from flowalign.utils.costs import Costs
from flowalign.utils.seeds import generator
from pipelines.families.sd3 import SD3
from reward_models.verifiers.shapes import ShapesVerifier
from reward_models.wrappers.trained import TrainedLatentReward, TrainedReward

HERE = Path(__file__).parent
DIMS = ("colour", "shape", "count", "position", "clean")
LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9)
"""Noise levels. Level 1 is left out, because both states of a pair would be equal."""
SCALES = (0.0, 0.5, 1.0, 2.0, 4.0)
PROMPTS, COPIES, STEPS, WINDOW = 96, 4, 8, (0, 3)
CREDITED, GROUP, GUIDED = 16, 12, 256
RESAMPLES = 1000


def loaded() -> SD3:
    """Return the toy model before training, with an active adapter."""
    policy = SD3("assets/shapes/sd3", 32, 32, 1.0, precision="fp32", max_sequence_length=1)
    policy.load(torch.device("cpu"))
    return policy


def held_out(count: int) -> list[Request]:
    """Return prompts of *seen* and *unseen* in turns, so that both are equally represented."""
    parts = [read_requests(f"assets/shapes/prompts/{split}.txt") for split in ("seen", "unseen")]
    both = [request for pair in zip(*parts, strict=False) for request in pair]
    return [both[i % len(both)] for i in range(count)]


def interval(found: Callable[[Tensor], float], count: int) -> list[float]:
    """Return a statistic over all clusters, and its 95 % interval by resampling clusters."""
    drawn = torch.Generator().manual_seed(0)
    rows = torch.randint(count, (RESAMPLES, count), generator=drawn)
    values = torch.tensor([found(row) for row in rows], dtype=torch.float64)
    low, high = values.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return [round(v, 4) for v in (found(torch.arange(count)), low, high)]


def total(reward: RewardModel, media: Tensor, prompts: list[str]) -> Tensor:
    """Return the mean of the five dimensions."""
    return reward.score(MediaBatch(media, prompts)).values[:, : len(DIMS)].mean(1)


class Agreement:
    """Pairs of images per prompt, ordered by a true score, for measuring the accuracy of scores."""

    def __init__(self, truth: Tensor, group: Tensor):
        self.i, self.j = (group[:, None] == group).triu(1).nonzero(as_tuple=True)
        lead = truth[self.i] - truth[self.j]
        kept = lead.abs() > 1e-6
        self.i, self.j, self.sign = self.i[kept], self.j[kept], lead[kept].sign()
        self.group, self.count = group[self.i], int(group.max()) + 1

    def of(self, score: Tensor) -> list[float]:
        """Return the share of correctly ordered pairs, with its interval over prompts."""
        right = ((score[self.i] - score[self.j]).sign() == self.sign).double()
        sums = torch.zeros(self.count, dtype=torch.float64).index_add(0, self.group, right)
        pairs = torch.bincount(self.group, minlength=self.count).double()
        return interval(lambda rows: float(sums[rows].sum() / pairs[rows].sum()), self.count)


def by_level(policy: SD3, latent: TrainedLatentReward) -> dict[str, Any]:
    """Return pair accuracy at each noise level; the images of a prompt share their noise.

    The true score is the mean of the dimensions, and for each dimension the verifier's score.
    """
    requests = [request for request in held_out(PROMPTS) for _ in range(COPIES)]
    seeds = [generator(0, "latent figure", i) for i in range(len(requests))]
    x = generate(policy, requests, STEPS, seeds, 128)
    group, prompts = torch.arange(len(x)) // COPIES, [r.prompt for r in requests]
    media, cond = policy.decode(x), policy.encode(requests)
    pixel = {"verifier": ShapesVerifier(), "learned": TrainedReward("assets/shapes/preference")}
    truth = {name: total(reward, media, prompts) for name, reward in pixel.items()}
    against = {name: Agreement(value, group) for name, value in truth.items()}
    verified = pixel["verifier"].score(MediaBatch(media, prompts)).values
    alone = {dim: Agreement(verified[:, d], group) for d, dim in enumerate(DIMS)}
    noise = torch.randn(PROMPTS, *x.shape[1:], generator=generator(0, "shared noise"))[group]
    rows = []
    for level in LEVELS:
        with torch.no_grad():
            noised, sigma = (1 - level) * x + level * noise, torch.tensor(level)
            score = latent.score(noised, sigma, cond)
        row = {"sigma": level} | {name: one.of(score.mean(1)) for name, one in against.items()}
        rows.append(row | {dim: one.of(score[:, d]) for d, (dim, one) in enumerate(alone.items())})
    return {
        "pairs": {name: len(one.sign) for name, one in (against | alone).items()},
        "learned with the verifier": against["verifier"].of(truth["learned"]),
        "levels": rows,
    }


def settings(credit: Gain | LatentGain) -> PolicyGradientSettings:
    """Return the rollouts of configs/shapes.yaml, with fewer prompts."""
    sampling = Sampling(
        num_steps=STEPS, samples_per_prompt=GROUP, eta=1.0, sde_window=Fixed(*WINDOW)
    )
    return PolicyGradientSettings(
        prompts="", sampling=sampling, credit=credit, prompts_per_step=CREDITED
    )


def credited(policy: SD3, credit: Gain | LatentGain, reward: RewardModel) -> dict[str, Any]:
    """Return the credit of each sample and step of the window, minus the mean of its prompt."""
    cfg, costs = settings(credit), Costs()
    rewards = Rewards([reward], dict.fromkeys(DIMS, 1 / len(DIMS)), costs=costs)
    rewards.load()
    costs.count(policy.denoiser)
    learner = Learner(policy, Optimizer(), Processes(0, 1, torch.device("cpu")), 1)
    before = time.process_time()
    values = collect_rollouts(cfg.rollouts, learner, rewards, held_out(CREDITED), 0, 0)
    given = compute_credit(cfg.rollouts, values).value.nan_to_num() @ rewards.weights
    seconds = time.process_time() - before
    each = given[:, slice(*WINDOW)].unflatten(0, (CREDITED, GROUP))
    return {
        "credit": each - each.mean(1, keepdim=True),
        "network evaluations": costs.network_evaluations,
        "decodes": costs.decodes,
        "reward calls": costs.reward_calls,
        "CPU seconds": round(seconds, 1),
    }


def by_credit(policy: SD3, latent: TrainedLatentReward) -> dict[str, Any]:
    """Compare credit from the latent reward with credit from completions, for the same rollouts."""
    learned = TrainedReward("assets/shapes/preference")
    found = {
        "latent": credited(policy, LatentGain(reward=latent), ShapesVerifier()),
        "verifier": credited(policy, Gain(), ShapesVerifier()),
        "learned": credited(policy, Gain(), learned),
    }
    credit = {name: one.pop("credit") for name, one in found.items()}
    rows = []
    for a, b in (("latent", "verifier"), ("latent", "learned"), ("learned", "verifier")):
        for k in range(*WINDOW):
            x, y = (credit[name][..., k - WINDOW[0]] for name in (a, b))
            alike = (x.sign() == y.sign()).double()
            known = (y.abs() > 1e-6).double()
            sums, counts = (alike * known).sum(1), known.sum(1)
            share = interval(lambda r, s=sums, c=counts: float(s[r].sum() / c[r].sum()), CREDITED)
            rows.append({"of": a, "with": b, "step": k, "signs alike": share})
            rows[-1]["correlation"] = round(
                float(torch.stack([x.flatten(), y.flatten()]).corrcoef()[0, 1]), 4
            )
    return {"costs": found, "steps": rows}


def by_scale(policy: SD3, latent: TrainedLatentReward) -> list[dict[str, Any]]:
    """Return the verifier's scores of images sampled with Flow-NRG at several scales."""
    requests = held_out(GUIDED)
    prompts, rows = [r.prompt for r in requests], []
    for scale in SCALES:
        guidance = FlowNRG(reward=latent, weights=dict.fromkeys(DIMS, 1 / len(DIMS)), scale=scale)
        seeds = [generator(0, "guided figure", i) for i in range(GUIDED)]
        media = policy.decode(generate(policy, requests, STEPS, seeds, 128, guidance))
        verifier = ShapesVerifier()
        values = verifier.score(MediaBatch(media, prompts)).values
        column = {
            "mean": values[:, : len(DIMS)].mean(1).double(),
            "exact_match": values[:, verifier.spec.dims.index("exact_match")].double(),
        }
        rows.append(
            {"scale": scale}
            | {n: interval(lambda r, c=c: float(c[r].mean()), GUIDED) for n, c in column.items()}
        )
    return rows


def measured(folder: str) -> dict[str, Any]:
    """Return all figures of the reward in a folder."""
    policy, latent = loaded(), TrainedLatentReward(folder, units="calibrated")
    latent.attach(policy)
    return {
        "reward": json.loads((Path(folder) / "config.json").read_text())["figures"],
        "agreement": by_level(policy, latent),
        "guidance": by_scale(policy, latent),
        "credit": by_credit(policy, latent),
    }


CREDITORS = {"verifier": "verifier", "learned": "learned reward"}
"""Words for the rewards of completed samples."""


def draw(found: dict[str, Any]) -> None:
    """Draw pair accuracy by noise level, signs of credit by step, and guidance by scale."""
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), dpi=100, layout="constrained")
    levels = found["agreement"]["levels"]
    for name, text in (("verifier", "as the verifier"), ("learned", "as the learned reward")):
        _curve(left, [row["sigma"] for row in levels], [row[name] for row in levels], text)
    left.set(xlabel="noise level sigma", ylabel="pairs that the latent reward orders equally")
    for a, b in (("latent", "verifier"), ("latent", "learned"), ("learned", "verifier")):
        rows = [r for r in found["credit"]["steps"] if (r["of"], r["with"]) == (a, b)]
        first = "latent reward" if a == "latent" else "learned reward, completed"
        text = f"{first} / {CREDITORS[b]}, completed"
        _curve(middle, [r["step"] for r in rows], [r["signs alike"] for r in rows], text)
    middle.set(xlabel="denoising step", ylabel="credits with equal sign")
    middle.set_xticks(range(*WINDOW))
    middle.set_ylim(0.35, 1.0)
    for axes in (left, middle):
        axes.axhline(0.5, color="#999999", lw=0.8)
    rows = found["guidance"]
    for name, text in (("mean", "mean of five dimensions"), ("exact_match", "accuracy (all five)")):
        _curve(right, [row["scale"] for row in rows], [row[name] for row in rows], text)
    right.set(
        xlabel="guidance scale of Flow-NRG", ylabel="score of the verifier on held-out prompts"
    )
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        percent_axis(axes.yaxis)
    fig.savefig(HERE / "latent_reward.png")


def _curve(axes: Any, x: list[float], rows: list[list[float]], text: str) -> None:
    value, low, high = zip(*rows, strict=True)
    below = [v - one for v, one in zip(value, low, strict=True)]
    above = [one - v for v, one in zip(value, high, strict=True)]
    axes.errorbar(x, value, yerr=[below, above], fmt="o-", ms=4, capsize=2, label=text)


if __name__ == "__main__":
    torch.set_num_threads(1)
    file = HERE / "latent_reward.json"
    if len(sys.argv) > 1:
        file.write_text(json.dumps(measured(sys.argv[1]), indent=2) + "\n")
    draw(json.loads(file.read_text()))
