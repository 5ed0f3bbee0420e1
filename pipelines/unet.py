"""Wraps the UNet of Stable Diffusion pipelines as a policy in flow coordinates."""

from collections.abc import Mapping
from math import prod
from typing import Any

from diffusers import UNet2DConditionModel
from torch import Tensor

from flowalign.types import Cond
from pipelines.base import DiffusersPolicy
from pipelines.discrete_times import flow_of, trailing_sigmas
from pipelines.guidance import guided
from pipelines.weights import Lora

LORA = Lora(rank=8, alpha=8, target_modules=("to_q", "to_k", "to_v", "to_out.0"))
"""Default adapter, rank 8. Source: diffusers' LoRA example of Diffusion-DPO.

A run file that gives some fields of `lora` gets the others from `Lora`, whose `target_modules` are
those of a transformer: give these, too.
"""


class UNetPolicy(DiffusersPolicy):
    """Wraps a variance-preserving, discrete-time diffusion model as a policy in flow coordinates.

    States are flow states, see `functional.diffusion`: whether the network predicts the noise, v or
    the data, its velocity is that of a flow, and an Euler step is the model's deterministic DDIM
    step. Times run from the last one that the model knows, sigma_max < 1, to sigma = 0, evenly
    ("trailing") whatever the scheduler's file says: a fixed first time lets `noise` draw states of
    the right scale without knowing the number of steps. Between the model's times the network gets
    fractional ones; sigmas beyond its times get the nearest.

    `cond` holds "text", the UNet's added conditions by their names, and a "_neg" entry for each of
    them that differs without the prompt.
    """

    transformer_class = UNet2DConditionModel
    part = "unet"
    state = "sample"
    max_sequence_length = 77
    """Prompt length of CLIP in tokens."""

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        if self.height % factor or self.width % factor:
            raise ValueError(
                f"size {self.width}x{self.height}: both sides must be multiples of {factor} "
                f"for {self.path}"
            )
        return transformer["in_channels"], self.height // factor, self.width // factor

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        return prod(latent_shape) // transformer["in_channels"]

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return trailing_sigmas(scheduler, num_steps)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guided(self._unguided, x, sigma.expand(len(x)), cond, self.guidance)

    def _unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        def predict(state: Tensor, time: Tensor) -> Tensor:
            return self.call_denoiser(
                state,
                timestep=time,
                encoder_hidden_states=cond["text"],
                added_cond_kwargs={name: value for name, value in cond.items() if name != "text"},
            )

        return flow_of(self.pipe.scheduler, predict, x, sigma)
