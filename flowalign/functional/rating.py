"""Define features of samples, the wrapper of the head that rates them, and score units."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Features:
    """Holds the features that a backbone extracts from n samples."""

    joint: Float[Tensor, "n D"]
    """Features of media and prompt together, which a head rates."""
    prompt: Float[Tensor, "n E"]
    """Features of the prompt alone, which a gate reads; E is 0 if the backbone reads no prompt."""

    def __len__(self) -> int:
        return len(self.joint)

    def take(self, rows: Int[Tensor, "k"]) -> "Features":
        """Return the given samples, in that order."""
        return Features(self.joint[rows], self.prompt[rows])

    def to(self, device: torch.device) -> "Features":
        """Return the features on a device, in float32."""
        return Features(self.joint.float().to(device), self.prompt.float().to(device))


@dataclass(frozen=True)
class Ratings:
    """Holds the scores of samples and, for heads that estimate it, the log-variance.

    If there are several reward dimensions, they are the last axis.
    """

    score: Float[Tensor, "*n"]
    log_variance: Float[Tensor, "*n"] | None = None

    def to(self, device: torch.device) -> "Ratings":
        """Return the ratings on a device."""
        spread = self.log_variance
        return Ratings(self.score.to(device), None if spread is None else spread.to(device))


class Standardiser(nn.Module):
    """Subtracts the mean of the training features and divides by their standard deviation.

    A feature that never varied is centred and not scaled.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def fit(self, features: Float[Tensor, "n D"]) -> None:
        """Set mean and standard deviation to those of these features."""
        mean = features.mean(0)
        std = (features - mean).square().mean(0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))

    def forward(self, features: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """Return features of mean 0 and variance 1."""
        return (features - self.mean) / self.std


class Rater(nn.Module):
    """Wraps a head: standardises its features and converts its scores to calibrated units.

    Calibrated scores are factor * score + shift. For dimensions learned from comparisons factor is
    1 / temperature and shift is 0, so that a difference is in log-odds; for dimensions learned from
    ratings they restore the units of the ratings. `mean` and `std` of the calibrated scores over
    the training media make z-scores.
    """

    factor: Tensor
    shift: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, head: nn.Module, joint: int, prompt: int, num_dims: int):
        super().__init__()
        self.head = head
        self.joint, self.prompt = Standardiser(joint), Standardiser(prompt)
        for name, value in (("factor", 1.0), ("shift", 0.0), ("mean", 0.0), ("std", 1.0)):
            self.register_buffer(name, torch.full((num_dims,), value))

    def standardise(self, features: Features) -> Features:
        """Return the standardised features that the head receives."""
        return Features(self.joint(features.joint), self.prompt(features.prompt))

    def forward(self, features: Features) -> Ratings:
        """Return the head's own scores, on which its losses are defined."""
        return self.head(self.standardise(features))

    def in_units(self, ratings: Ratings, z_score: bool) -> tuple[Tensor, Tensor | None]:
        """Return scores [n, R], calibrated or as z-scores, and their standard deviations."""
        scale = self.factor / self.std if z_score else self.factor
        offset = (self.shift - self.mean) / self.std if z_score else self.shift
        spread = ratings.log_variance
        deviation = None if spread is None else (0.5 * spread).exp() * scale
        return ratings.score * scale + offset, deviation


def ridge(
    x: Float[Tensor, "n D"], y: Float[Tensor, "n"], penalty: float
) -> tuple[Float[Tensor, "D"], Float[Tensor, ""]]:
    """Return the w and b that minimise |x w + b - y|^2 + penalty |w|^2, solved in float64.

    The intercept b is not penalised.
    """
    x, y = x.double(), y.double()
    centre, level = x.mean(0), y.mean()
    x = x - centre
    if len(x) >= x.shape[1]:
        gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype)
        weight = torch.linalg.solve(gram, x.T @ (y - level))
    else:
        gram = x @ x.T + penalty * torch.eye(len(x), dtype=x.dtype)
        weight = x.T @ torch.linalg.solve(gram, y - level)
    return weight.float(), (level - centre @ weight).float()
