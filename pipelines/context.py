"""Evaluates networks of diffusers on several processes together, each on a part of the tokens.

A class of diffusers has a plan that says where its tokens are split and gathered. Between the two a
process computes its own tokens, and in attention all tokens for some of the heads (Ulysses). The
gradient behind the gathering is that of the process's own tokens: parts of a parameter's gradient
sum to the gradient over the processes, wherever the parameter stands before the gathering.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from flowalign.types import ContextParallel
from pipelines.folder import config_of
from pipelines.quantization import networks_of
from pipelines.speed import usable_attention

_COMPARED = ("WanTransformer3DModel",)
"""Networks whose parts were compared with the whole: velocities and gradients."""
_KNOWN = "pipelines.wan.Wan, wan_i2v.WanI2V, wan22.Wan22, wan22_i2v.Wan22I2V and WanTI2V"
_FARTHEST = 64
"""Steps to other sizes after which none that would do is named."""


class ContextParallelPolicy(ContextParallel):
    """Lets several processes evaluate the networks of a `DiffusersPolicy`, which this is."""

    def check_context(self: Any, degree: int, attention: str) -> None:
        asked = f"sharding.context_degree is {degree}, but"
        network = self.transformer_class.__name__
        if network not in _COMPARED or self.replays_at_load:
            raise ValueError(
                f"{asked} {type(self).__name__} divides no tokens: either {network} has no plan in "
                f"diffusers, or it was not compared with the whole network; allowed here: 1. "
                f"Others do: {_KNOWN}"
            )
        config = config_of(self.pipeline_class, self.path, self.part)
        tokens = _tokens(self, config)
        known = _AttentionBackendRegistry._supports_context_parallel
        if attention not in known:
            usable = ", ".join(sorted(known & {*usable_attention()}))
            raise ValueError(
                f"{asked} speed.attention {attention!r} divides no tokens; allowed here: {usable}"
            )
        if self.lora is None:
            raise ValueError(f"{asked} policy.lora is null; train a LoRA, or set the degree to 1")
        heads = config["num_attention_heads"]
        if heads % degree:
            raise ValueError(
                f"{asked} the {heads} heads of {self.path} are divided, too; "
                f"allowed here: {_divisors(heads, tokens)}"
            )
        if tokens % degree:
            raise ValueError(
                f"{asked} the {tokens} tokens of a clip are no multiple of it; allowed here: "
                f"{_divisors(heads, tokens)}{_other_sizes(self, config, degree)}"
            )

    def divide_context(self: Any, mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
        group = mesh["ulysses"]
        config = ContextParallelConfig(ulysses_degree=group.size(), mesh=mesh)
        device = torch.device(mesh.device_type)
        config.setup(dist.get_rank(), dist.get_world_size(), device, mesh)
        for name in networks_of(self):
            network = self.pipe.components[name]
            network.register_forward_pre_hook(_Before(group, meet), with_kwargs=True)
            _divide(network, config)


@contextmanager
def undivided(networks: Sequence[Any]) -> Iterator[None]:
    """Let this process evaluate networks by itself inside this context."""
    divided = {
        network: network._parallel_config.context_parallel_config
        for network in networks
        if network._parallel_config is not None
    }
    try:
        for network in divided:
            _divide(network, None)
        yield
    finally:
        for network, config in divided.items():
            _divide(network, config)


def _divide(network: Any, config: ContextParallelConfig | None) -> None:
    """Divide a network as its class plans, or no longer.

    `enable_parallelism` of diffusers does so where there is an accelerator, and only there.
    """
    if config is None:
        remove_context_parallel(network, network._cp_plan)
    else:
        # diffusers 0.42.1 gathers by a name that torch 2.15 calls deprecated
        warnings.filterwarnings("ignore", ".*all_gather_tensor", FutureWarning)
        apply_context_parallel(network, config, network._cp_plan)
    parallel = ParallelConfig(context_parallel_config=config) if config else None
    network._parallel_config = parallel
    for module in network.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = parallel


class _Before:
    """Waits for the other processes before a network is evaluated, while it is divided.

    A process has a part of the gradient to what the network is given, which is summed here.
    """

    def __init__(self, group: DeviceMesh, meet: Callable[[str], None]):
        self.group, self.meet = group.get_group(), meet

    def __call__(
        self, network: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if network._parallel_config is None:
            return args, kwargs
        given = (one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))
        shape = tuple(max(given, key=lambda one: one.ndim).shape)
        self.meet(f"evaluation of {shape}, with gradient: {torch.is_grad_enabled()}")
        return tree_map(self._input, (args, kwargs))

    def _input(self, value: Any) -> Any:
        if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
            return _GradientOfAll.apply(value, self.group)
        return value


class _GradientOfAll(torch.autograd.Function):
    """Returns a tensor as it is; its gradient is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def _tokens(policy: Any, config: Mapping[str, Any]) -> int:
    vae = config_of(policy.pipeline_class, policy.path, "vae")
    return policy.num_tokens(policy.shape_of_latents(config, vae), config)


def _divisors(*numbers: int) -> str:
    common = gcd(*numbers)
    return ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)


def _other_sizes(policy: Any, config: Mapping[str, Any], degree: int) -> str:
    """Name the nearest sizes that so many processes can divide, if there are some."""
    found = []
    for side in ("width", "height"):
        unit, size = 8, getattr(policy, side)
        for sign in (-1, 1):
            sizes = (size + sign * unit * k for k in range(1, _FARTHEST))
            fits = (one for one in sizes if one > 0 and _fits(policy, config, degree, side, one))
            found += [f"{side} {one}" for one in list(fits)[:1]]
    return f"; or a {' or '.join(found)}" if found else ""


def _fits(policy: Any, config: Mapping[str, Any], degree: int, side: str, size: int) -> bool:
    other = copy(policy)
    setattr(other, side, size)
    try:
        return _tokens(other, config) % degree == 0
    except ValueError:  # the family makes no such size
        return False
