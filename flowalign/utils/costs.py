"""Count the costs of a run: network evaluations, decodes and reward calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn


@dataclass
class Costs:
    """Counters of the costs of a run.

    A network evaluation is one pass of one latent through the denoiser; guidance needs two.
    """

    sampling_evaluations: int = 0
    """Number of evaluations without gradient: rollouts, completions and references."""
    training_evaluations: int = 0
    """Number of evaluations with gradient, each followed by a backward pass."""
    decodes: int = 0
    reward_calls: int = 0
    """Number of scored samples, counted once per reward model."""

    def __post_init__(self) -> None:
        self._fraction = 0.0

    @property
    def network_evaluations(self) -> int:
        """Return the number of all evaluations of the denoiser."""
        return self.sampling_evaluations + self.training_evaluations

    def count(self, denoiser: nn.Module) -> None:
        """Count every sample that passes through `denoiser` from now on."""

        def count(_: nn.Module, args: tuple, kwargs: dict) -> None:
            size = next(size for a in (*args, *kwargs.values()) if (size := _count_samples(a)))
            if torch.is_grad_enabled():
                self.training_evaluations += size
            else:
                self.sampling_evaluations += size

        denoiser.register_forward_pre_hook(count, with_kwargs=True)

    def count_share(self, share: float, samples: int) -> None:
        """Count `samples` passes through a share of the denoiser, without gradient.

        Fractions are carried over, so the sum of many calls is rounded once.
        """
        self._fraction += share * samples
        whole = round(self._fraction)
        self._fraction -= whole
        self.sampling_evaluations += whole

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Discard counts inside the context: evaluations and checks are no cost of training."""
        kept = {f.name: getattr(self, f.name) for f in fields(self)}
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(self, name, value)


def _count_samples(argument: object) -> int:
    """Return the number of samples of a denoiser's argument; 0 for one that holds no samples.

    Z-Image's denoiser takes a list with one tensor per sample.
    """
    if isinstance(argument, list) and argument and all(isinstance(a, Tensor) for a in argument):
        return len(argument)
    return len(argument) if isinstance(argument, Tensor) and argument.ndim > 1 else 0
