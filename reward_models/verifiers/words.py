"""Verifies images of Words, the text-rendering toy model, with the glyphs of its fonts.

Images (see `assets/words/`) have 64x32 pixels and show a word of three or four capital letters in
one ink, on one paper and in one font. A prompt is, for example, `the word "SUN" in red on yellow,
serif`. The glyph matcher reads an image without a neural network: it finds the sequence of glyphs
with the least squared error. It is the ground truth to which a text recognizer is compared.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_uppercase

import numpy as np
import torch
from jaxtyping import Float, Int
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import MediaBatch, RewardSpec
from flowalign.utils.imports import import_optional
from reward_models.backbones.reward_bases import ScreenedReward
from reward_models.detection.ocr import character_accuracy, normalise_text

HEIGHT, WIDTH = 32, 64
INKS = {"red": (200, 30, 30), "green": (20, 130, 40), "blue": (30, 50, 190), "black": (20, 20, 20)}
PAPERS = {"white": (245, 245, 245), "yellow": (240, 220, 110)}
FONTS = {"sans": "DejaVuSans-Bold.ttf", "serif": "DejaVuSerif-Bold.ttf"}
"""Font files in matplotlib's data folder, in the DejaVu (Bitstream Vera) licence."""
_matplotlib = import_optional("matplotlib", "plots")
LETTERS = ascii_uppercase
Placed = tuple[str, int, int]
"""Letter with its first column and the column after its last, in pixels."""
GLYPH_HEIGHT = 18
"""Height of every glyph bitmap in pixels; the baseline is at `_BASELINE`."""
_BASELINE, _FONT_SIZE = 14, 18
_PROMPT = re.compile(r'the word "([A-Z]+)" in (\w+) on (\w+), (\w+)')


@dataclass(frozen=True)
class Label:
    """Word, colours and font of an image."""

    word: str
    ink: str
    paper: str
    font: str

    @property
    def prompt(self) -> str:
        """Return the prompt that requests this image."""
        return f'the word "{self.word}" in {self.ink} on {self.paper}, {self.font}'


def parse_prompt(prompt: str) -> Label:
    """Return the label that a prompt requests; raise ValueError for a prompt of another form."""
    if match := _PROMPT.fullmatch(prompt):
        label = Label(*match.groups())
        if label.ink in INKS and label.paper in PAPERS and label.font in FONTS:
            return label
    raise ValueError(
        f'the prompt {prompt!r} is not one of Words.\nIt must have the form \'the word "SUN" in '
        f"INK on PAPER, FONT',\nwith an ink of {list(INKS)}, a paper of {list(PAPERS)} and a font "
        f"of {list(FONTS)}"
    )


@cache
def load_glyphs(font: str) -> dict[str, Float[np.ndarray, "h w"]]:
    """Return the coverage of every letter in [0, 1]; the width is its advance."""
    file = Path(_matplotlib.get_data_path(), "fonts", "ttf", FONTS[font])
    face = ImageFont.truetype(str(file), _FONT_SIZE)
    glyphs = {}
    for letter in LETTERS:
        bitmap = Image.new("L", (round(face.getlength(letter)), GLYPH_HEIGHT))
        ImageDraw.Draw(bitmap).text((0, _BASELINE), letter, fill=255, font=face, anchor="ls")
        glyphs[letter] = np.asarray(bitmap, dtype=np.float32) / 255
    return glyphs


def measure_word(word: str, font: str) -> int:
    """Return the width of a word in pixels."""
    return sum(load_glyphs(font)[letter].shape[1] for letter in word)


def draw(label: Label, x: int, y: int) -> Float[np.ndarray, "3 32 64"]:
    """Draw a word in [0, 1] with the top left corner of its first glyph at x, y in pixels.

    Raise ValueError if the word does not fit.
    """
    width = measure_word(label.word, label.font)
    if x < 0 or y < 0 or x + width > WIDTH or y + GLYPH_HEIGHT > HEIGHT:
        raise ValueError(f"{label.word!r} does not fit at ({x}, {y}); its width is {width} pixels")
    coverage = np.zeros((HEIGHT, WIDTH), dtype=np.float32)
    for letter in label.word:
        glyph = load_glyphs(label.font)[letter]
        coverage[y : y + GLYPH_HEIGHT, x : x + glyph.shape[1]] = glyph
        x += glyph.shape[1]
    ink, paper = (
        np.array(colour, dtype=np.float32)[:, None, None] / 255
        for colour in (INKS[label.ink], PAPERS[label.paper])
    )
    return paper + (ink - paper) * coverage


def find_colours(
    images: Float[Tensor, "n 3 h w"],
) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"], Float[Tensor, "n h w"]]:
    """Return ink and paper as indices, and the coverage by ink in [0, 1] of each pixel.

    The pair of colours is the one with the least squared distance of the pixels to its mixtures.
    """
    best = torch.full((len(images),), torch.inf)
    ink, paper = torch.zeros(2, len(images), dtype=torch.long)
    coverage = torch.zeros(len(images), *images.shape[2:])
    for i, dark in enumerate(INKS.values()):
        for p, light in enumerate(PAPERS.values()):
            start = torch.tensor(light)[:, None, None] / 255
            way = torch.tensor(dark)[:, None, None] / 255 - start
            share = (((images - start) * way).sum(1) / way.square().sum()).clamp(0, 1)
            error = (images - start - share[:, None] * way).square().sum((1, 2, 3))
            better = error < best
            best = torch.where(better, error, best)
            ink[better], paper[better] = i, p
            coverage = torch.where(better[:, None, None], share, coverage)
    return ink, paper, coverage


