"""Tests on a pipeline folder which operations of training work."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flowalign.types import Request
from pipelines.any_pipeline.any_flow import LORA, AnyFlow, Call
from pipelines.any_pipeline.wrapping import replay_difference
from pipelines.network.speed import blocks_of, usable_attention

_PROMPT = "a red ball beside two cats"


def inspect_pipeline(
    path: str, height: int, width: int, arguments: Mapping[str, Any]
) -> dict[str, str]:
    """Return a report in float32: for each operation its result, or "no" and the reason.

    Raises:
        ValueError: The pipeline cannot be wrapped, or its weights cannot be read.
    """
    policy = AnyFlow(path, height, width, Call(arguments=arguments), lora=None, precision="fp32")
    policy.read(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    network, state = policy.denoiser, policy.noise(1, torch.Generator().manual_seed(0))
    steps, rows = policy.stock.rollout(network, [Request(_PROMPT)], 4)
    policy = _with_evaluations(policy, rows // len(steps))
    return {
        "pipeline": f"{policy.folder.pipeline.__name__}, {type(network).__name__} of "
        f"{sum(p.numel() for p in network.parameters()):,} parameters",
        "encode": _tried(lambda: _shapes(policy)),
        "velocity": f"{rows / len(steps):g} evaluations per step, state {tuple(state.shape[1:])}",
        "replay": _tried(
            lambda: f"off by {replay_difference(policy, steps, Request(_PROMPT)):.1e} in 4 steps"
        ),
        "decode": _tried(lambda: f"media {tuple(policy.decode(state).shape[1:])}"),
        "embed": _tried(lambda: f"state {tuple(policy.embed(policy.decode(state)).shape[1:])}"),
        "LoRA targets": _targets(network),
        "LoRA loader": "pipe.load_lora_weights"
        if "load_lora_weights" in dir(policy.folder.pipeline)
        else "the pipeline has none: pipe.transformer.load_lora_adapter",
        "sharding blocks": _blocks(network),
        "attention backends": ", ".join(usable_attention()),
    }


def _with_evaluations(policy: AnyFlow, count: int) -> AnyFlow:
    """Return the policy with this number of network evaluations per denoising step."""
    copied = copy(policy)
    copied.call = replace(policy.call, evaluations=count)
    copied.evaluations_per_velocity = count
    return copied


def _tried(work: Callable[[], str]) -> str:
    try:
        return work()
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        return f"no: {type(error).__name__}: {' '.join(str(error).split())[:160]}"


def _shapes(policy: AnyFlow) -> str:
    cond = policy.encode([Request(_PROMPT)])
    kept = [str(tuple(one.shape[1:])) for n, one in cond.items() if not n.endswith(".length")]
    how = "one prompt at a time" if policy.layout.ragged else "prompts together"
    return f"{how}, keeps {', '.join(kept)}"


def _targets(network: nn.Module) -> str:
    """Return the number of linear layers that the default LoRA target names match, as text."""
    linear = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    names = LORA.target_modules or ()
    hit = [one for one in linear if one.endswith(tuple(f".{name}" for name in names))]
    return f"{', '.join(names)}: {len(hit)} of {len(linear)} linear layers"


def _blocks(network: Any) -> str:
    kinds = [type(block).__name__ for block in blocks_of(network)]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
