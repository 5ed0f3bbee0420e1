"""Keep several sets of trained weights for one network, such as adapters of one base."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from flowalign.types import Cond, Policy, VelocityField


class TrainedSet(ABC):
    """Holds parameters that are trained beside those of the policy."""

    named: Mapping[str, nn.Parameter]
    """Parameters by name."""

    @abstractmethod
    def active(self) -> AbstractContextManager[None]:
        """Have them used, and differentiated by, inside the context."""


class TrainedWeights(TrainedSet, VelocityField):
    """Evaluates a policy by other values of its trained parameters, with a gradient to these.

    Networks that recompute activations in the backward pass need the values there, too: call
    `backward` while they are `active`, as `Learner.backward` does.
    """

    def __init__(self, policy: Policy, values: Mapping[str, Tensor] | None = None):
        """Take `values` by the names of the parameters; None copies the policy's own.

        Given values are shared, not copied, and get no gradient.
        """
        self.policy = policy
        own = {n: p for n, p in policy.denoiser.named_parameters() if p.requires_grad}
        self.named = {
            name: nn.Parameter(p.detach().clone())
            if values is None
            else nn.Parameter(values[name], requires_grad=False)
            for name, p in own.items()
        }
        """Parameters by the names that they have in the network."""
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
        """Put the values in place of the network's parameters inside the context."""
        before = [getattr(module, attribute) for module, attribute, _ in self.places]
        for module, attribute, name in self.places:
            setattr(module, attribute, self.named[name])
        try:
            yield
        finally:
            for (module, attribute, _), parameter in zip(self.places, before, strict=True):
                setattr(module, attribute, parameter)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return dx / dsigma by these values, with a gradient to them."""
        with self.active():
            return self.policy.velocity(x, sigma, cond)
