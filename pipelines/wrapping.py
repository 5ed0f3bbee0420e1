"""Tells by its configuration files whether a pipeline can be wrapped as it is."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from flowalign.types import Request
from pipelines.folder import config_of, setting_of
from pipelines.intact import parts_of
from pipelines.replay import WAY_OUT, named_failures
from pipelines.stock_call import rollout

_OURS = {
    *("self", "prompt", "height", "width", "latents", "generator", "num_inference_steps"),
    *("num_images_per_prompt", "num_videos_per_prompt", "output_type", "return_dict"),
}
"""Arguments of `__call__` that are no setting: the policy gives them, or they are self."""
_TOLERANCE = 1e-3
"""Largest relative difference of a replayed velocity; kernels on a GPU may sum in another order."""


def wrapped_classes(path: str, part: str, pictures: int) -> tuple[type[DiffusionPipeline], Any]:
    """Return the classes of a pipeline and of its network, the component `part`.

    Every prompt comes with so many pictures.

    Raises:
        ValueError: The pipeline cannot be wrapped; the message names the way out.
    """
    kind = setting_of(DiffusionPipeline, path, "_class_name")
    if kind not in dir(diffusers):
        raise ValueError(f"{path}: diffusers {diffusers.__version__} has no class {kind}")
    cls = getattr(diffusers, kind)
    parts = parts_of(cls, path)
    if reason := _misfit(cls, path, part, parts) or _unpictured(cls, pictures):
        raise ValueError(f"{path} ({kind}) cannot be replayed: {reason}; {WAY_OUT}")
    return cls, getattr(diffusers, parts[part][1])


def _misfit(
    cls: type[DiffusionPipeline], path: str, part: str, parts: Mapping[str, tuple[str, str]]
) -> str:
    """Return why the parts are not those of a pipeline that can be wrapped, or ""."""
    if part not in parts:
        return f"it has no {part}"
    if more := [name for name in parts if name.startswith(f"{part}_")]:
        return f"it has a second network, {more[0]}"
    if "audio_vae" in parts:
        return "it makes two states, video and audio"
    if (
        "expand_timesteps" in inspect.signature(cls.__init__).parameters
        and setting_of(cls, path, "expand_timesteps")
        and "image" in inspect.signature(cls.__call__).parameters
    ):
        return "it keeps the first frame outside of its state"
    scheduler = config_of(cls, path, "scheduler")
    flows = scheduler.get("prediction_type") == "flow_prediction"
    if not (flows or scheduler["_class_name"].startswith("FlowMatch")):
        return f"its scheduler, {scheduler['_class_name']}, is none of flow matching"
    return ""


def _unpictured(cls: type[DiffusionPipeline], pictures: int) -> str:
    """Return why the pipeline cannot be called with so many pictures a prompt, or ""."""
    parameters = inspect.signature(cls.__call__).parameters
    if pictures and "image" not in parameters:
        return f"it takes no image, and call.pictures is {pictures}"
    known = _OURS | {"image"} if pictures else _OURS
    needed = [p.name for p in parameters.values() if p.default is p.empty and p.name not in known]
    if not needed:
        return ""
    way = " (call.pictures)" if needed[0] == "image" else ""
    return f"it needs {needed[0]} beside a prompt{way}"


def check_arguments(cls: type[DiffusionPipeline], names: Iterable[str]) -> None:
    """Raise ValueError for an argument that the pipeline does not take, or that is no setting."""
    known = inspect.signature(cls.__call__).parameters.keys() - _OURS
    if unknown := sorted(set(names) - known):
        raise ValueError(
            f"call.arguments has {unknown[0]}; {cls.__name__} may be given "
            + ", ".join(sorted(known))
        )


def check_replay(policy: Any, request: Request) -> None:
    """Make two steps as the pipeline of an `AnyFlow` does, and compare what is replayed.

    Raises:
        ValueError: The velocities differ, or the pipeline makes another number of evaluations.
    """
    with named_failures(policy.path, policy.pipeline_class):
        steps, rows = rollout(policy, [request], 2)
        difference = policy.difference(steps, request)
        if not difference <= _TOLERANCE:
            raise RuntimeError(f"a velocity that was replayed is off by {difference:.1e}")
    evaluations = rows / len(steps)
    if evaluations != policy.evaluations_per_velocity:
        raise ValueError(
            f"call.evaluations is {policy.evaluations_per_velocity}, but with these arguments "
            f"{policy.pipeline_class.__name__} makes {evaluations:g} for a step"
        )
