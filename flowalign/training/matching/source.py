"""Define where examples come from: a stored dataset, or the policy itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.recipe import Log, RecipePlan, RunContext
from flowalign.types import Examples, Label, ModelPlan, PromptConditioning, Trajectory

NO_LABELS: Set[Label] = frozenset()
"""Labels that most losses require beside media and prompts: none."""


@dataclass(frozen=True)
class StreamContext:
    """Parts and settings of a run that its examples depend on, besides the learner."""

    rewards: Rewards
    seed: int
    requires: Set[Label] = NO_LABELS
    """Labels that the loss requires."""
    log: Log = lambda _: None
    conditioning: PromptConditioning | None = None
    """Conditioning of the prompts under which examples are made and learned."""


@dataclass(frozen=True)
class StepAdvantages:
    """Holds what the denoising steps of samples earned, compared with other samples."""

    sigmas: Float[Tensor, "S"]
    """Noise levels of the sampler, one more than there are steps."""
    advantage: Float[Tensor, "n T"]
    """Advantage of each step of each sample."""
    trained: Bool[Tensor, "n T"]
    """Steps at whose noise levels a sample is an example."""
    completed: Mapping[int, Float[Tensor, "n *latent"]] = field(default_factory=dict)
    """Clean latents to match at the noise levels of a step in place of the sample, by step."""


@dataclass(frozen=True)
class Batch:
    """Holds this process's share of the examples of a step, on the CPU or where they were made."""

    examples: Examples
    """Pairs or samples of this process."""
    first: int
    """Position of this process's first pair or sample among those of all processes."""
    total: int
    """Number of pairs or samples of all processes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measurements taken while the batch was made, equal on all processes."""
    steps: StepAdvantages | None = None
    """Advantages of denoising steps, by which samples count at the noise levels of these; None
    where `examples` hold their advantages."""
    visited: Trajectory | None = None
    """Trajectories that led to the examples, where their states are matched; None for others."""


class BatchStream(ABC):
    """Yields the batches of a started run."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return the batch of a step: a function of seed, step and, for rollouts, the policy."""

    def batches(self, steps: Iterable[int]) -> Iterator[Batch]:
        """Yield a batch per step; each is made at its step."""
        return map(self.batch, steps)

    def held_out(self) -> Examples | None:
        """Return this process's share of the pairs that are never trained on, or None.

        Samples of the policy have none: they age with it.
        """
        return None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for the stream, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (stored data have no state)
        """Continue from the state of a checkpoint. Called before `batches`."""


class DataSource(ABC):
    """Configures where examples come from: the component `recipe.data` of a run file."""

    @property
    def paired(self) -> bool:
        """Return True for pairs, False for samples."""
        return False

    @property
    def sampled_weights(self) -> str | None:
        """Return the weights that make the examples: policy or the name of an average; or None."""
        return "policy"

    @property
    @abstractmethod
    def provides(self) -> Set[Label]:
        """Return the labels that the examples may have.

        A loss that requires another one is refused.
        """

    @property
    def trajectory_steps(self) -> int | None:
        """Return the denoising steps of the trajectories that the examples are; None: of none."""
        return None

    @property
    def random_steps(self) -> Set[int]:
        """Return which of these steps are always random."""
        return frozenset()

    def check_teachers(self, names: Sequence[str]) -> None:
        """Raise ValueError if the examples are not matched to these teachers, or to other ones."""
        refuse_teachers(names, type(self).__name__)

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Return the pairs or samples of a step at most, over all processes."""

    @property
    def rows_per_group(self) -> int | None:
        """Return the most samples of a group that are compared, or None if there are no groups."""
        return None

    @property
    def leaves_levels_out(self) -> bool:
        """Return whether noise levels of an example may be left out: those without credit."""
        return False

    @property
    @abstractmethod
    def prompt_files(self) -> list[str]:
        """Return the files of prompts that are sampled."""

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for settings that no run can use, before anything heavy is loaded."""

    def check_context(self) -> None:  # noqa: B027 (most sources do)
        """Raise ValueError if processes cannot compute the examples of a sample together."""

    @abstractmethod
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        """Return what the examples of one step take: rows of the plan table, and memory.

        Raises:
            ValueError: That many processes, or this model, cannot make the examples.
        """

    @abstractmethod
    def open(self, learner: Learner, context: StreamContext) -> BatchStream:
        """Read, encode and prepare the examples.

        Raises:
            ValueError: These data cannot be trained on.
        """


def refuse_teachers(names: Sequence[str], source: str) -> None:
    """Raise ValueError if there are teachers, for data that are matched to noise - latents."""
    if names:
        raise ValueError(
            f"recipe.teachers names {', '.join(names)}, but data of class {source} are matched to "
            "noise - latents: take OnPolicyStates, or StoredDataset with kind samples or attributes"
        )
