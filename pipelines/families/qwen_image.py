"""Wraps Qwen-Image and Qwen-Image 2.1 as flowalign policies.

Guidance of the first keeps the norm of the conditional velocity. The second has no padding, and
images with an alpha channel.
"""

from collections.abc import Sequence
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from flowalign.types import Cond, Guidance, PositiveInt, Request, prompts_of
from pipelines.codec import SingleFrameCodec
from pipelines.network.schedules import round_times
from pipelines.network.weights import ATTENTION, Lora
from pipelines.parts.encoding import pad_text, pad_texts
from pipelines.parts.evaluation import (
    evaluate_by_kind,
    grid_of,
    pack,
    read_once,
    read_with_negatives,
    unpack,
)
from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy, Precision

NEGATIVE = " "
"""Negative prompt of guidance. Source: diffusers' page on Qwen-Image. The pipeline uses no guidance
without a negative prompt."""


class QwenImage(DiffusersPolicy):
    """Wraps a `QwenImagePipeline` folder or hub identifier as a text-to-image policy.

    `guidance` above 1 makes the guided velocity the policy, at two evaluations each. Each token of
    the guided velocity is rescaled to the norm of the conditional velocity. Prompts are padded or
    truncated to `max_sequence_length`; `cond` holds their mask.
    """

    pipeline_class = "QwenImagePipeline"
    transformer_class = "QwenImageTransformer2DModel"
    fixed = dict.fromkeys(["transformer.guidance_embeds"], False)
    shifts_by_size = True
    codec_class = SingleFrameCodec
    negative: str = NEGATIVE
    """Negative prompt of guidance."""
    restores_norm: bool = True
    """Whether each token of the guided velocity gets the norm of the conditional velocity."""

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        guidance: Guidance = 4.0,
        lora: Lora | None = Lora(),  # noqa: B008 (frozen)
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        codec = self.codec_class(height, width)
        super().__init__(
            path, codec, lora, precision, guidance, max_sequence_length, gradient_checkpointing
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:  # noqa: ARG002
        patch = 2 ** (len(vae["temperal_downsample"]) + 1)  # pixels along a side of a token
        self.grid = grid_of(self, patch)
        return vae["z_dim"], 2 * self.grid[0], 2 * self.grid[1]

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return prod(latent_shape) // transformer["in_channels"] + self.max_sequence_length

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        return read_with_negatives(
            self.read, prompts_of(requests), self.negative, self.guidance > 1
        )

    def read(self, prompts: list[str]) -> dict[str, Tensor]:
        """Encode prompts to text and mask, padded to one length."""
        text, mask = self.pipe.encode_prompt(
            prompts, self.denoiser.device, max_sequence_length=self.max_sequence_length
        )
        return pad_text(text, mask, self.max_sequence_length)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        v = self.evaluate(x, sigma, cond, "")
        if self.guidance > 1:
            v_neg = self.evaluate(x, sigma, cond, "_neg")
            guided = v_neg + self.guidance * (v - v_neg)
            v = restore_norm(v, guided) if self.restores_norm else guided
        return self.unpacked(v)

    def evaluate(self, x: Tensor, sigma: Tensor, cond: Cond, ending: str) -> Tensor:
        """Evaluate the network with the text of suffix `ending`, and return the tokens of x."""
        tokens, shapes = self.seen(x, cond)
        v = self.call_denoiser(
            tokens,
            timestep=round_times(sigma, len(x), self.precision),
            encoder_hidden_states=cond[f"text{ending}"],
            encoder_hidden_states_mask=cond[f"mask{ending}"],
            img_shapes=[shapes] * len(x),
        )
        return v[:, : prod(self.grid)]

    def unpacked(self, tokens: Tensor) -> Tensor:
        """Return latents, given the tokens of x."""
        return unpack(tokens, self.grid)

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, list[tuple[int, ...]]]:  # noqa: ARG002 (QwenImageEdit uses it)
        """Return the input tokens of the network, those of x first, and the images' shapes."""
        return pack(x), [(1, *self.grid)]


def restore_norm(v: Float[Tensor, "n tokens d"], guided: Tensor) -> Float[Tensor, "n tokens d"]:
    """Return the guided velocity, rescaled at each token to the norm of v."""
    return guided * (v.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


LORA = Lora(target_modules=tuple(f"attn.{name}" for name in ATTENTION))
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
    restores_norm = False
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
            path,
            height,
            width,
            guidance,
            lora,
            precision,
            max_sequence_length,
            gradient_checkpointing,
        )

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        if self.folder.setting("sample_sigmas"):
            raise ValueError(
                f"{self.path} has fixed sigmas (sample_sigmas), so it is distilled to a few steps: "
                "train the undistilled model"
            )
        channels, *self.grid = super().shape_of_latents(transformer, vae)
        return channels, *self.grid  # one token per latent; four take one text position

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
