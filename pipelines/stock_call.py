"""Calls the pipeline of an `AnyFlow`, whole or in part, with its settings and its network."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flowalign.functional.resizing import covering
from flowalign.types import Request, prompts_of
from pipelines.dry import dry
from pipelines.recorded import STATE, Calls
from pipelines.references import as_picture, hole_of
from pipelines.replay import (
    Recording,
    Step,
    accepted,
    call,
    counting,
    exchanged,
    first_of,
    named_failures,
    recorder,
    stopping,
)
from pipelines.weights import DTYPES

if TYPE_CHECKING:
    from pipelines.any_flow import AnyFlow


def recorded(policy: "AnyFlow", requests: Sequence[Request]) -> Calls:
    """Return what the pipeline encodes for these requests, in a call that stops at the network.

    Initial noise is recorded as well, and not used. All have the pictures of the first.
    """
    recording = Recording(policy.pipe)
    others = {"scheduler": recorder(policy.pipe.scheduler), **recording.methods()}
    with named_failures(policy.path, policy.pipeline_class), stopping(policy.denoiser):
        run(policy, requests, others)
    return recording.calls


def run(
    policy: "AnyFlow",
    requests: Sequence[Request] | int,
    others: Mapping[str, Any],
    output_type: str = "latent",
    num_steps: int = 2,
) -> Any:
    """Call the pipeline on requests, or on so many, with other methods and components."""
    if isinstance(requests, int):
        requests = [policy.blank_request] * requests
    with exchanged(policy.pipe, {**others, policy.part: policy.denoiser}):
        return call(policy.pipe, **_arguments(policy, requests, output_type, num_steps))[0]


@torch.no_grad()
def rollout(
    policy: "AnyFlow", requests: Sequence[Request], num_steps: int
) -> tuple[list[Step], int]:
    """Return the steps that the pipeline makes by itself, and how many rows it evaluates."""
    scheduler = recorder(policy.pipe.scheduler)
    with counting(policy.denoiser) as rows, autocast(policy):
        run(policy, requests, {"scheduler": scheduler}, num_steps=num_steps)
    return scheduler.steps, sum(rows)


def autocast(policy: "AnyFlow", precision: str | None = None) -> Any:
    """Compute in a precision, by default the run's, inside this context."""
    precision = precision or policy.precision
    device = policy.pipe.vae.device.type
    return torch.autocast(device, DTYPES[precision], enabled=precision != "fp32")


def _arguments(
    policy: "AnyFlow", requests: Sequence[Request], output_type: str, num_steps: int = 2
) -> dict[str, Any]:
    pictures = _pictures(policy, requests[0])
    given = {
        "prompt": prompts_of(requests),
        "height": policy.height,
        "width": policy.width,
        "num_inference_steps": num_steps,
        "generator": torch.Generator().manual_seed(0),
        "output_type": output_type,
        "return_dict": False,
    }
    return accepted(policy.pipeline_class, given) | pictures | dict(policy.call.arguments)


def _pictures(policy: "AnyFlow", request: Request) -> dict[str, Any]:
    """Return the arguments of the pipeline's call that are pictures of a request."""
    size = policy.height, policy.width
    shown = [as_picture(covering(one.read(), *size)) for one in request.references]
    found: dict[str, Any] = {"image": shown[0] if len(shown) == 1 else shown} if shown else {}
    if request.mask is not None:
        hole = hole_of(request.mask, request.references[0].read(), *size)
        found["mask_image"] = as_picture(hole.float().expand(-1, 3, -1, -1))
    return found


def rehearsed(policy: "AnyFlow", num_steps: int) -> tuple[tuple[int, ...], Tensor]:
    """Return the shape of a state and the sigmas, of a call without weights."""
    if policy.rehearsal is None:
        with named_failures(policy.path, policy.pipeline_class):
            policy.rehearsal = dry(policy.pipeline_class, policy.path, policy.part)
    pipe, recording = policy.rehearsal, Recording(policy.rehearsal)
    scheduler = recorder(pipe.scheduler)
    network = vars(pipe)[policy.part]
    with (
        named_failures(policy.path, policy.pipeline_class),
        stopping(network),
        exchanged(pipe, {"scheduler": scheduler, **recording.methods()}),
    ):
        call(pipe, **_arguments(policy, [policy.blank_request], "latent", num_steps))
    state = first_of(dict(recording.calls)[STATE])
    return tuple(state.shape[1:]), scheduler.sigmas.clone()