def find_letters(
    coverage: Float[Tensor, "n h w"], font: str
) -> tuple[list[list[Placed]], Float[Tensor, "n"]]:
    """Return the letters of the most likely word in a font, and the squared error it explains.

    Glyphs do not overlap and have a common baseline. Dynamic programming over the columns finds
    the sequence, and the baseline is the one with the best sequence.
    """
    kernels, widths = _kernels(font)
    energy = kernels.square().sum((1, 2))
    pad = (0, kernels.shape[2] - 1)
    match = F.conv2d(F.pad(coverage[:, None], pad), kernels[:, None])  # [n, letters, rows, columns]
    gain = (2 * match - energy[:, None, None]).transpose(1, 2).contiguous()
    n, rows = gain.shape[:2]
    columns = coverage.shape[2]
    best = torch.zeros(n, rows, columns + 1)
    letter = torch.full((n, rows, columns + 1), -1)
    for end in range(1, columns + 1):
        start = end - widths
        value = (
            best[:, :, start.clamp(min=0)] + gain[..., torch.arange(len(widths)), start.clamp(0)]
        )
        value, choice = value.masked_fill(start < 0, -torch.inf).max(2)
        read = value > best[:, :, end - 1]
        best[:, :, end] = torch.where(read, value, best[:, :, end - 1])
        letter[:, :, end] = torch.where(read, choice, -1)
    total, row = best[:, :, -1].max(1)
    paths = letter[torch.arange(n), row].tolist()
    return [_trace(path, widths.tolist()) for path in paths], total


@cache
def _kernels(font: str) -> tuple[Float[Tensor, "l h w"], Int[Tensor, "l"]]:
    """Return the glyphs without empty columns, padded to one width, and their widths in pixels."""
    trimmed = []
    for glyph in load_glyphs(font).values():
        inked = np.flatnonzero(glyph.max(0) > 0.25)
        trimmed.append(torch.from_numpy(glyph[:, inked[0] : inked[-1] + 1].copy()))
    widths = torch.tensor([glyph.shape[1] for glyph in trimmed])
    widest = int(widths.max())
    return torch.stack([F.pad(g, (0, widest - g.shape[1])) for g in trimmed]), widths


def _trace(path: list[int], widths: list[int]) -> list[Placed]:
    """Return the letters of the best sequence, given the last letter at each column or -1."""
    found, end = [], len(path) - 1
    while end > 0:
        index = path[end]
        start = end - (1 if index < 0 else widths[index])
        if index >= 0:
            found.append((LETTERS[index], start, end))
        end = start
    return found[::-1]


class WordsVerifier(ScreenedReward):
    """Compares an image of Words with its prompt by the glyphs of its fonts, each in [0, 1].

    letters: 1 minus the character error rate of the glyph matcher, at least 0. colour: half for
    the ink, half for the paper. font: 1 if the requested font explains the image best. exact_match:
    1 if word, colours and font are the requested ones. exact_word: 1 if the word is.
    """

    spec = RewardSpec(
        name="words",
        dims=("letters", "colour", "font", "exact_word", "exact_match"),
        modality="image",
        scale=(0.0, 1.0),
        licence="Apache-2.0",
        needs=("prompt",),
    )

    def rate(self, batch: MediaBatch) -> Float[Tensor, "n 5"]:
        """Score the first frame of every sample. Without a letter, ink and font are wrong."""
        labels = read_labels(batch.media[:, 0].float().cpu())
        return torch.tensor([*map(_compare, map(parse_prompt, batch.prompts), labels)])


def read_labels(images: Float[Tensor, "n 3 32 64"]) -> list[Label]:
    """Return word, colours and font of every image; without a word, ink and font are empty."""
    ink, paper, coverage = find_colours(images)
    letters, totals = zip(*(find_letters(coverage, font) for font in FONTS), strict=True)
    labels = []
    for i, font in enumerate(torch.stack(totals).argmax(0).tolist()):
        word = "".join(letter for letter, _, _ in letters[font][i])
        shown = list(INKS)[ink[i]] if word else "", list(FONTS)[font] if word else ""
        labels.append(Label(word, shown[0], list(PAPERS)[paper[i]], shown[1]))
    return labels


def _compare(asked: Label, shown: Label) -> tuple[float, ...]:
    """Compute the five dimensions of one image."""
    letters = character_accuracy(normalise_text(asked.word), normalise_text(shown.word))
    colour = ((asked.ink == shown.ink) + (asked.paper == shown.paper)) / 2
    font, word = float(asked.font == shown.font), float(asked.word == shown.word)
    return letters, colour, font, word, float(asked == shown)
