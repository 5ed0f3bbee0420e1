"""Update the weights of a policy: parameters, optimizer, averages, and checks of each update."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from flowalign.distributed.processes import Processes, gather_whole, is_sharded, local_part
from flowalign.training.reference import (
    EMA,
    TrainedSet,
    TrainedWeights,
    WeightOverride,
    reference_for,
)
from flowalign.types import Policy, VelocityField
from flowalign.utils.errors import TrainingFailure
from flowalign.utils.ranges import (
    Decay,
    NonNegativeInt,
    PositiveFloat,
    Range,
    UnitInterval,
    require_ranges,
)

OptimizerKind = Literal["adamw", "adamw_8bit", "adamw_offloaded"]

MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "adamw_offloaded": 0.0}
"""Device memory of both moments per parameter, in bytes; 8-bit moments have one scale per 256
values."""


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW with moments in main memory.

    Moments are moved to the device for one parameter at a time. Results equal those of
    `torch.optim.AdamW` bit for bit.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient."""
        groups = self.param_groups
        for group in groups:
            for p in group["params"]:
                self.param_groups = [{**group, "params": [p]}]
                self._move_moments(p, p.device)
                super().step(closure)
                self._move_moments(p, torch.device("cpu"))
        self.param_groups = groups

    def _move_moments(self, p: nn.Parameter, device: torch.device) -> None:
        state = self.state.get(p, {})
        state |= {name: t.to(device) for name, t in state.items() if name != "step"}


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


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Settings of AdamW, its learning rate schedule, and the handling of bad gradients.

    The defaults of learning rate, weight decay, betas, eps and max_grad_norm follow Flow-GRPO's
    code.
    """

    kind: OptimizerKind = "adamw"
    """Implementation of AdamW. adamw: torch's. adamw_8bit: 8-bit moments from bitsandbytes,
    arXiv:2110.02861. adamw_offloaded: moments in main memory, with the same updates as adamw."""
    learning_rate: Annotated[float, Range(above=0, most=1)] = 3e-4
    """Peak learning rate, above 0."""
    weight_decay: UnitInterval = 1e-4
    """Decoupled weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decays of AdamW's running means of the gradient and of its square."""
    eps: Annotated[float, Range(above=0, most=1)] = 1e-8
    """Constant added to the denominator of AdamW."""
    warmup: NonNegativeInt = 0
    """Number of optimizer updates over which the learning rate rises linearly from 0. 0: none."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule by which the learning rate falls to 0 at the end of the run. constant: no decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the whole gradient, summed over ranks; larger gradients are scaled down."""
    max_skipped: NonNegativeInt = 10
    """Number of consecutive updates that may be skipped for a non-finite gradient before the run
    stops."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and an optimizer that is not installed."""
        check_kind(self.kind, divided=False)
        require_ranges(self, "optimizer")

    def rate(self, update: int, total: int) -> float:
        """Return the learning rate of the update with index `update`, of `total` updates."""
        rise = min(1.0, (update + 1) / self.warmup) if self.warmup else 1.0
        left = max(0.0, 1 - update / max(total, 1))
        fall = {"constant": 1.0, "linear": left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}
        return self.learning_rate * rise * fall[self.decay]

    def check_skipped(self, in_a_row: int) -> None:
        """Raise TrainingFailure if more consecutive updates were skipped than are allowed."""
        if in_a_row > self.max_skipped:
            raise TrainingFailure(
                f"the gradient was not finite in {in_a_row} updates in a row "
                f"(optimizer.max_skipped is {self.max_skipped}).\n"
                "Lower optimizer.learning_rate, or compute in fp32; the last checkpoint is intact."
            )


