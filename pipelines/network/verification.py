"""Compares a policy with networks loaded as a user of plain diffusers would load them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowalign.types import Policy, Request, encode_requests, with_denoiser
from flowalign.utils.adapters import TRAINED, active_adapters
from pipelines.network.adapter_files import (
    difference_of_copy,
    fold_alpha,
    load_into_pipeline,
    without_warnings,
)
from pipelines.network.context import undivide
from pipelines.network.denoisers import Denoisers, keep_dtype, place
from pipelines.network.lora_layers import check_copies
from pipelines.network.speed import speed_up
from pipelines.network.weights import load_pipeline
from pipelines.parts.libraries import find_class

_SAVED = "saved"
"""Name of an adapter that is loaded next to the trained one."""


class VerificationSamples:
    """Fixed samples, half at a high and half at a low noise level, to evaluate any denoiser on.

    Two levels are needed because low noise may use another network. Each network gets two rows: the
    product of a single row rounds by the alignment of the weights on some CPUs, and weights that
    are mapped from a file have any alignment.
    """

    def __init__(self, policy: Policy, num_networks: int):
        assert policy.text_encoder, "a pipeline of diffusers encodes prompts"
        requests: Sequence[Request] = [*policy.text_encoder.probe_requests()] * num_networks
        self.policy, self.cond = policy, encode_requests(policy, requests)
        self.x = policy.noise(2 * num_networks, torch.Generator().manual_seed(0))
        early = policy.schedule(4)[1]
        self.sigma = torch.stack([early, early / 20]).repeat(num_networks)

    @torch.no_grad()
    def velocity(self, denoiser: Any) -> Tensor:
        """Return the velocity with this denoiser, without compiled blocks.

        Compiled blocks round differently, and a loaded network must differ by exactly 0.
        """
        policy = with_denoiser(self.policy, denoiser)
        with torch.compiler.set_stance("force_eager"):
            return policy.velocity(self.x, self.sigma, self.cond)


def verify_saved(network: Denoisers, policy: Policy, folder: str) -> float:
    """Return the largest difference of a policy from networks loaded from `folder`.

    Networks are loaded one at a time, and each is freed before the next one is loaded. Into the
    pipeline of a script only the adapter is loaded, under another name.

    Raises:
        RuntimeError: The policy evaluated outdated copies of its weights.
    """
    probe = VerificationSamples(policy, len(network.names))
    trained = {name: network.components[name] for name in network.trained}
    for denoiser in trained.values():
        check_copies(denoiser)
    with undivide([network.components[n] for n in network.names]), fold_alpha(trained.values()):
        expected = probe.velocity(policy.denoiser)
        differences = [
            float((_velocity_of_saved(network, probe, name, folder) - expected).abs().max())
            for name in trained
        ]
    if network.lora:
        differences += [difference_of_copy(n, one, folder) for n, one in trained.items()]
    return max(differences)


def _velocity_of_saved(
    network: Denoisers, probe: VerificationSamples, name: str, folder: str
) -> Tensor:
    if network.folder.loaded and network.lora:
        with _load_next_to_trained(network, name, folder):
            return probe.velocity(network.join({}))
    saved = _load_saved(network, name, folder, probe.x.device)
    keep_dtype(saved)
    place(saved, probe.x.device, network.setup.offload)
    speed_up(saved, network.setup.speed)
    return probe.velocity(network.join({name: saved}))


@contextmanager
def _load_next_to_trained(network: Denoisers, name: str, folder: str) -> Iterator[None]:
    """Let the saved adapter act instead of the trained one inside the context."""
    denoiser = network.components[name]
    trains = [p for p in denoiser.parameters() if p.requires_grad]
    active = active_adapters(denoiser)
    load_into_pipeline(network.pipe, name, folder, _SAVED)
    for parameter_name, parameter in denoiser.named_parameters():
        if f".{_SAVED}." in parameter_name:
            parameter.data = parameter.data.float()
    denoiser.set_adapter([_SAVED if one == TRAINED else one for one in active])
    try:
        yield
    finally:
        with without_warnings():
            denoiser.delete_adapters(_SAVED)
        denoiser.set_adapter(active)
        denoiser.requires_grad_(False)
        for parameter in trains:
            parameter.requires_grad_(True)


def _load_saved(network: Denoisers, name: str, folder: str, device: torch.device) -> Any:
    """Load only this denoiser from `folder`, as a user of plain diffusers would."""
    if network.lora is None:
        return find_class(network.kind).from_pretrained(folder, subfolder=name)
    # Some constructors read sizes of the VAE, and diffusers infers the kind of model from the
    # first network. Tokenizers and processors are cheap.
    needed = {"vae", network.name}
    given: dict[str, Any] = {
        other: None if isinstance(one, nn.Module) and other not in needed else one
        for other, one in network.components.items()
        if other not in (name, "scheduler")
    }
    elsewhere = [name] if network.setup.offload != "none" else []
    settings = network.dtype, network.quantizers(name), device, elsewhere
    pipe = load_pipeline(network.folder, *settings, **given)
    load_into_pipeline(pipe, name, folder)
    denoiser = pipe.components[name]
    for parameter in denoiser.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    network.cast_layerwise(denoiser)
    return denoiser
