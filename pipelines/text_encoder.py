"""Loads, moves, frees and identifies the prompt encoders of a diffusers pipeline."""

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn

from flowalign.types import InputSpec, Policy, PromptCache, PromptEncoder, Request
from pipelines.network.checkpoint_checks import check_finite
from pipelines.network.denoisers import Denoisers
from pipelines.network.quantization import stored_bytes
from pipelines.network.weights import float32_bytes, load_pipeline
from pipelines.parts.encoding import digest, probe_request
from pipelines.parts.folder import digest_files
from pipelines.parts.libraries import transformers

PREFIXES = ("text_encoder", "image_encoder")
"""Name prefixes of the components that only `encode` needs."""
_CHANGES_NOTHING = {"self", "path", "lora", "gradient_checkpointing", "memory"}
"""Settings of policies that do not affect `encode`. The path is identified by its files. Every
other setting is an attribute with the name of its constructor argument."""


class TextEncoder(PromptEncoder):
    """Text and image encoders of a pipeline's prompts."""

    pipe: Any
    """Loaded pipeline."""
    device: torch.device
    """Device of the policy."""

    def __init__(
        self,
        network: Denoisers,
        input_spec: InputSpec,
        size: tuple[int, int],
        offload: bool,
    ):
        self.network, self.input_spec = network, input_spec
        self.size, self.offload = size, offload

    def with_network(self, network: Denoisers, cache: PromptCache | None) -> "TextEncoder":
        """Return these encoders for the networks of a run, with its cache of their results."""
        other = copy(self)
        other.network, other.cache = network, cache
        other.micro_batch = network.setup.text_micro_batch
        return other

    def open(self, pipe: Any, device: torch.device) -> None:
        """Take over a loaded pipeline."""
        self.pipe, self.device = pipe, device

    @property
    def names_in_main_memory(self) -> list[str]:
        """Return the names of encoders that are loaded to the CPU."""
        return self.names if self.offload and not self.cache else []

    @property
    def names(self) -> list[str]:
        """Return the names of the encoders."""
        return self.network.folder.names(*PREFIXES)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the encoders on the device inside this context, then move offloaded ones to the CPU.

        Policies that can offload their encoders run `encode` inside this context.
        """
        components = self.pipe.components.items() if self.offload else ()
        moved = [one for name, one in components if one and name.startswith(PREFIXES)]
        for encoder in moved:
            encoder.to(self.device)
        try:
            yield
        finally:
            for encoder in moved:
                encoder.to("cpu")

    def skipped(self) -> dict[str, None]:
        """Return the components that `load` leaves out, as keyword arguments."""
        return dict.fromkeys(self.names) if self.cache else {}

    def read(self, device: torch.device) -> None:
        components, names = self.pipe.components, self.names
        if all(components[name] is None for name in names):
            given: dict[str, Any] = {
                name: None if isinstance(one, nn.Module) else one
                for name, one in components.items()
                if name not in names
            }
            network, folder = self.network, self.network.folder
            quantizers = network.quantizers(*names)
            loaded = load_pipeline(folder, network.dtype, quantizers, device, **given).components
            encoders = {name: loaded[name] for name in names}
            check_finite(folder.path, encoders)
            self.pipe.register_modules(**encoders)
        for name in names:
            self.pipe.components[name].to(device)

    def free(self) -> None:
        self.pipe.register_modules(**dict.fromkeys(self.names))

    def probe_requests(self) -> Sequence[Request]:
        return [probe_request(text, self.input_spec, *self.size) for text in ("a", "b")]

    def stored_bytes(self) -> int:
        """Return the stored size of the encoders in bytes, computed from configs only."""
        total, folder = 0, self.network.folder
        for name in self.names:
            library, kind = folder.components()[name]
            if library != "transformers":
                continue
            values = folder.config(name)
            config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(values)
            with torch.device("meta"):
                encoder = getattr(transformers, kind)(config)
            is_text = name.startswith("text_encoder")
            form = self.network.setup.quantization.text_encoders if is_text else "none"
            total += stored_bytes(encoder, form, self.network.dtype)
            total += float32_bytes(encoder, self.network.dtype) if form == "none" else 0
        return total

    def digest(self, *settings: object) -> str:
        """Return the digest of the loaded encoders, their tokenizers and settings."""
        components, text = self.pipe.components, ""
        loaded = (n for n in components if n.startswith("text_encoder") and components[n])
        for name in sorted(loaded):
            tokenizer_name = name.replace("text_encoder", "tokenizer")
            tokenizer = components.get(tokenizer_name, components.get("processor"))
            tokenizer = vars(tokenizer).get("tokenizer", tokenizer)  # processors contain one
            words = type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())
            config = components[name].config.to_dict()
            text = digest(components[name], config, text, *settings, *words)
        if image_encoder := components.get("image_encoder"):
            text = digest(image_encoder, image_encoder.config.to_dict(), text)
        return text

    def digest_cache(self, policy: Policy) -> str:
        """Return the digest of encoders that are not loaded because their outputs are cached."""
        content = f"{self.digest_files()} {self.describe_settings(policy)}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def digest_files(self) -> str:
        folder, others = self.network.folder, ("scheduler", self.network.name)
        others += () if self.input_spec.references[1] else ("vae",)
        return digest_files(folder, [n for n in folder.components() if not n.startswith(others)])

    def describe_settings(self, policy: Policy) -> str:
        names = inspect.signature(type(policy).__init__).parameters.keys() - _CHANGES_NOTHING
        settings = {name: vars(policy)[name] for name in sorted(names)}
        quantization = self.network.setup.quantization.text_encoders
        return repr((type(policy).__name__, quantization, settings))
