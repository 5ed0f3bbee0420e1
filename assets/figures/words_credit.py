"""Compare step-level credit on Words with the true credit of each step, without training.

    python assets/figures/words_credit.py --measure    # ten minutes on one core

The value of a state is the expected share of right letters, according to the glyph matcher. It is
estimated from stochastic completions, which no credit method sees. The true credit of a step is
the difference of value between its two states. Writes `words_credit.json` and `words_credit.png`
next to this script. Without --measure it draws the stored numbers.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from flowalign.credit.branch import Branch, LeafAdvantage
from flowalign.credit.chain import ControlVariate, Gain, NextValue, Outcome
from flowalign.credit.turning_point import TurningPoint
from flowalign.data.requests import read_requests
from flowalign.distributed.processes import Processes
from flowalign.functional import resampling
from flowalign.functional.advantage import group_center
from flowalign.functional.agreement import spearman
from flowalign.functional.surrogate import StepWeight, step_weights
from flowalign.functional.transition import sample_next, transition
from flowalign.rewards.composite import Rewards
from flowalign.sampling.branching import Branching, Chain, Comb, Tree
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.stepping import evaluate_velocity
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.rollouts.collecting import completion_values, rollout
from flowalign.training.rollouts.rollout_settings import CreditRequirements, RolloutSettings
from flowalign.types import CreditEstimator, Request, Trajectory
from flowalign.types.trajectory import Completion
from flowalign.utils.seeds import generator
from pipelines.families.sd3 import SD3
from reward_models.detection.ocr import OCR, RapidOCRLine
from reward_models.verifiers.words import WordsVerifier, parse_prompt, read_labels

HERE = Path(__file__).parent
STEPS, ETA, LONGEST, MICRO_BATCH, RESAMPLES = 8, 0.7, 4, 128, 1000
REWARDS = {"glyphs": "letters", "OCR": "cer"}
"""Reward dimensions that the methods credit, by their names in the JSON."""
ARRANGEMENTS: Mapping[str, tuple[Branching, int]] = {
    "chains": (Chain(), 8),
    "comb": (Comb(children=4), 28),
    "tree": (Tree(children=2, splits=[0, 2, 4]), 8),
}
"""Branching and number of samples per prompt."""


@dataclass(frozen=True)
class Method:
    """Credit method with the rollouts, completions and step weights of its publication."""

    label: str
    credit: CreditEstimator
    arrangement: str = "chains"
    completion: Completion = field(default_factory=Completion)
    weight: StepWeight = "uniform"


ONE, FIVE = Completion(max_steps=1), Completion(max_steps=5)
METHODS = (
    Method("outcome (Flow-GRPO)", Outcome()),
    Method("outcome, weight std", Outcome(), weight="std"),
    Method("gain (DenseGRPO)", Gain()),
    Method("gain, five ODE steps (Stepwise-Flow-GRPO)", Gain(), completion=FIVE),
    Method("gain, one-step prediction", Gain(), completion=ONE),
    Method("next value", NextValue()),
    Method("turning points (TP-GRPO)", TurningPoint()),
    Method("control variate", ControlVariate()),
    Method("comb (TempFlow-GRPO)", Branch(), "comb", weight="std"),
    Method("comb, uniform weight", Branch(), "comb"),
    Method("outcome on the tree", Outcome(), "tree"),
    Method("tree, equal depth (BranchGRPO)", Branch(compare="depth"), "tree"),
    Method("tree, leaf advantages (TreeGRPO)", LeafAdvantage(beta=1.0), "tree"),
)


# Ground truth -------------------------------------------------------------------------------------


def match_letters(asked: str, shown: str) -> list[bool]:
    """Return for each letter of the requested word whether the shown word contains it in order."""
    right = [False] * len(asked)
    for block in SequenceMatcher(None, asked, shown, autojunk=False).get_matching_blocks():
        right[block.a : block.a + block.size] = [True] * block.size
    return right


def true_credit(values: Float[Tensor, "S B C"]) -> Float[Tensor, "B S-1"]:
    """Return the change of value of each step, given the results of C completions per state."""
    return values.mean(2).diff(dim=0).T


def variance_of_steps(values: Float[Tensor, "S B C"]) -> Float[Tensor, "S-1"]:
    """Return the mean squared true credit of each step, without the noise of the completions.

    The product of two independent estimates, from halves of the completions, is unbiased.
    """
    first, second = (true_credit(half) for half in values.chunk(2, dim=2))
    return (first * second).mean(0)


def reliability(credit: Float[Tensor, "n"], other: Float[Tensor, "n"]) -> float:
    """Return the largest correlation that a perfect method can have with the mean of two halves.

    The correlation of the halves is extrapolated to both halves with Spearman-Brown's formula.
    """
    between = spearman(credit, other)
    return max(2 * between / (1 + between), 0.0) ** 0.5


def find_right_letters(
    policy: SD3, x: Float[Tensor, "n *latent"], prompts: list[str]
) -> Float[Tensor, "n 4"]:
    """Decode and read images; 1 for each right letter, 0 for a wrong one, NaN after the word."""
    right = torch.full((len(x), LONGEST), torch.nan)
    for start in range(0, len(x), MICRO_BATCH):
        part = slice(start, start + MICRO_BATCH)
        labels = read_labels(policy.decode(x[part])[:, 0])
        for i, (prompt, label) in enumerate(zip(prompts[part], labels, strict=True), start):
            found = match_letters(parse_prompt(prompt).word, label.word)
            right[i, : len(found)] = torch.tensor(found).float()
    return right


@torch.no_grad()
def complete_stochastically(
    policy: SD3, trajectory: Trajectory, k: int, eta: Float[Tensor, "T"], copies: int
) -> tuple[Float[Tensor, "m *latent"], Int[Tensor, "m"]]:
    """Return `copies` clean latents per distinct state k, and the sample that each belongs to."""
    samples = trajectory.rows.unique_rows(k).repeat_interleave(copies)
    x = trajectory.unique_states(k).repeat_interleave(copies, 0)
    noise, prompts = generator(1, "completion", k), samples // trajectory.group_size
    sigmas = trajectory.sigmas
    for j in range(k, trajectory.num_steps):
        v = evaluate_velocity(policy, x, sigmas[j], trajectory.cond, prompts, MICRO_BATCH)
        gaussian = transition(trajectory.kernel, x, v, sigmas, j, eta[j].expand(len(x)))
        x = sample_next(gaussian, torch.randn(x.shape, generator=noise))
    return x, samples


def letter_values(
    policy: SD3, trajectory: Trajectory, eta: Float[Tensor, "T"], copies: int
) -> Float[Tensor, "S B C 4"]:
    """Return the right letters of C completions of each state; equal where no noise follows."""
    last, prompts, values = trajectory.num_steps, trajectory.prompts, []
    outcome = find_right_letters(policy, trajectory.state(last), prompts)
    for k in range(last + 1):
        if not eta[k:].any():
            values.append(outcome[:, None].expand(-1, copies, -1))
            continue
        x, samples = complete_stochastically(policy, trajectory, k, eta, copies)
        right = find_right_letters(policy, x, [prompts[i] for i in samples.tolist()])
        values.append(trajectory.rows.expand(right.unflatten(0, (-1, copies)), k))
    return torch.stack(values)


# Methods ------------------------------------------------------------------------------------------


def settings(arrangement: str, num_prompts: int, how: Completion) -> RolloutSettings:
    """Return rollouts with noise in all steps but the last."""
    branching, group = ARRANGEMENTS[arrangement]
    sampling = Sampling(
        num_steps=STEPS,
        samples_per_prompt=group,
        eta=ETA,
        branching=branching,
        micro_batch=MICRO_BATCH,
    )
    return RolloutSettings(
        sampling=sampling, prompts_per_step=num_prompts, completion=how, keeps="all"
    )


def centred_credit(
    value: Float[Tensor, "B T"],
    group: Int[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    normalised: bool,
) -> Float[Tensor, "B T"]:
    """Return credit minus the mean of its group, as policy gradients use it; 0 outside `mask`."""
    out = torch.zeros_like(value)
    scale = "given" if normalised else "none"
    out[mask] = group_center(value[mask][:, None], group[mask], scale)[:, 0]
    return out


def costs(method: Method, cfg: RolloutSettings) -> dict[str, float]:
    """Return network evaluations and reward calls per sample, from the requested completions."""
    empty = cfg.empty_trajectory(range(STEPS - 1))
    states = [len(empty.rows.unique_rows(k)) for k in range(STEPS + 1)]
    asked = CreditRequirements(method.credit, empty, method.completion).requested
    extra = sum(states[k] * how.num_evaluations(k, STEPS) for k, how in asked)
    return {
        "evaluations": (sum(states[:STEPS]) + extra) / len(empty.logp),
        "reward_calls": sum(states[k] for k, _ in asked) / len(empty.logp),
    }


def correlation(x: Tensor, y: Tensor, prompt: Tensor) -> list[float]:
    """Return Spearman's correlation, and its 95 % interval over resampled prompts."""
    statistic: Callable[[Tensor], Tensor] = partial(resampling.spearman, x, y)
    seed = torch.Generator().manual_seed(0)
    low, high = resampling.bootstrap(statistic, prompt, RESAMPLES, seed)
    return [round(v, 4) for v in (spearman(x, y), low, high)]


