"""Compute SRPO's relative reward: the difference between two control words before the prompt."""

from dataclasses import dataclass, field, replace

from flowalign.functional.relative import RelativeForm, ramp, relative_reward
from flowalign.rewards.composite import Rewards
from flowalign.types import MediaBatch, RewardOutput, insert_words
from flowalign.types.ranges import FiniteFloat, require_ranges


@dataclass(frozen=True, kw_only=True)
class ControlWords:
    """Relative score of media under "wanted word. prompt" and "unwanted word. prompt".

    Preferences of the reward that do not depend on the words cancel. The defaults match the
    released HPSv2.1 run.

    Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO.
    """

    wanted: list[str] = field(
        default_factory=lambda: ["Natural-lighting", "Detail", "Detailed", "Real"]
    )
    """Wanted words; each step takes the next one."""
    unwanted: list[str] = field(
        default_factory=lambda: ["Concept art", "Painting", "Anime", "Flat", "Oil"]
    )
    """Unwanted words to compare with; each step takes the next one."""
    form: RelativeForm = "released"
    """Combination of the two scores. released: (1 + k) wanted - unwanted, from the authors' code.
    difference: wanted - unwanted. guided: (1 - k) unwanted + k wanted. The last two are from the
    paper."""
    k: tuple[FiniteFloat, FiniteFloat] = (0.1, 0.25)
    """Values of k at the lowest and at the highest noise level of the gradient path's range."""
    k_inverted: tuple[FiniteFloat, FiniteFloat] = (0.3, 0.01)
    """Values of k for latents that were reached by adding noise; their words are swapped."""

    def __post_init__(self) -> None:
        """Raise ValueError for a list without words."""
        require_ranges(self, "recipe.relative")
        for name in ("wanted", "unwanted"):
            if not getattr(self, name) or not all(getattr(self, name)):
                raise ValueError(
                    f"recipe.relative.{name} is {getattr(self, name)}; give at least one word"
                )

    def check(self, rewards: Rewards) -> None:
        """Raise ValueError if a weighted reward does not read prompts."""
        deaf = [m.spec.name for m in rewards.weighted().models if "prompt" not in m.spec.needs]
        if deaf:
            raise ValueError(
                f"recipe.relative compares prompts, which reward {deaf[0]!r} does not read: "
                "set it to null, or weigh rewards that need a prompt"
            )

    def score(
        self, rewards: Rewards, batch: MediaBatch, step: int, inverted: bool, place: float
    ) -> RewardOutput:
        """Return relative scores, with a gradient to the media.

        `place` in [0, 1] is the position of the noise level in the gradient path's range.
        """
        words = self.wanted[step % len(self.wanted)], self.unwanted[step % len(self.unwanted)]
        first, second = (
            rewards.score_with_gradient(
                replace(
                    batch,
                    prompts=[insert_words("{words}. {prompt}", p, [word]) for p in batch.prompts],
                )
            )
            for word in (reversed(words) if inverted else words)
        )
        k = ramp(self.k_inverted if inverted else self.k, place)
        return RewardOutput(
            relative_reward(first.values, second.values, k, self.form),
            first.valid & second.valid,
            {**second.reasons, **first.reasons},
        )
