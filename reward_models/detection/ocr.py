"""Implements a text rendering reward: whether an image shows the text that its prompt requests.

ddddocr, a recognizer with other weights than PP-OCRv4, is a second judge.

Source: the OCR reward of Flow-GRPO, arXiv:2505.05470v5; mode `contained` follows its code.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from flowalign.types import (
    Loadable,
    MediaBatch,
    NonNegativeInt,
    PositiveInt,
    RewardSpec,
    UnitInterval,
)
from flowalign.utils.imports import import_optional
from reward_models.backbones.pixels import sample_frames
from reward_models.backbones.reward_bases import (
    Composed,
    RuleReward,
    Unscorable,
    Verdict,
    metadata_of,
    to_uint8,
)

Mode = Literal["contained", "cer", "exact"]
Over = Literal["mean", "max"]


class TextReader(Loadable):
    """Reader of text in images."""

    version: str
    """Identifier of everything that determines its readings."""

    @abstractmethod
    def read(self, picture: UInt8[np.ndarray, "h w 3"]) -> list[str]:
        """Return the lines of text in an 8-bit RGB image, in reading order."""


class RapidOCR(TextReader):
    """Reader with PP-OCRv4 on onnxruntime; the weights come with the PyPI package (Apache-2.0).

    Lines with a score below `confidence` are dropped. `threads` 0 leaves the number to onnxruntime.
    """

    def __init__(self, confidence: UnitInterval = 0.5, threads: NonNegativeInt = 0):
        self.confidence, self.threads = confidence, threads
        self.version = f"rapidocr-onnxruntime 1.x PP-OCRv4, confidence {confidence}"

    def load(self) -> None:
        """Open the networks."""
        engine = import_optional("rapidocr_onnxruntime", "ocr").RapidOCR
        self._engine = engine(text_score=self.confidence, intra_op_num_threads=self.threads or -1)

    def read(self, picture: UInt8[np.ndarray, "h w 3"]) -> list[str]:
        """Return the lines with a confidence of at least `confidence`."""
        self.load()
        lines, _ = self._engine(picture[..., ::-1].copy())  # it reads arrays in OpenCV's BGR
        return [text for _, text, _ in lines or ()]


class RapidOCRLine(TextReader):
    """Recognizer of PP-OCRv4 without its text detector: it reads an image as one line of text.

    Use it for images that contain a single line and little else. It needs about 6 ms of one core
    for an image of 64x32 pixels. `threads` 0 leaves the number to onnxruntime.
    """

    version = "rapidocr-onnxruntime 1.x PP-OCRv4 recognizer, unpadded"

    def __init__(self, threads: NonNegativeInt = 1):
        self.threads = threads

    def load(self) -> None:
        """Open the network."""
        engine = import_optional("rapidocr_onnxruntime", "ocr").RapidOCR
        self._recognizer = engine(intra_op_num_threads=self.threads or -1).text_rec
        # It pads every image to this aspect ratio, by default 320:48: five times the work here.
        self._recognizer.rec_image_shape = [3, 48, 48]

    def read(self, picture: UInt8[np.ndarray, "h w 3"]) -> list[str]:
        """Return the line; an image without text gives an empty string."""
        self.load()
        lines, _ = self._recognizer([picture[..., ::-1].copy()])  # BGR, as in `RapidOCR`
        return [lines[0][0]]


class OCR(Composed, RuleReward):
    """Scores how much of the requested text is shown, in [0, 1]; `mode` names the only dimension.

    The target is `metadata["text"]` or the first double-quoted span of the prompt; a sample without
    either cannot be scored. Case and white space are ignored, and lines are joined.

    `contained`: 1 if the target occurs anywhere, otherwise the same as `cer`. This is the rule in
    papers. It can be hacked, because an image full of text contains every short target. `cer`: 1
    minus the character error rate, at least 0, so surplus text lowers the score. `exact`: 1 if
    exactly the target is read, else 0.

    A video scores the `mean` or `max` over at most `num_frames` evenly spaced frames.
    """

    def __init__(
        self,
        reader: TextReader | None = None,
        mode: Mode = "contained",
        over: Over = "mean",
        num_frames: PositiveInt = 8,
    ):
        self.reader = RapidOCR() if reader is None else reader
        self.rule, self.over, self.num_frames = RULES[mode], OVER[over], num_frames
        self.spec = RewardSpec(
            name="ocr",
            dims=(mode,),
            scale=(0.0, 1.0),
            licence="Apache-2.0",
            version=f"{self.reader.version}; {over} of {num_frames} frames",
        )

    def judge(self, sample: MediaBatch) -> Verdict:
        """Read the frames and compare; the extras hold the target and the text that was read."""
        target = find_target(sample.prompts[0], metadata_of(sample))
        frames = sample_frames(sample.media[0], self.num_frames)
        readings = ["".join(self.reader.read(picture)) for picture in to_uint8(frames)]
        scores = [
            self.rule(normalise_text(target), normalise_text(reading)) for reading in readings
        ]
        return (self.over(scores),), {"target": target, "read": readings}


_QUOTED = re.compile(
    '(?:(?<![0-9])"|“)([^"“”]*)["”]|„([^„“”]*)[“”]|«([^«»]*)»|「([^「」]*)」|『([^『』]*)』|\uff02([^\uff02]*)\uff02'
)
"""Text between quotation marks of several languages."""


def find_target(prompt: str, metadata: Mapping[str, Any]) -> str:
    """Return the text that an image should show; raise Unscorable if there is none.

    Single quotes do not count, because most of them are apostrophes, nor does the sign of inches
    after a digit.
    """
    quoted = _QUOTED.search(prompt.replace('\\"', '"'))
    target = metadata.get("text", quoted[quoted.lastindex or 0] if quoted else None)
    if target is None:
        raise Unscorable("neither its prompt quotes a text nor its metadata has `text`")
    if not isinstance(target, str) or not normalise_text(target):
        raise Unscorable(f"the text it should show is {target!r}")
    return target


def normalise_text(text: str) -> str:
    """Return the text in lower case without white space, for comparison."""
    return "".join(text.lower().split())


def score_contained(target: str, reading: str) -> float:
    """Return 1 if the target occurs in the reading, otherwise its `character_accuracy`."""
    return 1.0 if target in reading else character_accuracy(target, reading)


def character_accuracy(target: str, reading: str) -> float:
    """Return 1 minus the edits per character of the target, at least 0."""
    return 1 - min(edit_distance(target, reading), len(target)) / len(target)


RULES: Mapping[str, Callable[[str, str], float]] = {
    "contained": score_contained,
    "cer": character_accuracy,
    "exact": lambda target, reading: float(target == reading),
}
OVER: Mapping[str, Callable[[list[float]], float]] = {"mean": fmean, "max": max}


def edit_distance(a: str, b: str) -> int:
    """Return the minimum number of inserted, deleted and replaced characters that turn a into b."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        corner, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (x != y))
    return row[-1]


