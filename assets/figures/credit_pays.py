"""Measure when step-level credit pays: predictions of the law, training, and the figure.

    python assets/figures/credit_pays.py predict runs/pays   # before training: credit_pays_law.json
    python assets/figures/credit_pays.py tune runs/pays      # appends to runs.jsonl, resumes
    python assets/figures/credit_pays.py train runs/pays     # the same
    python assets/figures/credit_pays.py draw runs/pays      # credit_pays.json, credit_pays.png

The world: a word of six letters, each a point in a plane with four corners. Letters have different
sizes, so that they are decided at different noise levels. A small network learns the words of
prompts. In the world `letters`, points are near corners, a third of them near a random one, and the
reward is the share of right corners. In the world `points`, each is a Gaussian around its corner,
and the reward is minus the mean squared distance. Noise of the reward depends on the content only.
Everything else is flowalign: rollouts, credit, loss, update.

Predicted by the law before training (`credit_pays_law.json`), after a trial of the code with ten
updates per arm: `mixed, late` ends above `outcome` for every reward, because it has siblings only
where they pay. The other combs end level with `outcome` with the exact reward, and below it with
noise of 0.6 and 2.24 deviations. The comb with ODE completions is the lowest of them. Added before
its runs: with as many reward calls as `outcome`, `mixed, late` ends below it (gain 0.3 to 0.5).
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr, t
from torch import Tensor, nn

from flowalign.credit import MixedAdvantage
from flowalign.data.requests import Requests
from flowalign.distributed.processes import Processes
from flowalign.functional.advantage import group_mean
from flowalign.functional.signal import inner_products, moments, sibling_gain
from flowalign.losses import GRPO, PPOClip
from flowalign.rewards.composite import Rewards
from flowalign.runs.session import compute_batch
from flowalign.sampling import AllButLast, Chain, Comb, Sampling
from flowalign.sampling.branching import Branching
from flowalign.sampling.rollout import sample
from flowalign.studies.probe.measure import gradients_of_steps
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.training.policy_gradient.policy_gradient_settings import PolicyGradientSettings
from flowalign.training.rollouts.advantage_config import AdvantageConfig
from flowalign.training.rollouts.collecting import rollout
from flowalign.types import (
    MediaBatch,
    ModelPlan,
    Policy,
    Request,
    RewardModel,
    RewardOutput,
    RewardSpec,
    plain_requests,
)
from flowalign.types.trajectory import sibling_ids
from flowalign.utils.seeds import generator

HERE = Path(__file__).parent
SIZES = torch.tensor([2.0, 1.0, 0.6, 0.4, 0.3, 0.25])
"""Distance of the corners of each letter from its centre."""
WORLDS = {"letters": (0.1, 1 / 3), "points": (0.7, 0.0)}
"""Deviation of a letter relative to its size, and share of random letters in the training data."""
LETTERS = "ABCD"
CORNERS = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]) / 2**0.5
STEPS, ETA, CHILDREN = 8, 0.7, 4
NOISES = (0.0, 0.3, 0.6, 2.24)
"""Deviation of the reward noise in deviations of the reward; 2.24: a reader that explains 17 %."""
RATES, TUNING_SEEDS, SEEDS = (2e-4, 6e-4, 2e-3), (101, 102), (0, 1, 2)
TUNED_AT = {0.0: 0.3, 0.3: 0.3, 0.6: 0.3, 2.24: 2.24}
"""Noise at which the rate of an arm is tuned; with 2.24, with the first tuning seed only."""
UPDATES = 24
ALONE = Processes(0, 1, torch.device("cpu"))


class Words(Policy):
    """Small velocity network on words of six letters."""

    evaluations_per_velocity = 1
    precision = "fp32"

    def __init__(self, width: int = 192):
        torch.manual_seed(0)
        inputs = 2 * len(SIZES) + len(LETTERS) * len(SIZES) + 6
        self.denoiser = nn.Sequential(
            nn.Linear(inputs, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 2 * len(SIZES)),
        )

    def plan(self) -> ModelPlan:
        """Return the sizes."""
        size = sum(p.numel() for p in self.denoiser.parameters())
        return ModelPlan((12,), size, size, 4, 4 * 32, self.schedule)

    def load(self, device: torch.device) -> None:
        """Do nothing; the network is in memory."""

    def encode(self, requests: Sequence[Request]) -> dict[str, Tensor]:
        """Return the letters as one-hot vectors."""
        return {"word": torch.stack([one_hot(read(r.prompt)) for r in requests])}

    def schedule(self, num_steps: int) -> Tensor:
        """Return equal steps."""
        return torch.linspace(1, 0, num_steps + 1)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw initial states."""
        return torch.randn(num_samples, 2 * len(SIZES), generator=generator)

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        """Return dx / dsigma."""
        s = sigma.reshape(-1, 1).expand(len(x), 1)
        times = torch.cat([s, s.square(), (3 * s).sin(), (9 * s).sin(), (9 * s).cos(), s.sqrt()], 1)
        # The clean letter is small, so the network sees the state at the scale of its noise.
        return self.denoiser(torch.cat([x, times, cond["word"]], 1)) + x

    def decode(self, x: Tensor) -> Tensor:
        """Return the latents as an image of four pixels."""
        return (x / 16 + 0.5).clamp(0, 1).view(-1, 1, 3, 2, 2)

    def embed(self, media: Tensor) -> Tensor:
        """Return the latents of an image."""
        return (media.flatten(1) - 0.5) * 16

    def encoders(self) -> tuple[str, str]:
        """Return the names of the encoders."""
        return "none", "letters"

    def save_weights(self, folder: str) -> None:
        """Raise; nothing is saved."""
        raise NotImplementedError

    def load_weights(self, folder: str) -> None:
        """Raise; nothing is saved."""
        raise NotImplementedError

    def verify_weights(self, folder: str) -> float:
        """Raise; nothing is saved."""
        raise NotImplementedError


