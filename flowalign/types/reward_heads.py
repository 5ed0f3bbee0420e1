"""What is trained or fitted of rewards: weights of a checklist, heads and their backbones."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn

from flowalign.functional.rating import Features
from flowalign.types.media_batch import MediaBatch
from flowalign.types.reward import Loadable


@dataclass(frozen=True)
class Fit:
    """Holds the result of fitting the weights of a reward."""

    text: str
    """Content of the file that the reward reads its weights from."""
    figures: Mapping[str, float]
    """Figures to report, by name: accuracies and counts."""


class Fittable(ABC):
    """Marks rewards whose weights can be fitted to how people compared what they scored."""

    @property
    @abstractmethod
    def fitted_dims(self) -> Sequence[str]:
        """Return the F dimensions of the reward that are weighted; raise ValueError for none."""

    @abstractmethod
    def fit(
        self,
        lead: Float[Tensor, "n F"],
        share: Float[Tensor, "n"],
        ridge: float = 0.0,
        held_out: float = 0.2,
        seed: int = 0,
    ) -> Fit:
        """Fit weights to leads of the first over the second of n pairs, in these dimensions.

        `share` is the probability that people prefer the first; a share `held_out` of the pairs,
        drawn by `seed`, is only measured.

        Raises:
            ValueError: The pairs do not determine weights.
        """


class Refreshable(ABC):
    """Marks a `RewardModel` whose head can be trained on between the steps of a run."""

    @abstractmethod
    def head(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of the head by name; the model is loaded."""

    @abstractmethod
    def features(self, batch: MediaBatch) -> Features:
        """Return what the head reads of each sample, without gradient."""

    @abstractmethod
    def score_features(self, features: Features) -> Float[Tensor, "n R"]:
        """Return the scores of samples with these features, with a gradient to the head."""


class Backbone(Loadable):
    """Turns media and prompts into features, for a trained head to rate."""

    network: nn.Module
    """The network, in main memory after `load`; its owner moves it. Parameters that require a
    gradient are an adapter, which is trained and saved together with the head. The rest is
    frozen."""
    fingerprint: str
    """Hash of the frozen weights and all settings, known after `load`; equal fingerprints mean
    equal features."""
    reads_prompts: bool
    """Whether the features depend on the prompts."""
    reads_references: bool = False
    """Whether the features depend on the sources of edits; then every sample must have one."""
    num_frames: int | None
    """Frames that are read of longer videos, evenly spaced; None: all."""

    @abstractmethod
    def embed(self, batch: MediaBatch) -> Features:
        """Return the features of each sample, independent of others, on the network's device."""


class HeadNetwork(nn.Module, ABC):
    """Maps standardised `Features` to `Ratings`; the torch module of a `Head`."""

    @abstractmethod
    def linear_layer(self) -> tuple[nn.Linear, Sequence[int]] | None:
        """Return the layer that ridge regression can set, with the dimension that each row scores.

        That layer is linear in the joint features; None if there is none.
        """


class Head(ABC):
    """Builds the network between features and scores, once their sizes are known."""

    @abstractmethod
    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        """Build a network from torch's random state; raise ValueError where it does not fit."""
