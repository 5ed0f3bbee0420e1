"""Define what a plan knows of a model before its weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Saving:
    """Describes one setting of a policy that lowers one part of its memory."""

    part: Literal["activations", "decoding", "recast weights", "text encoders", "weights"]
    """Part of the memory that the setting lowers."""
    setting: str
    """Key and value as a run file has them: "policy.gradient_checkpointing: true"."""
    saved_bytes: int
    """Bytes saved, per sample where the part is counted per sample."""


@dataclass(frozen=True)
class ModelPlan:
    """Holds what is known of a policy before its weights are read."""

    latent_shape: tuple[int, ...]
    """Shape of one latent without the sample axis: (C, H, W), or (C, F, H, W) for videos."""
    parameters: int
    """Number of parameters of the denoiser."""
    trainable: int
    """Number of parameters that are trained."""
    bytes_per_parameter: int | float
    """Bytes of one parameter as it is stored, on average: in the policy's precision or less."""
    activation_bytes: int
    """Bytes kept for the backward pass, per sample of a micro-batch; a rough estimate."""
    sigmas: Callable[[int], Float[Tensor, "S"]]
    """Maps a number of steps to the schedule."""
    decode_bytes: int = 0
    """Bytes at the peak of decoding, per sample that is decoded with others; a rough estimate."""
    decodes_together: bool = True
    """Whether a micro-batch is decoded at once, and not one sample after another."""
    text_bytes: int = 0
    """Bytes of text encoders that stay on the device, and of the VAE where its size is known."""
    offloaded_bytes: int = 0
    """Bytes of text encoders that are kept in main memory."""
    encoder_bytes: int = 0
    """Bytes of the encoders of prompts, which are among the two above."""
    networks: int = 1
    """Number of equal networks among the parameters, such as experts; saved and verified one at a
    time."""
    gathered_parameters: int = 0
    """Parameters that sharded processes hold whole at once: the largest block, and all that is
    around the blocks."""
    recast_bytes: int = 0
    """Bytes of weights that are stored in fewer bits, and that the backward pass keeps in the
    policy's precision."""
    savings: Sequence[Saving] = ()
    """Settings that would lower the memory further; empty if all are in use."""
