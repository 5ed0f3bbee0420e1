"""Wraps the UNet of Stable Diffusion pipelines as a policy in flow coordinates."""

from math import prod
from typing import Any

from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.codec import Codec
from pipelines.network.weights import Lora
from pipelines.parts.discrete_times import predict_flow, trailing_sigmas
from pipelines.parts.folder import Config
from pipelines.parts.guidance import guide
from pipelines.parts.packing import grid_of
from pipelines.policy import DiffusersPolicy, Precision

LORA = Lora(rank=8, alpha=8, target_modules=("to_q", "to_k", "to_v", "to_out.0"))
"""Default adapter, rank 8. Source: diffusers' LoRA example of Diffusion-DPO."""


class UNetPolicy(DiffusersPolicy):
    """Wraps a variance-preserving, discrete-time diffusion model as a policy in flow coordinates.

    States are flow states, see `functional.diffusion`. The network may predict the noise, v or the
    data; its output is converted to the velocity of a flow. An Euler step equals the model's
    deterministic DDIM step. Timesteps run evenly ("trailing") from the model's last one, sigma_max
    < 1, to sigma = 0, regardless of the scheduler's file. With a fixed first timestep, `noise` can
    draw states of the right scale without knowing the number of steps. Between the model's
    timesteps the network receives fractional ones; sigmas outside their range get the nearest.

    `cond` holds "text", the UNet's added conditions by their names, and a "_neg" entry for each
    condition that differs without the prompt.
    """

    transformer_class = "UNet2DConditionModel"
    default_lora = LORA
    denoiser_name = "unet"
    latents_argument = "sample"

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        guidance: Guidance = 7.5,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
    ):
        super().__init__(
            *(path, Codec(height, width), lora, precision, guidance),
            gradient_checkpointing=gradient_checkpointing,
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        factor = 2 ** (len(vae["block_out_channels"]) - 1)
        return transformer["in_channels"], *grid_of(self, factor)

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return prod(latent_shape) // transformer["in_channels"]

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        return trailing_sigmas(scheduler, num_steps)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self._unguided, x, sigma.expand(len(x)), cond, self.guidance)

    def _unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        def predict(state: Tensor, time: Tensor) -> Tensor:
            return self.call_denoiser(
                state,
                timestep=time,
                encoder_hidden_states=cond["text"],
                added_cond_kwargs={name: value for name, value in cond.items() if name != "text"},
            )

        return predict_flow(self.pipe.scheduler, predict, x, sigma)
