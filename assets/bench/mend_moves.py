"""Measure what MEND's moves do to the learned reward and to the accuracy on Shapes.

`python assets/bench/mend_moves.py [--prompts 48] [--samples 6] [--seed 3]`

Moves samples of the base model along their own reward gradient, along the mean gradient of all
samples, and by the accepted moves. Prints the mean changes, and the share of the gradients' energy
that the other samples of a prompt predict.
"""

import torch
from jsonargparse import auto_cli
from torch import Tensor

from flowalign.data.requests import read_requests
from flowalign.distributed.processes import ALONE
from flowalign.losses.matching import mend
from flowalign.losses.reward_gradient import Maximise
from flowalign.rewards.latent_gradient import latent_gradient
from flowalign.runs.config import load
from flowalign.sampling.inference import generate
from flowalign.utils.seeds import generator


def main(prompts: int = 48, samples: int = 6, seed: int = 3) -> None:
    """Sample, take the gradients, and print a line for each kind of move."""
    run, _ = load("configs/shapes_mend.yaml")
    rewards = run.build_rewards()
    run.load_rewards(rewards)
    run.load_policy(ALONE)
    chosen = read_requests("assets/shapes/prompts/train.txt")[::19][:prompts]
    requests = [one for one in chosen for _ in range(samples)]
    draws = [generator(seed, "why", i) for i in range(len(requests))]
    x = generate(run.policy, requests, 8, draws, 96)
    ask = rewards.weighted()
    found = latent_gradient(run.policy, ask, ask.score_with_gradient, Maximise(), x, requests)
    reward, gradient = found.total, -found.gradient

    @torch.no_grad()
    def score(latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted reward and the accuracy of each sample."""
        values = rewards.score(rewards.decode(run.policy, latents, requests)).values
        return (values * rewards.weights).sum(1), values[:, rewards.dims.index("exact_match")]

    before = score(x)

    def show(name: str, moves: Tensor, rows: Tensor | slice = slice(None)) -> None:
        """Print the mean changes of some rows."""
        gains = [float((a - b)[rows].mean()) for a, b in zip(score(x + moves), before, strict=True)]
        print(f"{name:16} reward {gains[0]:+.3f}  accuracy {gains[1]:+.3f}")  # noqa: T201

    (unit,) = mend.propose(gradient, [1.0])
    for length in (0.05, 0.1, 0.2, 0.4):
        show(f"own {length}", length * unit)
    (common,) = mend.propose(unit.mean(0, keepdim=True), [1.0])
    for length in (0.05, 0.1):
        show(f"common {length}", length * common.expand_as(x))
    groups = unit.unflatten(0, (-1, samples))
    others = (groups.sum(1, keepdim=True) - groups) / (samples - 1)
    print(f"predicted by other samples: {float((others * groups).mean()):.4f}")  # noqa: T201
    place = torch.arange(prompts).repeat_interleave(samples)
    cap = mend.reward_cap(reward, place, 0.75, mend.raise_floor(None, reward))
    moves = mend.propose(gradient, (0.1, 0.2, 0.4))
    accepted = mend.accept_moves(moves, [score(x + d)[0] for d in moves], reward, cap, 0.1)
    accepted[reward >= cap] = 0
    moved = accepted.flatten(1).any(1)
    show(f"accepted, {int(moved.sum())}", accepted, moved)


if __name__ == "__main__":
    auto_cli(main)
