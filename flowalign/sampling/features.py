"""Observe a denoiser's own features of the states that a rollout evaluates, at no evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import Cond, Policy, VelocityField

LAST_LAYERS = ("proj_out", "conv_out", "final_layer")
"""Names that the last layers of denoisers have in diffusers."""


class FeatureRecorder(VelocityField):
    """Evaluates a policy's velocity, and keeps what the last layer of its denoiser reads.

    The input of the last layer is averaged over tokens or places. Guidance evaluates a sample
    twice; its features then are those of both evaluations.

    Raises:
        ValueError: The denoiser has no layer of the name that last layers have, or samples of a
            batch are evaluated apart.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.layers = last_layers(policy.denoiser)
        self.rows: list[Tensor] = []
        """Features of the samples of each call since the last `take`."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the policy's dx / dsigma."""
        with _collect_inputs(self.layers) as seen:
            v = self.policy.velocity(x, sigma, cond)
        if any(len(hidden) % len(x) for hidden in seen):
            raise ValueError(
                f"a critic reads features of whole batches, and {type(self.policy).__name__} "
                "evaluates samples of different lengths apart: choose credit without a critic"
            )
        each = torch.cat([average_places(hidden) for hidden in seen]).unflatten(0, (-1, len(x)))
        self.rows.append(each.transpose(0, 1).flatten(1))
        return v

    def take(self, count: int) -> Float[Tensor, "n D"]:
        """Return the features of the first `count` samples since the last call, and forget all."""
        features, self.rows = torch.cat(self.rows)[:count], []
        return features


def last_layers(denoiser: nn.Module) -> list[nn.Module]:
    """Return the last layer of a network, or of each of those that it joins.

    Raises:
        ValueError: No layer has the name of one.
    """
    layers = [
        layer
        for name, layer in denoiser.named_modules()
        if name.rpartition(".")[2] in LAST_LAYERS and name.count(".") <= 1
    ]
    if not layers:
        raise ValueError(
            f"a critic reads the input of a denoiser's last layer; {type(denoiser).__name__} has "
            f"none that is called {' or '.join(LAST_LAYERS)}"
        )
    return layers


def average_places(hidden: Tensor) -> Float[Tensor, "n D"]:
    """Return the mean over tokens [n, tokens, D] or places [n, D, *places], in float32."""
    hidden = hidden.detach().float()
    if hidden.ndim == 2:
        return hidden
    return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)


@contextmanager
def _collect_inputs(layers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect what these layers read inside the context."""
    seen: list[Tensor] = []
    # A pre-hook sees what the layer reads, whatever it returns.
    handles = [
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