def compare(
    credit: Float[Tensor, "B T"],
    truth: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    trajectory: Trajectory,
) -> dict[str, Any]:
    """Return correlations over all transitions and per step, and the squared credit per step."""
    prompt = trajectory.prompt[:, None].expand_as(mask)
    steps = mask.any(0).nonzero().flatten().tolist()
    squares = [float(credit[mask[:, k], k].square().mean()) for k in steps]
    each = [spearman(credit[mask[:, k], k], truth[mask[:, k], k]) for k in steps]
    return {
        "all": correlation(credit[mask], truth[mask], prompt[mask]),
        "steps": [round(v, 4) for v in each],
        "share": [round(v / max(sum(squares), 1e-12), 4) for v in squares],
    }


class Benchmark:
    """Rollouts of one arrangement, with the true credit and the credit of its methods."""

    def __init__(self, policy: SD3, requests: list[Request], arrangement: str, copies: int):
        self.requests, self.arrangement = requests, arrangement
        self.learner = Learner(policy, Optimizer(), Processes(0, 1, torch.device("cpu")), 1)
        reader = OCR(reader=RapidOCRLine(), mode="cer")
        self.rewards = Rewards([WordsVerifier(), reader], dict.fromkeys(REWARDS.values(), 0.5))
        self.rewards.load()
        self.cfg = settings(arrangement, len(requests), Completion())
        self.trajectory = rollout(self.cfg, self.learner, requests, 0, 0)
        eta = settings("chains", 1, Completion()).empty_trajectory(range(STEPS - 1)).eta[0]
        self.eta = eta
        self.letters = letter_values(policy, self.trajectory, eta, copies)
        self.values = self.letters.nanmean(3)
        self.truth = true_credit(self.values)
        self.valued: dict[Completion, Any] = {}

    def value_function(self, how: Completion) -> Any:
        """Return the library's value function with ODE completions, one per completion."""
        if how not in self.valued:
            cfg = settings(self.arrangement, len(self.requests), how)
            self.valued[how] = completion_values(cfg, self.learner, self.rewards, self.trajectory)
        return self.valued[how]

    def measure(self, method: Method) -> dict[str, Any]:
        """Return the agreement of a method with the true credit, for each reward."""
        trajectory = self.trajectory
        given = method.credit(trajectory, self.value_function(method.completion))
        trained = trajectory.trained.any(0)
        weight = step_weights(
            method.weight, trajectory.kernel, trajectory.sigmas, self.eta, trained
        )
        row: dict[str, Any] = {"method": method.label, "transitions": int(given.mask.sum())}
        for name, dim in REWARDS.items():
            column = given.value[..., self.rewards.dims.index(dim)]
            credit = centred_credit(column, given.group, given.mask, given.normalised) * weight
            row[name] = compare(credit, self.truth, given.mask, trajectory)
        return row | costs(method, self.cfg)

    def ceiling(self) -> float:
        """Return the largest correlation that the noise of the true credit permits."""
        first, second = (true_credit(half) for half in self.values.chunk(2, dim=2))
        mask = self.trajectory.trained
        return round(reliability(first[mask], second[mask]), 4)


