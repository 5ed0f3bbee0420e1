"""Define the interface of data sources: stored datasets, or samples of the policy."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from flowalign.data.requests import Requests
from flowalign.rewards.composite import Rewards
from flowalign.training.learner import Learner
from flowalign.training.recipe import Log, RecipePlan, RunContext
from flowalign.training.rollouts.collecting import CreditedRollouts
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.types import (
    Batch,
    CreditEstimator,
    ModelPlan,
    Policy,
    PromptConditioning,
    Trajectory,
)


@dataclass(frozen=True)
class StreamContext:
    """Context of a run that its examples depend on, besides the learner."""

    rewards: Rewards
    seed: int
    needs: Set[str] = frozenset()
    """Columns that the loss needs."""
    log: Log = lambda _: None
    conditioning: PromptConditioning | None = None
    """Conditioning of prompts in sampling and training. None: plain prompts."""


@dataclass(frozen=True)
class StepAdvantages:
    """Advantages of the denoising steps of samples, or weights of the steps of pairs."""

    sigmas: Float[Tensor, "S"]
    """Noise levels of the sampler; their number is the number of steps plus 1."""
    advantage: Float[Tensor, "n T"] | None
    """Advantage of each step of each sample; None for pairs."""
    trained: Bool[Tensor, "n T"]
    """Mask of the steps with noise levels at which a sample or pair is trained."""
    completed: Mapping[int, Float[Tensor, "n *latent"]] = field(default_factory=dict)
    """Clean latents to match instead of the sample at the noise levels of a step, by step."""
    places: Float[Tensor, "n T 1 *grid"] | None = None
    """Advantage of each step at each latent position; None without spatial credit."""
    weight: Float[Tensor, "n T"] | None = None
    """Factor on the loss weight of each pair at each step; None for samples."""

    def take(self, indices: Int[Tensor, "k"]) -> "StepAdvantages":
        """Return the weights of the pairs with these indices."""
        assert self.weight is not None, "only pairs are taken"
        return replace(self, trained=self.trained[indices], weight=self.weight[indices])


@dataclass(frozen=True)
class StepExamples:
    """Examples of this process in one step, on the CPU or on the device that made them."""

    examples: Batch
    """Pairs or samples of this process."""
    first: int
    """Global position of this process's first pair or sample."""
    total: int
    """Number of pairs or samples over all processes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of making the batch, equal on all processes."""
    steps: StepAdvantages | None = None
    """Advantages of denoising steps, for step-level credit. None: `examples` hold the
    advantages."""
    visited: Trajectory | None = None
    """Trajectories of the examples, if visited states are matched; else None."""


class BatchStream(ABC):
    """Stream of the batches of a run."""

    @abstractmethod
    def batch(self, step: int) -> StepExamples:
        """Return the batch of a step; it depends on seed, step and, for rollouts, the policy."""

    def batches(self, steps: Iterable[int]) -> Iterator[StepExamples]:
        """Yield one batch per step, made when it is requested."""
        return map(self.batch, steps)

    def held_out(self) -> Batch | None:
        """Return this process's share of the held-out pairs, or None.

        Sources that sample the policy have no held-out pairs.
        """
        return None

    def state(self) -> dict[str, Any]:
        """Return the stream's state for a checkpoint, as JSON values."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027 (stored data have no state)
        """Restore the state of a checkpoint; called before `batches`."""


class DataSource(ABC):
    """Source of the examples: the component `recipe.data` of a run file."""

    credit: CreditEstimator | None = None
    """Method of step-level credit. Null: none, or the source has no denoising steps."""

    @property
    def paired(self) -> bool:
        """Return True for pairs, False for samples."""
        return False

    @property
    def sampled_weights(self) -> str | None:
        """Return the weights that sample the examples: policy, the name of an average, or None."""
        return "policy"

    @property
    @abstractmethod
    def gives(self) -> Set[str]:
        """Return the columns of the examples that losses may need."""

    @property
    def trajectory_steps(self) -> int | None:
        """Return the number of denoising steps if the examples are trajectories, else None."""
        return None

    @property
    def query(self) -> int | None:
        """Return the only denoising step with states to match, if the source chooses it."""
        return None

    @property
    def random_steps(self) -> Set[int]:
        """Return the denoising steps that are always stochastic."""
        return frozenset()

    def check_teachers(self, names: Sequence[str]) -> None:
        """Raise ValueError if the examples cannot be matched to the named teachers."""
        refuse_teachers(names, type(self).__name__)

    @property
    @abstractmethod
    def examples_per_step(self) -> int:
        """Return the largest number of pairs or samples per step, over all processes."""

    @property
    def rows_per_group(self) -> int:
        """Return the largest number of compared samples per group; 0 if there are no groups."""
        return 0

    @property
    @abstractmethod
    def prompt_files(self) -> list[str]:
        """Return the paths of the prompt files for sampling."""

    @abstractmethod
    def check(self, run: RunContext) -> None:
        """Raise ValueError for invalid settings, before any model is loaded."""

    def check_data(self, policy: Policy) -> None:  # noqa: B027 (most sources sample)
        """Read the first rows of stored data; raise ValueError if they cannot be used."""

    def check_context(self) -> None:  # noqa: B027 (most sources do)
        """Raise ValueError if the source does not support context parallelism."""

    @abstractmethod
    def plan(self, run: RunContext, model: ModelPlan, world: int) -> RecipePlan:
        """Return the cost of the examples of one step: rows of the plan table, and memory.

        Raises:
            ValueError: The settings do not fit the number of processes or the model.
        """

    @abstractmethod
    def open(self, learner: Learner, context: StreamContext) -> BatchStream:
        """Read, encode and prepare the examples.

        Raises:
            ValueError: The data cannot be used for training.
        """


def refuse_teachers(names: Sequence[str], source: str) -> None:
    """Raise ValueError if there are teachers, for data with the target noise - latents."""
    if names:
        raise ValueError(
            f"recipe.teachers names {', '.join(names)}, but data of class {source} are matched to "
            "noise - latents: take OnPolicyStates, or StoredDataset with kind samples or attributes"
        )


@dataclass(eq=False)
class CreditedStream(BatchStream):
    """Stream with credited rollouts, whose state is that of the rollouts."""

    cfg: RolloutSettings
    learner: Learner
    rewards: Rewards
    requests: Requests

    def __post_init__(self) -> None:
        """Prepare the rollouts."""
        seed = self.requests.seed
        self.rollouts = CreditedRollouts(self.cfg, self.learner, self.rewards, seed)

    @override
    def state(self) -> dict[str, Any]:
        return self.rollouts.state()

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.rollouts.restore(state)