class DdddOCR(TextReader):
    """Recognizer of ddddocr: it reads an image as one line of text.

    The weights come with the PyPI package (MIT, 76 MB). Use it to judge a policy that was trained
    with PP-OCRv4. `alphabet` contains the only characters that it reads, for example the capital
    letters, which excludes confusions of I and l; None allows all. It needs about 30 ms of one core
    for an image of 64x32 pixels.
    """

    def __init__(self, alphabet: str | None = None):
        if alphabet is not None and (not alphabet or len({*alphabet}) < len(alphabet)):
            remedy = "give different characters, or null for all"
            raise ValueError(f"alphabet of DdddOCR is {alphabet!r}; {remedy}")
        self.alphabet = alphabet
        self.version = f"ddddocr 1.x common_old, alphabet {alphabet}"

    def load(self) -> None:
        """Open the network; raise ValueError for characters that it cannot read."""
        self._engine = import_optional("ddddocr", "ocr-judge").DdddOcr(show_ad=False)
        if unknown := sorted({*(self.alphabet or "")} - {*self._engine.get_charset()}):
            raise ValueError(f"ddddocr cannot read {unknown}: remove them from its alphabet")

    def read(self, picture: UInt8[np.ndarray, "h w 3"]) -> list[str]:
        """Return the line; an image without text gives an empty string."""
        self.load()
        found = self._engine.classification(Image.fromarray(picture), probability=True)
        charset: list[str] = found["charset"]
        scores = np.asarray(found["probabilities"])[:, 0]
        kept = range(len(charset))
        if self.alphabet is not None:
            kept = [0, *(charset.index(letter) for letter in self.alphabet)]
        return [decode_greedily(scores[:, kept], [charset[i] for i in kept])]


def decode_greedily(scores: Float[np.ndarray, "t c"], charset: list[str]) -> str:
    """Return the text of the best character of each column; character 0 is CTC's blank.

    Equal neighbours count once.
    """
    best = scores.argmax(1)
    new = np.diff(best, prepend=0) != 0
    return "".join(charset[i] for i in best[new] if i != 0)
