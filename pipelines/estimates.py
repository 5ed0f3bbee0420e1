"""Estimates the memory of pipeline parts by running them on tensors of the meta device."""

import inspect
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from flowalign.types import Saving
from pipelines.folder import config_of, file_in, setting_of
from pipelines.intact import parts_of
from pipelines.quantization import recast_bytes, stored_bytes
from pipelines.sharding import gathered_parameters
from pipelines.weights import DTYPES, prepare_training

_ENCODERS = ("text_encoder", "image_encoder")


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


def encoder_bytes(policy: Any) -> int:
    """Return the bytes of the encoders of prompts as they are stored, from configurations alone."""
    total, dtype = 0, DTYPES[policy.precision]
    for name, (library, kind) in parts_of(policy.pipeline_class, policy.path).items():
        if library != "transformers" or not name.startswith(_ENCODERS) or name in policy.unused:
            continue
        file = file_in(policy.path, "config.json", name)
        config = AutoConfig.from_pretrained(file.parent)
        with torch.device("meta"):
            encoder = getattr(transformers, kind)(config)
        text = name.startswith("text_encoder")
        stored = policy.quantization.text_encoders if text else "none"
        total += stored_bytes(encoder, stored, dtype)
    return total


def planned_network(policy: Any, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Return the prepared network of a policy on the meta device, and fields of its `ModelPlan`."""
    dtype, kind = DTYPES[policy.precision], policy.quantization.denoiser
    recomputed = policy.gradient_checkpointing
    with torch.device("meta"):
        network = policy.transformer_class.from_config(config)
        total = sum(p.numel() for p in network.parameters())
        gathered = gathered_parameters(network)
        sizes = {one: stored_bytes(network, one, dtype) for one in ("none", "int8", "nf4")}
        recast = recast_bytes(network, kind, dtype, recomputed)
        least = recast_bytes(network, kind, dtype, recomputed=True)
        stored = sizes[kind] if kind in sizes else stored_bytes(network, kind, dtype)
        prepare_training(network, policy.lora)
    smaller = {one: stored - sizes[one] for one in ("int8", "nf4") if policy.lora}
    savings = [
        Saving("weights", f"quantization.denoiser: {one}", saved)
        for one, saved in smaller.items()
        if saved > stored / 10
    ]
    if recast > least:
        savings.append(Saving("recast weights", f"{policy.recomputing}: true", recast - least))
    return network, {
        "parameters": total,
        "trainable": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "bytes_per_parameter": stored / total,
        "gathered_parameters": gathered,
        "recast_bytes": recast,
        "savings": savings,
    }


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
