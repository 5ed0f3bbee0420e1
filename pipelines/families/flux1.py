"""Wraps FLUX.1 as flowalign policies: dev and schnell, Kontext (edits) and Fill (inpainting)."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pixel_unshuffle

from flowalign.functional.resizing import resize_to_cover
from flowalign.types import Cond, Guidance, InputSpec, PositiveInt, Request, prompts_of
from pipelines.codec import Codec
from pipelines.network.schedules import round_times
from pipelines.network.weights import JOINT_ATTENTION, Lora
from pipelines.parts.encoding import check_references, read_hole
from pipelines.parts.evaluation import grid_of, pack, positions, unpack
from pipelines.parts.folder import Config, check_channels, check_embedded_guidance
from pipelines.policy import DiffusersPolicy, Precision

LORA = Lora(
    rank=64,
    alpha=128,
    target_modules=(
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ),
)
"""Default adapter, from Flow-GRPO's FLUX.1 script. Single-stream blocks are adapted only in
attention.

If a run file sets only some fields of `lora`, the layers are still these, but a missing rank or
alpha has the default of `Lora`."""


class Flux1(DiffusersPolicy):
    """Wraps a `FluxPipeline` folder or hub identifier as a text-to-image policy.

    `embedded_guidance` is an input of the network, which was distilled to imitate that guidance
    scale, so a velocity takes one evaluation. A model without this input (schnell) takes None.

    States have the shape of the autoencoder's latents, and equal seeds give the pipeline's noise.
    They are packed into tokens of 2 x 2 only for the network.
    """

    pipeline_class = "FluxPipeline"
    transformer_class = "FluxTransformer2DModel"
    default_lora = LORA
    has_guidance = False
    shifts_by_size = True

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        embedded_guidance: Guidance | None = 3.5,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        codec = Codec(height, width)
        super().__init__(
            path, codec, lora, precision, 1.0, max_sequence_length, gradient_checkpointing
        )
        self.embedded_guidance = embedded_guidance

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:  # noqa: ARG002 (editing uses it)
        """Return the input tokens of the network, those of x first, and their positions."""
        return pack(x), positions(0, self.grid, x)

    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        patch = 2 ** len(vae["block_out_channels"])  # pixels along a side of a token
        self.grid = grid_of(self, patch)
        check_embedded_guidance(self.embedded_guidance, transformer, self.path)
        channels = vae["latent_channels"]
        more = channels + (patch // 2) ** 2 if self.input_spec.mask else 0  # image, and mask
        kinds = "FLUX.1 is pipelines.Flux1, FLUX.1 Fill pipelines.Flux1Fill"
        check_channels(self, transformer, 4 * (channels + more), kinds)
        return channels, 2 * self.grid[0], 2 * self.grid[1]

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        values = transformer.get("out_channels") or transformer["in_channels"]  # per token
        return prod(latent_shape) // values + self.max_sequence_length

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        text, pooled, _ = self.pipe.encode_prompt(
            prompts_of(requests),
            None,
            device=self.denoiser.device,
            max_sequence_length=self.max_sequence_length,
        )
        return {"text": text, "pooled": pooled}

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        tokens, places = self.seen(x, cond)
        guidance = self.embedded_guidance
        v = self.call_denoiser(
            tokens,
            timestep=round_times(sigma, len(x), self.precision),
            guidance=None if guidance is None else x.new_full((len(x),), guidance),
            encoder_hidden_states=cond["text"],
            pooled_projections=cond["pooled"],
            txt_ids=x.new_zeros(cond["text"].shape[1], 3),
            img_ids=places,
        )
        return unpack(v, self.grid)


class Flux1Kontext(Flux1):
    """Wraps a `FluxKontextPipeline` folder or hub identifier as an editing policy.

    A request has one reference image, resized and centre-cropped to the policy's size. An image of
    this size is processed as in the pipeline with `_auto_resize=False`. `cond` holds its latents as
    "source" in addition to the text; their tokens follow those of the state.
    """

    pipeline_class = "FluxKontextPipeline"
    input_spec = InputSpec(references=(1, 1), kind="source")

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        return super().num_tokens(latent_shape, transformer) + prod(self.grid)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode instructions and their images, one row per request.

        Raises:
            ValueError: A request does not have exactly one image.
        """
        check_references(self, requests)
        pictures = [request.references[0].read()[None] for request in requests]
        return {**super().encode(requests), "source": torch.cat([*map(self.embed, pictures)])}

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        places = [positions(number, self.grid, x) for number in (0, 1)]
        return torch.cat([pack(x), pack(cond["source"])], 1), torch.cat(places)


class Flux1Fill(Flux1):
    """Wraps a `FluxFillPipeline` folder or hub identifier as an inpainting policy.

    A request has one reference image and a mask of the same size, white where to paint. Both are
    resized and centre-cropped to the policy's size. As in the pipeline, pixels outside the mask are
    also generated and not pasted back.

    In addition to the text, `cond` holds "source", which the network sees with the state: the mask,
    and the latents of the image without the masked part. The pipeline samples these latents from
    the autoencoder's distribution. This policy uses the mode, so that a request always has the same
    inputs.
    """

    pipeline_class = "FluxFillPipeline"

    def __init__(
        self,
        path: str,
        height: PositiveInt = 1024,
        width: PositiveInt = 1024,
        embedded_guidance: Guidance | None = 30.0,
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        max_sequence_length: PositiveInt = 512,
        gradient_checkpointing: bool = False,
    ):
        self.input_spec = InputSpec(
            references=(1, 1), mask=True, kind="source", crop=(height, width)
        )
        super().__init__(
            path,
            height,
            width,
            embedded_guidance,
            lora,
            precision,
            max_sequence_length,
            gradient_checkpointing,
        )

    def seen(self, x: Tensor, cond: Cond) -> tuple[Tensor, Tensor]:
        return pack(torch.cat([x, cond["source"]], 1)), positions(0, self.grid, x)

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        """Encode prompts, images and masks, one row per request.

        Raises:
            ValueError: A request does not have exactly one image, or its mask is missing, differs
                in size or is black.
        """
        check_references(self, requests)
        sources = torch.cat([self._masked(request) for request in requests])
        return {**super().encode(requests), "source": sources}

    def _masked(self, request: Request) -> Tensor:
        """Return the latents of a request's image outside the mask, and the mask."""
        picture, device = request.references[0].read(), self.pipe.vae.device
        assert request.mask is not None  # see check_references
        hole = read_hole(request.mask, picture, self.height, self.width).to(device, torch.float32)
        pixels = resize_to_cover(picture.to(device, torch.float32), self.height, self.width)
        side = self.height // (2 * self.grid[0])
        known = self.codec.encode((2 * pixels - 1) * (1 - hole))
        return torch.cat([known, pixel_unshuffle(hole, side)], 1)
