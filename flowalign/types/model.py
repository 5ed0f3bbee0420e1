"""Define what a model takes and decodes, the memory that it needs, and how it is loaded."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from flowalign.types.request import Request
from flowalign.utils.media.media import Sound
from flowalign.utils.ranges import PositiveInt, UnitInterval


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantization of frozen weights; rollout, update and reference use the same weights.

    Linear layers are stored as int8 or fp8 (float8 e4m3) with a scale per output (torchao), or as
    nf4 in 4 bits with double quantization as in QLoRA, arXiv:2305.14314 (bitsandbytes).
    """

    denoiser: Literal["none", "int8", "fp8", "nf4", "layerwise"] = "none"
    """Quantization of the trained network. It needs `policy.lora`; the adapter stays in float32.
    layerwise: all layers except norms, position embeddings and the last layer are stored as float8
    e4m3 without a scale, and cast when they compute (diffusers)."""
    text_encoders: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Quantization of the text encoders."""


Attention = Literal[
    "auto",
    "native",
    "_native_math",
    "_native_efficient",
    "_native_flash",
    "_native_cudnn",
    "flex",
    "flash",
    "flash_hub",
    "_flash_3",
    "_flash_3_hub",
    "sage",
    "sage_hub",
    "xformers",
]
"""Attention backends, with the names that diffusers gives them, or the choice by measurement."""

Reduced = Literal["bf16"]
"""Rollout precisions lower than the precision of updates."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Faster kernels for the trained network; rollout and update always use the same kernels."""

    attention: Attention = "native"
    """Attention backend of diffusers. It must be installed and have a backward pass. `native` is
    torch's default. Other backends round differently; each run checks its first ratio. auto: the
    fastest at the shape of the run, measured at the start and remembered for the card. All
    processes use what the first one measured."""
    compile: bool = False
    """Whether to compile the blocks with torch.compile, for all batch shapes at once. It takes a
    minute or more at the start."""
    graphs: bool = False
    """Whether evaluations of at most 8 rows without gradient are replayed as CUDA graphs, with the
    same bits. It is meant for trees, completions and previews; not measured on a GPU."""
    kept_blocks: UnitInterval | None = None
    """Share of the blocks that keep their activations although `gradient_checkpointing` is on. Each
    kept block saves its recomputation; gradients are the same bits. Null: the largest share that
    does not raise the planned peak of a step, which decoding often sets."""


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding of weights, or of sequences, over processes; the results do not change."""

    weights: Literal["replicated", "blocks"] = "replicated"
    """Placement of the weights. replicated: every process holds the whole network. blocks: each
    process holds a part of every block, and all processes gather a block when one computes it, by
    FSDP2 of torch (arXiv:2304.11277)."""
    shard_degree: PositiveInt | None = None
    """Number of consecutive processes that share one copy of the weights, for example all
    processes of a machine (hybrid sharding). It must divide the number of processes. Null: all
    processes share one copy."""
    context_degree: PositiveInt = 1
    """Number of consecutive processes that compute the same samples, each a part of the tokens, by
    Ulysses (arXiv:2309.14509) of diffusers. It must divide the number of processes, of attention
    heads and of tokens. 1: each process computes its own samples."""

    def __post_init__(self) -> None:
        """Raise ValueError for a shard_degree without shards, or two kinds of sharding at once."""
        if self.shard_degree and self.weights == "replicated":
            raise ValueError(
                f"sharding.shard_degree is {self.shard_degree}, but sharding.weights is "
                "replicated; set it to blocks, or leave both out"
            )
        if self.context_degree > 1 and self.weights != "replicated":
            raise ValueError(
                f"sharding.context_degree {self.context_degree} and sharding.weights "
                f"{self.weights} exclude each other; set weights to replicated or the degree to 1"
            )

    def groups(self, world: int) -> int:
        """Return the number of groups with different samples among `world` processes."""
        return world // self.context_degree


@runtime_checkable  # tests check annotations at run time
class SampleRanks(Protocol):
    """Ranks that compute the same samples together."""

    @property
    def is_leader(self) -> bool:
        """Whether this rank is the first of the group."""
        ...

    def broadcast_first(self, value: T) -> T:
        """Return the value of the first rank; all ranks of the group must call this."""
        ...


Offload = Literal["none", "layers"]
"""none: the network is on the device. layers: frozen weights stay in main memory, and each layer is
moved to the device while it computes (group offloading of diffusers)."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings of a run for the weights of its policy."""

    quantization: Quantization = field(default_factory=Quantization)
    speed: Speed = field(default_factory=Speed)
    sharding: Sharding = field(default_factory=Sharding)
    offload: Offload = "none"
    prompt_cache: str | None = None
    """Folder of cached conditioning; None: no cache, so the prompt encoders stay in memory."""
    text_micro_batch: int | None = None
    """Number of prompts that are encoded together; None: all that a caller passes."""
    decode_micro_batch: int | None = None
    """Number of samples that are decoded together; None: all that a caller passes."""
    vae_tile: int | None = None
    """Side of the tiles on which the VAE of images runs, in pixels; None: whole images."""

    def changes(self) -> list[str]:
        """Return the settings that differ from the defaults, as texts for messages."""

        def name_settings(setup: Setup) -> dict[str, object]:
            sharding = {f"sharding.{name}": value for name, value in vars(setup.sharding).items()}
            own = {name: value for name, value in vars(setup).items() if name != "sharding"}
            return sharding | own

        defaults = name_settings(Setup())
        own = name_settings(self)
        return [f"{name} is {value}" for name, value in own.items() if value != defaults[name]]


