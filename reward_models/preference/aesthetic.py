"""Implements LAION's aesthetic predictors: a small head on CLIP's normalised image embedding.

v2 (improved-aesthetic-predictor, `sac+logos+ava1-l14-linearMSE.pth`) uses CLIP ViT-L/14. v2.5 has
the same head on SigLIP so400m and is released under AGPL-3.0.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import MediaBatch, PositiveInt, RewardSpec
from reward_models.backbones.checkpoints import (
    find_file,
    fingerprint_of,
    load_exactly,
    read_tensors,
    to_float32,
)
from reward_models.backbones.clip_towers import Towers, read_hugging_face, read_open_clip
from reward_models.backbones.network_reward import NetworkReward
from reward_models.backbones.pixels import average_over_frames


class LinearStack(nn.Module):
    """Linear layers n-1024-128-64-16-1 with only (unused) dropout between them.

    ImageReward has the same head; the keys of `layers` are indices in the original's list.
    """

    def __init__(self, width: int):
        super().__init__()
        sizes = {0: (width, 1024), 2: (1024, 128), 4: (128, 64), 6: (64, 16), 7: (16, 1)}
        self.layers = nn.ModuleDict({str(i): nn.Linear(*size) for i, size in sizes.items()})

    def forward(self, embedding: Float[Tensor, "n d"]) -> Float[Tensor, "n 1"]:
        """Return one score per embedding."""
        for layer in self.layers.values():
            embedding = layer(embedding)
        return embedding


def build_linear_stack(tensors: Mapping[str, Tensor], source: str | Path) -> LinearStack:
    """Build the head with these weights; the first layer determines its input width."""
    first = tensors.get("layers.0.weight")
    if first is None or first.ndim != 2:
        raise ValueError(f"{source} does not fit LinearStack\n1 missing: layers.0.weight")
    head = LinearStack(first.shape[1])
    load_exactly(head, to_float32(tensors), source)
    return head


class AestheticNetwork(nn.Module):
    """Image tower and head."""

    def __init__(self, towers: Towers, head: LinearStack):
        super().__init__()
        self.towers, self.head = towers, head


class Aesthetic(NetworkReward):
    """Predicts the aesthetic rating of an image, about 1 to 10; a video scores its frames' mean.

    The prompt is not used. `head` is the file, or a folder or hub repository that has `head_file`.
    `clip` is a Hugging Face folder or hub repository or, with `pretrained`, a model of open_clip
    (`ViT-L-14`, `openai`). For v2.5, `clip` is `google/siglip-so400m-patch14-384`.
    """

    network: AestheticNetwork

    def __init__(
        self,
        head: str = "trl-lib/ddpo-aesthetic-predictor",
        head_file: str = "aesthetic-model.pth",
        clip: str = "openai/clip-vit-large-patch14",
        pretrained: str | None = None,
        device: str = "auto",
        batch_size: PositiveInt = 32,
        offload: bool = False,
    ):
        spec = RewardSpec(
            name="aesthetic",
            dims=("aesthetic",),
            modality="any",
            scale=(float("-inf"), float("inf")),
            licence="Apache-2.0",
            differentiable=True,
            version=" ".join(map(fingerprint_of, (head, head_file, clip, pretrained))),
        )
        super().__init__(spec, device, batch_size, offload)
        self.head, self.head_file, self.clip, self.pretrained = head, head_file, clip, pretrained

    def read(self) -> AestheticNetwork:
        """Read the head and the image tower (with the text tower, which is not used)."""
        path = find_file(self.head, self.head_file)
        head = build_linear_stack(read_tensors(path), path)
        if self.pretrained is None:
            towers = read_hugging_face(self.clip)
        else:
            towers = read_open_clip(self.clip, self.pretrained)
        return AestheticNetwork(towers, head)

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 1"]:
        """Return head(embedding / |embedding|), averaged over frames."""
        embedded = self.network.towers.images(batch.media.flatten(0, 1), self.batch_size)
        return average_over_frames(batch.media, self.network.head(embedded)[:, 0])[:, None]
