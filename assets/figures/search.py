"""Compare tree search with best-of-N on the toy model at equal network evaluations.

    python assets/figures/search.py

Samples the held-out prompts of configs/shapes.yaml with three noise seeds, by trees of several
sizes and by up to 13 independent samples. The reward of that run file values states and samples;
its dimension `exact_match` is plotted. Writes `search.png` and `search.json` next to this script;
takes five minutes on one core.
"""

import json
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from drawing import percent_axis

from flowalign.data.requests import read_requests
from flowalign.distributed.processes import join
from flowalign.runs.config import load
from flowalign.sampling.search import Search, search
from flowalign.types import Request
from flowalign.utils.seeds import generator

HERE = Path(__file__).parent
SEEDS, STEPS, PROMPTS, MOST = (0, 1, 2), 8, 128, 13
TREES = (
    Search(width=4, prune=[3], keep=1, branches=2),
    Search(width=6, prune=[3, 5], keep=2, branches=2),
    Search(width=12, prune=[3, 5], keep=3, branches=2),
    Search(width=18, prune=[3, 5], keep=4, branches=2),
)


class Scorer:
    """Scorer of latents that stores the last exact_match values."""

    def __init__(self, policy, rewards):
        self.policy, self.rewards = policy, rewards
        self.exact_match = rewards.dims.index("exact_match")
        self.last = torch.empty(0)

    def __call__(self, x: torch.Tensor, requests) -> torch.Tensor:
        """Return the weighted reward of each latent."""
        media = torch.cat([self.policy.decode(part).cpu() for part in x.split(256)])
        values = self.rewards.score(self.rewards.batch(media, requests)).values
        self.last = values[:, self.exact_match]
        return (values.nan_to_num() * self.rewards.weights).sum(1)


def held_out(run) -> list[Request]:
    """Return the same number of held-out prompts from each split."""
    splits = [read_requests(path) for path in run.evaluation.prompts.values()]
    return [request for some in splits for request in some[: PROMPTS // len(splits)]]


def of_trees(policy, scorer: Scorer, requests: list[Request], seed: int) -> list[float]:
    """Return the share of exactly matching images that each tree finds."""
    found = []
    for tree in TREES:
        draws = [generator(seed, "search", i) for i in range(len(requests))]
        latents = search(policy, scorer, requests, tree, STEPS, draws, 256)
        scorer(latents, requests)
        found.append(float(scorer.last.mean()))
    return found


def of_samples(policy, scorer: Scorer, requests: list[Request], seed: int) -> list[float]:
    """Return the share of exactly matching images among the best of 1, 2, ... samples."""
    totals, exact_match = [], []
    for number in range(MOST):
        draws = [generator(seed, "sample", number, i) for i in range(len(requests))]
        latents = search(policy, scorer, requests, Search(width=1), STEPS, draws, 256)
        totals.append(scorer(latents, requests))
        exact_match.append(scorer.last)
    total, known = torch.stack(totals), torch.stack(exact_match)
    best = [total[: n + 1].argmax(0) for n in range(MOST)]
    return [float(known.gather(0, one[None]).mean()) for one in best]


def figure(found: dict) -> None:
    """Draw both curves with a point for each seed."""
    fig, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
    for name, colour in (("best of N", "#777777"), ("search", "#0072b2")):
        x, rows = found[name]["evaluations"], torch.tensor(found[name]["exact_match"])
        axes.plot(x, rows.mean(0), "o-", color=colour, ms=4, label=name)
        for row in rows:
            axes.plot(x, row, ".", color=colour, ms=3, alpha=0.5)
    axes.set(xlabel="network evaluations per image", ylabel="accuracy on held-out prompts")
    percent_axis(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    fig.savefig(HERE / "search.png", dpi=110)


def main() -> None:
    """Measure and draw."""
    run, _ = load("configs/shapes.yaml")
    torch.set_num_threads(1)
    run.load_policy(join("cpu"))
    rewards = run.build_rewards()
    run.load_rewards(rewards)
    scorer, requests = Scorer(run.policy, rewards), held_out(run)
    found = {
        "best of N": {"evaluations": [STEPS * (n + 1) for n in range(MOST)], "exact_match": []},
        "search": {"evaluations": [t.cost(STEPS, 1).evaluations for t in TREES], "exact_match": []},
    }
    for seed in SEEDS:
        found["search"]["exact_match"].append(of_trees(run.policy, scorer, requests, seed))
        found["best of N"]["exact_match"].append(of_samples(run.policy, scorer, requests, seed))
    found["prompts"], found["scored"] = PROMPTS, [t.cost(STEPS, 1).scored for t in TREES]
    (HERE / "search.json").write_text(json.dumps(found, indent=1) + "\n")
    figure(found)


if __name__ == "__main__":
    main()
