"""Wraps Stable Diffusion 3 or FLUX.1 with a hypernetwork that writes LoRA weights: HyperAlign."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.extra.extended_policy import ExtendedPolicy
from flowalign.types import Cond, ModelPlan
from flowalign.utils.ranges import Guidance, PositiveInt, UnitInterval
from pipelines.families.flux1 import Flux1
from pipelines.families.sd3 import SD3
from pipelines.network.weights import DTYPES, JOINT_ATTENTION
from pipelines.policy import DiffusersPolicy, Precision

HEADS = 4
"""Attention heads of the decoder."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Size of a hypernetwork, and the noise levels at which it writes weights.

    Weights that are kept over several steps cannot depend on the state, because a policy sees only
    the current state.
    """

    when: Literal["every_step", "once", "key_steps"] = "every_step"
    """Time of writing. every_step: from state, noise level and prompt. once: from the prompt only.
    key_steps: from the prompt and the lowest of `key_levels` that the noise level has not passed.
    """
    key_levels: tuple[UnitInterval, ...] = (1.0, 0.75, 0.5)
    """Noise levels of `key_steps`."""
    rank: PositiveInt = 4
    """Rank of the written weights."""
    hidden: PositiveInt = 64
    """Width of the hypernetwork."""
    blocks: PositiveInt = 1
    """Number of decoder blocks."""

    def __post_init__(self) -> None:
        """Raise ValueError if HEADS does not divide `hidden`, or key levels lack 1.0."""
        if self.hidden % HEADS:
            raise ValueError(
                f"policy.hyper.hidden is {self.hidden}; it must be a multiple of the {HEADS} heads"
            )
        if self.when == "key_steps" and 1.0 not in self.key_levels:
            raise ValueError(
                f"policy.hyper.key_levels is {list(self.key_levels)}; it must contain 1.0, where "
                "sampling starts"
            )

    def level(self, sigma: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        """Return, for each noise level, the noise level at which its weights are written."""
        if self.when == "every_step":
            return sigma
        if self.when == "once":
            return torch.ones_like(sigma)
        keys = torch.tensor(sorted(self.key_levels), device=sigma.device, dtype=sigma.dtype)
        return keys[torch.searchsorted(keys, sigma.clamp(max=1.0).contiguous())]


class LowRank(NamedTuple):
    """Factors of a layer's weight update for each sample: up @ down."""

    down: Float[Tensor, "n r d_in"]
    up: Float[Tensor, "n d_out r"]


