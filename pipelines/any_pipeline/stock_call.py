"""Builds a stock diffusers pipeline and calls it, completely or in part, for a policy."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowalign.functional.resizing import resize_to_cover
from flowalign.types import Request, prompts_of
from pipelines.any_pipeline.recorded import STATE, Calls
from pipelines.any_pipeline.replay import (
    Recording,
    Step,
    build_recorder,
    call,
    count_rows,
    exchange,
    failure_context,
    initial_state,
    stop_at_network,
)
from pipelines.network.denoisers import current_precision
from pipelines.network.schedules import build_scheduler
from pipelines.network.weights import DTYPES
from pipelines.parts.encoding import read_hole, to_image
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
        if name == "vae":
            components[name] = _encode_to_zeros(folder.vae_on_meta())
        elif name == denoiser:
            with torch.device("meta"):
                network = getattr(diffusers, class_name).from_config(folder.config(name))
            components[name] = network.eval()
        elif name == "scheduler":
            components[name] = build_scheduler(folder.config(name))
        elif name in _WITHOUT_WEIGHTS:
            known = getattr(importlib.import_module(library), class_name)
            components[name] = known.from_pretrained(folder.root, subfolder=name)
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
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=names)],
                value=ast.Call(func=ast.Attribute(attr="encode_prompt")),
            ):
                return [ast.unparse(name) for name in names]
    raise ValueError(f"{cls.__name__} does not call encode_prompt")


@dataclass
class StockCall:
    """Caller of a pipeline's `__call__` with any denoiser."""

    folder: Folder
    name: str
    """Name of the denoiser component."""
    size: tuple[int, int]
    """Height and width in pixels."""
    arguments: Mapping[str, Any]
    """Further arguments of the call."""
    precision: str
    blank_request: Request
    """Request used where only the shape of results matters."""
    pipe: Any = None
    """Loaded pipeline."""
    meta_pipe: Any = None
    """Pipeline on the meta device. Set by the first `trace`."""

    def record(self, denoiser: Any, requests: Sequence[Request]) -> Calls:
        """Return the encoding results for these requests, from a call that stops at the network.

        The initial noise is recorded but not used. All requests get the images of the first
        request.
        """
        recording = Recording(self.pipe)
        others = {"scheduler": build_recorder(self.pipe.scheduler), **recording.methods()}
        with failure_context(self.folder.path, self.folder.pipeline), stop_at_network(denoiser):
            self.run(denoiser, requests, others)
        return recording.calls

    def run(
        self,
        denoiser: Any,
        requests: Sequence[Request] | int,
        others: Mapping[str, Any],
        output_type: str = "latent",
        num_steps: int = 2,
    ) -> Any:
        """Call the pipeline with replaced methods and components.

        An integer `requests` means this number of blank requests.
        """
        if isinstance(requests, int):
            requests = [self.blank_request] * requests
        with exchange(self.pipe, {**others, self.name: denoiser}):
            return call(self.pipe, **self._arguments(requests, output_type, num_steps))[0]

    @torch.no_grad()
    def rollout(
        self, denoiser: Any, requests: Sequence[Request], num_steps: int
    ) -> tuple[list[Step], int]:
        """Return the steps of the unmodified pipeline and the number of rows that it evaluates."""
        scheduler = build_recorder(self.pipe.scheduler)
        with count_rows(denoiser) as rows, self.autocast(self.precision):
            self.run(denoiser, requests, {"scheduler": scheduler}, num_steps=num_steps)
        return scheduler.steps, sum(rows)

    def autocast(self, precision: str | None = None) -> Any:
        """Return a context that computes in `precision`, by default the current one."""
        precision = precision or current_precision(self.precision)
        device = self.pipe.vae.device.type
        return torch.autocast(device, DTYPES[precision], enabled=precision != "fp32")

    def trace(self, num_steps: int) -> tuple[tuple[int, ...], Tensor]:
        """Return the shape of a state and the sigmas, from a call without weights."""
        path, cls = self.folder.path, self.folder.pipeline
        with failure_context(path, cls):
            pipe = self.meta_pipe = self.meta_pipe or build_on_meta(self.folder, self.name)
        recording, scheduler = Recording(pipe), build_recorder(pipe.scheduler)
        with (
            failure_context(path, cls),
            stop_at_network(vars(pipe)[self.name]),
            exchange(pipe, {"scheduler": scheduler, **recording.methods()}),
        ):
            call(pipe, **self._arguments([self.blank_request], "latent", num_steps))
        state = initial_state(dict(recording.calls)[STATE])
        return tuple(state.shape[1:]), scheduler.sigmas.clone()

    def _arguments(
        self, requests: Sequence[Request], output_type: str, num_steps: int
    ) -> dict[str, Any]:
        known = {
            "prompt": prompts_of(requests),
            "height": self.size[0],
            "width": self.size[1],
            "num_inference_steps": num_steps,
            "generator": torch.Generator().manual_seed(0),
            "output_type": output_type,
            "return_dict": False,
        }
        accepted = inspect.signature(self.folder.pipeline.__call__).parameters
        known = {name: value for name, value in known.items() if name in accepted}
        return known | self._images(requests[0]) | dict(self.arguments)

    def _images(self, request: Request) -> dict[str, Any]:
        """Return the image arguments of the pipeline's call for a request."""
        shown = [to_image(resize_to_cover(one.read(), *self.size)) for one in request.references]
        images: dict[str, Any] = {"image": shown[0] if len(shown) == 1 else shown} if shown else {}
        if request.mask is not None:
            hole = read_hole(request.mask, request.references[0].read(), *self.size)
            images["mask_image"] = to_image(hole.float().expand(-1, 3, -1, -1))
        return images
