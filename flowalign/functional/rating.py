"""Define features of samples, the wrapper of the head that scores them, and ridge regressions."""

from dataclasses import dataclass
from typing import Any

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

    def __getitem__(self, index: Any) -> "Ratings":
        """Return the ratings at an index, as of a tensor."""
        spread = self.log_variance
        return Ratings(self.score[index], None if spread is None else spread[index])


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


@dataclass(frozen=True)
class Regression:
    """Running sums of a ridge regression without intercept, in float64."""

    gram: Float[Tensor, "D D"]
    """Sum of x x^T over the samples."""
    cross: Float[Tensor, "D R"]
    """Sum of x y^T."""
    count: float
    """Effective number of samples; older samples count less than 1."""

    @staticmethod
    def start(num_features: int, num_targets: int) -> "Regression":
        """Return a regression without samples; its weights are 0."""
        gram = torch.zeros(num_features, num_features, dtype=torch.float64)
        return Regression(gram, gram.new_zeros(num_features, num_targets), 0.0)

    def update(
        self, x: Float[Tensor, "n D"], y: Float[Tensor, "n R"], memory: float = 1.0
    ) -> "Regression":
        """Return the regression with n more samples; earlier samples are weighted by `memory`."""
        x, y = x.double(), y.double()
        return Regression(
            memory * self.gram + x.T @ x,
            memory * self.cross + x.T @ y,
            memory * self.count + len(x),
        )

    def weights(self, penalty: float) -> Float[Tensor, "D R"]:
        """Return the w that minimise |x w - y|^2 / n + penalty D / n |s w|^2.

        s are the root mean squares of the features, so their units do not matter. For equally
        useful, uncorrelated features, the best penalty is the ratio of unexplained to explained
        variance.
        """
        size = self.gram.diagonal().sqrt()
        size = torch.where(size > 0, size, 1.0)
        ridge = penalty * len(size) / max(self.count, 1.0)
        alike = self.gram / (size[:, None] * size)
        alike = alike + ridge * torch.eye(len(size), dtype=alike.dtype)
        return torch.linalg.solve(alike, self.cross / size[:, None]) / size[:, None]

    def state(self) -> list:
        """Return the exact state for a checkpoint."""
        return [self.gram.tolist(), self.cross.tolist(), self.count]

    @staticmethod
    def restore(state: list) -> "Regression":
        """Return the regression of a checkpoint."""
        gram, cross = (torch.tensor(part, dtype=torch.float64) for part in state[:2])
        return Regression(gram, cross, float(state[2]))
