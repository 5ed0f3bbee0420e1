"""Record some of the groups that a reward model scores."""

from dataclasses import replace

from typing_extensions import override

from flowalign.types import MediaBatch, RewardModel, RewardOutput
from flowalign.types.ranges import PositiveInt


class Recorder(RewardModel):
    """Reward model that wraps another one and records the samples of the first groups."""

    def __init__(self, model: RewardModel, num_groups: PositiveInt):
        self.model, self.spec, self.num_groups = model, model.spec, num_groups
        self.kept: list[MediaBatch] = []
        self.groups: dict[int, int] = {}
        """Position of each recorded group, by its id."""

    @override
    def score(self, batch: MediaBatch) -> RewardOutput:
        """Return the scores, and record the samples of the first groups.

        Raises:
            ValueError: The samples have no groups.
        """
        if not batch.groups:
            raise ValueError(
                "recipe.inner compares no samples of the same prompt, so there are no pairs: use "
                "PolicyGradient, ScoredGroups or TDM with a surrogate"
            )
        for group in batch.groups:
            if len(self.groups) < self.num_groups:
                self.groups.setdefault(group, len(self.groups))
        rows = [i for i, group in enumerate(batch.groups) if group in self.groups]
        if rows:
            some = batch.take(rows)
            self.kept.append(replace(some, media=some.media.detach().cpu().clone()))
        return self.model.score(batch)

    def taken(self) -> MediaBatch | None:
        """Return and clear the recorded samples, with consecutive group ids; None if empty."""
        kept, self.kept = self.kept, []
        places, self.groups = self.groups, {}
        if not kept:
            return None
        whole = MediaBatch.concat(kept)
        return replace(whole, groups=[places[group] for group in whole.groups])
