"""Checks that a network takes the inputs that a policy gives it."""

from typing import Any

from pipelines.parts.folder import Config


def check_channels(policy: Any, transformer: Config, channels: int, kinds: str) -> None:
    """Check that the network of a policy takes as many channels as it is given.

    Raises:
        ValueError: It takes others; the message names the policies of each of the `kinds`.
    """
    if transformer["in_channels"] != channels:
        raise ValueError(
            f"the network of {policy.path} takes {transformer['in_channels']} channels, "
            f"{type(policy).__name__} gives it {channels}:\n{kinds}"
        )


def check_embedded_guidance(guidance: float | None, transformer: Config, path: str) -> None:
    """Raise ValueError unless guidance is given to just the networks that take it as an input."""
    if transformer["guidance_embeds"] == (guidance is None):
        wanted = "a number" if transformer["guidance_embeds"] else "None"
        raise ValueError(f"embedded_guidance is {guidance}; {path} needs {wanted}")
