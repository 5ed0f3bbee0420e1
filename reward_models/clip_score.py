"""CLIPScore: cosine similarity of picture and prompt under an open_clip model.

Source: Hessel et al. 2021, arXiv:2104.08718v3, Eq. (1), without its factor 2.5 and its clip at 0.
"""

from typing import Any

import open_clip
import torch
from torch import Tensor
from torchvision.transforms import functional as TF

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec


class CLIPScore(RewardModel):
    """One dimension in [-1, 1]; a video scores the mean over its frames.

    `pretrained` is an open_clip tag (fetched from the hub when first used) or the path of a
    checkpoint.
    """

    def __init__(
        self,
        model: str = "ViT-L-14",
        pretrained: str | None = "openai",
        device: str = "cpu",
        batch_size: int = 32,
    ):
        self.name, self.pretrained = model, pretrained
        self.device, self.batch_size = device, batch_size
        self.spec = RewardSpec(
            name="clip_score",
            dims=("clip_score",),
            modality="any",
            scale=(-1.0, 1.0),
            licence="MIT",
        )
        self.model: Any = None

    @torch.no_grad()
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score all frames, in chunks of `batch_size` samples."""
        if self.model is None:
            self._load()
        media, prompts = batch.media.split(self.batch_size), list(batch.prompts)
        starts = range(0, len(prompts), self.batch_size)
        scores = [
            self._similarity(part, prompts[i : i + self.batch_size])
            for part, i in zip(media, starts, strict=True)
        ]
        return RewardOutput.build(self.spec, torch.cat(scores)[:, None])

    def _load(self) -> None:
        self.model = open_clip.create_model(self.name, self.pretrained, device=self.device).eval()
        self.tokenize = open_clip.get_tokenizer(self.name)
        size = self.model.visual.image_size
        self.size: int = size[0] if isinstance(size, tuple) else size
        config = open_clip.get_model_preprocess_cfg(self.model)
        self.mean, self.std = config["mean"], config["std"]

    def _similarity(self, media: Tensor, prompts: list[str]) -> Tensor:
        frames = media.flatten(0, 1).float().to(self.device)
        frames = TF.resize(
            frames, [self.size], interpolation=TF.InterpolationMode.BICUBIC, antialias=True
        )
        frames = TF.normalize(TF.center_crop(frames.clamp(0, 1), [self.size]), self.mean, self.std)
        image = self.model.encode_image(frames, normalize=True).unflatten(0, media.shape[:2])
        text = self.model.encode_text(self.tokenize(prompts).to(self.device), normalize=True)
        return torch.einsum("nfd,nd->nf", image, text).mean(1).cpu()
