"""Send trained weights to SGLang-Diffusion servers, and let the servers confirm every tensor.

Weights travel as safetensors files: the server's other way, `/update_weights_from_tensor`, needs
pickle.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flowalign.training.sglang.client import ServerError, SGLangServer
from flowalign.training.workers.worker_settings import SGLang
from flowalign.utils.adapters import merged_weights
from flowalign.utils.files import atomic_write

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class SyncedWeights:
    """Merged weights of one training process in a folder that its servers read."""

    def __init__(self, cfg: SGLang):
        self.cfg = cfg
        self._folder = tempfile.TemporaryDirectory(
            prefix="flowalign-", dir=cfg.folder, ignore_cleanup_errors=True
        )
        self.version = 0
        self.digests: dict[str, str] = {}

    def write(self, network: nn.Module, precision: str) -> None:
        """Write the current weights in the precision of the servers.

        Raises:
            ValueError: The precision is unknown, or the adapter cannot be merged.
        """
        if precision not in DTYPES:
            raise ValueError(f"the server computes in {precision}; known are {', '.join(DTYPES)}")
        named = {
            name: value.detach().to(DTYPES[precision]).cpu().contiguous()
            for name, value in merged_weights(network).items()
        }
        before, self.version = self.path, self.version + 1
        place = Path(self.path, self.cfg.module)
        place.mkdir(parents=True)
        with atomic_write(place / "model.safetensors", alone=True) as partial:
            save_file(named, partial)
        self.digests = {name: digest_tensor(value) for name, value in named.items()}
        shutil.rmtree(before, ignore_errors=True)

    def send(self, server: SGLangServer) -> None:
        """Make a server load the weights, and confirm each tensor.

        Raises:
            ServerLost: The server does not answer.
            ServerError: It does not have all tensors, or other values.
        """
        module = self.cfg.module
        self._require(
            server,
            "/update_weights_from_disk",
            {"model_path": self.path, "flush_cache": True, "target_modules": [module]},
        )
        # The server skips tensors with unknown names without a message, so it must confirm all.
        self._require(
            server,
            "/update_weights_from_tensor_checker",
            {"target_module": module, "expected_named_tensors_sha256": self.digests},
        )

    @property
    def path(self) -> str:
        """Return the folder of the newest weights."""
        return str(Path(self._folder.name, f"version-{self.version}"))

    def close(self) -> None:
        """Delete the weights."""
        self._folder.cleanup()

    def _require(self, server: SGLangServer, path: str, body: Mapping[str, object]) -> None:
        try:
            server.post(path, body)  # a failed update has an error status
        except ServerError as error:
            raise ServerError(
                f"it did not take the {len(self.digests)} trained tensors, so it would sample with "
                f"other weights: {error}"
            ) from error


def digest_tensor(tensor: Tensor) -> str:
    """Return the SHA-256 by which a server identifies a tensor: type, shape and values."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)!r}".encode())
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
