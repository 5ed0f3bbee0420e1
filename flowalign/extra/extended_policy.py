"""Implements policies that add trained layers to the network of another policy."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from flowalign.types import Cond, Policy, Request, plain_requests
from pipelines.parts.tensors import read_tensors, require_file, require_same_shapes
from pipelines.policy import DiffusersPolicy


class ExtendedPolicy(Policy):
    """Frozen policy, `base`, with additional trained layers in its network.

    diffusers cannot load the saved weights.
    """

    weights_file: str
    """Name of the file that `save_weights` writes."""
    denoiser: Any
    """Network of the base with the added layers."""

    def __init__(self, make_base: Callable[[], DiffusersPolicy]):
        self.make_base, self.base = make_base, make_base()
        self.guidance, self.precision = self.base.guidance, self.base.precision
        self.evaluations_per_velocity = self.base.evaluations_per_velocity

    @abstractmethod
    def trained_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors of the added layers by name; writing to them changes the layers."""

    def current_base(self) -> Any:
        """Return the base with this policy's network and guidance; self may itself be a copy."""
        base = copy.copy(self.base)
        base.denoiser, base.guidance = self.denoiser, self.guidance
        return base

    def encode(self, requests: Sequence[Request]) -> Cond:
        return self.current_base().encode(requests)

    def schedule(self, num_steps: int) -> Tensor:
        return self.base.schedule(num_steps)

    def noise(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self.base.noise(num_samples, generator)

    def decode(self, x: Tensor) -> Tensor:
        return self.base.decode(x)

    def embed(self, media: Tensor) -> Tensor:
        return self.base.embed(media)

    def encoders(self) -> tuple[str, str]:
        return self.current_base().encoders()

    def save_weights(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        state = {name: value.contiguous() for name, value in self.trained_tensors().items()}
        save_file(state, Path(folder) / self.weights_file)

    @torch.no_grad()
    def load_weights(self, folder: str) -> None:
        file = require_file(Path(folder) / self.weights_file)
        state, trained = read_tensors(file), self.trained_tensors()
        require_same_shapes(state, trained, file)
        for name, tensor in trained.items():
            tensor.copy_(state[name])

    def verify_weights(self, folder: str) -> float:
        fresh = copy.copy(self)
        fresh.base = self.make_base()  # a copy would share network and codec
        fresh.load(self.schedule(1).device)
        fresh.load_weights(folder)
        x, sigma = self.noise(2, torch.Generator().manual_seed(0)), self.schedule(4)[1]
        cond = self.probe_conditioning()
        with torch.no_grad():
            difference = fresh.velocity(x, sigma, cond) - self.velocity(x, sigma, cond)
        return float(difference.abs().max())

    def probe_conditioning(self) -> Cond:
        """Return the conditioning of two samples that verify saved weights."""
        return self.encode(plain_requests(["a", "b"]))
