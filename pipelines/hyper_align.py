"""Wraps Stable Diffusion 3 with a hypernetwork that writes its LoRA weights: HyperAlign."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowalign.types import (
    Cond,
    Guidance,
    ModelPlan,
    Policy,
    PositiveInt,
    Renders,
    Request,
    plain_requests,
)
from pipelines.base import DTYPES, Precision
from pipelines.folder import config_of
from pipelines.hypernetwork import Hyper, HyperLinear, Hypernetwork
from pipelines.sd3 import SD3
from pipelines.tensors import existing, read_tensors, same_shapes
from pipelines.weights import Lora

FILE = "hypernetwork.safetensors"
"""File that `save_weights` writes."""


class HyperAlign(Policy, Renders):
    """Extends `SD3` with low-rank weights that a hypernetwork writes for each sample.

    Only the hypernetwork is trained. diffusers cannot load what is saved: weights differ between
    samples.

    Source: HyperAlign, arXiv:2601.15968, as a reconstruction: its formulas and code are not
    published. Known are the inputs, the three times of writing, an encoder that reduces the state,
    and a transformer decoder; sizes and the maps to the factors are ours.
    """

    denoiser: Any
    """SD3's network, its linear layers wrapped, with the hypernetwork."""

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
        self.base = SD3(path, height, width, guidance, None, precision, max_sequence_length)
        self.guidance, self.precision, self.hyper = guidance, precision, hyper
        self.evaluations_per_velocity = self.base.evaluations_per_velocity

    def plan(self) -> ModelPlan:
        plan = self.base.plan()
        config = config_of(SD3.pipeline_class, self.base.path, "transformer")
        with torch.device("meta"):
            network = SD3.transformer_class.from_config(config)
            trained = attached(network, self.base.path, plan.latent_shape, self.hyper)
        return replace(plan, trainable=sum(p.numel() for p in trained.parameters()))

    def load(self, device: torch.device) -> None:
        self.base.load(device)
        self.denoiser = self.base.denoiser
        nn.Module.to(self.denoiser.requires_grad_(False), DTYPES[self.precision])
        with torch.random.fork_rng(devices=[]):  # every rank starts from the same hypernetwork
            torch.random.default_generator.manual_seed(0)
            shape = self.base.latent_shape
            attached(self.denoiser, self.base.path, shape, self.hyper).to(device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        layers = _layers(self.denoiser)
        level = self.hyper.level(sigma.expand(len(x)))
        with torch.autocast(x.device.type, enabled=False):
            read = x.float(), level.float(), cond["pooled"].float()
            written = self.denoiser.hypernetwork(*read)
        for layer, weights in zip(layers, written, strict=True):
            layer.written = weights
        try:
            return self._base().velocity(x, sigma, cond)
        finally:
            for layer in layers:
                layer.written = None

    def encode(self, requests: Sequence[Request]) -> Cond:
        return self._base().encode(requests)

    def schedule(self, num_steps: int) -> Tensor:
        return self.base.schedule(num_steps)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.base.noise(num_samples, generator)

    def decode(self, x: Tensor) -> Tensor:
        return self.base.decode(x)

    def render(self, x: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        return self.base.render(x, frames)

    def render_bytes(self) -> int:
        return self.base.render_bytes()

    def embed(self, media: Tensor) -> Tensor:
        return self.base.embed(media)

    def encoders(self) -> tuple[str, str]:
        return self._base().encoders()

    def save_weights(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = self.denoiser.hypernetwork.state_dict()
        save_file({name: value.contiguous() for name, value in state.items()}, Path(folder) / FILE)

    def load_weights(self, folder: str) -> None:
        file = existing(Path(folder) / FILE)
        state = read_tensors(file)
        same_shapes(state, self.denoiser.hypernetwork.state_dict(), file)
        self.denoiser.hypernetwork.load_state_dict(state)

    def verify_weights(self, folder: str) -> float:
        fresh = copy.copy(self)
        fresh.base = copy.copy(self.base)
        fresh.load(self.denoiser.device)
        fresh.load_weights(folder)
        x, sigma = self.noise(2, torch.Generator().manual_seed(0)), self.schedule(4)[1]
        cond = self.encode(plain_requests(["a", "b"]))
        with torch.no_grad():
            difference = fresh.velocity(x, sigma, cond) - self.velocity(x, sigma, cond)
        return float(difference.abs().max())

    def _base(self) -> SD3:
        """Return the base with this policy's network and guidance; self may itself be a copy."""
        base = copy.copy(self.base)
        base.denoiser, base.guidance = self.denoiser, self.guidance
        return base


def attached(
    network: nn.Module, path: str, latent_shape: Sequence[int], hyper: Hyper
) -> Hypernetwork:
    """Wrap the layers that a LoRA would adapt, and add the hypernetwork that serves them."""
    suffixes, sizes = Lora().target_modules, []
    linear = {n: m for n, m in network.named_modules() if n.endswith(suffixes)}
    for name, layer in linear.items():
        assert isinstance(layer, nn.Linear), "SD3's projections are linear"
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, HyperLinear(layer))
        sizes.append((layer.in_features, layer.out_features))
    prompt = config_of(SD3.pipeline_class, path, "transformer")["pooled_projection_dim"]
    made = Hypernetwork(sizes, prompt, latent_shape, hyper)
    network.add_module("hypernetwork", made)
    return made


def _layers(network: nn.Module) -> list[HyperLinear]:
    return [module for module in network.modules() if isinstance(module, HyperLinear)]