class HyperLinear(nn.Module):
    """Linear layer with an optional low-rank weight update per sample."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.linear = linear
        self.written: LowRank | None = None

    def forward(self, x: Float[Tensor, "m tokens d_in"]) -> Float[Tensor, "m tokens d_out"]:
        """Return (W + up @ down) x. If x repeats the samples, the repetitions share weights."""
        y = self.linear(x)
        if self.written is None:
            return y
        times = len(x) // len(self.written.down)
        down, up = (factor.repeat(times, 1, 1) for factor in self.written)
        return y + (x.float() @ down.mT @ up.mT).to(y.dtype)


class Hypernetwork(nn.Module):
    """Network that maps prompt, noise level and optionally the state to weights of all layers.

    A strided convolution reads the state. Each layer has a learned query, and a transformer decoder
    lets it attend to the inputs. Linear maps, shared by layers of equal size, turn the decoder's
    output into both factors. `up` starts at 0, so the initial policy equals the base model.
    """

    def __init__(
        self,
        layers: Sequence[tuple[int, int]],
        prompt: int,
        latent_shape: Sequence[int],
        hyper: Hyper,
    ):
        super().__init__()
        rank, width = hyper.rank, hyper.hidden
        self.sizes, self.rank, self.width = tuple(layers), rank, width
        self.prompt, self.time = nn.Linear(prompt, width), nn.Linear(width, width)
        self.state: nn.Conv2d | None = None
        if hyper.when == "every_step":
            channels, height, across = latent_shape
            self.state = nn.Conv2d(channels, width, kernel_size=2, stride=2)
            places = (height // 2) * (across // 2)
            self.places = nn.Parameter(torch.randn(places, width) / math.sqrt(width))
        self.queries = nn.Parameter(torch.randn(len(self.sizes), width))
        block = nn.TransformerDecoderLayer(
            width, nhead=HEADS, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.decoder = nn.TransformerDecoder(block, hyper.blocks)
        inputs, outputs = (sorted({size[side] for size in self.sizes}) for side in (0, 1))
        stds = {d: 1 / math.sqrt(width * d) for d in inputs}
        self.down = nn.ModuleDict({str(d): _linear(width, rank * d, stds[d]) for d in inputs})
        self.up = nn.ModuleDict({str(d): _linear(width, rank * d, 0.0) for d in outputs})

    def forward(
        self, x: Float[Tensor, "n C H W"], sigma: Float[Tensor, "n"], prompt: Float[Tensor, "n d"]
    ) -> list[LowRank]:
        """Return the weights of each layer, in the order of `layers`."""
        read = [self.prompt(prompt)[:, None], self.time(waves(sigma, self.width))[:, None]]
        if self.state is not None:
            read.append(self.state(x).flatten(2).mT + self.places)
        queries = self.queries.expand(len(x), -1, -1)
        answers = self.decoder(queries, torch.cat(read, 1))
        written = []
        for answer, (d_in, d_out) in zip(answers.unbind(1), self.sizes, strict=True):
            down = self.down[str(d_in)](answer).unflatten(1, (self.rank, d_in))
            written.append(LowRank(down, self.up[str(d_out)](answer).unflatten(1, (d_out, -1))))
        return written


def _linear(width: int, outputs: int, std: float) -> nn.Linear:
    """Return a linear layer with zero bias and normal weights of standard deviation `std`."""
    made = nn.Linear(width, outputs)
    nn.init.normal_(made.weight, std=std)
    nn.init.zeros_(made.bias)
    return made


def waves(sigma: Float[Tensor, "n"], width: int) -> Float[Tensor, "n w"]:
    """Return sines and cosines of the noise level at width / 2 frequencies from 1 to 1000."""
    frequencies = torch.logspace(0, 3, width // 2, device=sigma.device)
    angles = sigma[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)


class HyperAlign(ExtendedPolicy):
    """Extends `SD3` with low-rank weights that a hypernetwork writes for each sample.

    Only the hypernetwork is trained. diffusers cannot load the saved weights, because the LoRA
    weights differ between samples.

    Source: HyperAlign, arXiv:2601.15968. This is a reconstruction, because the paper's formulas and
    code are not published. The paper specifies the inputs, the three choices of writing times, an
    encoder that reduces the state, and a transformer decoder. Sizes and the maps to the factors are
    our choice.
    """

    weights_file = "hypernetwork.safetensors"

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        guidance: Guidance = 4.5,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 256,
        hyper: Hyper = Hyper(),
    ):
        settings = path, height, width, guidance, None, precision, max_sequence_length
        self.extend(partial(SD3, *settings), hyper)

    def extend(self, make_base: Callable[[], DiffusersPolicy], hyper: Hyper) -> None:
        """Initialize with a base model and the settings of its hypernetwork."""
        super().__init__(make_base)
        self.hyper, self.renderer = hyper, self.base.renderer

    def plan(self) -> ModelPlan:
        plan = self.base.plan()
        with torch.device("meta"):
            network = self.base.network.on_meta()
            trained = attach(network, self._prompt_width, plan.latent_shape, self.hyper)
        return replace(plan, trainable=sum(p.numel() for p in trained.parameters()))

    def load(self, device: torch.device) -> None:
        self.base.load(device)
        self.denoiser = self.base.denoiser
        nn.Module.to(self.denoiser.requires_grad_(False), DTYPES[self.precision])
        with torch.random.fork_rng(devices=[]):  # every rank starts from the same hypernetwork
            torch.random.default_generator.manual_seed(0)
            shape = self.base.latent_shape
            attach(self.denoiser, self._prompt_width, shape, self.hyper).to(device)

    @property
    def _prompt_width(self) -> int:
        return self.base.folder.config("transformer")["pooled_projection_dim"]

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        layers = _layers(self.denoiser)
        level = self.hyper.level(sigma.expand(len(x)))
        with torch.autocast(x.device.type, enabled=False):
            read = x.float(), level.float(), cond["pooled"].float()
            written = self.denoiser.hypernetwork(*read)
        for layer, weights in zip(layers, written, strict=True):
            layer.written = weights
        try:
            return self.current_base().velocity(x, sigma, cond)
        finally:
            for layer in layers:
                layer.written = None

    def trained_tensors(self) -> Mapping[str, Tensor]:
        return self.denoiser.hypernetwork.state_dict()


class HyperAlignFlux1(HyperAlign):
    """Extends `Flux1` with low-rank weights that a hypernetwork writes for each sample.

    The layers are the attention projections of both kinds of blocks. Activations cannot be
    recomputed, because the written weights are gone by the backward pass.

    Source: HyperAlign, arXiv:2601.15968, reconstructed as in `HyperAlign`.
    """

    has_guidance = False

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        embedded_guidance: Guidance | None = 3.5,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        hyper: Hyper = Hyper(),
    ):
        settings = path, height, width, embedded_guidance, None, precision, max_sequence_length
        self.extend(partial(Flux1, *settings), hyper)


def attach(
    network: nn.Module, prompt_width: int, latent_shape: Sequence[int], hyper: Hyper
) -> Hypernetwork:
    """Wrap the layers that a LoRA would adapt, and add the hypernetwork for their weights."""
    suffixes, sizes = JOINT_ATTENTION, []
    linear = {n: m for n, m in network.named_modules() if n.endswith(suffixes)}
    for name, layer in linear.items():
        assert isinstance(layer, nn.Linear), "attention projections are linear"
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, HyperLinear(layer))
        sizes.append((layer.in_features, layer.out_features))
    hypernetwork = Hypernetwork(sizes, prompt_width, latent_shape, hyper)
    network.add_module("hypernetwork", hypernetwork)
    return hypernetwork


def _layers(network: nn.Module) -> list[HyperLinear]:
    return [module for module in network.modules() if isinstance(module, HyperLinear)]
