"""Distinguishes the kinds of Wan folders, and names the policy class for each."""

from typing import Any

from pipelines.parts.denoiser_inputs import check_channels
from pipelines.parts.folder import Config

_NETWORKS = (
    "for two networks use pipelines.Wan22 or, from a first frame, pipelines.Wan22I2V; for one "
    "network use pipelines.Wan or others"
)
_CHANNELS = (
    "text-to-video is pipelines.Wan, image-to-video is pipelines.WanI2V, or pipelines.WanTI2V for "
    "Wan 2.2 5B"
)


def check_kind(policy: Any, transformer: Config, channels: int) -> None:
    """Check that a folder has the networks of a policy, each with `channels` input channels.

    Raises:
        ValueError: It does not. The message names the policies for each kind.
    """
    there = 1 if policy.folder.setting("boundary_ratio") is None else 2
    wanted = 2 if policy.experts else 1
    if there != wanted:
        raise ValueError(
            f"{policy.path} has {there} network(s), {type(policy).__name__} needs "
            f"{wanted}: {_NETWORKS}"
        )
    check_channels(policy, transformer, channels, _CHANNELS)
