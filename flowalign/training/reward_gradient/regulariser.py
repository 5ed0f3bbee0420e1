"""Add a matching loss of stored examples to the updates of rewards: SFT, or one of pairs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from flowalign.losses.matching.sft import SFT
from flowalign.training.learner import Learner
from flowalign.training.matching.example_parts import on
from flowalign.training.matching.loop import micro_batch_loss
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.recipe import Matching
from flowalign.training.matching.residuals import add_users
from flowalign.training.matching.source import Batch, BatchStream, StreamContext
from flowalign.training.matching.stored import StoredDataset
from flowalign.training.matching.times import LogitNormal, Times
from flowalign.training.recipe import Log, MemoryPart, RunContext
from flowalign.types import MatchingLoss, ModelPlan
from flowalign.types.ranges import NonNegativeFloat, PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class Regulariser:
    """Configures a loss of stored media that holds the policy near them while rewards pull.

    ReFL, arXiv:2304.05977, has such a term of its pre-training data.
    """

    data: StoredDataset
    """Media or pairs, a batch of them for each update."""
    weight: NonNegativeFloat = 1.0
    """Weight of the loss beside that of the rewards; 0: the data are not read."""
    loss: MatchingLoss = field(default_factory=SFT)
    """Loss of the residuals, a class of `flowalign.losses`, without averages of the policy."""
    times: Times = field(default_factory=LogitNormal)
    """Distribution of the noise levels."""
    micro_batch: PositiveInt = 32
    """Pairs or samples per forward and backward pass; changes memory, not the update."""

    def __post_init__(self) -> None:
        """Reject numbers out of range, and held-out pairs, which nothing would read."""
        require_ranges(self, "recipe.regulariser")
        if self.data.held_out is not None:
            raise ValueError(
                "recipe.regulariser.data.held_out is not read: set it to null, and watch rewards"
            )

    @property
    def matching(self) -> Matching:
        """Return the recipe that would train on these data alone."""
        return Matching(
            data=self.data, loss=self.loss, times=self.times, micro_batch=self.micro_batch
        )

    @property
    def rows(self) -> int:
        """Return the rows of a batch, of which a pair has two."""
        return self.data.batch_size * (1 + self.data.paired)

    def check(self, run: RunContext) -> None:
        """Raise ValueError if the loss cannot learn from such data, or these are not there."""
        with _named():
            self.matching.check(run)

    def plan(self, run: RunContext, model: ModelPlan, world: int) -> Sequence[MemoryPart]:
        """Return the memory of a batch; raise ValueError if it cannot be divided or noised."""
        with _named():
            return self.matching.plan(run, model, world).parts

    def open(self, run: RunContext, learner: Learner, log: Log) -> "StoredGradient":
        """Read and encode the data."""
        requires = self.loss.requirements.requires
        context = StreamContext(run.rewards, run.seed, requires, log, run.conditioning)
        stream = self.data.open(learner, context)
        return StoredGradient(self, learner, stream, run.seed)


@contextmanager
def _named() -> Iterator[None]:
    """Say in errors of the preference loop, which name its own keys, whose they are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"of recipe.regulariser: {error}") from error


class StoredGradient:
    """Accumulates the gradient of stored examples, step by step."""

    def __init__(self, cfg: Regulariser, learner: Learner, stream: BatchStream, seed: int):
        self.cfg, self.learner, self.stream, self.seed = cfg, learner, stream, seed
        self.matching = cfg.matching

    def steps(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """Accumulate the weighted gradient of one step, and yield its mean loss, at each `next`."""
        for step, batch in zip(steps, self.stream.batches(steps), strict=True):
            yield self._accumulate(step, batch)

    def _accumulate(self, step: int, batch: Batch) -> dict[str, float]:
        cfg, learner, total = self.cfg, self.learner, 0.0
        examples = add_users(learner.policy, on(batch.examples, learner.processes.device))
        key = self.seed, step, 0
        levels = noise_for(self.matching, learner.policy, examples, batch.first, key)
        for part in levels.parts(cfg.micro_batch):
            loss, _ = micro_batch_loss(self.matching, learner, part)
            share = len(part.sigma) / batch.total
            learner.backward(cfg.weight * share * loss)
            total += share * float(loss.detach())
        return learner.processes.sum_by_name({"regulariser": total})
