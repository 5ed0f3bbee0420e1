"""Condition a personalised policy on a user (PPD).

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