def read(prompt: str) -> Tensor:
    """Return the letters of a prompt as indices."""
    return torch.tensor([LETTERS.index(letter) for letter in prompt])


def one_hot(words: Tensor) -> Tensor:
    """Return words as vectors."""
    return nn.functional.one_hot(words, len(LETTERS)).flatten(-2).float()


def quality(world: str, x: Tensor, words: Tensor) -> Tensor:
    """Return the exact reward."""
    places = x.unflatten(-1, (len(SIZES), 2)) / SIZES[:, None]
    far = torch.cdist(places[..., None, :], CORNERS.expand(*places.shape[:-1], 4, 2))[..., 0, :]
    if world == "letters":
        return (far.argmin(-1) == words).float().mean(-1)
    return -far.gather(-1, words[..., None])[..., 0].square().mean(-1)


class Letters(RewardModel):
    """Exact reward, with noise of a given deviation that depends on the content."""

    def __init__(self, world: str, noise: float):
        self.world, self.noise = world, noise
        self.spec = RewardSpec("letters", ("letters",), "any", (-1e3, 1e3), "Apache-2.0")
        self.way = torch.randn(12, generator=torch.Generator().manual_seed(5))

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score the images."""
        x = (batch.media.flatten(1) - 0.5) * 16
        words = torch.stack([read(prompt) for prompt in batch.prompts])
        noise = 2**0.5 * (1e4 * (x.double() @ self.way.double())).sin().float()
        values = quality(self.world, x, words) + self.noise * noise
        return RewardOutput.build(self.spec, values[:, None], {})


def data(world: str, words: Tensor, g: torch.Generator) -> Tensor:
    """Return clean latents of words."""
    spread, share = WORLDS[world]
    other = torch.randint(len(LETTERS), words.shape, generator=g)
    wrong = torch.rand(words.shape, generator=g) < share
    shown = CORNERS[torch.where(wrong, other, words)]
    noise = torch.randn(*words.shape, 2, generator=g)
    return ((shown + spread * noise) * SIZES[:, None]).flatten(1)


def base(world: str) -> Words:
    """Train the policy on the words of a world."""
    policy, g = Words(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(policy.denoiser.parameters(), lr=2e-3, weight_decay=0.0)
    total = 6000
    for step in range(total):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * (1 - step / total)
        words = torch.randint(len(LETTERS), (512, len(SIZES)), generator=g)
        clean, sigma = data(world, words, g), torch.rand(512, 1, generator=g)
        e = torch.randn(clean.shape, generator=g)
        v = policy.velocity((1 - sigma) * clean + sigma * e, sigma[:, 0], {"word": one_hot(words)})
        loss = (v - (e - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def copy(policy: Words) -> Words:
    """Return a copy."""
    new = Words()
    new.denoiser.load_state_dict(policy.denoiser.state_dict())
    return new


def stored_base(folder: Path, world: str) -> Words:
    """Return the base policy of a world, trained once."""
    policy, place = Words(), folder / f"{world}.safetensors"
    if not place.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(base(world).denoiser.state_dict(), place)
    policy.denoiser.load_state_dict(load_file(place))
    return policy


@dataclass(frozen=True)
class Arm:
    """Credit with its layout; sizes cost about 1980 evaluations per update, or as many reward calls
    as outcomes."""

    prompts: int
    trunks: int
    samples: int
    """Samples per trunk."""
    branching: Branching
    share: float | None

    @property
    def evaluations(self) -> int:
        """Return the evaluations of an update: all sampled states, and one per trained state."""
        layout = self.branching.seed_layout(self.samples, torch.tensor([ETA] * 7 + [0.0]))
        window, rows = range(STEPS - 1), layout.rows
        made = rows.owned & (layout.eta > 0)
        sampled = sum(len(rows.unique_rows(k)) for k in range(STEPS))
        trained = sum(len({*rows.source_row[made[:, k], k].tolist()}) for k in window)
        return self.prompts * self.trunks * (sampled + trained)


COMMON = Comb(children=CHILDREN, common_noise=True)
LATE = Comb(children=CHILDREN, common_noise=True, splits=(5, 6))
ARMS = {
    "outcome": Arm(11, 12, 1, Chain(), 0.0),
    "comb, ODE": Arm(8, 2, 28, Comb(children=CHILDREN), 1.0),
    "comb, common noise": Arm(10, 2, 22, COMMON, 1.0),
    "mixed": Arm(10, 2, 22, COMMON, None),
    "mixed, late": Arm(12, 7, 7, LATE, None),
    "mixed, late, equal calls": Arm(3, 6, 7, LATE, None),
}


def recipe(arm: Arm) -> PolicyGradientSettings:
    """Return the settings of an arm."""
    return PolicyGradientSettings(
        sampling=Sampling(
            num_steps=STEPS,
            samples_per_prompt=arm.trunks * arm.samples,
            seeds_per_prompt=arm.trunks,
            eta=ETA,
            branching=arm.branching,
            sde_window=AllButLast(),
            micro_batch=4096,
        ),
        advantages=AdvantageConfig(scale="given", clip=None),
        credit=MixedAdvantage(share=arm.share),
        # Steps with more transitions get no more weight in the loss.
        step_weight=[1.0] * 5 + [1 / CHILDREN] * 2 + [1.0] if arm.branching is LATE else "uniform",
        algorithm=GRPO(PPOClip(1e-2)),
        prompts_per_step=arm.prompts,
        micro_batch=4096,
        prompts="",
    )


def requests(seed: int, count: int) -> list[Request]:
    """Return random words."""
    words = torch.randint(4, (count, len(SIZES)), generator=torch.Generator().manual_seed(seed))
    return plain_requests(["".join(LETTERS[i] for i in word) for word in words.tolist()])


def held_out() -> list[Request]:
    """Return the words of an evaluation."""
    return requests(999, 256)


def clean(policy: Words, eta: float) -> Tensor:
    """Return clean latents of the held-out words, 4 each, by ODE (eta 0) or stochastic steps."""
    cfg = Sampling(num_steps=STEPS, samples_per_prompt=4, eta=max(eta, 0.1), micro_batch=4096)
    steps = tuple(range(STEPS - 1)) if eta else ()
    seeds = [generator(7, "evaluation", i) for i in range(256)]
    return sample(policy, held_out(), cfg, steps, seeds).state(STEPS)


def words_of(samples: int) -> Tensor:
    """Return the held-out words, each repeated."""
    return torch.stack([read(r.prompt) for r in held_out()]).repeat_interleave(samples, 0)


def score(policy: Words, world: str, eta: float) -> float:
    """Return the exact reward on held-out words."""
    return float(quality(world, clean(policy, eta), words_of(4)).mean())


@torch.no_grad()
def distance(policy: Words, start: Words, world: str) -> float:
    """Return the mean squared difference of the velocities of policy and base, on noisy data."""
    g, words = torch.Generator().manual_seed(3), words_of(4)
    sigma = torch.rand(len(words), 1, generator=g)
    x = (1 - sigma) * data(world, words, g) + sigma * torch.randn(len(words), 12, generator=g)
    asked = x, sigma[:, 0], {"word": one_hot(words)}
    return float((policy.velocity(*asked) - start.velocity(*asked)).square().mean())


def deviation(start: Words, world: str) -> float:
    """Return the deviation of the exact reward within a prompt, under stochastic sampling."""
    return float(quality(world, clean(start, ETA), words_of(4)).view(-1, 4).var(1).mean().sqrt())


def opened(
    start: Words, world: str, arm: str, noise: float, rate: float, seed: int
) -> PolicyGradientLoop:
    """Return the loop of an arm on a copy of the base."""
    cfg = Optimizer(learning_rate=rate, weight_decay=0.0)
    learner = Learner(copy(start), cfg, ALONE, UPDATES, None)
    rewards = Rewards([Letters(world, noise * deviation(start, world))], {"letters": 1.0})
    words = Requests(requests(seed + 10_000, 4096), seed)
    return PolicyGradientLoop(recipe(ARMS[arm]), learner, rewards, words, seed)


def run(start: Words, world: str, arm: str, noise: float, rate: float, seed: int) -> dict[str, Any]:
    """Train an arm, and return its evaluations."""
    loop = opened(start, world, arm, noise, rate, seed)
    policy, curve, began = loop.learner.policy, [], time.process_time()
    for done, _ in enumerate(loop.run(range(UPDATES)), 1):
        if done % (UPDATES // 4) == 0:
            found = {"ode": score(policy, world, 0.0), "sde": score(policy, world, ETA)}
            curve.append({"update": done} | found | {"distance": distance(policy, start, world)})
    costs = {"reward_calls": loop.rollouts.rewards.costs.reward_calls}
    return {"curve": curve, "cpu": time.process_time() - began} | costs


def variances(start: Words, world: str, arm: str) -> tuple[Tensor, float]:
    """Return the variance among siblings of each step, and among a prompt's samples."""
    cfg, steps = recipe(ARMS[arm]).sampling, tuple(range(STEPS - 1))
    seeds = [generator(11, "variance", i) for i in range(256)]
    found = sample(start, held_out(), cfg, steps, seeds)
    reward = quality(world, found.state(STEPS), words_of(found.group_size))
    group, mask, each = sibling_ids(found), found.trained, torch.zeros(STEPS - 1)
    for k in steps:
        value, index = reward[mask[:, k], None], group[mask[:, k], k].unique(return_inverse=True)[1]
        freedom = len(value) - int(index.max()) - 1
        each[k] = (value - group_mean(value, index)).square().sum() / max(freedom, 1)
    return each, float(reward.view(256, -1).var(1).mean())


