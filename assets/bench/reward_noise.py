"""Measure how much noise of the OCR reward `reward_models.Shifted` removes on Words.

`python assets/bench/reward_noise.py [--prompts 24] [--samples 8] [--seed 0]`

Every sample of the base model is read at 25 shifts of up to two pixels. For J views, the shifts
are divided into sets of J. Noise is the standard deviation of a set's mean score within a sample.
Signal is the standard deviation of the true mean within a prompt. The correlation, within prompts,
is that with the letters that the glyph matcher finds, the ground truth. Prints a JSON line per J.
"""

import json

import torch
from jsonargparse import auto_cli
from torch import Tensor

from flowalign.data.requests import read_requests
from flowalign.distributed.processes import ALONE
from flowalign.rewards.composite import Rewards
from flowalign.runs.config import load
from flowalign.sampling.inference import generate
from flowalign.utils.seeds import generator
from reward_models import WordsVerifier
from reward_models.wrappers.composed import list_shifts, shift

NUM_SHIFTS = 25


def centre(values: Tensor, samples: int) -> Tensor:
    """Return values minus the mean over the samples of each prompt; the last axis is samples."""
    groups = values.unflatten(-1, (-1, samples))
    return (groups - groups.mean(-1, keepdim=True)).flatten(-2)


def measure(scores: Tensor, truth: Tensor, samples: int, views: int, first: Tensor) -> dict:
    """Return noise, signal and correlation for sets of `views` shifts.

    `scores` are [shifts, n]; `first` holds the scores of the nearest `views` shifts, which is what
    `Shifted` returns.
    """
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(views))
    sets = scores[order[: len(scores) // views * views]].unflatten(0, (-1, views)).mean(1)
    noise = sets.var(0).mean()
    signal = (
        centre(sets.mean(0), samples).square().mean() * samples / (samples - 1)
    ) - noise / len(sets)
    pair = torch.stack([centre(first, samples), centre(truth, samples)])
    return {
        "views": views,
        "noise": round(float(noise.sqrt()), 4),
        "signal": round(float(signal.clamp(min=0).sqrt()), 4),
        "correlation": round(float(torch.corrcoef(pair)[0, 1]), 4),
    }


def main(prompts: int = 24, samples: int = 8, seed: int = 0) -> None:
    """Sample, read every shift, and print a line for each number of views."""
    run, _ = load("configs/words_flow_grpo.yaml")
    run.load_policy(ALONE)
    requests = read_requests("assets/words/prompts/train.txt")[::7][:prompts]
    requests = [one for one in requests for _ in range(samples)]
    draws = [generator(seed, "noise", i) for i in range(len(requests))]
    latents = generate(run.policy, requests, 8, draws, 64)
    reader = run.rewards[0].model
    rewards = Rewards([reader, WordsVerifier()], {})
    batch = rewards.decode(run.policy, latents, requests)
    truth = WordsVerifier().score(batch).values[:, WordsVerifier().spec.dims.index("letters")]
    scores = []
    for down, right in list_shifts(NUM_SHIFTS):
        moved = rewards.batch(shift(batch.media, down, right), requests)
        scores.append(reader.score(moved).values[:, 0])
    table = torch.stack(scores)
    for views in (1, 2, 3, 5, 8):
        first = table[:views].mean(0)
        print(json.dumps(measure(table, truth, samples, views, first)))  # noqa: T201


if __name__ == "__main__":
    auto_cli(main)
