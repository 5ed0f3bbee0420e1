"""Ask a personalised policy for a person: PPD's users.

Source: PPD, arXiv:2501.06655, known from secondary sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from typing_extensions import override

from flowalign.types import (
    ConditionedPrompt,
    Policy,
    PromptConditioning,
    PromptGuidance,
    Request,
)


@dataclass(frozen=True, kw_only=True)
class Users(PromptConditioning):
    """Samples for the person that a request names, as a policy with `user_conditioning` learned to.

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
                "conditioning.guidance is set, but Users adds no words to guide to: leave it null"
            )

    @property
    @override
    def dims(self) -> tuple[()]:
        return ()

    @override
    def check(self, policy: Policy, weights: Mapping[str, float]) -> None:
        if policy.user_conditioning is None:
            raise ValueError(
                f"conditioning Users asks for a person, whom {type(policy).__name__} does not "
                "know: take pipelines.PersonalSD15, or leave conditioning out"
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
