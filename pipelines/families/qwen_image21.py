"""Wraps Qwen-Image 2.1 as a flowalign policy: no padding, and images with an alpha channel."""

from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowalign.types import Cond, Guidance, PositiveInt
from pipelines.codec import SingleFrameCodec
from pipelines.families.qwen_image import QwenImage
from pipelines.network.schedules import round_times
from pipelines.network.weights import Lora
from pipelines.parts.encoding import pad_texts
from pipelines.parts.folder import Config
from pipelines.parts.packing import grid_of
from pipelines.parts.rows import evaluate_by_kind, read_once
from pipelines.policy import Precision

LORA = Lora(target_modules=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"))
"""Default adapter: attention, which has one stream in this network."""


class AlphaCodec(SingleFrameCodec):
    """Blends decoded images over white by their alpha channel, and encodes images as opaque."""

    def decode(self, x: Tensor) -> Tensor:
        colours, alpha = super().decode(x).split([3, 1], dim=2)
        return alpha * colours + 1 - alpha

    def encode(self, pixels: Tensor) -> Tensor:
        return super().encode(pad(pixels, (0, 0, 0, 0, 0, 1), value=1.0))  # opaque


class QwenImage21(QwenImage):
    """Wraps a `QwenImage21Pipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each, without
    restoring its norm. In this network the position of an image follows the padded text, so in the
    pipeline the output for a prompt depends on the longest prompt of the call. This policy pads
    nothing. It evaluates prompts of different lengths in separate calls. Prompts that are longer
    than `max_sequence_length` raise ValueError, because the pipeline truncates nothing.

    Decoded images are blended over white by their alpha channel; images are encoded as opaque.
    """

    pipeline_class = "QwenImage21Pipeline"
    transformer_class = "QwenImage21Transformer2DModel"
    default_lora = LORA
    no_features = "evaluates prompts of different lengths separately"
    codec_class = AlphaCodec

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 1.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        super().__init__(
            *(path, height, width, guidance, lora, precision),
            *(max_sequence_length, gradient_checkpointing),
        )

    def shape_of_latents(
        self,
        transformer: Config,  # noqa: ARG002
        vae: Config,
    ) -> tuple[int, ...]:
        if self.folder.setting("sample_sigmas"):
            raise ValueError(
                f"{self.path} has fixed sigmas (sample_sigmas), so it is distilled to a few steps: "
                "train the undistilled model"
            )
        rows, columns = grid_of(self, 2 ** (len(vae["temperal_downsample"]) + 1))
        self.grid = 2 * rows, 2 * columns  # one token per latent; four take one text position
        return vae["z_dim"], *self.grid

    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        texts = [self.pipe.encode_prompt(p, device=self.denoiser.device)[0][0] for p in prompts]
        longest = self.max_sequence_length
        for prompt, text in zip(prompts, texts, strict=True):
            if len(text) > longest:
                raise ValueError(
                    f"{prompt!r} has {len(text)} tokens; policy.max_sequence_length is {longest}"
                )
        return pad_texts(texts, longest)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return evaluate_by_kind(super().velocity, cond["length"], x, sigma, cond)

    def guide(self, v: Tensor, v_neg: Tensor) -> Tensor:
        return v_neg + self.guidance * (v - v_neg)

    def evaluate(self, x: Tensor, sigma: Tensor, cond: Cond, ending: str) -> Tensor:
        length, tokens = read_once(cond[f"length{ending}"])[0], prod(self.grid)
        pictures = torch.arange(length + tokens // 4, device=x.device) >= length
        v = self.call_denoiser(
            x.flatten(2).mT,
            timestep=round_times(sigma, len(x), self.precision),
            encoder_hidden_states=cond[f"text{ending}"][:, :length],
            img_shapes=[[(1, *self.grid)]] * len(x),
            img_mask=pictures.expand(len(x), -1),
        )
        return v[:, -tokens:]

    def unpacked(self, tokens: Tensor) -> Tensor:
        return tokens.mT.unflatten(2, self.grid)
