"""Define how a network is loaded: quantized, compiled, sharded and offloaded."""

from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar, runtime_checkable

from flowalign.types.ranges import PositiveInt


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
"""Attention backends, with the names that diffusers gives them."""

Reduced = Literal["bf16"]
"""Rollout precisions lower than the precision of updates."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Faster kernels for the trained network; rollout and update always use the same kernels."""

    attention: Attention = "native"
    """Attention backend of diffusers. It must be installed and have a backward pass. `native` is
    torch's default. Other backends round differently; each run checks its first ratio."""
    compile: bool = False
    """Whether to compile the blocks with torch.compile, for all batch shapes at once. It takes a
    minute or more at the start."""


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
    decode_micro_batch: int | None = None
    """Number of samples that are decoded together; None: all that a caller passes."""
    vae_tile: int | None = None
    """Side of the tiles on which the VAE of images runs, in pixels; None: whole images."""

    def changes(self) -> list[str]:
        """Return the settings that differ from the defaults, as texts for messages."""
        sharding = self.sharding
        changed = {
            f"quantization is {self.quantization}": self.quantization != Quantization(),
            f"speed is {self.speed}": self.speed != Speed(),
            f"sharding.weights is {sharding.weights}": sharding.weights != "replicated",
            f"sharding.context_degree is {sharding.context_degree}": sharding.context_degree > 1,
            f"offload is {self.offload}": self.offload != "none",
            f"prompt_cache is {self.prompt_cache}": self.prompt_cache is not None,
            f"decode_micro_batch is {self.decode_micro_batch}": self.decode_micro_batch is not None,
            f"vae_tile is {self.vae_tile}": self.vae_tile is not None,
        }
        return [setting for setting, is_changed in changed.items() if is_changed]
