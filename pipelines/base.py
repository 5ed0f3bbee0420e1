"""What all diffusers pipelines do alike as policies: sizes, loading, precision, saving."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from torch import Tensor, nn

from flowalign.functional.diffusion import norm
from flowalign.types import Cond, ModelPlan, Policy
from flowalign.utils.files import bundled
from pipelines.encoding import covering, digest
from pipelines.folder import activations, config_of, scheduler_of, shifted
from pipelines.weights import (
    Lora,
    load_adapter,
    load_pipeline,
    load_weights,
    prepare_training,
    save_weights,
)

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DiffusersPolicy(Policy):
    """A policy around a pipeline with a denoiser (`part`), a `vae` and a `scheduler`.

    A family is one subclass: its two classes, a constructor, and the abstract methods below
    together with `encode` and `velocity`. The constructor is cheap; `load` reads the
    weights. With `lora` None the whole denoiser is trained.
    """

    pipeline_class: type[DiffusionPipeline]
    transformer_class: Any
    """A subclass of both `ModelMixin` and `ConfigMixin`."""
    part: str = "transformer"
    """The component that is the denoiser, or the first of them."""
    parts: tuple[str, ...]
    """Those that are trained."""
    state: str = "hidden_states"
    """What its forward method calls the noisy latents."""
    tells_size: bool = False
    """Whether conditions say how large pictures are."""
    unused: Mapping[str, Any] = {}
    """Arguments that keep the pipeline from loading what a policy does not need."""
    offloaded: tuple[str, ...] = ()
    """How names of components begin that stay on the CPU, from where `encode` brings them."""
    film: tuple[object, ...] = ()
    """What, beside VAE and size, decides how media are encoded."""
    shift: float | None = None
    """Of the schedule, where it is not that of the folder."""
    probes: Sequence[str] = ("a", "b")
    """Prompts that `encode` takes, by which saved weights are compared."""
    denoiser: Any
    height: int
    width: int
    max_sequence_length: int

    def __init__(
        self, path: str, lora: Lora | None, precision: Precision, gradient_checkpointing: bool
    ):
        self.path, self.lora, self.precision = bundled(path), lora, precision
        self.gradient_checkpointing, self.parts = gradient_checkpointing, (self.part,)

    @abstractmethod
    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Latent shape of one sample, from the two configurations. ValueError where none fits."""

    @abstractmethod
    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        """Tokens that the denoiser attends over, for the estimate of memory."""

    @abstractmethod
    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        """The pipeline's own schedule: num_steps + 1 values from the state of `noise` to 0."""

    def plan(self) -> ModelPlan:
        transformer, vae, scheduler = (
            config_of(self.pipeline_class, self.path, part)
            for part in (self.part, "vae", "scheduler")
        )
        scheduler = scheduler_of(shifted(scheduler, self.shift, self.path))
        latent_shape = self.shape_of_latents(transformer, vae)
        with torch.device("meta"):
            denoiser = self.transformer_class.from_config(transformer)
            total = sum(p.numel() for p in denoiser.parameters())
            prepare_training(denoiser, self.lora)
        tokens = self.num_tokens(latent_shape, transformer)
        activated = activations(transformer, tokens, self.gradient_checkpointing)
        return ModelPlan(
            latent_shape=latent_shape,
            parameters=total,
            trainable=sum(p.numel() for p in denoiser.parameters() if p.requires_grad),
            bytes_per_parameter=DTYPES[self.precision].itemsize,
            activation_bytes=activated * DTYPES[self.precision].itemsize,
            sigmas=partial(self.sigmas, scheduler),
        )

    def load(self, device: torch.device) -> None:
        self.pipe = load_pipeline(
            self.pipeline_class, self.path, DTYPES[self.precision], **self.unused
        )
        scheduler = shifted(self.pipe.scheduler.config, self.shift, self.path)
        self.pipe.scheduler = scheduler_of(scheduler)
        self.pipe.vae.float()
        for name, part in self.pipe.components.items():
            if isinstance(part, nn.Module) and not name.startswith(self.offloaded):
                part.to(device)
        for part in self.parts:
            prepare_training(self.pipe.components[part], self.lora)
            if self.gradient_checkpointing:
                self.pipe.components[part].enable_gradient_checkpointing()
        self.denoiser = self.assembled(self.pipe.components)
        transformer = self.pipe.components[self.part].config
        self.latent_shape = self.shape_of_latents(transformer, self.pipe.vae.config)

    def assembled(self, components: Mapping[str, Any]) -> Any:
        """The denoiser that these components make."""
        return components[self.part]

    def schedule(self, num_steps: int) -> Tensor:
        return self.sigmas(self.pipe.scheduler, num_steps).to(self.denoiser.device)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(num_samples, *self.latent_shape, generator=generator)
        return norm(self.schedule(1)[0]) * x.to(self.denoiser.device)

    def call_denoiser(self, x: Tensor, **inputs: Any) -> Tensor:
        """The network in the run's precision; float32 out."""
        dtype = DTYPES[self.precision]
        inputs[self.state] = x.to(dtype)
        with torch.autocast(x.device.type, dtype, enabled=self.precision != "fp32"):
            out = self.denoiser(return_dict=False, **inputs)
        return out[0].float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        config = self.pipe.vae.config
        z = x / config.scaling_factor + (config.shift_factor or 0.0)
        image = self.pipe.vae.decode(z, return_dict=False)[0]
        return (image / 2 + 0.5).clamp(0, 1)[:, None]

    @torch.no_grad()
    def embed(self, media: Tensor) -> Tensor:
        if media.shape[1] != 1:
            raise ValueError(f"media of {media.shape[1]} frames: {self.path} encodes 1, a picture")
        vae = self.pipe.vae
        pictures = covering(media[:, 0].to(vae.device, torch.float32), self.height, self.width)
        z = vae.encode(2 * pictures - 1, return_dict=False)[0].mode()
        return (z - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor

    def encoders(self) -> tuple[str, str]:
        vae, parts = self.pipe.vae, self.pipe.components
        size = (self.height, self.width) if self.tells_size else ()
        settings = self.precision, self.max_sequence_length, self.guidance > 1, *size
        text = ""
        for name in sorted(n for n in parts if n.startswith("text_encoder") and parts[n]):
            tokenizer = parts[name.replace("text_encoder", "tokenizer")]
            words = type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())
            text = digest(parts[name], parts[name].config.to_dict(), text, *settings, *words)
        return digest(vae, vae.config, self.height, self.width, *self.film), text

    def save_weights(self, folder: str) -> None:
        for part in self.parts:
            save_weights(self.pipeline_class, part, self.pipe.components[part], folder)

    def load_weights(self, folder: str) -> None:
        for part in self.parts:
            load_weights(part, self.pipe.components[part], folder)

    def verify_weights(self, folder: str) -> float:
        x = self.noise(2, torch.Generator().manual_seed(0))
        cond = self.encode((*self.probes, *self.probes)[:2])
        early = self.schedule(4)[1]
        sigma = torch.stack([early, early / 20])  # late, too: it may be another network's
        with torch.no_grad():
            expected = self.velocity(x, sigma, cond)
            found = [_replayed(self, part, folder, x, sigma, cond) for part in self.parts]
        return max(float((got - expected).abs().max()) for got in found)


def _replayed(
    policy: DiffusersPolicy, part: str, folder: str, x: Tensor, sigma: Tensor, cond: Cond
) -> Tensor:
    """Velocity with one part as a fresh pipeline loads it, which is freed afterwards."""
    mine, fresh = policy.denoiser, {part: _saved(policy, part, folder).to(x.device)}
    policy.denoiser = policy.assembled({**policy.pipe.components, **fresh})
    try:
        return policy.velocity(x, sigma, cond)
    finally:
        policy.denoiser = mine


def _saved(policy: DiffusersPolicy, part: str, folder: str) -> Any:
    """What a user of plain diffusers gets from `folder` for one component, the others left out."""
    if policy.lora is None:
        return policy.transformer_class.from_pretrained(folder, subfolder=part)
    components = policy.pipe.components
    without = {**policy.unused, **{n: None for n in components if n not in (part, "scheduler")}}
    if part != policy.part:  # diffusers asks the first network what kind of model it is
        without[policy.part] = components[policy.part]
    pipe = load_pipeline(policy.pipeline_class, policy.path, DTYPES[policy.precision], **without)
    load_adapter(pipe, part, folder)
    denoiser = pipe.components[part]
    for parameter in denoiser.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return denoiser
