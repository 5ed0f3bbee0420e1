"""The tiny worlds of `credit_pays.py`: prompts, network, rewards and evaluation.

A word has six letters, each a point in a plane with four corners. Letters have different sizes, so
that they are decided at different noise levels. A small network learns the words of prompts. In the
world `letters`, points are near corners, a third of them near a random one, and the reward is the
share of right corners. In the world `points`, each is a Gaussian around its corner, and the reward
is minus the mean squared distance. Noise of the reward depends on the content only.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowalign.sampling import Sampling
from flowalign.sampling.rollout import sample
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
from flowalign.utils.seeds import generator

SIZES = torch.tensor([2.0, 1.0, 0.6, 0.4, 0.3, 0.25])
"""Distance of the corners of each letter from its centre."""
WORLDS = {"letters": (0.1, 1 / 3), "points": (0.7, 0.0)}
"""Deviation of a letter relative to its size, and share of random letters in the training data."""
LETTERS = "ABCD"
CORNERS = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]) / 2**0.5
STEPS, ETA = 8, 0.7


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
