"""Condition a personalised policy on a user, and embed users from a few of their choices (PPD).

Source: PPD, arXiv:2501.06655, known from secondary sources. There a vision-language model sees four
choices of a user, and its hidden state is the embedding. Our reconstruction uses a token per
choice: the difference between the features of the chosen and the rejected sample, from any
backbone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize
from typing_extensions import override

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.data.preference.preference_data import Pair
from flowalign.reward_training.embeddings import RewardSample, embed_samples
from flowalign.reward_training.training import frames_for
from flowalign.types import (
    Backbone,
    ConditionedPrompt,
    Policy,
    PromptConditioning,
    PromptGuidance,
    Request,
)
from flowalign.types.ranges import PositiveInt, require_ranges


@dataclass(frozen=True, kw_only=True)
class Users(PromptConditioning):
    """Conditioning on the user that a request names, for policies with `user_conditioning`.

    It does not affect stored preferences. Training uses the user that is stored with them.

    Source: PPD, arXiv:2501.06655.
    """

    user: str = ""
    """Identifier of the user for requests that name none. Empty: no user."""
    column: str = "user_id"
    """Column of the requests with the user's identifier."""
    guidance: PromptGuidance | None = None
    """Must be null, because users do not change the prompt."""

    def __post_init__(self) -> None:
        """Reject guidance, because users do not change the prompt."""
        if self.guidance is not None:
            raise ValueError(
                "conditioning.guidance is set, but Users does not change prompts: set it to null"
            )

    @property
    @override
    def dims(self) -> tuple[()]:
        return ()

    @override
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        if policy.user_conditioning is None:
            raise ValueError(
                f"conditioning Users needs a personalised policy; {type(policy).__name__} has no "
                "user conditioning: use flowalign.extra.PersonalSD15 or PersonalSDXL, or leave it "
                "out"
            )
        if self.user:
            policy.user_conditioning.check_user(self.user)

    @override
    def for_inference(self, request: Request) -> Request:
        user = str(request.metadata.get(self.column, self.user))
        return replace(request, conditioned=ConditionedPrompt(request.policy_prompt, user))

    @override
    def for_rollout(self, request: Request, position: int) -> Request:
        return self.for_inference(request)

    @override
    def for_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        return request


@dataclass(frozen=True, kw_only=True)
class UserEmbeddings:
    """Run file of `flowalign users`: a dataset of choices, a backbone and an output file."""

    backbone: Backbone
    """Network that embeds images or videos, such as `reward_models.PooledFrames`."""
    path: str
    """Dataset of pairs with the annotator in a column `user_id`."""
    schema: str = "auto"
    """Name of the dataset's reader. auto: detected from its columns."""
    root: str | None = None
    """Folder where relative paths begin. Null: the folder of the dataset."""
    columns: dict[str, str | list[str]] | None = None
    """Columns of the dataset by their names in flowalign. Null: as they are."""
    shots: PositiveInt = 4
    """Number of choices embedded per user, from the first one; users with fewer are left out."""
    micro_batch: PositiveInt = 32
    """Number of choices per call of the backbone."""
    output: str
    """Safetensors file of the embeddings [shots, dim] by user, for `policy.users` of a run file."""

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range, and for a file that policies do not read."""
        require_ranges(self, "users")
        if not self.output.endswith(".safetensors"):
            raise ValueError(f"output is {self.output!r}; it must end in .safetensors")

    def select_choices(self) -> dict[str, list[Pair]]:
        """Return the first choices of every user who has made enough.

        Raises:
            ValueError: The dataset does not exist, or no user has made enough choices.
        """
        by_user: dict[str, list[Pair]] = {}
        settings = {"schema": self.schema, "root": self.root, "columns": self.columns}
        dataset = PreferenceDataset(path=self.path, **settings)
        for pair in dataset.read()[0]:
            if isinstance(pair, Pair):
                by_user.setdefault(pair.user, []).append(pair)
        enough = {u: p[: self.shots] for u, p in by_user.items() if u and len(p) >= self.shots}
        if not enough:
            most = max((len(p) for u, p in by_user.items() if u), default=0)
            raise ValueError(
                f"{self.path}: no user has {self.shots} usable choices; the maximum is {most}: "
                "lower shots, or add pairs with a user_id"
            )
        return enough

    def embed(self) -> dict[str, Float[Tensor, "shots dim"]]:
        """Return the embeddings of all users, except users with unreadable choices.

        Raises:
            ValueError: `select_choices` would raise, or no user is left.
        """
        self.backbone.load()
        found = {}
        for user, pairs in self.select_choices().items():
            tokens = torch.cat(
                [
                    self._tokens(pairs[i : i + self.micro_batch])
                    for i in range(0, len(pairs), self.micro_batch)
                ]
            )
            if tokens.isfinite().all():
                found[user] = tokens
        if not found:
            raise ValueError(f"{self.path}: every user has unreadable choices")
        return found

    @torch.no_grad()
    def _tokens(self, pairs: Sequence[Pair]) -> Float[Tensor, "n dim"]:
        """Return a unit vector per choice; NaN if an image or video cannot be read."""
        sides = [[RewardSample(s.media, s.prompt) for s in (p.chosen, p.rejected)] for p in pairs]
        samples = [sample for both in sides for sample in both]
        features, _ = embed_samples(self.backbone, frames_for(self.backbone), samples)
        return choice_tokens(features.joint[0::2], features.joint[1::2])


def choice_tokens(
    chosen: Float[Tensor, "n dim"], rejected: Float[Tensor, "n dim"]
) -> Float[Tensor, "n dim"]:
    """Return unit vectors from rejected to chosen features, after each feature is normalised."""
    return normalize(normalize(chosen, dim=1) - normalize(rejected, dim=1), dim=1)
