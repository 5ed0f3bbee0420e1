"""Tells folders of Wan apart, and names the policy of each."""

from collections.abc import Mapping
from typing import Any

from pipelines.folder import setting_of
from pipelines.intact import check_channels

_NETWORKS = (
    "for two networks are pipelines.wan22.Wan22 and, from a first frame, "
    "pipelines.wan22_i2v.Wan22I2V; for one pipelines.wan.Wan and others"
)
_CHANNELS = (
    "text-to-video is pipelines.wan.Wan, image-to-video pipelines.wan_i2v.WanI2V, "
    "that of Wan 2.2 5B pipelines.wan22_i2v.WanTI2V"
)


def check_kind(policy: Any, transformer: Mapping[str, Any], channels: int) -> None:
    """Check that a folder has the networks of a policy, each of so many channels.

    Raises:
        ValueError: It has not; the message names the policies for its kind.
    """
    boundary = setting_of(policy.pipeline_class, policy.path, "boundary_ratio")
    found = 1 if boundary is None else 2
    if found != policy.num_networks:
        raise ValueError(
            f"{policy.path} has {found} network(s), {type(policy).__name__} wants "
            f"{policy.num_networks}: {_NETWORKS}"
        )
    check_channels(policy, transformer, channels, _CHANNELS)
