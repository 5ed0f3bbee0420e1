"""Wraps Stable Diffusion 3 or FLUX.1 with a hypernetwork that writes LoRA weights: HyperAlign."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from flowalign.extra.extended_policy import ExtendedPolicy
from flowalign.extra.hypernetwork import Hyper, HyperLinear, Hypernetwork
from flowalign.types import Cond, Guidance, ModelPlan, PositiveInt
from pipelines.families.flux1 import Flux1
from pipelines.families.sd3 import SD3
from pipelines.network.weights import DTYPES, JOINT_ATTENTION
from pipelines.policy import DiffusersPolicy, Precision


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
        hyper: Hyper = Hyper(),  # noqa: B008 (frozen)
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
        hyper: Hyper = Hyper(),  # noqa: B008 (frozen)
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
