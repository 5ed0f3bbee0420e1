"""Implements what all diffusers policies share: sizes, loading, precision and saving."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.functional.diffusion import norm
from flowalign.types import Cond, ModelPlan, Saving, conditioning
from flowalign.utils.files import bundled
from pipelines.adapter_files import difference_of_copy, folded, load_into_pipeline
from pipelines.context import ContextParallelPolicy, undivided
from pipelines.decoding import DecodingPolicy, recompute_decoding
from pipelines.encoders_apart import EncodersApart
from pipelines.encoding import digest, only_frame, scaled_latents
from pipelines.estimates import planned_network
from pipelines.export import ExportsWeights
from pipelines.folder import activations, config_of, scheduler_of, shifted
from pipelines.intact import check_finite, check_folder, named_gaps
from pipelines.offload import OffloadedPolicy, adapter_to
from pipelines.quantization import QuantizedPolicy, networks_of, quantizers
from pipelines.sharding import ShardablePolicy
from pipelines.speed import AcceleratedPolicy, computed_in
from pipelines.weights import (
    DTYPES,
    Lora,
    Precision,
    load_pipeline,
    load_weights,
    prepare_training,
    save_weights,
)


class DiffusersPolicy(
    ExportsWeights,
    DecodingPolicy,
    AcceleratedPolicy,
    ShardablePolicy,
    ContextParallelPolicy,
    QuantizedPolicy,
    OffloadedPolicy,
    EncodersApart,
):
    """Wraps a diffusers pipeline with a denoiser (`part`), a `vae` and a `scheduler` as a policy.

    A model family is one subclass: its two classes, a constructor, and the abstract methods below
    together with `encode` and `velocity`. The constructor is cheap; `load` reads the weights. With
    `lora` None the whole denoiser is trained.
    """

    transformer_class: Any
    """Class of the denoiser, a subclass of both `ModelMixin` and `ConfigMixin`."""
    part: str = "transformer"
    """Name of the pipeline component that is the denoiser, or the first of two."""
    parts: tuple[str, ...]
    """Names of the components that are trained."""
    state: str = "hidden_states"
    """Name of the argument of the denoiser's `forward` that takes the noisy latents."""
    tells_size: bool = False
    """Whether the conditioning contains the image size, as SDXL's does."""
    unused: Mapping[str, Any] = {}
    """Arguments to `from_pretrained` that skip components which a policy does not need."""
    recomputing: str = "policy.gradient_checkpointing"
    """Setting by which activations are recomputed."""
    offloaded: tuple[str, ...] = ()
    """Prefixes of component names that wait on the CPU while `encode` does not need them."""
    film: tuple[object, ...] = ()
    """Further settings that change how media are encoded, such as tiling; part of `encoders`."""
    shift: float | None = None
    """Shift of the noise schedule; None keeps that of the folder's scheduler."""
    denoiser: Any
    height: int
    width: int
    max_sequence_length: int

    def __init__(
        self, path: str, lora: Lora | None, precision: Precision, gradient_checkpointing: bool
    ):
        self.path, self.lora, self.precision = bundled(path), lora, precision
        self.gradient_checkpointing, self.parts = gradient_checkpointing, (self.part,)

    @abstractmethod
    def shape_of_latents(
        self, transformer: Mapping[str, Any], vae: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Return the latent shape of one sample, given the configurations of denoiser and VAE.

        Raises:
            ValueError: the model cannot produce the requested size.
        """

    @abstractmethod
    def num_tokens(self, latent_shape: tuple[int, ...], transformer: Mapping[str, Any]) -> int:
        """Count the tokens that the denoiser attends over, for the memory estimate."""

    @abstractmethod
    def sigmas(self, scheduler: Any, num_steps: int) -> Tensor:
        """Return the pipeline's schedule: num_steps + 1 values from the state of `noise` to 0."""

    def plan(self) -> ModelPlan:
        _check(self)
        transformer, vae, scheduler = (
            config_of(self.pipeline_class, self.path, part)
            for part in (self.part, "vae", "scheduler")
        )
        with named_gaps(self.path):
            scheduler = scheduler_of(shifted(scheduler, self.shift, self.path))
            latent_shape = self.shape_of_latents(transformer, vae)
            _, counts = planned_network(self, transformer)
            tokens = self.num_tokens(latent_shape, transformer)
        width = DTYPES[self.precision].itemsize
        kept, least = (
            width * activations(transformer, tokens, recomputed)
            for recomputed in (self.gradient_checkpointing, True)
        )
        if kept > least:
            saving = Saving("activations", f"{self.recomputing}: true", kept - least)
            counts["savings"].append(saving)
        return ModelPlan(
            latent_shape=latent_shape,
            activation_bytes=kept,
            sigmas=partial(self.sigmas, scheduler),
            **counts,
        )

    def load(self, device: torch.device) -> None:
        _check(self)
        self.pipe = load_pipeline(
            self.pipeline_class,
            self.path,
            DTYPES[self.precision],
            quantizers(self),
            **self.unused,
            **self.absent(),
        )
        scheduler = shifted(self.pipe.scheduler.config, self.shift, self.path)
        self.pipe.scheduler = scheduler_of(scheduler)
        recompute_decoding(self.pipe.vae.float())
        self.set_up(self.pipe.vae)
        networks = networks_of(self)
        waiting = self.offloaded + self.parts if self.loads_to_cpu else self.offloaded
        for name, part in self.pipe.components.items():
            if isinstance(part, nn.Module) and not name.startswith(waiting):
                self.place(part, device) if name in networks else part.to(device)
        check_finite(self.path, self.pipe.components)
        for part in self.parts:
            prepare_training(self.pipe.components[part], self.lora)
            adapter_to(self.pipe.components[part], self.pipe.components[part].device)
            if self.gradient_checkpointing:
                self.pipe.components[part].enable_gradient_checkpointing()
        for name in networks:
            self.cast_layerwise(self.pipe.components[name])
        self.denoiser = self.assembled(self.pipe.components)
        transformer = self.pipe.components[self.part].config
        self.latent_shape = self.shape_of_latents(transformer, self.pipe.vae.config)

    def assembled(self, components: Mapping[str, Any]) -> Any:
        """Return the denoiser built from these components; two networks are joined here."""
        return components[self.part]

    def schedule(self, num_steps: int) -> Tensor:
        return self.sigmas(self.pipe.scheduler, num_steps).to(self.denoiser.device)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        x = torch.randn(num_samples, *self.latent_shape, generator=generator)
        return norm(self.schedule(1)[0]) * x.to(self.denoiser.device)

    def call_denoiser(self, x: Tensor, **inputs: Any) -> Tensor:
        """Evaluate the network in the precision of now and return its output in float32."""
        return self.outputs(x, **inputs)[0].float()

    def outputs(self, x: Tensor, **inputs: Any) -> tuple[Tensor, ...]:
        """Evaluate the network in the precision of now and return all that it returns."""
        precision = computed_in(self)
        dtype = DTYPES[precision]
        inputs[self.state] = x.to(dtype)
        with torch.autocast(x.device.type, dtype, enabled=precision != "fp32"):
            return self.denoiser(return_dict=False, **inputs)

    @torch.no_grad()
    def embed(self, media: Tensor) -> Tensor:
        pixels = media.to(self.pipe.vae.device, torch.float32)
        pictures = only_frame(pixels, self.height, self.width, self.path)
        return scaled_latents(self.pipe.vae, pictures)

    def encoders(self) -> tuple[str, str]:
        vae, parts = self.pipe.vae, self.pipe.components
        media = digest(vae, vae.config, self.height, self.width, *self.film)
        size = (self.height, self.width) if self.tells_size else ()
        pictures = (media,) if self.takes.references[1] else ()  # their latents are in it
        if self.prompt_store:
            content = f"{self.encoding_files()} {self.encoding_settings()}"
            return media, hashlib.sha256(content.encode()).hexdigest()[:16]
        settings = self.precision, self.max_sequence_length, self.guidance > 1, *size, *pictures
        text = ""
        for name in sorted(n for n in parts if n.startswith("text_encoder") and parts[n]):
            given = parts.get(name.replace("text_encoder", "tokenizer"), parts.get("processor"))
            tokenizer = vars(given).get("tokenizer", given)  # a processor has one
            words = type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())
            text = digest(parts[name], parts[name].config.to_dict(), text, *settings, *words)
        return media, text

    def save_weights(self, folder: str) -> None:
        for part in self.parts:
            save_weights(part, self.pipe.components[part], folder)

    def load_weights(self, folder: str) -> None:
        for part in self.parts:
            load_weights(part, self.pipe.components[part], folder)

    def verify_weights(self, folder: str) -> float:
        x = self.noise(2, torch.Generator().manual_seed(0))
        cond = conditioning(self, self.probes())
        early = self.schedule(4)[1]
        sigma = torch.stack([early, early / 20])  # low noise may use another network
        trained = {part: self.pipe.components[part] for part in self.parts}
        networks = [self.pipe.components[name] for name in networks_of(self)]
        with torch.no_grad(), undivided(networks), folded(trained.values()):
            expected = self.velocity(x, sigma, cond)
            found = [_replayed(self, part, folder, x, sigma, cond) for part in trained]
        differences = [float((got - expected).abs().max()) for got in found]
        if self.lora:
            differences += [difference_of_copy(n, part, folder) for n, part in trained.items()]
        return max(differences)


