"""Defines the interface of object detectors, and a detector from transformers."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowalign.types import Loadable, UnitInterval
from reward_models.backbones.checkpoints import find_folder, fingerprint_of, read_transformers
from reward_models.backbones.devices import choose_device, require_device
from reward_models.backbones.libraries import transformers


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

    def __init__(self, model: str, device: str = "cpu", least: UnitInterval = 0.05):
        if not 0 <= least < 1:
            raise ValueError(f"least of TransformersDetector is {least}; it must be in [0, 1)")
        self.model, self.device, self.least = model, choose_device(device), least
        self.version = f"{fingerprint_of(model)}; score > {least}"
        self._network: Any = None

    def load(self) -> None:
        """Read the weights once; raise ValueError if they do not fit."""
        if self._network is not None:
            return
        require_device(self.device)
        network = read_transformers(transformers.AutoModelForObjectDetection, self.model)
        self._network = network.eval().requires_grad_(False).to(self.device)
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
