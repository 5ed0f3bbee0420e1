"""The loop that a run file asks for, and what is particular about it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from typing_extensions import override

from flowalign.runs.config import AnyRun, PreferenceRun, Run
from flowalign.training.policy_gradient.credit_record import CreditPictures, worth_a_picture
from flowalign.data.prompts import Prompts, read_prompts
from flowalign.training.policy_gradient.calibrate import calibrated
from flowalign.training.learner import Learner
from flowalign.training.policy_gradient.loop import train_online
from flowalign.training.matching.evaluation import held_out_metrics
from flowalign.training.matching.loop import train_preference
from flowalign.rewards.composite import Rewards


class Loop(ABC):
    """One kind of training. Evaluation, checkpoints and logs are the caller's."""

    @abstractmethod
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """Make these steps, yielding the metrics of each."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """What is measured beside the rewards of held-out pictures."""

    @abstractmethod
    def draw(self) -> float:
        """Draw what there is to draw of the last step; the seconds that it took."""


class OnlineLoop(Loop):
    """Rollouts whose rewards are credited to denoising steps."""

    def __init__(
        self, run: Run, learner: Learner, rewards: Rewards, folder: Path, say: Callable[[str], None]
    ):
        self.cfg, self.learner, self.rewards = run, learner, rewards
        self.recipe = calibrated(run, learner, rewards, folder, say)
        self.pictures = _pictures(run, folder) if learner.processes.is_main else None

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """See `train_online`."""
        prompts = Prompts(read_prompts(self.cfg.prompts), self.cfg.seed)
        return train_online(
            self.recipe, self.learner, self.rewards, prompts, self.cfg.seed, steps, self.pictures
        )

    @override
    def evaluate(self) -> dict[str, float]:
        """Nothing."""
        return {}

    @override
    def draw(self) -> float:
        """What denoising steps have earned."""
        return self.pictures.write() if self.pictures else 0.0


class PreferenceLoop(Loop):
    """Pairs or labels, and matching errors."""

    def __init__(self, run: PreferenceRun, learner: Learner, rewards: Rewards):
        self.cfg, self.learner = run, learner
        self.stream = run.data.open(
            learner, rewards, run.seed, learner.processes, run.recipe.loss.traits.needs
        )
        self.held_out = self.stream.held_out()

    @override
    def run(self, steps: Iterable[int]) -> Iterator[dict[str, float]]:
        """See `train_preference`."""
        return train_preference(self.cfg.recipe, self.learner, self.stream, self.cfg.seed, steps)

    @override
    def evaluate(self) -> dict[str, float]:
        """How often the policy agrees with held-out pairs."""
        return held_out_metrics(self.cfg.recipe, self.learner, self.held_out, self.cfg.seed)

    @override
    def draw(self) -> float:
        """Nothing."""
        return 0.0


def make_loop(
    run: AnyRun, learner: Learner, rewards: Rewards, folder: Path,
    say: Callable[[str], None],
) -> Loop:  # fmt: skip
    """Get everything ready that the first step needs. ValueError for data that cannot be used."""
    if isinstance(run, Run):
        return OnlineLoop(run, learner, rewards, folder, say)
    return PreferenceLoop(run, learner, rewards)


def _pictures(run: Run, folder: Path) -> CreditPictures | None:
    """Where the credit method has more to tell than the outcome."""
    credit = run.recipe.credit
    if not worth_a_picture(credit, run.recipe.sampling.branching):
        return None
    every = run.evaluation.every if run.evaluation else 0
    return CreditPictures(folder / "credit", credit, run.num_steps, every)
