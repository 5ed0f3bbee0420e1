"""Fit ridge regressions from running sums, exactly after every batch, with fading memory."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


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
