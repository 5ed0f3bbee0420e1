"""Stable Diffusion 3 and 3.5 of any size as a flowalign policy."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor

from flowalign.types import Cond, ModelPlan, Policy
from pipelines.weights import Lora, load_pipeline, load_weights, prepare_training, save_weights

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SD3(Policy):
    """Text-to-image policy around a `StableDiffusion3Pipeline` folder or hub identifier.

    The constructor is cheap; `load` reads the weights. With `lora: null` the whole transformer is trained.
    `guidance` above 1 makes the guided velocity the policy, at two evaluations each.
    """

    def __init__(
        self,
        path: str,
        height: int = 512,
        width: int = 512,
        guidance: float = 4.5,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Literal["fp32", "bf16", "fp16"] = "bf16",
        max_sequence_length: int = 256,
        gradient_checkpointing: bool = False,
    ):
        self.path, self.height, self.width = path, height, width
        self.guidance, self.lora, self.precision = guidance, lora, precision
        self.max_sequence_length = max_sequence_length
        self.gradient_checkpointing = gradient_checkpointing
        self.evaluations_per_velocity = 2 if guidance > 1 else 1

    def plan(self) -> ModelPlan:
        """Sizes from the configuration files alone, weights left where they are."""
        transformer_config = self._config("transformer")
        with torch.device("meta"):
            denoiser = SD3Transformer2DModel.from_config(transformer_config)
            total = sum(p.numel() for p in denoiser.parameters())
            prepare_training(denoiser, self.lora)
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._config("scheduler"))
        return ModelPlan(
            latent_shape=self._latent_shape(transformer_config, self._config("vae")),
            parameters=total,
            trainable=sum(p.numel() for p in denoiser.parameters() if p.requires_grad),
            bytes_per_parameter=PRECISIONS[self.precision].itemsize,
            activation_bytes=self._activation_bytes(transformer_config),
            sigmas=lambda num_steps: _sigmas(scheduler, num_steps),
        )

    def load(self, device: torch.device) -> None:
        self.pipe: StableDiffusion3Pipeline = load_pipeline(
            StableDiffusion3Pipeline, self.path, PRECISIONS[self.precision]
        )
        self.pipe.set_progress_bar_config(disable=True)
        self.pipe.vae.float()
        self.pipe.to(device)
        self.denoiser = self.pipe.transformer
        prepare_training(self.denoiser, self.lora)
        if self.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        self.latent_shape = self._latent_shape(self.denoiser.config, self.pipe.vae.config)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Cond:
        guided = self.guidance > 1
        text, text_neg, pooled, pooled_neg = self.pipe.encode_prompt(
            list(prompts), None, None, do_classifier_free_guidance=guided,
            max_sequence_length=self.max_sequence_length, device=self.denoiser.device,
        )  # fmt: skip
        cond = {"text": text, "pooled": pooled}
        return cond | {"text_neg": text_neg, "pooled_neg": pooled_neg} if guided else cond

    def schedule(self, num_steps: int) -> Tensor:
        return _sigmas(self.pipe.scheduler, num_steps).to(self.denoiser.device)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(num_samples, *self.latent_shape, generator=generator)
        return x.to(self.denoiser.device)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        if self.guidance <= 1:
            return self._denoise(x, sigma, cond["text"], cond["pooled"])
        text = torch.cat([cond["text_neg"], cond["text"]])
        pooled = torch.cat([cond["pooled_neg"], cond["pooled"]])
        v_neg, v = self._denoise(torch.cat([x, x]), sigma, text, pooled).chunk(2)
        return v_neg + self.guidance * (v - v_neg)

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        vae = self.pipe.vae
        image = vae.decode(x / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
        return (image / 2 + 0.5).clamp(0, 1)[:, None]

    def save_weights(self, folder: str) -> None:
        save_weights(StableDiffusion3Pipeline, self.denoiser, folder)

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

    def _fresh_transformer(self, folder: str) -> SD3Transformer2DModel:
        """What a user of plain diffusers gets from `folder`."""
        if self.lora is None:
            return SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")
        absent = ("vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "tokenizer_2", "tokenizer_3")
        pipe = load_pipeline(
            StableDiffusion3Pipeline, self.path, PRECISIONS[self.precision], **dict.fromkeys(absent)
        )
        pipe.load_lora_weights(folder)
        for parameter in pipe.transformer.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return pipe.transformer

    def _denoise(self, x: Tensor, sigma: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        dtype = PRECISIONS[self.precision]
        with torch.autocast(x.device.type, dtype, enabled=self.precision != "fp32"):
            return self.denoiser(
                hidden_states=x.to(dtype),
                timestep=(sigma * 1000).expand(len(x)),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                return_dict=False,
            )[0].float()

    def _latent_shape(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, int, int]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        unit = factor * transformer["patch_size"]
        if self.height % unit or self.width % unit:
            raise ValueError(
                f"size {self.width}x{self.height}: both sides must be multiples of {unit} for {self.path}"
            )
        return transformer["in_channels"], self.height // factor, self.width // factor

    def _activation_bytes(self, transformer: Mapping[str, Any]) -> int:
        """About 34 values per token, layer and channel (both attention and feed-forward), one layer if recomputed."""
        _, h, w = self._latent_shape(transformer, self._config("vae"))
        tokens = h * w // transformer["patch_size"] ** 2 + 77 + self.max_sequence_length
        width = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        layers = 1 if self.gradient_checkpointing else transformer["num_layers"]
        return 34 * tokens * width * layers * PRECISIONS[self.precision].itemsize

    def _config(self, part: str) -> dict:
        names = ("config.json", "scheduler_config.json")
        files = [Path(self.path) / part / name for name in names]
        for file in files:
            if file.is_file():
                return json.loads(file.read_text())
        if Path(self.path).exists():
            raise ValueError(f"{self.path} is no StableDiffusion3Pipeline folder: {files[0]} is missing")
        cls = {"transformer": SD3Transformer2DModel, "scheduler": FlowMatchEulerDiscreteScheduler}
        return dict((cls.get(part) or SD3Transformer2DModel).load_config(self.path, subfolder=part))


def _sigmas(scheduler: FlowMatchEulerDiscreteScheduler, num_steps: int) -> Tensor:
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas.clone()
