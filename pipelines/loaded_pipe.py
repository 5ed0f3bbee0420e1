"""Lends a pipeline that a script has loaded to a run, and gives it back as it was.

The run trains the networks of the pipeline itself, so there is no second copy in memory. Afterwards
the pipeline has one more adapter, or trained weights, and is otherwise unchanged.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

from torch import nn

import pipelines
from flowalign.types import Policy
from flowalign.utils.adapters import TRAINED
from flowalign.utils.live_objects import PREFIX
from pipelines.network.adapter_files import save_adapter
from pipelines.network.denoisers import release
from pipelines.network.weights import DTYPES, Precision
from pipelines.parts.folder import INDEX, LoadedPipe
from pipelines.parts.libraries import diffusers
from pipelines.policy import DiffusersPolicy


def name_of(pipe: Any) -> str:
    """Return the folder or hub id from which a pipeline was loaded, or a name for its class."""
    return pipe.name_or_path or f"{PREFIX}{type(pipe).__name__}"


def check_pipe(pipe: Any, device: str | None = None) -> None:
    """Check that a pipeline can be lent to a run on a device, by default its own.

    Raises:
        ValueError: It is no pipeline, its components move between devices, or it already has an
            adapter with the name of the trained one.
    """
    if not isinstance(pipe, diffusers.DiffusionPipeline):
        raise ValueError(
            f"pipe is {type(pipe).__name__}; it must be a diffusers pipeline, such as "
            "StableDiffusion3Pipeline.from_pretrained(...)"
        )
    if getattr(pipe, "_all_hooks", None):
        raise ValueError(
            "pipe moves its components between devices: call pipe.remove_all_hooks() and "
            "pipe.to(device), or pass offload settings instead"
        )
    if device and device != pipe.device.type:
        raise ValueError(f"pipe is on {pipe.device}, not on {device}: call pipe.to({device!r})")
    for name, network in _networks(pipe).items():
        if TRAINED in _adapters(network):
            raise ValueError(
                f"{name} already has an adapter called {TRAINED!r}, the name of the trained one: "
                f"call pipe.{name}.delete_adapters({TRAINED!r}), or fuse it first"
            )


def find_policy(pipe: Any) -> type[DiffusersPolicy]:
    """Return the policy class of a pipeline.

    Raises:
        ValueError: No class wraps it; `pipelines.AnyFlow` may.
    """
    kind = type(pipe).__name__
    classes = [getattr(pipelines, name) for name in dir(pipelines) if name[0].isupper()]
    classes = [one for one in classes if hasattr(one, "pipeline_class")]
    found = [one for one in classes if one.pipeline_class == kind]
    if not found:
        known = sorted({one.pipeline_class for one in classes})
        raise ValueError(
            f"no policy class wraps {kind}; supported: {', '.join(known)}.\n"
            "A flow-matching pipeline with one network works with pipelines.AnyFlow, which needs "
            "the arguments of its\ncall and the evaluations per step: model={'class_path': "
            "'pipelines.AnyFlow', 'call': {'evaluations': 2, 'arguments': {...}}}"
        )
    two = pipe.components.get("transformer_2") is not None
    spread = bool(pipe.config.get("expand_timesteps"))
    return min(found, key=lambda one: _distance(one.__name__, two, spread))


def _distance(name: str, two: bool, spread: bool) -> int:
    """Return 0 for the class of Wan with these networks, and for classes of other families."""
    if not name.startswith("Wan"):
        return 0
    return int(("22" in name) != two) + int(("TI2V" in name) != spread)


def find_precision(pipe: Any) -> Precision:
    """Return the precision of the first network of a pipeline.

    Raises:
        ValueError: It has another dtype than those that a run supports.
    """
    name, network = next(iter(_networks(pipe).items()))
    for precision in get_args(Precision):
        if network.dtype == DTYPES[precision]:
            return precision
    supported = ", ".join(map(str, DTYPES.values()))
    raise ValueError(f"{name} has dtype {network.dtype}; supported: {supported}")


def default_size(pipe: Any) -> int | None:
    """Return the side in pixels that the pipeline uses by default; None if it states none."""
    side, scale = getattr(pipe, "default_sample_size", None), getattr(pipe, "vae_scale_factor", 1)
    if side is None and (unet := pipe.components.get("unet")) is not None:
        side = unet.config.sample_size
    return side * scale if isinstance(side, int) else None


def class_path_of(policy: type[Policy]) -> str:
    """Return the name of a policy class in run files."""
    exported = getattr(pipelines, policy.__name__, None) is policy
    return f"{'pipelines' if exported else policy.__module__}.{policy.__qualname__}"


def accepts(policy: type[Policy], name: str) -> bool:
    """Return whether the constructor of a policy class has an argument."""
    return name in inspect.signature(policy.__init__).parameters


def has_adapter(pipe: Any) -> bool:
    """Return whether a pipeline has the trained adapter."""
    return any(TRAINED in _adapters(network) for network in _networks(pipe).values())


def save_trained(pipe: Any, folder: str) -> None:
    """Write the trained adapter for diffusers, ComfyUI and PEFT, or the whole pipeline."""
    if not has_adapter(pipe):
        pipe.save_pretrained(folder)
    for name, network in _networks(pipe).items():
        if TRAINED in _adapters(network):
            save_adapter(name, network, folder)


def lend(pipe: Any, folder: Path) -> LoadedPipe:
    """Return a pipeline with its configuration files, written to `folder` without weights."""
    for name, part in pipe.components.items():
        if part is None:
            continue
        if isinstance(part, diffusers.ModelMixin):
            part.save_config(folder / name)
        else:
            described: Any = part.config if isinstance(part, nn.Module) else part
            described.save_pretrained(folder / name)
    pipe.save_config(folder)
    if not (folder / INDEX).is_file():
        raise ValueError(f"{type(pipe).__name__} has no {INDEX}, so it cannot be described")
    return LoadedPipe(pipe, str(folder))


@contextmanager
def borrow(pipe: Any) -> Iterator[Callable[[], None]]:
    """Give a pipeline back as it was when the context ends.

    Call the yielded function to keep the trained adapter. Without it, the adapter is removed.
    """
    kept: list[bool] = []
    with ExitStack() as undo:
        undo.callback(setattr, pipe, "scheduler", pipe.scheduler)
        for name, network in pipe.components.items():
            if isinstance(network, nn.Module):
                undo.callback(_restorer(network))
            if name in _networks(pipe):
                undo.callback(_adapter_restorer(network, kept))
        yield lambda: kept.append(True)


def _networks(pipe: Any) -> dict[str, Any]:
    """Return the denoisers of a pipeline, by component name."""
    names = ("transformer", "transformer_2", "unet")
    return {n: p for n, p in pipe.components.items() if n in names and p is not None}


def _adapters(network: Any) -> Mapping[str, Any]:
    return getattr(network, "peft_config", None) or {}


def _restorer(network: nn.Module) -> Callable[[], None]:
    """Return a function that restores everything but the weights and the trained adapter."""
    tensors = {
        name: (one.dtype, one.requires_grad)
        for name, one in [*network.named_parameters(), *network.named_buffers()]
    }
    modes = [(one, one.training) for one in network.modules()]
    flags = ("gradient_checkpointing", "use_tiling", "tile_sample_min_size", "tile_latent_min_size")
    values = [(one, n, vars(one)[n]) for one in network.modules() for n in flags if n in vars(one)]

    def restore() -> None:
        for module, training in modes:
            module.training = training
        for module, name, value in values:
            setattr(module, name, value)
        for name, one in [*network.named_parameters(), *network.named_buffers()]:
            dtype, trains = tensors.get(name.replace(".base_layer.", "."), (one.dtype, False))
            one.data = one.data.to(dtype)
            if isinstance(one, nn.Parameter):
                one.requires_grad_(trains)
                one.grad = None

    return restore


def _adapter_restorer(network: Any, kept: list[bool]) -> Callable[[], None]:
    """Return a function that removes what training added, but no adapter that is kept."""
    adapted = bool(getattr(network, "_hf_peft_config_loaded", False))

    def restore() -> None:
        release(network)
        if kept or TRAINED not in _adapters(network):
            return
        if adapted:
            network.delete_adapters(TRAINED)
        else:
            network.unload_lora()

    return restore
