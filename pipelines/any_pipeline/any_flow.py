"""Wraps any flow-matching pipeline of diffusers as a policy, using its unmodified `__call__`."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.types import (
    Cond,
    InputSpec,
    ModelPlan,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Request,
    Setup,
)
from pipelines.any_pipeline.latent_map import LatentMap
from pipelines.any_pipeline.recorded import STATE, Layout, group_calls
from pipelines.any_pipeline.replay import (
    build_at_times,
    build_standing,
    catch_result,
    failure_context,
    initial_state,
    replay_calls,
    skip_network,
)
from pipelines.any_pipeline.stock_call import StockCall
from pipelines.any_pipeline.wrapping import check_arguments, check_replay, find_classes
from pipelines.codec import Codec
from pipelines.network.checkpoint_checks import check_folder, check_headers
from pipelines.network.estimates import evaluation_flops, kept_per_token, mask_bytes, plan_network
from pipelines.network.schedules import has_whole_times
from pipelines.network.weights import ATTENTION, Lora, prepare_training
from pipelines.parts.encoding import (
    check_references,
    crop_clips,
    digest,
    mirror_references,
    probe_request,
)
from pipelines.parts.folder import Config
from pipelines.policy import DiffusersPolicy, Precision, schedule_of

LORA = Lora(target_modules=ATTENTION)
"""Default adapter."""
_SHORT, _LONG = "a", "a red ball beside two cats"
"""Prompts of different lengths that reveal the layout of conditions."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of the pipeline's `__call__` other than prompts, height and width."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `__call__` by name, such as guidance_scale, negative_prompt, num_frames or
    max_sequence_length. Missing arguments keep the pipeline's defaults."""
    evaluations: PositiveInt = 1
    """Network evaluations per denoising step, usually 2 with guidance. `load` counts them and
    raises ValueError if the number differs."""
    fps: PositiveFloat | None = None
    """Frames per second of clips; null for images."""
    pictures: NonNegativeInt = 0
    """Number of images per prompt, for pipelines with an `image` argument in `__call__`. The image
    is the first frame of a clip, or the source of an edit. If `__call__` has a `mask_image`
    argument, every prompt also needs a mask."""
    one_request: bool = False
    """Call the pipeline with one request at a time. Qwen-Image-Edit pipelines need it."""
    decode_one: bool = False
    """Decode and encode one sample at a time. It saves memory, and the autoencoder of HunyuanVideo
    1.5 needs it."""

    def split(self, samples: Tensor) -> Sequence[Tensor]:
        """Return the parts of samples that one call of the autoencoder takes."""
        alone = self.decode_one or self.one_request
        return samples.split(1 if alone else max(1, len(samples)))


