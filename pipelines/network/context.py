"""Evaluates diffusers networks on several processes together, each on a part of the tokens.

A diffusers class has a plan that names where tokens are split and gathered. Between these points a
process computes its own tokens; in attention it computes all tokens for some heads (Ulysses). The
gradient after gathering is the gradient of the process's own tokens. The gradient of a parameter is
therefore the sum over the processes, for every parameter before the gathering.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from flowalign.utils.imports import LazyModule

_hooks = LazyModule("diffusers.hooks.context_parallel")
_parallel = LazyModule("diffusers.models._modeling_parallel")


def divide_context(networks: Sequence[Any], mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
    """Evaluate networks together with the other processes of a mesh, see `TrainedNetwork`."""
    group = mesh["ulysses"]
    config = _parallel.ContextParallelConfig(ulysses_degree=group.size(), mesh=mesh)
    device = torch.device(mesh.device_type)
    config.setup(dist.get_rank(), dist.get_world_size(), device, mesh)
    for network in networks:
        hook = _wait_before(group.get_group(), meet)
        network.register_forward_pre_hook(hook, with_kwargs=True)
        _divide(network, config)


@contextmanager
def undivide(networks: Sequence[Any]) -> Iterator[None]:
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


def _divide(network: Any, config: Any) -> None:
    """Divide a network by the plan of its class; `config` None removes the division.

    diffusers' `enable_parallelism` does the same, but only on an accelerator.
    """
    if config is None:
        _hooks.remove_context_parallel(network, network._cp_plan)
    else:
        # diffusers 0.42.1 gathers by a name that torch 2.15 calls deprecated
        warnings.filterwarnings("ignore", ".*all_gather_tensor", FutureWarning)
        _hooks.apply_context_parallel(network, config, network._cp_plan)
    parallel = _parallel.ParallelConfig(context_parallel_config=config) if config else None
    network._parallel_config = parallel
    for module in network.modules():
        if hasattr(getattr(module, "processor", None), "_parallel_config"):
            module.processor._parallel_config = parallel


def _wait_before(group: dist.ProcessGroup, meet: Callable[[str], None]) -> Callable[..., Any]:
    """Return a pre-forward hook that waits for the other processes while a network is divided.

    Each process has only a part of the gradient to the network's inputs, so the hook sums the
    parts.
    """

    def sum_gradient(value: Any) -> Any:
        if torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad:
            return _SumGradient.apply(value, group)
        return value

    def wait(network: Any, *inputs: Any) -> Any:
        if network._parallel_config is None:
            return inputs
        given = (one for one in tree_leaves(inputs) if isinstance(one, Tensor))
        shape = tuple(max(given, key=lambda one: one.ndim).shape)
        meet(f"evaluation of {shape}, with gradient: {torch.is_grad_enabled()}")
        return tree_map(sum_gradient, inputs)

    return wait


class _SumGradient(torch.autograd.Function):
    """Identity with a gradient that is summed over the processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