def _check(policy: DiffusersPolicy) -> None:
    """Check settings and folder of a policy, reading configuration files alone.

    Raises:
        ValueError: the folder is not of this family or lacks a part, the model cannot produce the
            requested size, or prompts have no tokens.
    """
    cls, path = policy.pipeline_class, policy.path
    check_folder(cls, path, policy.part, policy.transformer_class.__name__, policy.unused)
    if policy.max_sequence_length < 1:
        raise ValueError(
            f"max_sequence_length is {policy.max_sequence_length}; it must be at least 1"
        )
    with named_gaps(path):
        policy.shape_of_latents(*(config_of(cls, path, part) for part in (policy.part, "vae")))


def _replayed(
    policy: DiffusersPolicy, part: str, folder: str, x: Tensor, sigma: Tensor, cond: Cond
) -> Tensor:
    """Compute the velocity with one part freshly loaded from `folder`; it is freed afterwards."""
    mine, fresh = policy.denoiser, {part: _saved(policy, part, folder)}
    policy.place(fresh[part], x.device)
    policy.denoiser = policy.assembled({**policy.pipe.components, **fresh})
    try:
        return policy.velocity(x, sigma, cond)
    finally:
        policy.denoiser = mine


def _saved(policy: DiffusersPolicy, part: str, folder: str) -> Any:
    """Load one component from `folder` as a user of plain diffusers would, without the others."""
    if policy.lora is None:
        return policy.transformer_class.from_pretrained(folder, subfolder=part)
    components = policy.pipe.components
    without = dict(policy.unused)
    for name, component in components.items():
        if name not in (part, "scheduler"):  # tokenizers and processors cost nothing
            without[name] = None if isinstance(component, nn.Module) else component
    without["vae"] = components["vae"]  # some constructors read its sizes
    if part != policy.part:  # diffusers reads the kind of model from it
        without[policy.part] = components[policy.part]
    bits = {name: one for name, one in quantizers(policy).items() if name == part}
    dtype = DTYPES[policy.precision]
    pipe = load_pipeline(policy.pipeline_class, policy.path, dtype, bits, **without)
    load_into_pipeline(pipe, part, folder)
    denoiser = pipe.components[part]
    for parameter in denoiser.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    policy.cast_layerwise(denoiser)
    return denoiser
