"""Composes a policy from the network, codec and text encoder of a diffusers pipeline."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.functional.transition import flow_std
from flowalign.types import ModelPlan, Policy, PromptCache, Setup
from flowalign.utils.files import bundled
from pipelines.codec import Codec
from pipelines.network.checkpoint_checks import (
    check_finite,
    check_folder,
    check_headers,
    missing_keys_context,
)
from pipelines.network.estimates import evaluation_flops, plan_activations, plan_network
from pipelines.network.network import Network, check_setup
from pipelines.network.schedules import (
    build_scheduler,
    check_sigmas,
    shift_by_size,
    shift_schedule,
)
from pipelines.network.speed import fastest_attention
from pipelines.network.verification import verify_saved
from pipelines.network.weights import JOINT_ATTENTION, Lora, Precision, load_pipeline
from pipelines.parts.folder import Config, Folder
from pipelines.parts.recorded_plans import find_plan
from pipelines.text_encoder import PREFIXES, TextEncoder


class DiffusersPolicy(Policy):
    """Policy that wraps a diffusers pipeline with a denoiser, a `vae` and a `scheduler`.

    It holds a `network`, a `codec` and a `text_encoder`. A model family is one subclass. It sets
    `pipeline_class` and `transformer_class`, defines a constructor, and implements `encode`,
    `velocity` and the abstract methods below. The constructor is cheap; `load` reads the weights.
    With `lora` None the whole denoiser is trained.
    """

    pipeline_class: str
    """Name of the pipeline's class in diffusers, or a dotted name such as "mine.Pipeline"."""
    transformer_class: str
    """Name of the denoiser's class, a subclass of both `ModelMixin` and `ConfigMixin`."""
    denoiser_name: str = "transformer"
    """Name of the pipeline component that is the denoiser, or the first of two denoisers."""
    latents_argument: str = "hidden_states"
    """Name of the argument of the denoiser's `forward` that takes the noisy latents."""
    skip_components: Mapping[str, Any] = {}
    """Arguments to `from_pretrained` that skip components which the policy does not need."""
    fixed: Mapping[str, Any] = {}
    """Settings that the policy does not read, such as "vae.latents_mean", and the only value that
    it supports."""
    conditions_on_size: bool = False
    """Whether the conditioning contains the image size, as SDXL's does."""
    default_lora: Lora = Lora(target_modules=JOINT_ATTENTION)
    """Default adapter, whose layers a LoRA without `target_modules` adapts."""
    unit_noise: bool = False
    """Whether initial noise has unit variance for any first sigma, as in video pipelines."""
    extra_text_tokens: int = 0
    """Text tokens of the denoiser in addition to `max_sequence_length`."""
    shifts_by_size: bool = False
    """Whether the pipeline shifts its schedule by the number of cells of `grid`."""
    grid: Sequence[int]
    """Size of the grid of tokens or latents, for families that need it. Set by `shape_of_latents`.
    """
    network: Network
    text_encoder: TextEncoder
    codec: Codec
    denoiser: Any
    pipe: Any
    """Pipeline. Set by `load`."""
    device: torch.device
    """Where the denoiser computes; its own property visits every layer. Set by `load`."""
    latent_shape: tuple[int, ...]
    """Shape of the latents of one sample. Set by `load`."""

    def __init__(
        self,
        path: str,
        codec: Codec,
        lora: Lora | None,
        precision: Precision,
        guidance: float = 1.0,
        max_sequence_length: int = 77,
        gradient_checkpointing: bool = False,
        offload_text: bool = False,
    ):
        lora = lora and lora.with_layers(self.default_lora)
        self.path, self.lora, self.precision = bundled(path), lora, precision
        self.guidance, self.max_sequence_length = guidance, max_sequence_length
        self.evaluations_per_velocity = 2 if guidance > 1 else 1
        self.height, self.width, self.num_frames = codec.height, codec.width, codec.num_frames
        self.fps = codec.fps
        self.folder = Folder(self.pipeline_class, self.path, self.skip_components)
        network = Network(
            folder=self.folder,
            kind=self.transformer_class,
            owner=type(self).__name__,
            lora=lora,
            precision=precision,
            gradient_checkpointing=gradient_checkpointing,
            checkpointing=f"{codec.settings_key}.gradient_checkpointing",
            name=self.denoiser_name,
            family_layers=self.default_lora.target_modules or (),
            latents_argument=self.latents_argument,
        )
        self.network = network
        self.codec = self.renderer = codec.with_network(network)
        size = codec.height, codec.width
        self.text_encoder = TextEncoder(network, self.input_spec, size, offload_text)

    @abstractmethod
    def shape_of_latents(self, transformer: Config, vae: Config) -> tuple[int, ...]:
        """Return the latent shape of one sample, given the configs of denoiser and VAE.

        Raises:
            ValueError: The model cannot produce the requested size.
        """

    @abstractmethod
    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Config) -> int:
        """Count the tokens that the denoiser attends over, for the memory estimate."""

    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        """Return the pipeline's schedule: num_steps + 1 sigmas from the initial noise to 0."""
        if self.shifts_by_size:
            return shift_by_size(scheduler, prod(self.grid), num_steps)
        scheduler.set_timesteps(num_steps)
        return scheduler.sigmas.clone()

    def take_setup(self, setup: Setup, rows: int, cache: PromptCache | None) -> None:
        # a DiffusersPolicy always has these parts, so they cannot be None
        self.network = replace(  # pyright: ignore[reportIncompatibleVariableOverride]
            self.network, setup=setup, rows=rows
        )
        self.codec = self.renderer = self.codec.with_network(self.network)
        self.text_encoder = self.text_encoder.with_network(  # pyright: ignore[reportIncompatibleVariableOverride]
            self.network, cache
        )

    def check_setup(self, setup: Setup) -> None:
        count_tokens = partial(_count_tokens, self)
        check_setup(self.network, setup, count_tokens, self.max_sequence_length)
        if setup.vae_tile is not None:
            self.codec.check_tile(setup.vae_tile)

    def plan(self) -> ModelPlan:
        compute = partial(compute_plan, self)
        return find_plan(self, compute) or compute()

    def load(self, device: torch.device) -> None:
        _check(self)
        self.device = device
        network, skipped = self.network, self.text_encoder.skipped()
        elsewhere = network.names_in_main_memory + self.text_encoder.names_in_main_memory
        quantizers = network.quantizers()
        pipe = load_pipeline(self.folder, network.dtype, quantizers, device, elsewhere, **skipped)
        scheduler = shift_schedule(pipe.scheduler.config, self.codec.shift, self.path)
        pipe.scheduler = build_scheduler(scheduler)
        self.pipe = network.pipe = pipe
        self.codec.open(pipe.vae)
        self.text_encoder.open(pipe, device)
        for name, component in pipe.components.items():
            if isinstance(component, nn.Module) and name not in (*network.names, *elsewhere):
                component.to(device)
        network.place(device)
        check_finite(self.path, pipe.components)
        self.denoiser = network.prepare()
        transformer = pipe.components[self.denoiser_name].config
        self.latent_shape = self.shape_of_latents(transformer, pipe.vae.config)
        if network.setup.speed.attention == "auto":
            trained = network.components[network.trained[0]]
            shape = network.rows, self.num_tokens(self.latent_shape, transformer)
            network.set_attention(fastest_attention(trained, shape, network.dtype, device))

    def schedule(self, num_steps: int) -> Tensor:
        return schedule_of(self, self.pipe.scheduler, num_steps).to(self.device)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(num_samples, *self.latent_shape, generator=generator, dtype=torch.float32)
        scale = 1.0 if self.unit_noise else flow_std(self.schedule(1)[0])
        return scale * x.to(self.device)

    def call_denoiser(self, x: Tensor, **inputs: Any) -> Tensor:
        """Evaluate the network in the current precision and return its output in float32."""
        return self.network.evaluate(self.denoiser, x, **inputs)[0].float()

    @torch.no_grad()
    def decode(self, x: Tensor) -> Tensor:
        rows = self.network.setup.decode_micro_batch or max(1, len(x))
        return torch.cat([self.codec.decode(part) for part in x.split(rows)])

    @torch.no_grad()
    def embed(self, media: Tensor) -> Tensor:
        return self.codec.embed(media)

    def encoders(self) -> tuple[str, str]:
        media = self.codec.digest()
        if self.text_encoder.cache:
            return media, self.text_encoder.digest_cache(self)
        size = (self.height, self.width) if self.conditions_on_size else ()
        # conditioning holds the latents of references
        references = (media,) if self.input_spec.references[1] else ()
        settings = self.precision, self.max_sequence_length, self.guidance > 1, *size, *references
        return media, self.text_encoder.digest(*settings)

    def save_weights(self, folder: str) -> None:
        self.network.save(folder)

    def load_weights(self, folder: str) -> None:
        self.network.restore(folder)

    def verify_weights(self, folder: str) -> float:
        return verify_saved(self.network, self, folder)