def summarise(chains: Benchmark) -> dict[str, Any]:
    """Return the value of each letter over the steps, and where the variance of values arises."""
    mean, final = chains.letters.mean(2), chains.letters[-1, :, 0]
    ode = chains.value_function(Completion())([*range(STEPS + 1)])
    glyphs = ode[..., chains.rewards.dims.index("letters")].mean(0)
    first, second = (half.mean(2)[0] for half in chains.values.chunk(2, dim=2))
    covariance = ((first - first.mean()) * (second - second.mean())).mean()
    rounded: Callable[[Tensor], list[float]] = lambda x: [round(v, 4) for v in x.tolist()]  # noqa: E731
    return {
        "letters": [
            {
                name: rounded(mean[:, final[:, i] == kind, i].mean(1))
                for name, kind in (("right", 1), ("wrong", 0))
            }
            for i in range(LONGEST)
        ],
        "accuracy_stochastic": rounded(chains.values.mean((1, 2))),
        "accuracy_ode": rounded(glyphs),
        "variance": {
            "outcome": round(float(chains.values[-1, :, 0].var(correction=0)), 5),
            "initial": round(float(covariance), 5),
            "steps": [round(v, 5) for v in variance_of_steps(chains.values)[:-1].tolist()],
        },
    }


def measure(num_prompts: int, copies: int) -> dict[str, Any]:
    """Return all figures for held-out prompts, half of them seen and half unseen."""
    start = time.process_time()
    policy = SD3("assets/words/sd3", 32, 64, 1.0, precision="fp32", max_sequence_length=1)
    policy.load(torch.device("cpu"))
    requests = []
    for split in ("seen", "unseen"):
        some = read_requests(f"assets/words/prompts/{split}.txt")
        requests += some[:: len(some) // (num_prompts // 2)][: num_prompts // 2]
    content: dict[str, Any] = {"prompts": len(requests), "copies": copies, "steps": STEPS}
    rows, ceilings = [], {}
    for arrangement in ARRANGEMENTS:
        one = Benchmark(policy, requests, arrangement, copies)
        rows += [one.measure(m) for m in METHODS if m.arrangement == arrangement]
        ceilings[arrangement] = one.ceiling()
        if arrangement == "chains":
            content |= summarise(one)
    seconds = round(time.process_time() - start)
    return content | {"ceiling": ceilings, "cpu_seconds": seconds, "methods": rows}


# Figure -------------------------------------------------------------------------------------------


def draw(content: Mapping[str, Any], file: Path) -> None:
    """Draw the value of each letter, the share of credit per step, and the rank correlations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = {"figsize": (16, 5), "dpi": 100, "layout": "constrained"}
    fig, panels = plt.subplots(1, 3, width_ratios=(1, 1.1, 1.3), **shape)
    _draw_letters(panels[0], content)
    _draw_shares(panels[1], content)
    _draw_correlations(panels[2], content)
    fig.savefig(file)


def _draw_letters(panel: Any, content: Mapping[str, Any]) -> None:
    from drawing import BLUE, GREEN, ORANGE, PINK, percent_axis

    for i, colour in enumerate((BLUE, ORANGE, GREEN, PINK)):
        curves = content["letters"][i]
        panel.plot(curves["right"], "o-", ms=4, color=colour, label=f"letter {i + 1}")
        panel.plot(curves["wrong"], "o--", ms=4, color=colour)
    panel.set(
        xlabel="denoising steps taken",
        ylabel="probability that the letter ends right",
        title="value of letters (dashed: ends wrong)",
    )
    panel.legend(fontsize=9)
    panel.grid(alpha=0.3)
    percent_axis(panel.yaxis)


def _draw_shares(panel: Any, content: Mapping[str, Any]) -> None:
    from drawing import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, percent_axis

    steps = content["variance"]["steps"]
    truth = [v / sum(steps) for v in steps]
    panel.bar(range(len(truth)), truth, color="#d0d0d0", label="true credit")
    shown = (METHODS[0], METHODS[2], METHODS[4], METHODS[7], METHODS[8])
    rows = {row["method"]: row for row in content["methods"]}
    for method, colour in zip(shown, (GREY, PINK, GREEN, ORANGE, BLUE), strict=True):
        share = rows[method.label]["glyphs"]["share"]
        panel.plot(share, "o-", ms=4, color=colour, label=method.label)
    panel.axhline(0, color=BLACK, lw=0.8)
    panel.set(xlabel="denoising step", ylabel="share", title="squared credit per step")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    percent_axis(panel.yaxis)


def _draw_correlations(panel: Any, content: Mapping[str, Any]) -> None:
    from drawing import BLUE, ORANGE

    rows = content["methods"]
    for name, colour, shift in (("glyphs", BLUE, 0.15), ("OCR", ORANGE, -0.15)):
        for i, row in enumerate(rows):
            value, low, high = row[name]["all"]
            label = f"reward: {name}" if i == 0 else None
            panel.plot([low, high], [shift - i] * 2, color=colour, lw=1.6)
            panel.plot([value], [shift - i], "o", ms=5, color=colour, label=label)
    panel.axvline(0, color="#888888", lw=1)
    panel.set_yticks([-i for i in range(len(rows))], [row["method"] for row in rows], fontsize=8)
    panel.set(xlabel="rank correlation", title="agreement with the true credit, 95 % intervals")
    panel.legend(fontsize=9)
    panel.grid(alpha=0.3, axis="x")


def tabulate(content: Mapping[str, Any]) -> str:
    """Return the table of the result page."""
    lines = [
        "| method | glyph reward | OCR reward | evaluations | reward calls |",
        "|---|---|---|---|---|",
    ]
    for row in content["methods"]:
        cells = ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]["all"]) for name in REWARDS]
        cost = f"{row['evaluations']:.1f} | {row['reward_calls']:.1f}"
        lines.append(f"| {row['method']} | {' | '.join(cells)} | {cost} |")
    return "\n".join(lines)


def main() -> None:
    """Measure if requested, then draw the stored numbers and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="measure again")
    parser.add_argument("--prompts", type=int, default=24, help="number of prompts (default: 24)")
    parser.add_argument("--copies", type=int, default=10, help="completions (default: 10)")
    parser.add_argument("--to", type=Path, default=HERE, help="folder (default: this one)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    file = args.to / "words_credit.json"
    if args.measure:
        file.write_text(json.dumps(measure(args.prompts, args.copies), indent=1) + "\n")
    content = json.loads(file.read_text())
    draw(content, args.to / "words_credit.png")
    print(tabulate(content))  # noqa: T201


if __name__ == "__main__":
    main()
