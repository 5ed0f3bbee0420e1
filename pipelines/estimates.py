"""Estimates the memory of pipeline parts by running them on tensors of the meta device."""

import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from pipelines.folder import config_of, file_in, setting_of

_ENCODERS = ("text_encoder", "text_encoder_2", "image_encoder")


def peak_bytes(work: Callable[[], object], with_gradient: bool = False) -> int:
    """Return the peak bytes of the tensors that `work` creates and that are alive at once."""
    with torch.set_grad_enabled(with_gradient), _Alive() as alive:
        work()
    return alive.most


def hollow(cls: type[DiffusionPipeline], path: str) -> Any:
    """Build the pipeline with its VAE on the meta device and no other component."""
    config = config_of(cls, path, "vae")
    with torch.device("meta"):
        vae = getattr(diffusers, config["_class_name"]).from_config(config)
    vae.eval()
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    needed: dict[str, Any] = {p.name: None for p in parameters if p.default is p.empty}
    if "processor" in needed:  # some pipelines read its template when they are built
        _, kind = setting_of(cls, path, "processor")
        needed["processor"] = getattr(transformers, kind).from_pretrained(
            path, subfolder="processor"
        )
    return cls(**needed | {"vae": vae})


def encoder_parameters(cls: type[DiffusionPipeline], path: str) -> int:
    """Count the parameters of the text and image encoders of prompts, from configurations alone."""
    total = 0
    for name in _ENCODERS:
        library, kind = setting_of(cls, path, name) or ("", "")
        if library != "transformers":
            continue
        config = AutoConfig.from_pretrained(file_in(path, "config.json", name).parent)
        with torch.device("meta"):
            encoder = getattr(transformers, kind)(config)
        total += sum(p.numel() for p in encoder.parameters())
    return total


def kept_per_token(denoiser: nn.Module, recomputed: bool) -> int:
    """Estimate how many values per token the backward pass keeps.

    Twice what the linear layers of blocks read and write; with recomputation one block's, and what
    each block reads.
    """
    blocks: dict[str, list[nn.Linear]] = {}
    for name, layer in denoiser.named_modules():
        found = re.match(r"\w+\.\d+\.(?!.*norm)", name)  # modulations are per sample
        if found and isinstance(layer, nn.Linear):
            blocks.setdefault(".".join(name.split(".")[:2]), []).append(layer)
    kept = [2 * sum(one.in_features + one.out_features for one in some) for some in blocks.values()]
    width = sum(some[0].in_features for some in blocks.values())
    return max(kept, default=0) + width if recomputed else sum(kept)


class _Alive(TorchDispatchMode):
    """Tracks the bytes of every tensor that an operation creates, until the tensor is freed."""

    def __init__(self):
        super().__init__()
        self.now, self.most = 0, 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and count the storages of its results."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self.seen:
            return
        self.seen.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes
