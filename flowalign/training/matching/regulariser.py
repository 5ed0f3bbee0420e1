"""Add a matching loss on stored data to online updates, such as SFT or a pair loss."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil

from flowalign.losses.matching.fits import SFT
from flowalign.training.engine import Term
from flowalign.training.learner import Learner
from flowalign.training.matching.matching_loop import micro_batch_loss
from flowalign.training.matching.matching_recipe import Matching
from flowalign.training.matching.noising import NoiseLevels, noise_for, prepare
from flowalign.training.matching.source import BatchStream, StreamContext
from flowalign.training.matching.states import LogitNormal, Times
from flowalign.training.matching.stored import StoredDataset
from flowalign.training.recipe import Log, MemoryPart, RunContext
from flowalign.types import Batch, MatchingLoss, ModelPlan
from flowalign.types.losses import Loss
from flowalign.utils.errors import explain_errors, require_default
from flowalign.utils.ranges import NonNegativeFloat, PositiveInt, require_ranges

_WHERE = "in recipe.regulariser"
StoredTerms = Callable[[Iterable[int]], Iterator[Term]]
"""Function that yields the loss on stored examples of each update."""


@dataclass(frozen=True, kw_only=True)
class Regulariser:
    """Matching loss on stored data that keeps the policy close to the data.

    Source: ReFL, arXiv:2304.05977, with its pre-training data; DDRL, arXiv:2512.04332, whose term
    is a forward KL to the data, at the noise levels of the sampler.
    """

    data: StoredDataset
    """Stored samples or pairs; each update uses one batch."""
    weight: NonNegativeFloat = 1.0
    """Weight of the loss relative to the online loss. 0: the data is not read. DDRL: 0.01."""
    loss: MatchingLoss = field(default_factory=SFT)
    """Loss of the residuals, a class from `flowalign.losses` that needs no averages of the
    policy."""
    times: Times = field(default_factory=LogitNormal)
    """Distribution of the noise levels."""
    micro_batch: PositiveInt = 32
    """Number of pairs or samples per forward and backward pass. It changes memory, not the
    update."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and held-out pairs, which are never evaluated."""
        require_ranges(self, "recipe.regulariser")
        require_default(self, "recipe.regulariser", "it is never evaluated", "data.held_out")

    @property
    def matching(self) -> Matching:
        """Return the recipe for training on the stored data alone."""
        return Matching(
            data=self.data, loss=self.loss, times=self.times, micro_batch=self.micro_batch
        )

    @property
    def rows(self) -> int:
        """Return the number of rows of a batch; a pair has two rows."""
        return self.data.batch_size * (1 + self.data.paired)

    def rows_beside(self, micro_batch: int) -> int:
        """Return the rows in memory together, per sample of an online micro-batch."""
        return ceil(self.micro_batch * (1 + self.data.paired) / micro_batch)

    def check(self, run: RunContext) -> None:
        """Raise ValueError if the loss does not fit the data, or the data does not exist."""
        with explain_errors(_WHERE):
            self.matching.check(run)

    def check_data(self, run: RunContext) -> None:
        """Read the first rows; raise ValueError if they cannot be used."""
        with explain_errors(_WHERE):
            self.matching.check_data(run)

    def plan(self, run: RunContext, model: ModelPlan, world: int) -> Sequence[MemoryPart]:
        """Return the memory of a batch; raise ValueError for unsuitable batch sizes or times."""
        with explain_errors(_WHERE):
            return self.matching.plan(run, model, world).parts

    def open(self, run: RunContext, learner: Learner, log: Log) -> StoredTerms:
        """Read and encode the data."""
        context = StreamContext(run.rewards, run.seed, self.loss.needs, log, run.conditioning)
        stream = self.data.open(learner, context)
        return partial(self._terms, self.matching, learner, stream, run.seed)

    def _terms(
        self,
        matching: Matching,
        learner: Learner,
        stream: BatchStream,
        seed: int,
        steps: Iterable[int],
    ) -> Iterator[Term]:
        """Yield the weighted loss of each step; the log has the loss before its weight."""

        def losses(levels: NoiseLevels, rows: Batch) -> list[Loss]:
            loss, _ = micro_batch_loss(matching, learner, levels.take(rows["row"]))
            return [(self.weight * loss, {"regulariser": loss.detach()})]

        for step, batch in zip(steps, stream.batches(steps), strict=True):
            examples = prepare(batch.examples, learner.policy, learner.processes.device)
            levels = noise_for(matching, learner.policy, examples, batch.first, (seed, step, 0))
            yield Term(
                rows=levels.rows(),
                total=batch.total,
                losses=partial(losses, levels),
                micro_batch=self.micro_batch,
            )


@dataclass(frozen=True, kw_only=True)
class OptionalRegulariser:
    """Setting of the online recipes that can also train on stored data."""

    regulariser: Regulariser | None = None
    """Loss on stored data that is added to every update, such as SFT (ReFL, DDRL). Null: none."""

    @property
    def regularised(self) -> Regulariser | None:
        """Return the regulariser, unless its weight is 0."""
        return self.regulariser if self.regulariser and self.regulariser.weight else None

    def check_regulariser(self, run: RunContext) -> None:
        """Raise ValueError if the loss does not fit the data, or the data does not exist."""
        if self.regularised:
            self.regularised.check(run)

    def check_data(self, run: RunContext) -> None:
        """Read the first rows; raise ValueError if they cannot be used."""
        if self.regularised:
            self.regularised.check_data(run)
