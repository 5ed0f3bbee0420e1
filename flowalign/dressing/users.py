"""Ask a personalised policy for a person: PPD's users.

Source: PPD, arXiv:2501.06655, known from secondary sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from typing_extensions import override

from flowalign.types import Dress, Dressing, Personal, Policy, PromptGuidance, Request


@dataclass(frozen=True, kw_only=True)
class Users(Dressing):
    """Samples for the person that a request names, as a `Personal` policy learned to.

    Stored preferences that name their judges are learned under these, whatever stands here.

    Source: PPD, arXiv:2501.06655.
    """

    user: str = ""
    """Identifier of the person that requests without one are sampled for. Empty: nobody."""
    column: str = "user_id"
    """Column of the requests that names the person."""
    guidance: PromptGuidance | None = None
    """Guidance to the prompt with and without words, of which there are none here: null."""

    def __post_init__(self) -> None:
        """Reject guidance between equal prompts."""
        if self.guidance is not None:
            raise ValueError(
                "dressing.guidance is set, but Users adds no words to guide to: leave it null"
            )

    @property
    @override
    def dims(self) -> tuple[()]:
        return ()

    @override
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        if not isinstance(policy, Personal):
            raise ValueError(
                f"dressing Users asks for a person, whom {type(policy).__name__} does not know: "
                "take pipelines.personal.PersonalSD15, or leave dressing out"
            )
        if self.user:
            policy.check_user(self.user)

    @override
    def at_sampling(self, request: Request) -> Request:
        user = str(request.metadata.get(self.column, self.user))
        return replace(request, dress=Dress(request.asked, user))

    @override
    def at_rollout(self, request: Request, position: int) -> Request:
        return self.at_sampling(request)

    @override
    def at_training(self, request: Request, scores: Mapping[str, float]) -> Request:
        return request
