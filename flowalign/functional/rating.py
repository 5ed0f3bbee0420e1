"""Define features of samples, the wrapper of the head that scores them, and score units."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Features:
    """Features of n samples from a backbone."""

    joint: Float[Tensor, "n D"]
    """Joint features of media and prompt, the input of the head."""
    prompt: Float[Tensor, "n E"]
    """Features of the prompt alone, the input of a gate; E is 0 if the backbone reads no prompt."""

    def __len__(self) -> int:
        return len(self.joint)

    def take(self, rows: Int[Tensor, "k"]) -> "Features":
        """Return the samples `rows`, in that order."""
        return Features(self.joint[rows], self.prompt[rows])

    def to(self, device: torch.device) -> "Features":
        """Return the features on a device, in float32."""
        return Features(self.joint.float().to(device), self.prompt.float().to(device))


@dataclass(frozen=True)
class Ratings:
    """Scores of samples, with the log-variance if the head estimates it.

    Several reward dimensions form the last axis.
    """

    score: Float[Tensor, "*n"]
    log_variance: Float[Tensor, "*n"] | None = None

    def to(self, device: torch.device) -> "Ratings":
        """Return the ratings on a device."""
        spread = self.log_variance
        return Ratings(self.score.to(device), None if spread is None else spread.to(device))


class Standardiser(nn.Module):
    """Standardisation by the mean and the standard deviation of the training features.

    A constant feature is centred but not scaled.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def fit(self, features: Float[Tensor, "n D"]) -> None:
        """Set mean and standard deviation to the values of `features`."""
        mean = features.mean(0)
        std = (features - mean).square().mean(0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))

    def forward(self, features: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """Return standardised features."""
        return (features - self.mean) / self.std


class Rater(nn.Module):
    """Head with standardised features and scores in calibrated units.

    Calibrated scores are factor * score + shift. For dimensions trained on comparisons, factor is
    1 / temperature and shift is 0, so that a difference is in log-odds. For dimensions trained on
    ratings, they restore the units of the ratings. z-scores use `mean` and `std` of the calibrated
    scores over the training media.
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

    def forward(self, features: Features) -> Ratings:
        """Return the uncalibrated scores of the head from standardised features."""
        return self.head(Features(self.joint(features.joint), self.prompt(features.prompt)))

    def in_units(self, ratings: Ratings, z_score: bool) -> tuple[Tensor, Tensor | None]:
        """Return scores [n, R], calibrated or as z-scores, with their standard deviations."""
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
