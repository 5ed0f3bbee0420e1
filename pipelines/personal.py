"""Wraps Stable Diffusion with user conditioning, for preferences that differ between people."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from safetensors.torch import save_file
from torch import Tensor, nn

from flowalign.types import (
    Cond,
    Guidance,
    ModelPlan,
    NonNegativeFloat,
    Personal,
    Policy,
    PositiveInt,
    Request,
    plain_requests,
)
from flowalign.utils.files import bundled
from pipelines.base import DTYPES, Precision
from pipelines.folder import config_of
from pipelines.sd15 import SD15
from pipelines.tensors import existing, read_tensors, same_shapes

FILE = "user_attention.safetensors"
"""File that `save_weights` writes: keys and values of the user attention, by layer of the UNet."""


class PersonalSD15(Policy, Personal):
    """Extends `SD15` with attention to the user beside the prompt; only this part is trained.

    Every cross-attention becomes Attn(Q, K, V) + strength Attn(Q, u W_k, u W_v), where u is the
    embedding of a user and W_v starts at 0, so the untrained policy is the base model. `users` is a
    safetensors file of embeddings [tokens, dim] by user. The empty user "" and users that the file
    lacks get u = 0, for which the policy equals the base model whatever was learned; so does the
    unconditional half of guidance. `strength` from 0 to 1 interpolates from the base model to the
    user's.

    Source: PPD, arXiv:2501.06655, known from secondary sources, where u is the hidden state of a
    vision-language model that sees four of a user's choices, and the model is Stable Cascade.
    """

    def __init__(
        self,
        path: str,
        users: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        guidance: Guidance = 7.5,
        strength: NonNegativeFloat = 1.0,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
    ):
        self.base = SD15(path, height, width, guidance, None, precision, gradient_checkpointing)
        self.users, self.strength = bundled(users), strength
        self.guidance, self.precision = guidance, precision
        self.evaluations_per_velocity = self.base.evaluations_per_velocity

    def plan(self) -> ModelPlan:
        config = config_of(SD15.pipeline_class, self.base.path, "unet")
        dim = next(iter(embeddings(self.users).values())).shape[1]
        with torch.device("meta"):
            unet: Any = UNet2DConditionModel.from_config(config)
            attend_to_users(unet, dim, self.strength)
        trainable = sum(p.numel() for p in _attention(unet).values())
        return replace(self.base.plan(), trainable=trainable)

    def load(self, device: torch.device) -> None:
        self.embeddings = {u: e.to(device) for u, e in embeddings(self.users).items()}
        self.base.load(device)
        self.denoiser = self.base.denoiser
        self.denoiser.requires_grad_(False).to(DTYPES[self.precision])
        self.nobody = torch.zeros_like(next(iter(self.embeddings.values())))
        attend_to_users(self.denoiser, self.nobody.shape[1], self.strength)

    def encode(self, requests: Sequence[Request]) -> Cond:
        return self.with_users(self._base().encode(requests), [""] * len(requests))

    def with_users(self, cond: Cond, users: Sequence[str]) -> Cond:
        """Add one user per row to the conditions; unknown users get the zero embedding."""
        found = [self.embeddings.get(user, self.nobody) for user in users]
        return {**cond, "user": torch.stack(found)}

    def check_user(self, user: str) -> None:
        if user not in (known := embeddings(self.users)):
            raise ValueError(
                f"user {user!r} has no embedding in {self.users}; it has those of "
                f"{', '.join(sorted(known)[:8])}{' and others' * (len(known) > 8)}"
            )

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        told = {name: value for name, value in cond.items() if name != "user"}
        told["image_embeds"] = cond["user"]
        told["image_embeds_neg"] = torch.zeros_like(cond["user"])
        return self._base().velocity(x, sigma, told)

    def schedule(self, num_steps: int) -> Tensor:
        return self.base.schedule(num_steps)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.base.noise(num_samples, generator)

    def decode(self, x: Tensor) -> Tensor:
        return self.base.decode(x)

    def embed(self, media: Tensor) -> Tensor:
        return self.base.embed(media)

    def encoders(self) -> tuple[str, str]:
        media, text = self._base().encoders()
        return media, f"{text}-{tuple(self.nobody.shape)}"

    def save_weights(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {name: value.contiguous() for name, value in _attention(self.denoiser).items()}
        save_file(state, Path(folder) / FILE)

    def load_weights(self, folder: str) -> None:
        file = existing(Path(folder) / FILE)
        state = read_tensors(file)
        same_shapes(state, _attention(self.denoiser), file)
        self.denoiser.load_state_dict(state, strict=False)

    def verify_weights(self, folder: str) -> float:
        fresh = copy.copy(self)
        fresh.base = copy.copy(self.base)
        fresh.load(self.nobody.device)
        fresh.load_weights(folder)
        x, sigma = self.noise(2, torch.Generator().manual_seed(0)), self.schedule(4)[1]
        cond = self.with_users(
            self.encode(plain_requests(["a", "b"])), ["", next(iter(self.embeddings))]
        )
        with torch.no_grad():
            difference = fresh.velocity(x, sigma, cond) - self.velocity(x, sigma, cond)
        return float(difference.abs().max())

    def _base(self) -> SD15:
        """Return the base with this policy's network and guidance; self may itself be a copy."""
        base = copy.copy(self.base)
        base.denoiser, base.guidance = self.denoiser, self.guidance
        return base


class _Users(nn.Module):
    """Passes user embeddings through where a UNet expects an image-embedding projection."""

    def forward(self, image_embeds: Tensor) -> list[Tensor]:
        return [image_embeds]


def attend_to_users(unet: Any, dim: int, strength: float) -> None:
    """Add trainable keys and values for users to every cross-attention, with the values at 0.

    The keys are drawn from a fixed seed, so every load gets the same ones.
    """
    processors, device = dict(unet.attn_processors), unet.device
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        for name in processors:
            attention = unet.get_submodule(name.removesuffix(".processor"))
            if attention.is_cross_attention:
                added = IPAdapterAttnProcessor2_0(attention.inner_dim, dim, (1,), strength)
                added.to_v_ip.load_state_dict({"0.weight": torch.zeros(attention.inner_dim, dim)})
                processors[name] = added.to(device)
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = _Users()
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")


def embeddings(file: str) -> dict[str, Tensor]:
    """Read the embeddings by user, in float32.

    Raises:
        ValueError: they do not all have one shape [tokens, dim].
    """
    found = {user: e.float() for user, e in read_tensors(existing(Path(file))).items()}
    shapes = {tuple(e.shape) for e in found.values()}
    if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes):
        raise ValueError(
            f"{file} must hold embeddings of one shape [tokens, dim]; it has {sorted(shapes)[:4]}"
        )
    return found


def _attention(unet: nn.Module) -> Mapping[str, Tensor]:
    return {name: p for name, p in unet.state_dict().items() if ".processor.to_" in name}
