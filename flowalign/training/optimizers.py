"""Build AdamW by name: torch's, with 8-bit moments, or with moments in main memory."""

from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_offloaded"]

MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "adamw_offloaded": 0.0}
"""Device memory of both moments per parameter, in bytes; 8-bit moments have one scale per 256
values."""


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW with moments in main memory.

    Moments are moved to the device for one parameter at a time. Results equal those of
    `torch.optim.AdamW` bit for bit.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ):
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        assert closure is None, "no loop of this package has one"
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: nn.Parameter, gradient: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(p)
        first, second = (state[name].to(p.device) for name in ("exp_avg", "exp_avg_sq"))
        adamw(
            [p],
            [gradient],
            [first],
            [second],
            [],
            [state["step"]],
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        state["exp_avg"], state["exp_avg_sq"] = first.cpu(), second.cpu()


def check_kind(kind: OptimizerKind, divided: bool) -> None:
    """Check that an optimizer is installed and supports the parameters.

    Raises:
        ValueError: Its package is missing, or it does not support sharded parameters.
    """
    if kind == "adamw_8bit" and not find_spec("bitsandbytes"):
        raise ValueError(
            "optimizer.kind adamw_8bit needs bitsandbytes: "
            "pip install 'flowalign-diffusion[quantized]'"
        )
    if kind != "adamw" and divided:
        raise ValueError(
            f"optimizer.kind {kind} updates whole parameters, but sharding.weights blocks shards "
            "the parameters of a whole network: set optimizer.kind to adamw, or train a LoRA"
        )


def new_optimizer(
    kind: OptimizerKind, parameters: Iterable[nn.Parameter], **settings: Any
) -> torch.optim.Optimizer:
    """Return an optimizer of the given kind; `settings` are those of `torch.optim.AdamW`."""
    if kind == "adamw":
        return torch.optim.AdamW(parameters, **settings)
    if kind == "adamw_offloaded":
        return OffloadedAdamW(parameters, **settings)
    from bitsandbytes.optim import AdamW8bit

    updated = list(parameters)
    optimizer = AdamW8bit(updated, **settings)
    # its kernels write through pointers, and copies of the parameters must notice
    optimizer.register_step_post_hook(lambda *_: torch.autograd.graph.increment_version(updated))
    return optimizer
