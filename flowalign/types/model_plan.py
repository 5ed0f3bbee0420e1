"""Define the properties of a model that a plan reads before the weights are loaded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Saving:
    """Setting of a policy that lowers one part of its memory."""

    part: Literal["activations", "decoding", "recast weights", "text encoders", "weights"]
    """Part of the memory that the setting lowers."""
    setting: str
    """Key and value in run-file syntax: "policy.gradient_checkpointing: true"."""
    saved_bytes: int
    """Bytes saved; per sample if the part is counted per sample."""


@dataclass(frozen=True)
class ModelPlan:
    """Sizes of a policy that are known before its weights are loaded."""

    latent_shape: tuple[int, ...]
    """Shape of one latent without the sample axis: (C, H, W), or (C, F, H, W) for videos."""
    parameters: int
    """Number of parameters of the denoiser."""
    trainable: int
    """Number of parameters that are trained."""
    bytes_per_parameter: int | float
    """Average stored bytes per parameter, in the policy's precision or quantized."""
    activation_bytes: int
    """Bytes kept for the backward pass, per sample of a micro-batch; a rough estimate."""
    sigmas: Callable[[int], Float[Tensor, "S"]]
    """Function from a number of steps to the schedule."""
    decode_bytes: int = 0
    """Peak bytes of decoding, per sample that is decoded at once; a rough estimate."""
    decodes_together: bool = True
    """Whether a micro-batch is decoded at once instead of one sample after another."""
    text_bytes: int = 0
    """Bytes of text encoders that stay on the device, plus the VAE if its size is known."""
    offloaded_bytes: int = 0
    """Bytes of text encoders that are kept in main memory."""
    encoder_bytes: int = 0
    """Bytes of the prompt encoders; `text_bytes` and `offloaded_bytes` include them."""
    networks: int = 1
    """Number of equal networks among the parameters, such as experts; they are saved and verified
    one at a time."""
    gathered_parameters: int = 0
    """Parameters that a sharded process gathers at once: the largest block, and everything outside
    the blocks."""
    recomputes: bool = False
    """Whether the backward pass recomputes activations (gradient checkpointing)."""
    recast_bytes: int = 0
    """Bytes of quantized weights that the backward pass keeps in the policy's precision."""
    savings: Sequence[Saving] = ()
    """Settings that would lower the memory further; empty if all are in use."""
    evaluation_flops: Callable[[], int] = field(default=int, compare=False)
    """Function that counts the floating-point operations of one network evaluation of one sample,
    without gradient. It returns 0 if the number is unknown."""
    decode_flops: Callable[[], int] = field(default=int, compare=False)
    """The same for decoding one sample."""
