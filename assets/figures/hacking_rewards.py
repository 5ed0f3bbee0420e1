"""Train rewards with known flaws for `hacking.py`, and read an independent reward.

The flawed rewards are heads on the bundled two-tower model that learn from preferences between
images of the untrained toy model, with the verifier as the annotator. `learned` sees 100 pairs,
`few_pairs` 24. In the pairs of `spurious`, most of the preferred images are also brighter.
"""

from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from flowalign.functional.rating import Standardiser
from flowalign.sampling.inference import generate
from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec, plain_requests
from flowalign.utils.seeds import generator
from pipelines.families.sd3 import SD3
from reward_models import TrainedLatentReward, TrainedReward
from reward_models.verifiers.shapes import ShapesVerifier

PAIRS = {"learned": 100, "few_pairs": 24, "spurious": 2000}
"""Number of training pairs of each reward."""
PROMPTS, IMAGES = 480, 4
CUE, CUE_SHARE = 0.15, 0.9
"""Added brightness of preferred images, and the share of pairs that have it."""
INFINITE = float("inf")


def load_toy() -> SD3:
    """Return the toy model without guidance or adapters."""
    policy = SD3("assets/shapes/sd3", 32, 32, 1.0, precision="fp32", max_sequence_length=1)
    policy.load(torch.device("cpu"))
    return policy


class HeadReward(RewardModel):
    """Head on the image, text and product features of the bundled two-tower model.

    The score is in standard deviations over images of the untrained model. `path` is a file that
    `train_rewards` wrote; None is an untrained head.
    """

    def __init__(self, path: str | None = None):
        name = Path(path).stem if path else "untrained"
        scale, needs = (-INFINITE, INFINITE), ("prompt",)
        self.spec = RewardSpec(
            name, (name,), "image", scale, "Apache-2.0", differentiable=True, needs=needs
        )
        towers = TrainedReward("assets/shapes/preference", device="cpu", batch_size=256)
        towers.load()
        self.backbone, width = towers.backbone, towers.rater.joint.mean.numel()
        layers = nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 1)
        self.network = nn.Sequential(Standardiser(width), *layers, Standardiser(1))
        if path:
            self.network.load_state_dict(load_file(path))
        self.network.requires_grad_(False)

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score each image against its prompt."""
        return RewardOutput.build(self.spec, self.network(self.backbone.embed(batch).joint), {})


class Similarity(HeadReward):
    """Similarity of image and prompt under the bundled two-tower model, like a CLIP score."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = replace(self.spec, name="similarity", dims=("similarity",))

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score each image against its prompt."""
        product = self.backbone.embed(batch).joint.chunk(3, 1)[2]
        return RewardOutput.build(self.spec, product.sum(1, keepdim=True))


class Judge(RewardModel):
    """Mean of the bundled latent reward's dimensions, on noise-free latents of the untrained model.

    Its network, the toy denoiser, shares nothing with the optimised rewards.
    """

    def __init__(self) -> None:
        scale, needs = (-INFINITE, INFINITE), ("prompt",)
        self.spec = RewardSpec("judge", ("judge",), "image", scale, "Apache-2.0", needs=needs)
        self.policy, self.reward = load_toy(), TrainedLatentReward("assets/shapes/latent")
        self.reward.attach(self.policy)

    @torch.no_grad()
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score each image against its prompt."""
        latents = self.policy.embed(batch.media)
        cond = self.policy.encode(plain_requests(batch.prompts))
        values = self.reward.score(latents, torch.zeros(len(latents)), cond)
        return RewardOutput.build(self.spec, values.mean(1, keepdim=True), {})


def train_rewards(folder: Path) -> None:
    """Train the flawed rewards unless the folder has them; print their accuracy."""
    if all((folder / f"{name}.safetensors").exists() for name in PAIRS):
        return
    images, prompts, scores = draw_images()
    for name in PAIRS:
        save_file(fit(name, images, prompts, scores), folder / f"{name}.safetensors")


def draw_images() -> tuple[Float[Tensor, "p k 3 32 32"], list[str], Float[Tensor, "p k"]]:
    """Return images of the untrained model, their prompts and their true scores."""
    prompts = Path("assets/shapes/prompts/train.txt").read_text().splitlines()
    prompts = prompts[:: len(prompts) // PROMPTS][:PROMPTS]
    repeated = [prompt for prompt in prompts for _ in range(IMAGES)]
    seeds = [generator(0, "hacking rewards", i) for i in range(len(repeated))]
    policy = load_toy()
    latents = generate(policy, plain_requests(repeated), 8, seeds, 192)
    with torch.no_grad():
        images = torch.cat([policy.decode(x)[:, 0] for x in latents.split(192)])
    dims = ShapesVerifier().score(MediaBatch(images[:, None], repeated)).values[:, :5]
    shape = len(prompts), IMAGES
    return images.unflatten(0, shape), prompts, dims.mean(1).unflatten(0, shape)


def fit(
    name: str,
    images: Float[Tensor, "p k 3 32 32"],
    prompts: list[str],
    scores: Float[Tensor, "p k"],
) -> dict[str, Tensor]:
    """Train a head with the Bradley-Terry loss; return its tensors."""
    torch.manual_seed(0)
    reward, flat = HeadReward(), images.flatten(0, 1)[:, None]
    repeated = [prompt for prompt in prompts for _ in range(IMAGES)]
    with torch.no_grad():
        plain = reward.backbone.embed(MediaBatch(flat, repeated)).joint
        bright = reward.backbone.embed(MediaBatch((flat + CUE).clamp(max=1), repeated)).joint
    pairs = torch.tensor(
        [
            (i * IMAGES + a, i * IMAGES + b)
            for i, row in enumerate(scores.tolist())
            for a, first in enumerate(row)
            for b, second in enumerate(row)
            if first > second + 1e-6
        ]
    )
    held_out = pairs[:, 0] // IMAGES % 8 == 0
    rest = pairs[~held_out]
    better, worse = rest[torch.randperm(len(rest))[: PAIRS[name]]].T
    cued = (torch.rand(len(better)) < CUE_SHARE) & (name == "spurious")
    winners = torch.where(cued[:, None], bright[better], plain[better])
    standardise, *layers, units = reward.network
    standardise.fit(plain)
    network = nn.Sequential(standardise, *layers).requires_grad_(True)
    optimizer = torch.optim.AdamW(network.parameters(), 3e-3, weight_decay=1e-2)
    for _ in range(300):
        some = torch.randint(len(better), (128,))
        margin = network(winners[some]) - network(plain[worse[some]])
        optimizer.zero_grad()
        (-logsigmoid(margin).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        units.fit(network(plain))
        first, second = (network(plain[rows]) for rows in pairs[held_out].T)
    print(f"{name}: accuracy {float((first > second).float().mean()):.3f}")  # noqa: T201
    return reward.network.state_dict()
