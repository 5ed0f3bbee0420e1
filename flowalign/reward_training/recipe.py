"""What a training of reward models is made of, as a run file says it."""

from collections.abc import Sequence
from dataclasses import dataclass

from flowalign.reward_training.losses import LabelKind, RewardLoss


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One named dimension of the reward: its labels, and the loss that learns from them."""

    loss: RewardLoss
    labels: LabelKind = "ranks"
    weight: float = 1.0
    """Of its loss in the sum."""

    def __post_init__(self) -> None:
        """Refuse labels that the loss cannot read."""
        if self.labels not in self.loss.reads:
            raise ValueError(
                f"{type(self.loss).__name__} reads {' or '.join(self.loss.reads)}, "
                f"not {self.labels}"
            )
        if not self.weight > 0:
            raise ValueError(f"the weight of a dimension is {self.weight}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """First stage: ridge regression sets the layer that is linear in the features (ArmoRM)."""

    penalties: Sequence[float] = (1e-4, 1e-2, 1.0, 1e2, 1e4)
    """Per dimension the best of them on the held-out records stays."""
    freeze: bool = True
    """Keep that layer as it is, and train the rest: the gates."""

    def __post_init__(self) -> None:
        """Refuse what is no penalty."""
        if not self.penalties or min(self.penalties) <= 0:
            raise ValueError(f"ridge.penalties are {list(self.penalties)}; give numbers above 0")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a reward model is trained."""

    epochs: int = 20
    batch_size: int = 64
    """Records in a minibatch."""
    patience: int = 5
    """Epochs without a lower held-out loss after which training stops; the best epoch stays."""
    ridge: Ridge | None = None
    """A first stage before the first epoch."""

    def __post_init__(self) -> None:
        """Refuse what trains nothing."""
        if self.epochs < 1 or self.batch_size < 1 or self.patience < 1:
            raise ValueError(
                f"schedule.epochs {self.epochs}, batch_size {self.batch_size}, patience "
                f"{self.patience}: all must be at least 1"
            )
