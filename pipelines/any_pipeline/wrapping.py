"""Decides from configuration files whether a pipeline can be wrapped."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from flowalign.types import Policy, Request
from pipelines.any_pipeline.replay import WAY_OUT, Step, failure_context
from pipelines.any_pipeline.stock_call import StockCall
from pipelines.parts.folder import Folder
from pipelines.parts.libraries import diffusers

_OURS = {
    *("self", "prompt", "height", "width", "latents", "generator", "num_inference_steps"),
    *("num_images_per_prompt", "num_videos_per_prompt", "output_type", "return_dict"),
}
"""Arguments of `__call__` that are not settings, because the policy supplies them."""
_TOLERANCE = 1e-3
"""Largest relative difference of a replayed velocity; GPU kernels may sum in another order."""


def find_classes(unknown: Folder, name: str, pictures: int) -> tuple[str, str]:
    """Return the class names of a pipeline and of its network, the component `name`.

    `pictures` is the number of images per prompt.

    Raises:
        ValueError: The pipeline cannot be wrapped. The message names an alternative.
    """
    path, kind = unknown.path, unknown.setting("_class_name")
    if kind not in dir(diffusers):
        raise ValueError(f"{path}: diffusers {diffusers.__version__} has no class {kind}")
    folder, components = copy(unknown), unknown.components()  # `replace` looks the pipe up again
    folder.kind = kind
    if reason := _misfit(folder, name, components) or _refuse_images(folder.pipeline, pictures):
        raise ValueError(f"{path} ({kind}) cannot be replayed: {reason}; {WAY_OUT}")
    return kind, components[name][1]


def _misfit(folder: Folder, name: str, components: Mapping[str, tuple[str, str]]) -> str:
    """Return the reason why the components cannot be wrapped, or ""."""
    cls = folder.pipeline
    if name not in components:
        return f"it has no {name}"
    if more := [other for other in components if other.startswith(f"{name}_")]:
        return f"it has a second network, {more[0]}"
    if "audio_vae" in components:
        return "it makes two states, video and audio"
    if (
        "expand_timesteps" in inspect.signature(cls.__init__).parameters
        and folder.setting("expand_timesteps")
        and "image" in inspect.signature(cls.__call__).parameters
    ):
        return "it keeps the first frame outside of its state"
    scheduler = folder.config("scheduler")
    if scheduler["_class_name"].startswith("FlowMap"):
        return "its network predicts the mean velocity between two times, and a policy has one time"
    flows = scheduler.get("prediction_type") == "flow_prediction"
    if flows or scheduler["_class_name"].startswith("FlowMatch"):
        return ""
    return f"its scheduler, {scheduler['_class_name']}, is not a flow-matching scheduler"


def _refuse_images(cls: Any, pictures: int) -> str:
    """Return the reason why the pipeline does not take `pictures` images per prompt, or ""."""
    parameters = inspect.signature(cls.__call__).parameters
    if pictures and "image" not in parameters:
        return f"it takes no image, and call.pictures is {pictures}"
    known = _OURS | {"image"} if pictures else _OURS
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.name not in known]
    if not needed:
        return ""
    way = " (call.pictures)" if needed[0] == "image" else ""
    return f"it needs {needed[0]} in addition to a prompt{way}"


def check_arguments(cls: Any, names: Iterable[str]) -> None:
    """Raise ValueError for an argument that the pipeline does not take or that is not a setting."""
    known = inspect.signature(cls.__call__).parameters.keys() - _OURS
    if unknown := sorted(set(names) - known):
        raise ValueError(
            f"call.arguments has {unknown[0]}; {cls.__name__} accepts " + ", ".join(sorted(known))
        )


def check_replay(policy: Policy, stock: StockCall, request: Request) -> None:
    """Make two steps as the pipeline does, and compare them with the velocities of the policy.

    Raises:
        ValueError: The velocities differ, or the number of evaluations per step does.
    """
    cls = stock.folder.pipeline
    with failure_context(stock.folder.path, cls):
        steps, rows = stock.rollout(policy.denoiser, [request], 2)
        difference = replay_difference(policy, steps, request)
        if not difference <= _TOLERANCE:
            raise RuntimeError(f"a replayed velocity differs by {difference:.1e}")
    evaluations = rows / len(steps)
    if evaluations != policy.evaluations_per_velocity:
        raise ValueError(
            f"call.evaluations is {policy.evaluations_per_velocity}, but with these arguments "
            f"{cls.__name__} makes {evaluations:g} per step"
        )


@torch.no_grad()
def replay_difference(policy: Policy, steps: Sequence[Step], request: Request) -> float:
    """Return the largest difference of replayed velocities, relative to the largest value."""
    cond = policy.encode([request])
    velocities = [policy.velocity(step.x.float(), step.sigma, cond) for step in steps]
    return max(
        float((v - step.v.float()).abs().max() / step.v.abs().max())
        for v, step in zip(velocities, steps, strict=True)
    )
