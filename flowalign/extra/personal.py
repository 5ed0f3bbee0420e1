"""Wraps Stable Diffusion with user conditioning, for preferences that differ between users."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.extra.extended_policy import ExtendedPolicy
from flowalign.types import Cond, ModelPlan, Request, UserConditioning
from flowalign.utils.files import bundled
from flowalign.utils.imports import LazyModule
from flowalign.utils.ranges import Guidance, NonNegativeFloat, PositiveInt
from pipelines.families.unet import SD15, SDXL, UNetPolicy
from pipelines.network.weights import DTYPES
from pipelines.parts.libraries import diffusers
from pipelines.parts.tensors import read_tensors, require_file
from pipelines.policy import Precision

_processors = LazyModule("diffusers.models.attention_processor")


class UserEmbeddingFile(UserConditioning):
    """Embeddings of users from a file; unknown users get zeros."""

    embeddings: Mapping[str, Tensor]
    """Embeddings by user, set by `load`; the key "" holds the embedding of unknown users."""

    def __init__(self, file: str):
        self.file = file

    def read(self) -> dict[str, Tensor]:
        """Read the embeddings by user in float32, and add zeros for "".

        Raises:
            ValueError: The embeddings do not all have one shape [tokens, dim].
        """
        tensors = read_tensors(require_file(Path(self.file)))
        shapes = {tuple(e.shape) for e in tensors.values()}
        if len(shapes) != 1 or any(len(shape) != 2 for shape in shapes):
            raise ValueError(
                f"{self.file} must hold embeddings of one shape [tokens, dim]; "
                f"it has {sorted(shapes)[:4]}"
            )
        return {user: e.float() for user, e in tensors.items()} | {"": torch.zeros(*shapes.pop())}

    def load(self, device: torch.device) -> None:
        """Load the embeddings to a device."""
        self.embeddings = {user: e.to(device) for user, e in self.read().items()}

    @property
    def known(self) -> list[str]:
        """Return the users that have an embedding."""
        return [user for user in self.embeddings if user]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of an embedding."""
        return tuple(self.embeddings[""].shape)

    def add_users(self, cond: Cond, users: Sequence[str]) -> Cond:
        unknown = self.embeddings[""]
        rows = [self.embeddings.get(user, unknown) for user in users]
        return {**cond, "user": torch.stack(rows)}

    def check_user(self, user: str) -> None:
        known = sorted(self.read().keys() - {""})
        if user not in known:
            raise ValueError(
                f"user {user!r} has no embedding in {self.file}; known are "
                f"{', '.join(known[:8])}{' and others' * (len(known) > 8)}"
            )


class PersonalSD15(ExtendedPolicy):
    """Extends `SD15` with attention to the user, and trains only this part.

    Every cross-attention becomes Attn(Q, K, V) + strength Attn(Q, u W_k, u W_v), where u is the
    embedding of a user. W_v starts at 0, so the untrained policy is the base model. `users` is a
    safetensors file of embeddings [tokens, dim] by user. The empty user "" and users that are not
    in the file get u = 0, which reduces the policy to the base model after any training. The
    unconditional half of guidance also uses u = 0. `strength` from 0 to 1 interpolates from the
    base model to the user's.

    Source: PPD, arXiv:2501.06655, known from secondary sources. There u is the hidden state of a
    vision-language model that sees four choices of a user, and the model is Stable Cascade.
    """

    weights_file = "user_attention.safetensors"
    """File of the keys and values of the user attention, by layer of the UNet."""
    user_conditioning: UserEmbeddingFile

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
        settings = path, height, width, guidance, None, precision, gradient_checkpointing
        self.extend(partial(SD15, *settings), users, strength)

    def extend(self, make_base: Callable[[], UNetPolicy], users: str, strength: float) -> None:
        """Initialize with a base model, the file of users and the strength of their attention."""
        super().__init__(make_base)
        self.user_conditioning = UserEmbeddingFile(  # pyright: ignore[reportIncompatibleVariableOverride]
            bundled(users)
        )
        self.strength = strength

    def plan(self) -> ModelPlan:
        config = self.base.folder.config("unet")
        dim = self.user_conditioning.read()[""].shape[1]
        with torch.device("meta"):
            unet: Any = diffusers.UNet2DConditionModel.from_config(config)
            attend_to_users(unet, dim, self.strength)
        trainable = sum(p.numel() for p in _attention(unet).values())
        return replace(self.base.plan(), trainable=trainable)

    def load(self, device: torch.device) -> None:
        self.user_conditioning.load(device)
        self.base.load(device)
        self.denoiser = self.base.denoiser
        self.denoiser.requires_grad_(False).to(DTYPES[self.precision])
        attend_to_users(self.denoiser, self.user_conditioning.shape[1], self.strength)

    def encode(self, requests: Sequence[Request]) -> Cond:
        return self.user_conditioning.add_users(super().encode(requests), [""] * len(requests))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        inputs = {name: value for name, value in cond.items() if name != "user"}
        inputs["image_embeds"] = cond["user"]
        inputs["image_embeds_neg"] = torch.zeros_like(cond["user"])
        return self.current_base().velocity(x, sigma, inputs)

    def encoders(self) -> tuple[str, str]:
        media, text = super().encoders()
        return media, f"{text}-{self.user_conditioning.shape}"

    def trained_tensors(self) -> Mapping[str, Tensor]:
        return _attention(self.denoiser)

    def probe_conditioning(self) -> Cond:
        return self.user_conditioning.add_users(
            super().probe_conditioning(), ["", self.user_conditioning.known[0]]
        )


class PersonalSDXL(PersonalSD15):
    """Extends `SDXL` with attention to the user, and trains only this part.

    Settings and files are those of `PersonalSD15`.

    Source: PPD, arXiv:2501.06655, known from secondary sources.
    """

    def __init__(
        self,
        path: str,
        users: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 5.0,
        strength: NonNegativeFloat = 1.0,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
    ):
        settings = path, height, width, guidance, None, precision, gradient_checkpointing
        self.extend(partial(SDXL, *settings), users, strength)


class _Users(nn.Module):
    """Passes user embeddings through where a UNet expects an image-embedding projection."""

    def forward(self, image_embeds: Tensor) -> list[Tensor]:
        return [image_embeds]


def attend_to_users(unet: Any, dim: int, strength: float) -> None:
    """Add trainable keys and values for users to every cross-attention, with the values at 0.

    The keys are drawn from a fixed seed, so every load gets the same ones.
    """
    processors, device = dict(unet.attn_processors), unet.device
    attend = _processors.IPAdapterAttnProcessor2_0
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        for name in processors:
            attention = unet.get_submodule(name.removesuffix(".processor"))
            if attention.is_cross_attention:
                added = attend(attention.inner_dim, dim, (1,), strength)
                added.to_v_ip.load_state_dict({"0.weight": torch.zeros(attention.inner_dim, dim)})
                processors[name] = added.to(device)
    unet.set_attn_processor(processors)
    unet.encoder_hid_proj = _Users()
    unet.register_to_config(encoder_hid_dim_type="ip_image_proj")


def _attention(unet: nn.Module) -> Mapping[str, Tensor]:
    return {name: p for name, p in unet.state_dict().items() if ".processor.to_" in name}
