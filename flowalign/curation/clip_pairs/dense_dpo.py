"""DenseDPO: a real clip, noised and denoised twice, and which copy is better in each segment.

Both copies keep the clip's motion and differ in details, so that a label need not be about a whole
clip and a still clip cannot win by being still.
Source: DenseDPO, arXiv:2506.03517.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.curation.clip_pairs.denoiser import Clips, Scores, Workshop
from flowalign.curation.clip_pairs.method import Dropped, Made, Method, Results, Side
from flowalign.functional.corruption import step_at_level
from flowalign.functional.segments import Span, frames_of, preferred, spans, temporal_stride
from flowalign.rewards.composite import Rewards


@dataclass(frozen=True, kw_only=True)
class DensePairs(Method):
    """Two copies from one noise level, labelled segment by segment by the rewards' weighted sum."""

    level: tuple[float, float] = (0.65, 0.8)
    """Of the noise: each clip's is drawn between these and moved to the sampler's nearest. Copies
    of different levels would teach the level."""
    seconds: float = 1.0
    """About how long a segment is."""
    margin: float = 0.0
    """A difference of scores up to this is a tie."""
    min_decided: float = 0.2
    """Pairs are kept of which a larger share of segments than this has a preference."""

    def __post_init__(self) -> None:
        """Refuse what labels nothing."""
        low, high = self.level
        if not 0 < low <= high < 1:
            raise ValueError(f"method.level is {self.level}; it must rise within (0, 1)")
        if not self.seconds > 0 or not self.margin >= 0 or not 0 <= self.min_decided < 1:
            raise ValueError(
                f"method.seconds {self.seconds}, margin {self.margin}, min_decided "
                f"{self.min_decided}: need seconds above 0, the margin at least 0, and a share "
                "below 1"
            )

    @override
    def check(self, rewards: Rewards) -> None:
        """Some reward must decide."""
        rewards.check_weights()

    @override
    def make(self, workshop: Workshop, clips: Clips) -> Results:
        """Copies a of all clips and copies b go through the network together."""
        levels, starts = self._levels(workshop, clips)
        noise = [workshop.noise(f"noise {side}", clips) for side in "ab"]
        twice = replace(
            clips, latents=clips.latents.repeat(2, 1, 1, 1, 1), prompts=[*clips.prompts] * 2
        )
        latents = workshop.regenerated(twice, torch.cat(noise), starts.repeat(2))
        media = workshop.decoded(latents)
        parts = self._parts(workshop, media.shape[1], latents.shape[2])
        scores = [workshop.scores(media[:, slice(*frames)], twice.prompts) for _, frames in parts]
        a, b = torch.stack([part.total for part in scores], 1).chunk(2)
        labels, n = preferred(a, b, self.margin), len(clips.numbers)
        return [
            self._problem(scores, {"a": i, "b": n + i}, labels[i])
            or Made(
                {"a": Side(latents[i], media[i]), "b": Side(latents[n + i], media[n + i])},
                {"segments": _segments([span for span, _ in parts], labels[i])}
                | _columns(scores, {"a": i, "b": n + i})
                | {"level": levels[i]},
            )
            for i in range(n)
        ]

    def _levels(self, workshop: Workshop, clips: Clips) -> tuple[list[float], Tensor]:
        """Noise level and first step of every clip."""
        sigmas, (low, high) = workshop.policy.schedule(workshop.num_steps).cpu(), self.level
        draws = [float(torch.rand((), generator=g)) for g in workshop.draws("level", clips)]
        starts = torch.tensor([step_at_level(sigmas, low + (high - low) * u) for u in draws])
        return sigmas[starts].tolist(), starts

    def _parts(self, workshop: Workshop, num_frames: int, latent: int) -> list[tuple[Span, Span]]:
        """Segments in latent frames, and the same in frames."""
        stride, fps = temporal_stride(num_frames, latent), workshop.policy.fps
        assert fps is not None, "a policy of pictures was let in"
        cut = spans(latent, self.seconds * fps / stride)
        return [(span, frames_of(span, stride)) for span in cut]

    def _problem(
        self, scores: Sequence[Scores], rows: Mapping[str, int], labels: Float[Tensor, "C"]
    ) -> Dropped | None:
        """Why two copies are no pair."""
        for c, part in enumerate(scores):
            for side, row in rows.items():
                if row in part.reasons:
                    return Dropped(f"no valid score: segment {c} of {side}: {part.reasons[row]}")
        decided = int(labels.count_nonzero()) / len(labels)  # exact, where a float32 mean is not
        if decided <= self.min_decided:
            return Dropped(f"too few segments with a preference: {decided:.0%}", ordinary=True)
        return None


def _segments(cut: Sequence[Span], labels: Float[Tensor, "C"]) -> list[dict[str, int]]:
    """As the reader takes them; 1: a is better."""
    return [
        {"start": start, "stop": stop, "label": int(label)}
        for (start, stop), label in zip(cut, labels.tolist(), strict=True)
    ]


def _columns(scores: Sequence[Scores], rows: Mapping[str, int]) -> dict[str, Any]:
    """Scores of both copies as a whole: means over their segments."""
    found: dict[str, Any] = {}
    for side, row in rows.items():
        found[f"score_{side}"] = _mean([part.total[row] for part in scores])
        found[f"scores_{side}"] = {
            dim: _mean([part.by_dimension[dim][row] for part in scores])
            for dim in scores[0].by_dimension
        }
    return found


def _mean(values: Sequence[Float[Tensor, ""]]) -> float:
    return float(torch.stack([*values]).mean())
