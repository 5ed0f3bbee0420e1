"""Defines object detectors, with one from transformers, and finds connected regions of images."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import Loadable, Range
from reward_models.backbones.checkpoints import find_folder, fingerprint_of, read_transformers
from reward_models.backbones.libraries import transformers
from reward_models.backbones.reward_bases import choose_device, require_device

Threshold = Annotated[float, Range(least=0, below=1)]
"""Score that a detection must exceed."""


@dataclass(frozen=True)
class Detection:
    """Detected object in an image."""

    label: str
    score: float
    """Confidence of the detector, in [0, 1]."""
    box: tuple[float, float, float, float]
    """Left, top, right, bottom in pixels."""
    colour: str | None = None
    """Main colour of the object, or None if the detector does not name colours."""


class Detector(Loadable):
    """Detector of objects of a fixed set of classes."""

    version: str
    """Identifier of the weights and settings that determine its detections."""
    names_colours: bool
    """Whether its detections have a colour."""

    @abstractmethod
    def classes(self) -> frozenset[str]:
        """Return the labels that it can assign. Call it after `load`."""

    @abstractmethod
    def detect(self, picture: Float[Tensor, "3 h w"]) -> list[Detection]:
        """Return the objects of an image in [0, 1] in any order, including uncertain ones."""


class TransformersDetector(Detector):
    """Detector from any `AutoModelForObjectDetection` folder or repository, without colours.

    GenEval itself uses an mmdet Mask2Former; other detectors give other absolute scores. Detections
    with a score below `least` are dropped.
    """

    names_colours = False

    def __init__(self, model: str, device: str = "cpu", least: Threshold = 0.05):
        self.model, self.device, self.least = model, choose_device(device), least
        self.version = f"{fingerprint_of(model)}; score > {least}"

    def load(self) -> None:
        """Read the weights; raise ValueError if they do not fit."""
        require_device(self.device)
        network = read_transformers(transformers.AutoModelForObjectDetection, self.model)
        self._network: Any = network.eval().requires_grad_(False).to(self.device)
        self._processor = transformers.AutoImageProcessor.from_pretrained(find_folder(self.model))

    def classes(self) -> frozenset[str]:
        """Return the labels of the model's config."""
        return frozenset(self._network.config.id2label.values())

    @torch.no_grad()
    def detect(self, picture: Float[Tensor, "3 h w"]) -> list[Detection]:
        """Run the network; boxes are in pixels of the given image."""
        self.load()
        inputs = self._processor(picture.float().cpu(), do_rescale=False, return_tensors="pt")
        output = self._network(**inputs.to(self.device))
        (found,) = self._processor.post_process_object_detection(
            output, threshold=self.least, target_sizes=[tuple(picture.shape[-2:])]
        )
        names = self._network.config.id2label
        columns = (found[key].tolist() for key in ("labels", "scores", "boxes"))
        return [Detection(names[c], s, tuple(box)) for c, s, box in zip(*columns, strict=True)]


def label_components(mask: Bool[Tensor, "n H W"]) -> Int[Tensor, "n H W"]:
    """Label eight-connected components by spreading the largest label; 0 is background."""
    labels = torch.arange(1, mask[0].numel() + 1, dtype=torch.float32).view(mask[0].shape) * mask
    while True:
        spread = F.max_pool2d(labels[:, None], 3, 1, 1)[:, 0] * mask
        if torch.equal(spread, labels):
            return labels.long()
        labels = spread


def match_shapes(mask: Bool[Tensor, "m H W"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return each region's best ideal shape and their IoU, and its box's centre and half size.

    The ideal shapes are a circle, a square and a triangle.
    """
    u, half_x, centre_x = _box_coordinates(mask.any(1))
    w, half_y, centre_y = _box_coordinates(mask.any(2))
    u, w = u[:, None, :], w[:, :, None]
    inside = (u.abs() <= 1) & (w.abs() <= 1)
    ideals = torch.stack(
        [u**2 + w**2 <= 1.08, inside, inside & (u.abs() <= (w + 1) / 2 + 0.1)], dim=1
    )
    overlap = (ideals & mask[:, None]).flatten(2).sum(2)
    union = (ideals | mask[:, None]).flatten(2).sum(2).clamp(min=1)
    # A sliver fits any ideal in its own bounding box, so regions far from square lose fit.
    aspect = torch.minimum(half_x, half_y) / torch.maximum(half_x, half_y).clamp(min=0.5)
    fit, shape = (overlap / union).max(1)
    fit = fit * (aspect / 0.75).clamp(max=1)
    centre, half = torch.stack([centre_x, centre_y], 1), torch.stack([half_x, half_y], 1)
    return shape, fit, centre, half


def _box_coordinates(occupied: Bool[Tensor, "m L"]) -> tuple[Tensor, Tensor, Tensor]:
    """Return coordinates with the occupied range scaled to [-1, 1], its half width and centre."""
    index = torch.arange(occupied.shape[-1], dtype=torch.float32)
    low = torch.where(occupied, index, torch.inf).amin(-1)
    high = torch.where(occupied, index, -torch.inf).amax(-1)
    half, centre = (high - low + 1) / 2, (high + low) / 2
    return (index - centre[..., None]) / half[..., None], half, centre


def find_centroids(mask: Bool[Tensor, "m H W"]) -> Float[Tensor, "m 2"]:
    """Return the mean of each region's pixels, x then y."""
    area = mask.flatten(1).sum(1)
    sums = [(mask.sum(axis) * torch.arange(mask.shape[3 - axis])).sum(1) for axis in (1, 2)]
    return torch.stack([along / area for along in sums], 1)
