"""Wraps HunyuanVideo (text to video) as a flowalign policy."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.families.hunyuan_base import HunyuanPolicy
from pipelines.network.weights import DTYPES, Lora
from pipelines.parts.denoiser_inputs import check_embedded_guidance
from pipelines.parts.folder import Config
from pipelines.parts.framewise import decode_windows
from pipelines.policy import Precision
from pipelines.video import Memory, Video, VideoCodec


class HunyuanCodec(VideoCodec):
    """Encodes clips, and decodes them in windows of frames."""

    def set_up(self) -> None:
        super().set_up()
        self.vae.use_framewise_decoding = self.memory.decode_frames is None

    def pieces(self, z: Tensor) -> Iterator[Tensor]:
        vae, size = self.vae, self.memory.decode_frames or z.shape[2]
        return decode_windows(
            lambda z: vae.decode(z).sample, z, size, vae.temporal_compression_ratio
        )


class HunyuanVideo(HunyuanPolicy):
    """Wraps a `HunyuanVideoPipeline` folder or hub identifier as a text-to-video policy.

    `embedded_guidance` is an input of the network, which was distilled to imitate that guidance
    scale; a model without this input takes None. `guidance` above 1 adds true classifier-free
    guidance away from the empty prompt, at two evaluations per velocity. Prompts are placed in the
    pipeline's own template.

    The pipeline decodes windows of 5 latent frames and blends their overlaps.
    `memory.decode_frames` sets another size; a window holds one latent frame more than this size.
    """

    pipeline_class = "HunyuanVideoPipeline"
    transformer_class = "HunyuanVideoTransformer3DModel"

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
        super().__init__(
            *(path, HunyuanCodec(video, memory), lora, precision, guidance, max_sequence_length),
            *(memory.gradient_checkpointing, memory.offload_text),
        )
        self.video = video
        self.embedded_guidance = embedded_guidance

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        check_embedded_guidance(self.embedded_guidance, transformer, self.path)
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
        if guidance is not None:  # rounded as in the pipeline, like the time
            guidance = 1000 * torch.full((len(x),), guidance, dtype=dtype, device=x.device)
        return self.call_denoiser(
            x,
            timestep=(1000 * sigma).to(dtype),
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            pooled_projections=cond["pooled"],
            guidance=guidance,
        )
