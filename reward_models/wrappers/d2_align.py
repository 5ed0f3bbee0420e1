"""Moves the text embedding of a CLIP-type reward away from images that score high (D2-Align).

Source: D2-Align, arXiv:2512.24146, from its formulas; no code was found. The policy is trained with
the gradient path `DirectAlign`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from flowalign.types import (
    Loadable,
    MediaBatch,
    PositiveFloat,
    PositiveInt,
    RewardModel,
    RewardOutput,
)
from flowalign.utils.files import explain_shape, read_objects
from reward_models.backbones.checkpoints import fingerprint_of
from reward_models.backbones.clip_towers import Towers, guide_text
from reward_models.backbones.reward_bases import NetworkReward, derive_spec


def learn_shift(
    images: Float[Tensor, "n d"],
    texts: Float[Tensor, "n d"],
    strength: float,
    steps: int,
    learning_rate: float,
) -> Float[Tensor, "d"]:
    """Return the shift that raises the mean guided score of images with their texts, by Adam.

    The embeddings have unit length. The shift starts at 0; its start and the learning rate are not
    published.
    """
    shift = torch.zeros_like(texts[0], requires_grad=True)
    optimizer = torch.optim.Adam([shift], lr=learning_rate)
    with torch.enable_grad():
        for _ in range(steps):
            loss = -(images * guide_text(texts, shift, strength)).sum(1).mean()
            (shift.grad,) = torch.autograd.grad(loss, shift)
            optimizer.step()
    return shift.detach()


@dataclass(eq=False, repr=False)
class D2Align(RewardModel, Loadable):
    """Scores with `reward` and a text embedding that a learned direction moves by `strength`.

    `reward` is PickScore, HPSv2 or CLIPScore. `media` is a folder of images of the initial policy
    from `flowalign sample`; the direction is learned on them at the first `load`, in `steps` steps
    on all images. The paper learns it on samples that are noised and denoised by one step.
    """

    reward: RewardModel
    media: str
    strength: PositiveFloat = 1.5
    steps: PositiveInt = 3000
    learning_rate: PositiveFloat = 1e-3

    def __post_init__(self) -> None:
        """Raise ValueError for a reward without a network."""
        super().__post_init__()
        if not isinstance(self.reward, NetworkReward):
            self._refuse_reward()
        (low, high), longest = self.reward.spec.scale, 1 + 2 * self.strength  # of a guided text
        settings = f"{self.strength:g} {self.steps} {self.learning_rate:g}"
        how, scale = f"{settings} {fingerprint_of(self.media)}", (low * longest, high * longest)
        self.spec = derive_spec(self.reward.spec, "d2", how, scale=scale)

    def load(self) -> None:
        """Load the reward and learn the direction; raise ValueError for unusable images."""
        listing = read_listing(self.media)
        assert isinstance(self.reward, NetworkReward), "the constructor has checked it"
        self.reward.load()
        towers = self.reward.network
        if not isinstance(towers, Towers):
            self._refuse_reward()
        towers.to(self.reward.place)  # it may be offloaded between calls
        with torch.no_grad():
            images = torch.cat([towers.images(_read(path), 1) for path, _ in listing])
            texts = towers.texts([prompt for _, prompt in listing])
        settings = self.strength, self.steps, self.learning_rate
        towers.shift, towers.strength = learn_shift(images, texts, *settings), self.strength

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score with the moved text embeddings."""
        self.load()
        return self.reward.score(batch)

    def _refuse_reward(self) -> NoReturn:
        remedy = "which has no CLIP towers: choose PickScore, HPSv2 or CLIPScore"
        raise ValueError(f"reward of D2Align is {type(self.reward).__name__}, {remedy}")


def read_listing(folder: str) -> list[tuple[Path, str]]:
    """Return the files and prompts of a folder from `flowalign sample`.

    Raises:
        ValueError: There is no listing, or it names no PNG files.
    """
    listing = Path(folder) / "metadata.jsonl"
    if not listing.is_file():
        raise ValueError(
            f"media of D2Align is {folder!r}, which has no metadata.jsonl: make images of the "
            f"initial policy with flowalign sample RUN.yaml --out {folder}"
        )
    with explain_shape(listing, "every line needs file_name and prompt"):
        rows = [row for _, row in read_objects(listing)]
        found = [(Path(folder) / row["file_name"], str(row["prompt"])) for row in rows]
    if not found or any(path.suffix != ".png" for path, _ in found):
        raise ValueError(f"{listing} must name at least one image, and PNG files only")
    return found


def _read(path: Path) -> Float[Tensor, "1 3 h w"]:
    """Return an image in [0, 1]."""
    with Image.open(path) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels / 255).permute(2, 0, 1)[None]
