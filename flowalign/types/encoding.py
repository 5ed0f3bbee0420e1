"""Define where conditioning comes from that is encoded once, and policies that can do without."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from flowalign.types.policy import Policy
from flowalign.types.request import Request
from flowalign.types.trajectory import Cond


class PromptStore(ABC):
    """Keeps the conditioning on requests, so that encoders need not stay."""

    @abstractmethod
    def conditioning(self, policy: "EncodesApart", requests: Sequence[Request]) -> Cond:
        """Return what `policy.encode` would, on the policy's device; encode what is missing."""


class EncodesApart(Policy):
    """Marks a `Policy` whose encoders of prompts can be read, and freed, apart from the rest."""

    prompt_store: PromptStore | None = None
    """Where conditioning comes from. With one, `load` reads no encoders of prompts."""

    @abstractmethod
    def check_prompt_store(self) -> None:
        """Raise ValueError if this policy needs its encoders for more than `encode`."""

    @abstractmethod
    def encoding_files(self) -> str:
        """Return a digest of the files that `encode` depends on; reads no weights into memory."""

    @abstractmethod
    def encoding_settings(self) -> str:
        """Return the settings that `encode` may depend on; changed ones are another text."""

    @abstractmethod
    def read_encoders(self, device: torch.device) -> None:
        """Move the encoders of prompts to a device, and read them first if they are not there."""

    @abstractmethod
    def free_encoders(self) -> None:
        """Forget the encoders of prompts."""

    @abstractmethod
    def probes(self) -> Sequence[Request]:
        """Return the requests that the verification of saved weights asks."""
