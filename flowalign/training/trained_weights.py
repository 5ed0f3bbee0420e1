"""Keep several sets of trained weights for one network, such as several adapters.

Parameter objects are swapped during an evaluation: gradients are bitwise equal whether or not
another set is evaluated in between. Copying values would invalidate graphs, and peft's adapters
support only LoRA. With activation checkpointing `Learner.backward` swaps the values in again.
Compiled networks with swapped parameters are not tested.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from flowalign.types import Cond, Policy, VelocityField


class TrainedSet(ABC):
    """Parameters that are trained in addition to the policy's."""

    named: Mapping[str, nn.Parameter]
    """Parameters by name."""

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are used and differentiable."""


class TrainedWeights(TrainedSet, VelocityField):
    """Policy evaluated with another set of trained weights, differentiable in them.

    Networks that recompute activations in the backward pass also need the weights there. Call
    `backward` inside `active`, as `Learner.backward` does.
    """

    def __init__(self, policy: Policy, values: Mapping[str, Tensor] | None = None):
        """Set the weights to `values`, by parameter name; None copies the policy's weights.

        `values` are shared, not copied, and get no gradient.
        """
        self.policy = policy
        own = {n: p for n, p in policy.denoiser.named_parameters() if p.requires_grad}
        self.named = {
            name: nn.Parameter(p.detach().clone())
            if values is None
            else nn.Parameter(values[name], requires_grad=False)
            for name, p in own.items()
        }
        """Parameters by their names in the network."""
        owner = {id(p): name for name, p in own.items()}
        self.places = [
            (module, attribute, owner[id(p)])
            for module in policy.denoiser.modules()
            for attribute, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in owner
        ]
        """Module, attribute and name of every place where the network reads a parameter."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace the network's parameters by the weights inside the context."""
        before = [getattr(module, attribute) for module, attribute, _ in self.places]
        for module, attribute, name in self.places:
            setattr(module, attribute, self.named[name])
        try:
            yield
        finally:
            for (module, attribute, _), parameter in zip(self.places, before, strict=True):
                setattr(module, attribute, parameter)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return dx / dsigma with the weights, differentiable in them."""
        with self.active():
            return self.policy.velocity(x, sigma, cond)
