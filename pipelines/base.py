"""What all diffusers pipelines do alike as policies: sizes, loading, precision, saving."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline
from diffusers.models import ModelMixin
from torch import Tensor

from flowalign.paths import bundled
from flowalign.types import ModelPlan, Policy
from pipelines.weights import Lora, load_pipeline, load_weights, prepare_training, save_weights

Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class DiffusersPolicy(Policy):
    """A policy around a pipeline with a `transformer`, a `vae` and a `scheduler`.

    A family is one subclass: its two classes, a constructor, and the abstract methods below
    together with `encode`, `velocity` and `decode`. The constructor is cheap; `load` reads the
    weights. With `lora` None the whole transformer is trained.
    """

    pipeline_class: type[DiffusionPipeline]
    transformer_class: Any
    """A subclass of both `ModelMixin` and `ConfigMixin`."""
    denoiser: Any

    def __init__(
        self, path: str, lora: Lora | None, precision: Precision, gradient_checkpointing: bool
    ):
        self.path, self.lora, self.precision = bundled(path), lora, precision
        self.gradient_checkpointing = gradient_checkpointing

    @abstractmethod
    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Latent shape of one sample, from the two configurations. ValueError where none fits."""

    @abstractmethod
    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        """Tokens that the transformer attends over, for the estimate of memory."""

    @abstractmethod
    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        """The schedule that the pipeline itself would use: num_steps + 1 values from 1 to 0."""

    def plan(self) -> ModelPlan:
        transformer = self._config("transformer")
        latent_shape = self.shape_of_latents(transformer, self._config("vae"))
        with torch.device("meta"):
            denoiser = self.transformer_class.from_config(transformer)
            total = sum(p.numel() for p in denoiser.parameters())
            prepare_training(denoiser, self.lora)
        scheduler_config = self._config("scheduler")
        scheduler = _diffusers_class(scheduler_config).from_config(scheduler_config)
        return ModelPlan(
            latent_shape=latent_shape,
            parameters=total,
            trainable=sum(p.numel() for p in denoiser.parameters() if p.requires_grad),
            bytes_per_parameter=DTYPES[self.precision].itemsize,
            activation_bytes=self._activation_bytes(latent_shape, transformer),
            sigmas=lambda num_steps: self.sigmas(scheduler, num_steps),
        )

    def load(self, device: torch.device) -> None:
        self.pipe = load_pipeline(self.pipeline_class, self.path, DTYPES[self.precision])
        self.pipe.vae.float()
        self.pipe.to(device)
        self.denoiser = self.pipe.transformer
        prepare_training(self.denoiser, self.lora)
        if self.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        self.latent_shape = self.shape_of_latents(self.denoiser.config, self.pipe.vae.config)

    def schedule(self, num_steps: int) -> Tensor:
        return self.sigmas(self.pipe.scheduler, num_steps).to(self.denoiser.device)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(num_samples, *self.latent_shape, generator=generator)
        return x.to(self.denoiser.device)

    def call_denoiser(self, hidden_states: Tensor, **inputs: Any) -> Tensor:
        """The transformer in the run's precision; float32 out."""
        dtype = DTYPES[self.precision]
        device = hidden_states.device.type
        with torch.autocast(device, dtype, enabled=self.precision != "fp32"):
            out = self.denoiser(hidden_states=hidden_states.to(dtype), return_dict=False, **inputs)
        return out[0].float()

    def save_weights(self, folder: str) -> None:
        save_weights(self.pipeline_class, self.denoiser, folder)

    def load_weights(self, folder: str) -> None:
        load_weights(self.denoiser, folder)

    def verify_weights(self, folder: str) -> float:
        fresh = self._fresh_transformer(folder).to(self.denoiser.device)
        x, cond = self.noise(2, torch.Generator().manual_seed(0)), self.encode(["a", "b"])
        sigma, mine = self.schedule(4)[1], self.denoiser
        with torch.no_grad():
            expected = self.velocity(x, sigma, cond)
            self.denoiser = fresh
            got = self.velocity(x, sigma, cond)
        self.denoiser = mine
        return float((got - expected).abs().max())

    def _fresh_transformer(self, folder: str) -> ModelMixin:
        """What a user of plain diffusers gets from `folder`."""
        if self.lora is None:
            return self.transformer_class.from_pretrained(folder, subfolder="transformer")
        others = dict.fromkeys(
            n for n in self.pipe.components if n not in ("transformer", "scheduler")
        )
        pipe: Any = load_pipeline(self.pipeline_class, self.path, DTYPES[self.precision], **others)
        pipe.load_lora_weights(folder)
        for parameter in pipe.transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return pipe.transformer

    def _activation_bytes(
        self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]
    ) -> int:
        """About 34 values per token, layer and channel; one layer where they are recomputed."""
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        layers = transformer["num_layers"] + transformer.get("num_single_layers", 0)
        layers = 1 if self.gradient_checkpointing else layers
        tokens = self.num_tokens(latent_shape, transformer)
        return 34 * tokens * width * layers * DTYPES[self.precision].itemsize

    def _config(self, part: str) -> dict[str, Any]:
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        file = Path(self.path) / part / name
        if file.is_file():
            return json.loads(file.read_text())
        wanted = self.pipeline_class.__name__
        if Path(self.path).exists():
            raise ValueError(f"{self.path} is no {wanted} folder: {part}/{name} is missing")
        try:
            return dict(self.transformer_class.load_config(self.path, subfolder=part))
        except OSError as error:
            raise ValueError(
                f"policy.path {self.path!r} is neither a folder nor a model that the hub gives: "
                + str(error).splitlines()[0]
            ) from error


def _diffusers_class(config: Mapping[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, config["_class_name"])