def compute_plan(policy: DiffusersPolicy) -> ModelPlan:
    """Return the plan of a policy, from networks on the meta device."""
    _check(policy)
    transformer, vae, scheduler = (
        policy.folder.config(name) for name in (policy.denoiser_name, "vae", "scheduler")
    )
    with missing_keys_context(policy.path):
        check_headers(policy.folder, PREFIXES if policy.network.setup.prompt_cache else ())
        scheduler = build_scheduler(shift_schedule(scheduler, policy.codec.shift, policy.path))
        latent_shape = policy.shape_of_latents(transformer, vae)
        denoiser, counts = plan_network(policy.network)
        tokens = policy.num_tokens(latent_shape, transformer)
    text = policy.max_sequence_length + policy.extra_text_tokens
    kept, savings = plan_activations(policy.network, transformer, tokens)
    counts["savings"] += savings
    plan = ModelPlan(
        latent_shape=latent_shape,
        evaluation_flops=partial(evaluation_flops, denoiser, latent_shape, tokens, text),
        sigmas=partial(schedule_of, policy, scheduler),
        **kept,
        **counts,
    )
    return policy.codec.extend_plan(plan, policy.text_encoder.stored_bytes)


def schedule_of(policy: DiffusersPolicy, scheduler: Any, num_steps: int) -> Tensor:
    """Return the checked schedule of a policy."""
    kind = f" ({type(scheduler).__name__})" if scheduler else ""
    name = f"the scheduler of {policy.path}{kind}"
    return check_sigmas(partial(policy.sigmas, scheduler), num_steps, name)


def _check(policy: DiffusersPolicy) -> None:
    """Check the settings and the folder of a policy. Only configuration files are read.

    Raises:
        ValueError: The folder belongs to another family or lacks a component, a component has a
            setting that the policy does not read, or the model cannot produce the requested size.
    """
    check_folder(policy.folder, policy.denoiser_name, policy.network.kind)
    for setting, value in policy.fixed.items():
        component, _, key = setting.partition(".")
        if (got := policy.folder.config(component).get(key, value)) != value:
            raise ValueError(
                f"{policy.path}: {key} of its {component} is {str(got)[:40]}, which "
                f"{type(policy).__name__} does not use; supported: {value}"
            )
    with missing_keys_context(policy.path):
        policy.shape_of_latents(*_configs(policy))


def _count_tokens(policy: DiffusersPolicy) -> int:
    transformer, vae = _configs(policy)
    return policy.num_tokens(policy.shape_of_latents(transformer, vae), transformer)


def _configs(policy: DiffusersPolicy) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configs of denoiser and VAE."""
    return policy.folder.config(policy.denoiser_name), policy.folder.config("vae")
