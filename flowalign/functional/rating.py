"""Features, what a head makes of them, and the units in which that is reported."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@dataclass(frozen=True)
class Features:
    """What a backbone sees in n samples."""

    joint: Float[Tensor, "n D"]
    """Of media and prompt together: what a head rates."""
    prompt: Float[Tensor, "n E"]
    """Of the prompt alone: what a gate looks at. E is 0 where the backbone reads no prompt."""

    def __len__(self) -> int:
        return len(self.joint)

    def take(self, rows: Int[Tensor, "k"]) -> "Features":
        """The given samples, in that order."""
        return Features(self.joint[rows], self.prompt[rows])

    def to(self, device: torch.device) -> "Features":
        """The same on a device, in float32."""
        return Features(self.joint.float().to(device), self.prompt.float().to(device))


@dataclass(frozen=True)
class Ratings:
    """Scores of samples, dimensions last if there are several, and how unsure the head is."""

    score: Float[Tensor, "*n"]
    log_variance: Float[Tensor, "*n"] | None = None

    def to(self, device: torch.device) -> "Ratings":
        """The same on a device."""
        spread = self.log_variance
        return Ratings(self.score.to(device), None if spread is None else spread.to(device))


class Standardise(nn.Module):
    """Subtracts the mean of the training features and divides by their standard deviation.

    A feature that never varied stays as it is, centred.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("std", torch.ones(size))

    def fit(self, features: Float[Tensor, "n D"]) -> None:
        """Take the statistics of these features."""
        mean = features.mean(0)
        std = (features - mean).square().mean(0).sqrt()
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6, std, 1.0))

    def forward(self, features: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """Features of mean 0 and variance 1."""
        return (features - self.mean) / self.std


class Rater(nn.Module):
    """A head with what surrounds it: standardised features in, calibrated units out.

    Units: factor * score + shift. Of compared dimensions this is 1 / temperature and 0, so that a
    difference is in log odds; of rated ones it restores the units of the ratings. Their `mean` and
    `std` over the training media make z-scores.
    """

    factor: Tensor
    shift: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, head: nn.Module, joint: int, prompt: int, num_dims: int):
        super().__init__()
        self.head = head
        self.joint, self.prompt = Standardise(joint), Standardise(prompt)
        for name, value in (("factor", 1.0), ("shift", 0.0), ("mean", 0.0), ("std", 1.0)):
            self.register_buffer(name, torch.full((num_dims,), value))

    def standardised(self, features: Features) -> Features:
        """What the head is given."""
        return Features(self.joint(features.joint), self.prompt(features.prompt))

    def forward(self, features: Features) -> Ratings:
        """The head's own scores, as its losses see them."""
        return self.head(self.standardised(features))

    def in_units(self, ratings: Ratings, z_score: bool) -> tuple[Tensor, Tensor | None]:
        """Scores [n, R] in calibrated units or as z-scores, and their standard deviations."""
        scale = self.factor / self.std if z_score else self.factor
        offset = (self.shift - self.mean) / self.std if z_score else self.shift
        spread = ratings.log_variance
        deviation = None if spread is None else (0.5 * spread).exp() * scale
        return ratings.score * scale + offset, deviation


def ridge(
    x: Float[Tensor, "n D"], y: Float[Tensor, "n"], penalty: float
) -> tuple[Float[Tensor, "D"], Float[Tensor, ""]]:
    """Weights and intercept that minimise |x w + b - y|^2 + penalty |w|^2, in float64.

    The intercept is not penalised.
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
