"""Builds pipelines from configuration files that run until the first network evaluation."""

import ast
import importlib
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipelines.network.schedules import build_scheduler
from pipelines.parts.folder import Folder
from pipelines.parts.libraries import diffusers

_WITHOUT_WEIGHTS = "guider", "processor"
"""Names of pipeline components that have no weights, besides the scheduler."""


def build_on_meta(folder: Folder, denoiser: str) -> Any:
    """Build a pipeline from configs, with networks on the meta device and without encoders.

    Its execution device is the CPU. `encode_prompt` returns one tensor for each text and mask that
    `__call__` unpacks. The autoencoder encodes every image to zeros.
    """
    cls = folder.pipeline
    on_cpu = {"_execution_device": property(lambda _: torch.device("cpu"))}
    kind: Any = type(cls.__name__, (cls,), on_cpu)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    components = dict.fromkeys(p.name for p in parameters if p.default is p.empty)
    for name, (library, class_name) in folder.components().items():
        if name in (denoiser, "vae"):
            with torch.device("meta"):
                made = getattr(diffusers, class_name).from_config(folder.config(name))
            components[name] = _encode_to_zeros(made.eval()) if name == "vae" else made.eval()
        elif name == "scheduler":
            components[name] = build_scheduler(folder.config(name))
        elif name in _WITHOUT_WEIGHTS:
            known = getattr(importlib.import_module(library), class_name)
            components[name] = known.from_pretrained(folder.path, subfolder=name)
    settings = {p.name: folder.setting(p.name) for p in parameters}
    plain = {n: s for n, s in settings.items() if s is not None and not isinstance(s, list)}
    pipe = kind(**components | plain)
    pipe.set_progress_bar_config(disable=True)
    names = _text_names(cls)
    texts = tuple(torch.ones(1, 1) if "mask" in name else torch.ones(1, 1, 1) for name in names)
    vars(pipe)["encode_prompt"] = lambda *_, **__: texts
    vars(pipe)["encode_image"] = lambda *_, **__: torch.ones(1, 1, 1)
    return pipe


def _encode_to_zeros(vae: Any) -> Any:
    """Make an autoencoder on the meta device return zero latents of the right shape on the CPU."""
    encode = vae.encode

    def zeros(pixels: Tensor) -> Any:
        with torch.no_grad():
            z = encode(pixels.to("meta", vae.dtype)).latent_dist.mode()
        found = torch.zeros(z.shape)
        return SimpleNamespace(
            latent_dist=SimpleNamespace(mode=lambda: found, sample=lambda *_, **__: found)
        )

    vars(vae)["encode"] = zeros
    for name in {"latents_mean", "latents_std"} & vae._buffers.keys():
        vae._buffers[name] = torch.zeros_like(vae._buffers[name], device="cpu")
    return vae


def _text_names(cls: type) -> list[str]:
    """Return the names to which `__call__` assigns the results of `encode_prompt`."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(cls.__call__)))
    found = [
        [ast.unparse(name) for name in node.targets[0].elts]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr == "encode_prompt"
    ]
    if not found:
        raise ValueError(f"{cls.__name__} does not call encode_prompt")
    return found[0]
