"""Wraps HunyuanVideo 1.5 (text to video) as a flowalign policy."""

import torch
from torch import Tensor

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.families.hunyuan_base import HunyuanPolicy
from pipelines.network.weights import DTYPES, Lora
from pipelines.parts.folder import Config
from pipelines.policy import Precision
from pipelines.video import Memory, Video, VideoCodec, refuse_decode_frames

_FIXED = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
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
        super().__init__(
            *(
                path,
                VideoCodec(video, memory, one_by_one=True),
                lora,
                precision,
                guidance,
                max_sequence_length,
            ),
            *(memory.gradient_checkpointing, memory.offload_text),
        )
        self.video = video
        reason = "the decoder of HunyuanVideo 1.5 attends over all frames: use memory.tile"
        refuse_decode_frames(memory, reason)

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        guider = self.folder.config("guider")
        fixed = {"_class_name": "ClassifierFreeGuidance", **_FIXED}
        other = {name: guider.get(name, value) for name, value in fixed.items()}
        if strange := sorted(name for name, value in fixed.items() if other[name] != value):
            raise ValueError(
                f"the guider of {self.path} has {strange[0]} {other[strange[0]]}; "
                f"HunyuanVideo15 computes {fixed[strange[0]]}"
            )
        pictures = "image_encoder" in self.folder.components()
        if pictures and not self.input_spec.references[1]:
            raise ValueError(
                f"{self.path} has image_encoder, so it is an image-to-video model: use "
                "pipelines.HunyuanVideo15I2V"
            )
        if transformer.get("use_meanflow"):
            raise ValueError(
                f"the network of {self.path} also takes the next timestep (use_meanflow), which is "
                "not supported: use a folder without it"
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
