"""Calls a stock diffusers pipeline, completely or in part, with the settings of a policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowalign.functional.resizing import resize_to_cover
from flowalign.types import Request, prompts_of
from pipelines.any_pipeline.build_on_meta import build_on_meta
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
    select_accepted,
    stop_at_network,
)
from pipelines.network.speed import current_precision
from pipelines.network.weights import DTYPES
from pipelines.parts.folder import Folder
from pipelines.parts.references import read_hole, to_image


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
        height, width = self.size
        known = {
            "prompt": prompts_of(requests),
            "height": height,
            "width": width,
            "num_inference_steps": num_steps,
            "generator": torch.Generator().manual_seed(0),
            "output_type": output_type,
            "return_dict": False,
        }
        images = self._images(requests[0])
        return select_accepted(self.folder.pipeline, known) | images | dict(self.arguments)

    def _images(self, request: Request) -> dict[str, Any]:
        """Return the image arguments of the pipeline's call for a request."""
        shown = [to_image(resize_to_cover(one.read(), *self.size)) for one in request.references]
        images: dict[str, Any] = {"image": shown[0] if len(shown) == 1 else shown} if shown else {}
        if request.mask is not None:
            hole = read_hole(request.mask, request.references[0].read(), *self.size)
            images["mask_image"] = to_image(hole.float().expand(-1, 3, -1, -1))
        return images