def gradients(start: Words, world: str, arm: str, noise: float, batches: int) -> dict[str, Any]:
    """Return signal and noise of each step's gradient at the base, and the ratio of an update."""
    loop = opened(start, world, arm, noise, 1e-3, 0)
    cfg, rows = loop.cfg, []
    for i in range(batches):
        asked = loop.requests.batch(i, cfg.prompts_per_step)
        batch = compute_batch(
            cfg, loop.learner, loop, rollout(cfg.rollouts, loop.learner, asked, 0, i)
        )
        rows.append([g for _, g in gradients_of_steps(cfg, loop.learner, batch)])
    found = moments(inner_products(rows, [1] * batches))
    return {
        "signal": found.signal.diagonal().tolist(),
        "noise": found.noise.diagonal().tolist(),
    }


def law(own: dict[str, Tensor], total: float, s: float) -> dict[str, Tensor]:
    """Return the predicted variance of each step's gradient of an update, up to a factor per step.

    `own` are variances among siblings, `total` that of a prompt's samples, without the reward noise
    s^2. The squared error of the own outcome, w + s, is not centred at the truth, so the outcome's
    own part w counts twice.
    """
    k, w = CHILDREN, own["mixed"]
    rest = (total - w).clamp(min=0)
    best = rest / (rest + (w + s) / (k - 1))
    outcome = total + s + w
    mixed = (w + s) * (1 + best**2 / (k - 1)) + (1 - best) ** 2 * rest + w
    siblings = {name: (own[name] + s) * k / (k - 1) + own[name] for name in own}
    late = torch.where(torch.arange(STEPS - 1) > 4, mixed / 84 / k, outcome / 84)
    return {
        "outcome": outcome / 132,
        "comb, ODE": siblings["comb, ODE"] / 16 / k,
        "comb, common noise": siblings["comb, common noise"] / 20 / k,
        "mixed": mixed / 20 / k,
        "mixed, late": late,
        "mixed, late, equal calls": late * 84 / 18,
    }


def predict(folder: Path, world: str) -> dict[str, Any]:
    """Return what the law says before training, and the gradients at the base."""
    start = stored_base(folder, world)
    total = variances(start, world, "outcome")[1]
    own = {n: variances(start, world, n)[0] for n in ("comb, ODE", "comb, common noise")}
    own["mixed"] = own["comb, common noise"]
    measured = {
        str(s): {name: gradients(start, world, name, s, 16) for name in ARMS} for s in (0.0, 2.24)
    }
    # What does not depend on credit, the squared score of a step, is taken from one measurement.
    score_norm = torch.tensor(measured["0.0"]["outcome"]["noise"]) / law(own, total, 0)["outcome"]
    more = {"children": CHILDREN, "num_steps": STEPS}
    ahead = torch.arange(STEPS - 2, -1, -1.0)
    gain, per_step = {}, {}
    for s in NOISES:
        found = law(own, total, s**2 * total)
        summed = {name: float((score_norm * v).sum()) for name, v in found.items()}
        gain[str(s)] = {name: summed["outcome"] / v for name, v in summed.items()}
        per_step[str(s)] = {
            f"training costs {c:g}": sibling_gain(
                own["mixed"], total, s**2 * total, ahead=ahead, training=c, **more
            ).tolist()
            for c in (1.0, 3.0)
        }
    return {
        "reward": {"ode": score(start, world, 0.0), "sde": score(start, world, ETA)},
        "deviation": deviation(start, world),
        "variance of outcomes": total,
        "variance of siblings": {name: value.tolist() for name, value in own.items()},
        "gain of siblings per step": per_step,
        "predicted gain": gain,
        "gradients at the base": measured,
    }


