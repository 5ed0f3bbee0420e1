"""Parts of a run file that trains a reward model: dimensions, ridge, schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowalign.reward_training.losses import LabelKind, RewardLoss
from flowalign.types.ranges import PositiveFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """Named dimension of the reward: its labels, and the loss that reads them."""

    loss: RewardLoss
    labels: LabelKind = "ranks"
    """Kind of labels that the loss learns from."""
    weight: PositiveFloat = 1.0
    """Weight of the loss in the sum over dimensions, above 0."""

    def __post_init__(self) -> None:
        """Reject labels that the loss cannot read, and a weight that is not positive."""
        require_ranges(self, "dimension")
        if self.labels not in self.loss.reads:
            raise ValueError(
                f"{type(self.loss).__name__} reads {' or '.join(self.loss.reads)}, "
                f"not {self.labels}"
            )


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """Settings of the first stage: ridge regression sets the head's linear layer (ArmoRM)."""

    penalties: Sequence[PositiveFloat] = (1e-4, 1e-2, 1.0, 1e2, 1e4)
    """Penalties to try, above 0; the best one on the held-out records is used, per dimension."""
    freeze: bool = True
    """Whether the linear layer is frozen afterwards, so only the gates are trained."""

    def __post_init__(self) -> None:
        """Raise ValueError for penalties of 0 or less."""
        if not self.penalties or min(self.penalties) <= 0:
            raise ValueError(f"ridge.penalties are {list(self.penalties)}; give numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and batches of the training of a reward model."""

    epochs: PositiveInt = 20
    """Largest number of epochs."""
    batch_size: PositiveInt = 64
    """Number of records in a minibatch."""
    patience: PositiveInt = 5
    """Number of epochs without a lower held-out loss before training stops; the best epoch is
    kept."""
    ridge: Ridge | None = None
    """Ridge stage before the first epoch. Null: none."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges."""
        require_ranges(self, "schedule")
