"""Record a denoiser's features during a rollout, without further network evaluations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.types import Cond, Policy, VelocityField

LAST_LAYERS = ("proj_out", "conv_out", "final_layer")
"""Names of the last layer in denoisers of diffusers."""


class FeatureRecorder(VelocityField):
    """Velocity of a policy that also records the input of the denoiser's last layer.

    The input is averaged over tokens or spatial positions. Guidance evaluates a sample twice; the
    features then concatenate both evaluations.

    Raises:
        ValueError: The denoiser has no layer with a name in `LAST_LAYERS`, or the policy evaluates
            the samples of a batch separately.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.layers = last_layers(policy.denoiser)
        self.rows: list[Tensor] = []
        """Features of each call since the last `take`, one row per sample."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the policy's dx / dsigma."""
        with _collect_inputs(self.layers) as seen:
            v = self.policy.velocity(x, sigma, cond)
        if any(len(hidden) % len(x) for hidden in seen):
            raise ValueError(
                f"a critic reads features of whole batches, and {type(self.policy).__name__} "
                "evaluates samples of different lengths separately: choose credit without a critic"
            )
        each = torch.cat([average_places(hidden) for hidden in seen]).unflatten(0, (-1, len(x)))
        self.rows.append(each.transpose(0, 1).flatten(1))
        return v

    def take(self, count: int) -> Float[Tensor, "n D"]:
        """Return the features of the first `count` samples since the last call; clear the rest."""
        features, self.rows = torch.cat(self.rows)[:count], []
        return features


def last_layers(denoiser: nn.Module) -> list[nn.Module]:
    """Return the last layer of a network, or of each sub-network that it combines.

    Raises:
        ValueError: No layer has a name in `LAST_LAYERS`.
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
    """Return the mean over tokens [n, tokens, D] or positions [n, D, *positions], in float32."""
    hidden = hidden.detach().float()
    if hidden.ndim == 2:
        return hidden
    return hidden.mean(1) if hidden.ndim == 3 else hidden.flatten(2).mean(2)


@contextmanager
def _collect_inputs(layers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Yield a list that collects the inputs of the layers."""
    seen: list[Tensor] = []
    # A pre-hook gets the input of the layer, independent of the type of its output.
    handles = [
        layer.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
