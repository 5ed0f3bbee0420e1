"""Implements a differentiable text rendering reward: the likelihood of the requested text.

Source of the loss: connectionist temporal classification (CTC), Graves et al., ICML 2006. The
recognizer is that of PP-OCRv4 in `RapidOCRLine`, run in torch.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.utils.imports import import_optional
from reward_models.backbones.rule import Unscorable, metadata_of
from reward_models.detection.ocr import find_target
from reward_models.detection.onnx_network import OnnxNetwork

_HEIGHT = 48
"""Height in pixels to which the recognizer's images are resized."""
_LEAST = 1e-30
"""Smallest probability, so that logarithms are finite."""


class TextLikelihood(RewardModel, Loadable):
    """Scores the CTC log-likelihood of the requested text in nats per character, at most 0.

    It reads an image as one line of text, like `RapidOCRLine`, and is differentiable in the pixels.
    The target is that of `OCR`, and upper and lower case differ. Samples without a target, or with
    a character that the recognizer does not know, cannot be scored. Needs the extra `ocr`.
    """

    def __init__(self) -> None:
        self.spec = RewardSpec(
            name="text_likelihood",
            dims=("text_likelihood",),
            modality="image",
            scale=(float("-inf"), 0.0),
            licence="Apache-2.0",
            differentiable=True,
            version="rapidocr-onnxruntime 1.x PP-OCRv4 recognizer",
        )
        self._network: OnnxNetwork | None = None
        self._characters: dict[str, int] = {}

    def load(self) -> None:
        """Convert the network once."""
        if self._network is None:
            models = Path(import_optional("rapidocr_onnxruntime", "ocr").__file__).parent / "models"
            self._network = OnnxNetwork(models / "ch_PP-OCRv4_rec_infer.onnx")
            known = [*self._network.metadata["character"].splitlines(), " "]
            self._characters = {character: i for i, character in enumerate(known, start=1)}

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score all samples at once; a failed row has no gradient."""
        self.load()
        failed = self.spec.screen(batch)
        targets: dict[int, list[int]] = {}
        for i in range(len(batch)):
            if i not in failed:
                try:
                    targets[i] = self._encode(batch.take([i]))
                except Unscorable as reason:
                    failed[i] = str(reason)
        values = torch.full((len(batch), 1), torch.nan)
        if targets:
            images = batch.media[list(targets), 0].float().cpu()
            scores = self._compare(images, list(targets.values()))
            values = values.index_put((torch.tensor(list(targets)),), scores[:, None])
        return RewardOutput.build(self.spec, values, failed)

    def _encode(self, sample: MediaBatch) -> list[int]:
        target = find_target(sample.prompts[0], metadata_of(sample))
        unknown = sorted({*target} - {*self._characters})
        if unknown:
            raise Unscorable(f"PP-OCRv4 cannot read {unknown} of the text it should show")
        return [self._characters[character] for character in target]

    def _compare(
        self, images: Float[Tensor, "n 3 h w"], targets: list[list[int]]
    ) -> Float[Tensor, "n"]:
        assert self._network
        width = round(images.shape[3] * _HEIGHT / images.shape[2])
        resized = F.interpolate(images, (_HEIGHT, width), mode="bilinear")
        probabilities = self._network(resized.flip(1) * 2 - 1)  # BGR in [-1, 1]
        return log_likelihood(probabilities.clamp(min=_LEAST).log(), targets)


def log_likelihood(
    log_probabilities: Float[Tensor, "n t c"], targets: list[list[int]]
) -> Float[Tensor, "n"]:
    """Return the CTC log-likelihood per character of each target; character 0 is the blank.

    It is -inf for a target that does not fit into t columns.
    """
    n, t, _ = log_probabilities.shape
    lengths = torch.tensor([len(target) for target in targets])
    losses = F.ctc_loss(
        log_probabilities.transpose(0, 1),
        torch.tensor([i for target in targets for i in target]),
        torch.full((n,), t),
        lengths,
        reduction="none",
    )
    return -losses / lengths
