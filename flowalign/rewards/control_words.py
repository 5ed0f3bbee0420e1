"""Score media relative to control words before their prompts: SRPO's relative reward."""

from dataclasses import dataclass, field, replace

from flowalign.functional.relative import RelativeForm, ramp, relative_reward
from flowalign.rewards.composite import Rewards
from flowalign.types import MediaBatch, RewardOutput, insert_words
from flowalign.types.ranges import FiniteFloat, require_ranges


@dataclass(frozen=True, kw_only=True)
class ControlWords:
    """Scores the same media under "wanted word. prompt" and "unwanted word. prompt".

    Preferences of the reward that have nothing to do with the words cancel. The defaults are those
    of the released HPSv2.1 run.

    Source: SRPO, arXiv:2509.06942; its code, Tencent-Hunyuan/SRPO.
    """

    wanted: list[str] = field(
        default_factory=lambda: ["Natural-lighting", "Detail", "Detailed", "Real"]
    )
    """Words of which each step takes the next."""
    unwanted: list[str] = field(
        default_factory=lambda: ["Concept art", "Painting", "Anime", "Flat", "Oil"]
    )
    """Words that they are compared with, taken in the same way."""
    form: RelativeForm = "released"
    """How the two scores are combined. released: (1 + k) wanted - unwanted, of the authors' code.
    difference: wanted - unwanted. guided: (1 - k) unwanted + k wanted. The last two are the
    paper's."""
    k: tuple[FiniteFloat, FiniteFloat] = (0.1, 0.25)
    """k at the least and at the most noise of the gradient path's range."""
    k_inverted: tuple[FiniteFloat, FiniteFloat] = (0.3, 0.01)
    """The same for latents that were reached by adding noise, for which the words swap."""

    def __post_init__(self) -> None:
        """Reject lists without words."""
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
        """Return relative scores, with the gradient of the media.

        `place` in [0, 1] is that of the noise level in the gradient path's range.
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