@dataclass(frozen=True)
class InputSpec:
    """Inputs that a policy needs with a prompt; requests that lack one are rejected."""

    references: tuple[int, int] = (0, 0)
    """Smallest and largest number of references of a request."""
    mask: bool = False
    """Whether every request needs an inpainting mask for the first reference."""
    kind: Literal["none", "source", "first_frame"] = "none"
    """Kind of references. source: images to edit. first_frame: first frame of a clip. none: no
    references."""
    frames: tuple[int, int] = (1, 1)
    """Smallest and largest number of frames of a reference; an image has one."""
    size: tuple[int, int] | None = None
    """Height and width that every reference must have. None: any, because the policy resizes."""
    crop: tuple[int, int] | None = None
    """Height and width to which references and masks are resized and centre-cropped; the mask must
    have a hole inside the crop. None: no crop, the hole may be anywhere."""

    def misfit(self, request: Request) -> str:
        """Return why the references or the mask of a request do not fit; "" if they fit."""
        fewest, most = self.references
        given = len(request.references)
        wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        if most and not fewest <= given <= most:
            return f"takes {wanted} {self.kind} references, and the request has {given}"
        if self.mask and request.mask is None:
            return "takes a mask, and the request has none"
        if request.mask is not None and not given:
            return f"has no source for the mask {request.mask.name}"
        if request.mask is not None and not self.mask:
            return f"takes no mask, and the request has {request.mask.name}"
        return ""

    def misshapen(self, frames: int, height: int, width: int) -> str:
        """Return why the shape of a reference does not fit; "" if it fits."""
        fewest, most = self.frames
        if not fewest <= frames <= most:
            wanted = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            return f"takes references of {wanted} frame{'s' * (most > 1)}, and this has {frames}"
        if self.size not in (None, (height, width)):
            wanted = f"{self.size[1]} x {self.size[0]}"
            return f"takes references of {wanted} pixels, and this has {width} x {height}"
        return ""


class SoundDecoder(ABC):
    """Decoder of the sound of clips that a policy makes together with their frames."""

    @abstractmethod
    def decode_sound(self, x: Float[Tensor, "n *latent"]) -> list[Sound]:
        """Decode the sound of clean latents, on the CPU."""


class DifferentiableDecoder(ABC):
    """Decoder with a gradient to the latents."""

    @abstractmethod
    def render(
        self, x: Float[Tensor, "n *latent"], frames: Sequence[int] | None = None
    ) -> Float[Tensor, "n F 3 H W"]:
        """Decode like `Policy.decode`, with a gradient.

        For clips, `frames` selects and orders the frames; None: all. The decoder recomputes its
        activations in the backward pass if it supports that.
        """

    @abstractmethod
    def render_bytes(self, latent_shape: Sequence[int]) -> int:
        """Return the peak bytes of `render` and its backward pass, per sample; needs no weights."""


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
    """Function from a number of steps to the schedule; it raises ValueError for a wrong one."""
    kept_bytes: int = 0
    """Bytes that a share of 1 of the blocks adds to `activation_bytes` by keeping activations. 0:
    unknown, or nothing is recomputed."""
    input_bytes: int = 0
    """Bytes that recomputation keeps of each sample until its backward pass, such as the inputs of
    the blocks. 0: nothing is recomputed."""
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
    trusted: bool = field(default=False, compare=False)
    """Whether the schedule is known to be right for any number of steps."""