class Learner:
    """Trained parameters of a policy, with their optimizer and averages.

    A checkpoint stores the state of the learner. Further parameters, such as other adapters of the
    network, are trained by `companions`. Each companion is a learner with a separate optimizer,
    averages and skipped updates.
    """

    def __init__(
        self,
        policy: Policy,
        cfg: Optimizer,
        processes: Processes,
        total_updates: int,
        ema: tuple[float, int] | None = None,
        weights: TrainedSet | None = None,
    ):
        self.policy, self.cfg, self.processes = policy, cfg, processes
        self.total_updates, self.weights = total_updates, weights
        self.fields: dict[str, VelocityField] = {}
        """Untrained velocity fields, such as references and teachers, by name."""
        self.companions: dict[str, Learner] = {}
        """Learners of further parameters, by name."""
        if weights is None:
            self.fields["reference"] = reference_for(policy)
            own = policy.denoiser.named_parameters()
            self.named = {name: p for name, p in own if p.requires_grad}
        else:
            self.named = weights.named
        self.parameters: list[nn.Parameter] = list(self.named.values())
        check_kind(cfg.kind, self.is_sharded)
        self.optimizer = new_optimizer(
            cfg.kind,
            self.parameters,
            lr=cfg.learning_rate,
            weight_decay=cfg.weight_decay,
            betas=cfg.betas,
            eps=cfg.eps,
        )
        self.averages: dict[str, EMA] = {"ema": EMA(self.parameters, *ema)} if ema else {}
        self.scaler = torch.amp.GradScaler(
            processes.device.type, enabled=policy.precision == "fp16"
        )
        # GradScaler is initialised by its first scale(), and a rank may have no loss at first.
        self.scaler.scale(torch.zeros(1, device=processes.device))
        self.num_updates = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0
        self.num_with_gradient = 0
        """Number of updates with a gradient above 0."""
        self.reached: set[str] = set()
        """Names of the parameters that ever had a gradient other than 0 on this process."""

    @property
    def reference(self) -> VelocityField:
        """Return the velocity field of the reference."""
        return self.fields["reference"]

    @property
    def ema(self) -> EMA | None:
        """Return the average that is evaluated and saved with the current weights, or None."""
        return self.averages.get("ema")

    @property
    def field(self) -> VelocityField:
        """Return the velocity field of the weights that this learner trains."""
        assert self.weights is None or isinstance(self.weights, TrainedWeights)
        return self.policy if self.weights is None else self.weights

    def add_companion(
        self, name: str, cfg: Optimizer, total_updates: int, weights: TrainedSet | None = None
    ) -> "Learner":
        """Add and return a learner of further parameters; `weights` None copies the policy's.

        Call it before a checkpoint is restored and, for a copy, before the policy is trained.

        Raises:
            ValueError: The parameters of the policy are sharded.
        """
        if self.is_sharded:
            raise ValueError(
                f"{name} cannot be trained together with sharded parameters of the policy: train "
                "a LoRA, or set sharding.weights to replicated"
            )
        weights = weights or TrainedWeights(self.policy)
        found = Learner(self.policy, cfg, self.processes, total_updates, weights=weights)
        self.companions[name] = found
        return found

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss."""
        with self.weights.active() if self.weights else nullcontext():
            self.scaler.scale(self.processes.before_backward(loss)).backward()

    def step(self) -> dict[str, float]:
        """Sum gradients over ranks, clip them and update the weights; return the metrics.

        The update is skipped if a gradient is not finite.
        """
        self.processes.sum_gradients(self.parameters)
        rate = self.cfg.rate(self.num_updates, self.total_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        total = gather_whole(nn.utils.get_total_norm(grads))
        nn.utils.clip_grads_with_norm_(self.parameters, self.cfg.max_grad_norm, total)
        norm = float(total)
        if math.isfinite(norm):
            self._record_gradient(norm)
            self.scaler.step(self.optimizer)
            self.skipped_in_a_row = 0
        else:
            self.num_skipped += 1
            self.skipped_in_a_row += 1
            self.cfg.check_skipped(self.skipped_in_a_row)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        for average in self.averages.values() if math.isfinite(norm) else ():
            average.update(self.num_updates - self.num_skipped)
        return {
            "optim/grad_norm": norm,
            "optim/learning_rate": rate,
            "optim/skipped": float(self.num_skipped),
        }

    def keep_average(
        self,
        name: str,
        decay: float | Callable[[int], float],
        every: int = 1,
        per: Literal["update", "step"] = "update",
    ) -> VelocityField:
        """Average the parameters from now on (see `EMA`); return the average's velocity field."""
        self.averages[name] = EMA(self.parameters, decay, every, per)
        return WeightOverride(self.policy, self.averages[name])

    @contextmanager
    def averaged(self, name: str) -> Iterator[None]:
        """Set the parameters to an average inside the context, and restore them afterwards.

        If trained parameters are sharded, all processes must call this together.
        """
        wait = self.processes.barrier if self.is_sharded else nullcontext
        wait()
        with self.averages[name].applied():
            yield
            wait()

    def end_step(self) -> None:
        """Update the averages with `per` step, after the updates of a training step."""
        for average in self.averages.values():
            average.end_step()

    def _record_gradient(self, norm: float) -> None:
        self.num_with_gradient += norm > 0
        for name in self.named.keys() - self.reached:
            gradient = self.named[name].grad
            if gradient is not None and local_part(gradient).any():
                self.reached.add(name)

    @property
    def is_sharded(self) -> bool:
        """Return whether trained parameters are sharded."""
        return any(is_sharded(p) for p in self.parameters)

    def gradient_size(self, loss: Tensor | None) -> float:
        """Return the sum of absolute values of a loss's gradient, and clear the gradient.

        A process without a loss passes None. The sum covers this process, or all processes if
        parameters are sharded.
        """
        if not self.is_sharded:
            if loss is None or not loss.requires_grad:
                return 0.0
            grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
            own = self.processes.context
            whole_grads = (own.sum_gradient(g) if own else g for g in grads if g is not None)
            return sum(float(g.abs().sum()) for g in whole_grads)
        if loss is not None and loss.requires_grad:
            self.backward(loss)
        self.processes.barrier()
        mine = sum(
            float(local_part(p.grad).abs().sum()) for p in self.parameters if p.grad is not None
        )
        self.optimizer.zero_grad(set_to_none=True)
        return self.processes.sum_by_name({"size": mine})["size"]