Asked = tuple[str, str, str, float, float, int]
"""Part, world, arm, noise, rate and seed of a run."""


def key(row: dict[str, Any]) -> Asked:
    """Return what identifies a run."""
    return tuple(row[name] for name in ("part", "world", "arm", "noise", "rate", "seed"))


def stored(folder: Path) -> list[dict[str, Any]]:
    """Return the finished runs."""
    files = sorted(folder.glob("runs*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def best_rate(rows: Sequence[dict[str, Any]], world: str, arm: str, noise: float) -> float:
    """Return the rate with the best mean over the tuning seeds."""

    def tuned(rate: float) -> float:
        same = [r for r in rows if key(r)[:5] == ("tune", world, arm, TUNED_AT[noise], rate)]
        return mean(r["curve"][-1]["ode"] for r in same)

    return max(RATES, key=tuned)


def complete(folder: Path, wanted: Sequence[Asked], part: str) -> None:
    """Run what is missing, and append it."""
    starts, known = {w: stored_base(folder, w) for w in WORLDS}, {key(r) for r in stored(folder)}
    for asked in wanted:
        if asked not in known:
            _, world, arm, noise, rate, seed = asked
            names = ("part", "world", "arm", "noise", "rate", "seed")
            found = run(starts[world], world, arm, noise, rate, seed)
            row = dict(zip(names, asked, strict=True)) | found
            with (folder / f"runs{part}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")


def results(folder: Path) -> dict[str, Any]:
    """Return the final rewards and distances, the gains over outcome, and their agreement."""
    rows = stored(folder)
    predicted = json.loads((HERE / "credit_pays_law.json").read_text())
    found: dict[str, Any] = {"rates": {}, "final": {}, "gain": {}, "detectable": {}}
    pairs = []
    for world in WORLDS:
        found["rates"][world] = {
            str(s): {arm: best_rate(rows, world, arm, s) for arm in ARMS} for s in (0.3, 2.24)
        }
        for noise in NOISES:
            name, last = f"{world}, {noise:g}", {}
            for arm in ARMS:
                rate = best_rate(rows, world, arm, noise)
                asked = ("train", world, arm, noise, rate)
                same = [r for r in rows if key(r)[:5] == asked]
                last[arm] = {r["seed"]: r["curve"][-1] for r in same}
            found["final"][name] = {
                arm: {m: [one[m] for one in seeds.values()] for m in ("ode", "sde", "distance")}
                for arm, seeds in last.items()
            }
            spread = mean(
                variance([one["ode"] for one in seeds.values()]) for seeds in last.values()
            )
            count = min(len(seeds) for seeds in last.values())
            # The standard error of a difference of two means, times the quantile of t.
            quantile = float(t.ppf(0.975, len(ARMS) * (count - 1)))
            found["detectable"][name] = quantile * (2 * spread / count) ** 0.5
            centre = mean(one["ode"] for one in last["outcome"].values())
            start = predicted[world]["reward"]["ode"]
            found["gain"][name] = {
                arm: mean(one["ode"] for one in seeds.values()) - centre
                for arm, seeds in last.items()
            }
            for arm in ARMS:
                if arm != "outcome":
                    real = found["gain"][name][arm] / (centre - start)
                    pairs.append((predicted[world]["predicted gain"][str(noise)][arm], real))
    found["pairs"] = pairs
    found["rank correlation"] = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    return found


COLOURS = {
    "outcome": "#444444",
    "comb, ODE": "#d95f02",
    "comb, common noise": "#7570b3",
    "mixed": "#1b9e77",
    "mixed, late": "#e7298a",
    "mixed, late, equal calls": "#e6ab02",
}


def draw(content: dict[str, Any], place: Path) -> None:
    """Draw the law per step, and the reward of each arm against the noise of the reward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    law_of = json.loads((HERE / "credit_pays_law.json").read_text())
    fig, panels = plt.subplots(1, 3, figsize=(14, 4.8), dpi=100, layout="constrained")
    steps = range(STEPS - 1)
    exact = {
        "Words, glyphs": law_of["Words"]["glyph"]["gain"],
        "Words, OCR reader": law_of["Words"]["ocr"]["gain"],
        "letters": law_of["letters"]["gain of siblings per step"]["0.0"]["training costs 3"],
        "letters, noise 2.24": law_of["letters"]["gain of siblings per step"]["2.24"][
            "training costs 3"
        ],
        "points": law_of["points"]["gain of siblings per step"]["0.0"]["training costs 3"],
    }
    for (name, gain), style in zip(exact.items(), ("o-", "o--", "s-", "s--", "^-"), strict=True):
        panels[0].plot(steps, gain, style, label=name, markersize=5)
    panels[0].axhline(1, color="black", linewidth=1)
    panels[0].set(yscale="log", xlabel="denoising step", title="gain of siblings, by the law")
    panels[0].set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
    panels[0].minorticks_off()
    panels[0].legend(frameon=False, fontsize=9)
    for panel, world in zip(panels[1:], WORLDS, strict=True):
        for i, (arm, colour) in enumerate(COLOURS.items()):
            values = [content["final"][f"{world}, {noise:g}"][arm]["ode"] for noise in NOISES]
            x = [j + (i - 2.5) * 0.1 for j in range(len(NOISES))]
            # The interval of a mean, from the deviation pooled over the arms.
            half = [content["detectable"][f"{world}, {s:g}"] / 2**0.5 for s in NOISES]
            centre = [mean(v) for v in values]
            panel.errorbar(x, centre, half, fmt="o", color=colour, label=arm, markersize=5)
        panel.axhline(law_of[world]["reward"]["ode"], color="black", linewidth=1, linestyle=":")
        panel.set(xlabel="noise of the reward, in deviations", title=f"{world}: reward at the end")
        panel.set_xticks(range(len(NOISES)), [f"{noise:g}" for noise in NOISES])
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    fig.savefig(place)


def main() -> None:
    """Run the requested part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("predict", "tune", "train", "draw"))
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS))
    parser.add_argument("--part", default="", help="suffix of the file that runs are appended to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    grid = [(w, arm, noise) for noise in NOISES for w in args.worlds for arm in ARMS]
    if args.what == "predict":
        found = {world: predict(args.folder, world) for world in args.worlds}
        costs = {name: arm.evaluations for name, arm in ARMS.items()}
        place = HERE / "credit_pays_law.json"
        place.write_text(json.dumps({"evaluations": costs} | found, indent=1) + "\n")
    if args.what == "tune":
        trials = [(0.3, rate, seed) for seed in TUNING_SEEDS for rate in RATES]
        trials += [(2.24, rate, TUNING_SEEDS[0]) for rate in RATES]
        runs = [("tune", w, arm, *one) for one in trials for w in args.worlds for arm in ARMS]
        complete(args.folder, runs, args.part)
    if args.what == "train":
        rows = stored(args.folder)
        chosen = {g: best_rate(rows, *g) for g in grid}
        complete(args.folder, [("train", *g, chosen[g], i) for i in SEEDS for g in grid], args.part)
    if args.what == "draw":
        found = results(args.folder)
        (HERE / "credit_pays.json").write_text(json.dumps(found, indent=1) + "\n")
        draw(found, HERE / "credit_pays.png")
        print(json.dumps({k: found[k] for k in ("gain", "rank correlation")}))  # noqa: T201


if __name__ == "__main__":
    main()
