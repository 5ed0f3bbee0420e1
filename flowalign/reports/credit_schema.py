"""Define the file that holds the credit of one training step."""

from dataclasses import dataclass, field

MAX_ROWS = 48
"""Largest number of samples in a table."""
PLACES = "{}-places.png"
"""Name of the grid of maps, from the stem of the record's file."""


@dataclass(frozen=True)
class CreditRecord:
    """Credit of one prompt's samples; None marks a missing number."""

    step: int
    """Index of the training step."""
    prompt: str
    """Prompt of the samples."""
    method: str
    """Name of the credit method's class."""
    rule: str
    """Sentence on how the method credits a step."""
    weights: dict[str, float]
    """Weights of the reward dimensions, without those of weight 0."""
    sigmas: list[float]
    """Noise levels of the schedule."""
    states: list[int]
    """Indices of the valued states; the last is the finished sample."""
    values: list[list[float | None]]
    """Weighted reward of the completion of each valued state, one row per sample."""
    credit: list[list[float | None]]
    """Weighted credit of each denoising step, one row per sample; None if not credited."""
    advantage: list[list[float | None]]
    """Advantage of each denoising step, one row per sample; None if not trained."""
    marked: list[list[bool]] | None
    """Whether the method marks each denoising step, for example as a turning point; one row per
    sample."""
    source_row: list[list[int]] | None
    """Index of the sample that computed state k of each sample, for branching rollouts; else
    None."""
    image_states: list[int] = field(default_factory=list)
    """States of the images in the grid next to the record; the grid has a column for each."""
    num_images: int = 0
    """Number of samples with images, one per row of the grid."""
    place_steps: list[int] = field(default_factory=list)
    """Denoising steps of the maps of advantages: columns of a second grid, with the rows of the
    first. Empty without advantages of latent positions."""
    place_scale: float = 0.0
    """Largest absolute advantage of a position, with the strongest colour of a map."""

    @property
    def trained(self) -> list[int]:
        """Return the denoising steps in which at least one sample is trained or credited."""
        rows = [*self.advantage, *self.credit]
        steps = range(len(self.sigmas) - 1)
        return [k for k in steps if any(row[k] is not None for row in rows)]

    @property
    def reward(self) -> str:
        """Return the reward as a formula of its dimensions."""
        terms = [f"{weight:g} {name}" for name, weight in self.weights.items()]
        return " + ".join(terms).replace("+ -", "- ")