class AnyFlow(DiffusersPolicy):
    """Wraps any flow-matching pipeline that has one network and one state per request.

    The pipeline's `__call__` computes everything. The results of its encoding methods are recorded
    once per request and replayed in every later call. A scheduler with a single timestep turns the
    call into one velocity evaluation; a scheduler with no timestep turns it into decoding. States
    are those of the pipeline's sampler, packed if the pipeline packs them. `load` makes two steps
    and raises ValueError if the replayed velocities differ.

    Images of a request are resized and centre-cropped to the policy's size, and passed to the
    pipeline as `image`. Use this class for families without a policy class. A family's policy is
    faster, and its plan includes the memory of encoders and decoder.
    """

    pipeline_class = "DiffusionPipeline"
    transformer_class = "ModelMixin"
    default_lora = LORA
    has_guidance = False

    def __init__(
        self,
        path: str,
        height: PositiveInt = 512,
        width: PositiveInt = 512,
        call: Call = Call(),
        lora: Lora | None = LORA,
        precision: Precision = "bf16",
        gradient_checkpointing: bool = False,
    ):
        longest = call.arguments.get("max_sequence_length", 512)
        codec = Codec(height, width, *sorted(call.arguments.items()))
        super().__init__(path, codec, lora, precision, 1.0, longest, gradient_checkpointing)
        self.call, self.evaluations_per_velocity, self.fps = call, call.evaluations, call.fps
        self.num_frames = call.arguments.get("num_frames")
        self.network.computes_at_load = True

    def identify(self) -> None:
        """Find the pipeline class, network class and required inputs from configuration files."""
        if self.folder.kind != AnyFlow.pipeline_class:
            return  # already found
        name, size = self.denoiser_name, (self.height, self.width)
        names = find_classes(self.folder, name, self.call.pictures)
        self.folder.kind, self.network.kind = names
        cls = self.folder.pipeline
        check_arguments(cls, self.call.arguments)
        if count := self.call.pictures:
            masked = "mask_image" in inspect.signature(cls.__call__).parameters
            kind = "first_frame" if self.num_frames else "source"
            crop = size if masked else None
            self.input_spec = InputSpec(
                references=(count, count), kind=kind, mask=masked, crop=crop
            )
        self.text_encoder.input_spec = self.input_spec
        blank = probe_request("", self.input_spec, *size)
        self.stock = StockCall(self.folder, name, size, self.call.arguments, self.precision, blank)

    def check_setup(self, setup: Setup) -> None:
        if setup != Setup():
            self.identify()
        super().check_setup(setup)

    def plan(self) -> ModelPlan:
        self.identify()
        check_folder(self.folder, self.denoiser_name, self.network.kind)
        check_headers(self.folder)
        latent_shape, _ = self.stock.trace(2)
        denoiser, counts = plan_network(self.network)
        with torch.device("meta"):
            prepare_training(denoiser, self.network.lora)
        config = self.folder.config(self.denoiser_name)
        recomputed = self.network.gradient_checkpointing
        tokens = self.num_tokens(latent_shape, config)
        given = denoiser, latent_shape, tokens, self.max_sequence_length
        masks = mask_bytes(self.network, config, tokens, recomputed)
        kept = tokens * kept_per_token(denoiser, recomputed)
        return ModelPlan(
            latent_shape=latent_shape,
            activation_bytes=self.network.dtype.itemsize * kept + masks,
            evaluation_flops=partial(evaluation_flops, *given),
            sigmas=partial(schedule_of, self, None),
            decodes_together=not self.call.decode_one,
            **counts,
        )

    def load(self, device: torch.device) -> None:
        self.read(device)
        request = mirror_references(replace(self.stock.blank_request, prompt=_LONG))
        check_replay(self, self.stock, request)

    def read(self, device: torch.device) -> None:
        """Read the weights and find the layout of conditions, without checking a step."""
        self.identify()
        super().load(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.stock.pipe, blank = self.pipe, self.stock.blank_request
        short = replace(blank, prompt=_SHORT)
        long = mirror_references(replace(blank, prompt=_LONG))
        twice = [long] if self.call.one_request else [long, long]
        probes = [self.stock.record(self.denoiser, some) for some in ([short], [long], twice)]
        with failure_context(self.path, self.folder.pipeline):
            self.layout = Layout.of(*probes, longest=self.max_sequence_length)
        self.blank = self.layout.kept(probes[:1])
        self.state_dtype = initial_state(dict(probes[0])[STATE]).dtype
        self.whole_times = has_whole_times(self.pipe.scheduler)

    def shape_of_latents(self, transformer: Any, vae: Any) -> tuple[int, ...]:  # noqa: ARG002
        return self.stock.trace(2)[0]

    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        patch = transformer.get("patch_size", 1)
        patch = prod(patch) if isinstance(patch, list | tuple) else patch**2
        packed, spec = len(latent_shape) == 2, self.input_spec
        places = latent_shape[0] if packed else prod(latent_shape[1:]) // patch
        sources = self.call.pictures if spec.kind == "source" and not spec.mask else 0
        return (1 + sources) * places + self.max_sequence_length

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:  # noqa: ARG002
        """Return the sigmas that the pipeline sets. One step goes from the first sigma to 0."""
        found = self.stock.trace(max(2, num_steps))[1]
        return found[[0, -1]] if num_steps == 1 else found

    @torch.no_grad()
    def encode(self, requests: Sequence[Request]) -> Cond:
        check_references(self, requests)
        apart = self.layout.ragged or self.call.pictures > 0 or self.call.one_request
        calls = [[request] for request in requests] if apart else [requests]
        return self.layout.kept([self.stock.record(self.denoiser, some) for some in calls])

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        if self.evaluations_per_velocity != self.call.evaluations:
            raise ValueError(
                "AnyFlow only computes velocities with the guidance of call.arguments; other "
                "guidance is not supported: use the policy of the family, or call the pipeline "
                "without guidance"
            )
        groups = group_calls(len(x), sigma, self.layout.lengths(cond))
        found = [
            self._velocity(x[rows], time, {name: value[rows] for name, value in cond.items()})
            for rows, time in groups
        ]
        if len(found) == 1:
            return found[0]
        return torch.cat(found)[torch.cat([rows for rows, _ in groups]).argsort()]

    def _velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        scheduler = self.pipe.scheduler
        time = sigma.reshape(1).float() * scheduler.config.num_train_timesteps
        time = time.long() if self.whole_times else time
        calls = self.layout.returned(cond, x.to(self.state_dtype))
        others = {"scheduler": build_at_times(scheduler, time), **replay_calls(calls)}
        with catch_result() as stop, self.stock.autocast():
            self.stock.run(self.denoiser, len(x), others)
        return stop.found.float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        media = torch.cat([self.finish(some) for some in self.call.split(x)])
        return (media if media.ndim == 5 else media[:, None]).float()

    def finish(self, x: Tensor) -> Tensor:
        """Run the part of the pipeline that follows its last denoising step."""
        rows = {name: value.expand(len(x), *value.shape[1:]) for name, value in self.blank.items()}
        others = replay_calls(self.layout.returned(rows, x))
        if "strength" not in inspect.signature(self.folder.pipeline.__call__).parameters:
            others["scheduler"] = build_at_times(self.pipe.scheduler, x.new_zeros(0))
            return self.stock.run(self.denoiser, len(x), others, "pt")
        others["scheduler"] = build_standing(self.pipe.scheduler)  # it rejects zero steps
        with skip_network(self.denoiser):
            return self.stock.run(self.denoiser, len(x), others, "pt")

    @torch.no_grad()
    def embed(self, media: Tensor) -> Tensor:
        media = media.to(self.pipe.vae.device, torch.float32)
        clips = crop_clips(media, self.num_frames or 1, self.height, self.width, self.path)
        latent_map = LatentMap.of(self.pipe.vae, self.finish, self.latent_shape)
        return torch.cat([latent_map.encoded(some) for some in self.call.split(clips)])

    def encoders(self) -> tuple[str, str]:
        arguments = sorted(self.call.arguments.items())
        kept = [tuple(one.shape[1:]) for one in self.blank.values()]  # some depend on the size
        parts, text = sorted(self.pipe.components.items()), ""
        tokenizers = [p for n, p in parts if p and n.startswith("tokenizer")]
        words = [sorted(vars(p).get("tokenizer", p).get_vocab().items()) for p in tokenizers]
        for name, part in parts:
            if isinstance(part, nn.Module) and "encoder" in name:
                config: Any = part.config
                settings = self.precision, arguments, kept
                text = digest(part, config.to_dict(), text, words, *settings)
        media = self.codec.digest()
        return media, f"{media}{text}" if self.call.pictures else text
