"""Implements the operations of training runs on a pipeline's denoisers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flowalign.types import ExportDtype, ExportTarget, Policy, Reduced, TrainedNetwork
from pipelines.network.context import divide_context
from pipelines.network.denoisers import Denoisers
from pipelines.network.export_formats import check_export, export
from pipelines.network.speed import blocks_of, reduce_precision
from pipelines.network.weights import DTYPES


class Network(Denoisers, TrainedNetwork):
    """Denoisers of a pipeline that can be sharded, divided, accelerated and exported."""

    def modules(self) -> Sequence[tuple[nn.Module, Sequence[nn.Module]]]:
        trained = [self.components[name] for name in self.trained]
        return [(denoiser, blocks_of(denoiser)) for denoiser in trained]

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        return blocks_of(module)

    def divide_context(self, mesh: DeviceMesh, meet: Callable[[str], None]) -> None:
        divide_context([self.components[name] for name in self.names], mesh, meet)

    def reduce_precision(self, precision: Reduced) -> AbstractContextManager[None]:
        return reduce_precision(precision)

    def check_export(self, folder: str, target: ExportTarget) -> None:
        check_export(self, folder, target)

    def export(
        self, policy: Policy, out: str, target: ExportTarget, dtype: ExportDtype
    ) -> float | None:
        return export(self, policy, out, target, DTYPES[dtype])
