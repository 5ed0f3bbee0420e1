"""Wraps HunyuanVideo (text to video) as a flowalign policy."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from diffusers import HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.base import DTYPES, Precision
from pipelines.framewise import windows
from pipelines.hunyuan_base import HunyuanBase
from pipelines.video import Memory, Video
from pipelines.weights import Lora


class HunyuanVideo(HunyuanBase):
    """Wraps a `HunyuanVideoPipeline` folder or hub identifier as a text-to-video policy.

    `embedded_guidance` is an input of the network, which was distilled to imitate that guidance
    scale; a model without the input takes None. `guidance` above 1 adds true classifier-free
    guidance away from the empty prompt, at two evaluations per velocity. Prompts are placed in the
    pipeline's own template.

    The pipeline decodes windows of 5 latent frames and blends them where they overlap;
    `memory.decode_frames` sets another size, and windows hold one latent frame more than that.
    """

    pipeline_class = HunyuanVideoPipeline
    transformer_class = HunyuanVideoTransformer3DModel

    def __init__(
        self,
        path: str,
        video: Video,
        embedded_guidance: Guidance | None = 6.0,
        guidance: Guidance = 1.0,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 256,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        super().__init__(path, video, guidance, lora, precision, max_sequence_length, memory)
        self.embedded_guidance = embedded_guidance

    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        if transformer["guidance_embeds"] == (self.embedded_guidance is None):
            wanted = "a number" if transformer["guidance_embeds"] else "None"
            raise ValueError(
                f"embedded_guidance is {self.embedded_guidance}; {self.path} needs {wanted}"
            )
        return super().shape_of_latents(transformer, vae)

    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        text, pooled, mask = self.pipe.encode_prompt(
            prompts,
            device=self.denoiser.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": text, "pooled": pooled, "mask": mask}

    def unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        guidance, dtype = self.embedded_guidance, DTYPES[self.precision]
        if guidance is not None:  # rounded like in the pipeline, and so is the time
            guidance = 1000 * torch.full((len(x),), guidance, dtype=dtype, device=x.device)
        return self.call_denoiser(
            x,
            timestep=(1000 * sigma).to(dtype),
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            pooled_projections=cond["pooled"],
            guidance=guidance,
        )

    def set_up(self, vae: Any) -> None:
        super().set_up(vae)
        vae.use_framewise_decoding = self.memory.decode_frames is None

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        vae = self.pipe.vae
        size = self.memory.decode_frames or z.shape[2]
        return windows(lambda z: vae.decode(z).sample, z, size, vae.temporal_compression_ratio)
