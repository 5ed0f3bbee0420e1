"""Checks that a network accepts the inputs of a policy."""

from typing import Any

from pipelines.parts.folder import Config


def check_channels(policy: Any, transformer: Config, channels: int, kinds: str) -> None:
    """Check that a policy's network takes `channels` input channels.

    Raises:
        ValueError: It takes another number. The message ends with `kinds`, the policies to use
            instead.
    """
    if transformer["in_channels"] != channels:
        raise ValueError(
            f"the network of {policy.path} takes {transformer['in_channels']} channels, "
            f"{type(policy).__name__} provides {channels}:\n{kinds}"
        )


def check_embedded_guidance(guidance: float | None, transformer: Config, path: str) -> None:
    """Raise ValueError unless guidance is set exactly for the networks that take it as an input."""
    if transformer["guidance_embeds"] == (guidance is None):
        wanted = "a number" if transformer["guidance_embeds"] else "None"
        raise ValueError(f"embedded_guidance is {guidance}; {path} needs {wanted}")
