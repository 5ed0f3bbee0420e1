"""Wraps HunyuanVideo 1.0 and 1.5 (text to video), and 1.5 image-to-video, as flowalign policies."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, InputSpec, PositiveInt, Request, prompts_of
from pipelines.network.weights import DTYPES, Lora, Precision
from pipelines.parts.encoding import crop_first_frames, decode_windows
from pipelines.parts.evaluation import guide, read_with_negatives
from pipelines.parts.folder import Config, check_embedded_guidance
from pipelines.video import Memory, Video, VideoCodec, VideoPolicy


class HunyuanPolicy(VideoPolicy):
    """Wraps a HunyuanVideo pipeline, which guides away from the empty prompt.

    Subclasses define `read`, which encodes prompts, and `unguided`, which evaluates the network.
    """

    unit_noise = True

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        frames, pixels = vae["temporal_compression_ratio"], vae["spatial_compression_ratio"]
        return self.shape_of_clip(vae["latent_channels"], frames, pixels, transformer)

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        """Count the tokens of video and text, which share one attention."""
        text = self.max_sequence_length + self.extra_text_tokens
        return super().num_tokens(latent_shape, transformer) + text

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        """Return the sigmas that the scheduler shifts from evenly spaced ones."""
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, num_steps + 1)[:-1])
        return scheduler.sigmas.clone()

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        with self.text_encoder.on_device():
            return read_with_negatives(self.read, prompts_of(requests), "", self.guidance > 1)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return guide(self.unguided, x, sigma.expand(len(x)), cond, self.guidance)

    @abstractmethod
    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        """Encode prompts, one row each."""

    @abstractmethod
    def unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Evaluate the network on x with the conditions without suffix."""


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
    fixed = dict.fromkeys(["transformer.image_condition_type"])

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
        codec = HunyuanCodec(video, memory)
        super().__init__(path, codec, lora, precision, guidance, max_sequence_length)
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


_GUIDER = {
    "guider._class_name": "ClassifierFreeGuidance",
    "guider.guidance_rescale": 0.0,
    "guider.use_original_formulation": False,
    "guider.start": 0.0,
    "guider.stop": 1.0,
}
"""Guidance settings of a folder with the only values that this policy supports."""


class HunyuanVideo15(HunyuanPolicy):
    """Wraps a `HunyuanVideo15Pipeline` folder or hub identifier as a text-to-video policy.

    `guidance` replaces the scale in the folder's guider. Above 1 it makes the guided velocity the
    policy, at two evaluations each. The second text encoder receives only text in double quotes,
    which is text to render in the video. The autoencoder takes one clip at a time. Its attention
    mask has one row and one column per latent of a tile over all frames, so full-size clips need
    `memory.tile`.

    The pipeline has no adapter loader. Load saved adapters by
    pipe.transformer.load_lora_adapter(folder, prefix="transformer",
    weight_name="pytorch_lora_weights.safetensors").
    """

    pipeline_class = "HunyuanVideo15Pipeline"
    fixed = _GUIDER | {"transformer.use_meanflow": False}
    transformer_class = "HunyuanVideo15Transformer3DModel"
    extra_text_tokens = 256 + 729  # of text to render and of the first frame, also if there is none

    def __init__(
        self,
        path: str,
        video: Video,
        guidance: Guidance = 6.0,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 1000,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ):
        codec = VideoCodec(video, memory, one_by_one=True)
        super().__init__(path, codec, lora, precision, guidance, max_sequence_length)
        codec.refuse_decode_frames(
            "the decoder of HunyuanVideo 1.5 attends over all frames: use memory.tile"
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        pictures = "image_encoder" in self.folder.components()
        if pictures and not self.input_spec.references[1]:
            raise ValueError(
                f"{self.path} has image_encoder, so it is an image-to-video model: use "
                "pipelines.HunyuanVideo15I2V"
            )
        return super().shape_of_latents(transformer, vae)

    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        self.pipe.tokenizer_max_length = self.max_sequence_length
        found = self.pipe.encode_prompt(
            prompts,
            device=self.denoiser.device,
            dtype=DTYPES[self.precision],
            batch_size=len(prompts),
        )
        return dict(zip(("text", "mask", "glyphs", "glyph_mask"), found, strict=True))

    def unguided(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        frame, features = self.first_frame(x, cond)
        return self.call_denoiser(
            torch.cat([x, frame], 1),
            timestep=(1000 * sigma).to(DTYPES[self.precision]),  # rounded as in the pipeline
            image_embeds=features.to(DTYPES[self.precision]),
            encoder_hidden_states=cond["text"],
            encoder_attention_mask=cond["mask"],
            encoder_hidden_states_2=cond["glyphs"],
            encoder_attention_mask_2=cond["glyph_mask"],
        )

    def first_frame(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:  # noqa: ARG002 (HunyuanVideo15I2V uses it)
        """Return latents and mask of the first frame, and its features; zeros if there is none."""
        features = self.pipe.vision_num_semantic_tokens, self.pipe.vision_states_dim
        return x.new_zeros(len(x), 1 + x.shape[1], *x.shape[2:]), x.new_zeros(len(x), *features)


class HunyuanVideo15I2V(HunyuanVideo15):
    """Wraps a `HunyuanVideo15ImageToVideoPipeline` folder or hub identifier as a policy.

    The single reference of a request is the first frame. It is centre-cropped to the aspect ratio
    of the video and resized to its size; the pipeline itself uses the nearest size of its buckets.
    All latent frames are denoised, including the first, and the network receives the given frame in
    addition to the state. In addition to the text, `cond` holds "first", the latents of the frame,
    and its "features". In all other respects the class equals `HunyuanVideo15`.
    """

    pipeline_class = "HunyuanVideo15ImageToVideoPipeline"
    input_spec = InputSpec(references=(1, 1), kind="first_frame")

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        cond = super().encode(requests)
        frames, rows = crop_first_frames(requests, self.width / self.height)
        processor, device = self.pipe.video_processor, self.pipe.vae.device
        size = {"height": self.height, "width": self.width}
        sized = [processor.resize(one, **size, resize_mode="crop") for one in frames]
        pixels = [processor.preprocess(one, **size)[:, :, None].to(device) for one in sized]
        dtype = DTYPES[self.precision]
        with self.text_encoder.on_device():
            features = [self.pipe.encode_image(one, 1, device, dtype) for one in sized]
        first = torch.cat([self.codec.encode(one) for one in pixels])
        return {**cond, "first": first[rows], "features": torch.cat(features)[rows]}

    def first_frame(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        frame, _ = super().first_frame(x, cond)
        frame[:, :-1, :1], frame[:, -1:, :1] = cond["first"], 1.0
        return frame, cond["features"]
