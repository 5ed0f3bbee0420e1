"""Cache the conditioning of requests in a folder, so that prompt encoders need not stay loaded.

<folder>/<digest of encoders and settings>/ is a `TensorCache`. Its keys are digests of the policy's
inputs: the prompt with added words, and the content of references and mask.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from flowalign.data.latents.tensor_store import Key, Keys, TensorCache
from flowalign.distributed.processes import ALONE, Processes
from flowalign.types import Cond, Policy, PromptCache, PromptEncoder, Request


class StoredPrompts(PromptCache):
    """Prompt cache in a folder; the encoders are moved to the device only for missing requests."""

    def __init__(self, policy: Policy, folder: Path):
        """Open the folder for a policy that is not loaded."""
        self.folder, self.files = folder, _encoder(policy).digest_files()
        self.caches: dict[str, TensorCache] = {}
        self.num_encoded = 0
        """Number of requests that this process has encoded."""

    def prepare(
        self, policy: Policy, requests: Sequence[Request], processes: Processes = ALONE
    ) -> None:
        """Encode missing requests and free the encoders. All processes must make the same call."""
        cache = self._cache(policy)
        cache.processes = processes
        wanted: dict[Keys, Request] = {(request.input_digest,): request for request in requests}
        cache.fill(wanted, lambda todo: self._encode(policy, cache, todo))
        cache.processes = ALONE
        _encoder(policy).free()

    def conditioning(self, policy: Policy, requests: Sequence[Request]) -> Cond:
        """Return one row per request, on the device of the policy."""
        cache, keys = self._cache(policy), [request.input_digest for request in requests]
        absent = {*cache.missing(keys)}
        todo = {key: one for key, one in zip(keys, requests, strict=True) if key in absent}
        self._encode(policy, cache, [((key,), one) for key, one in todo.items()])
        device = next(policy.denoiser.parameters()).device
        return {name: value.to(device) for name, value in cache.read(keys).items()}

    def _cache(self, policy: Policy) -> TensorCache:
        """Return the cache for the settings of a policy, which may differ between its copies."""
        content = f"{self.files}\n{_encoder(policy).describe_settings(policy)}"
        name = hashlib.sha256(content.encode()).hexdigest()[:16]
        if name not in self.caches:
            self.caches[name] = TensorCache(self.folder / name)
        return self.caches[name]

    @torch.no_grad()
    def _encode(
        self, policy: Policy, cache: TensorCache, todo: Sequence[tuple[Keys, Request]]
    ) -> dict[Key, str]:
        """Encode and store requests; return {}, because no request fails.

        Requests are encoded one by one, because rounding depends on the batch size and a row must
        not depend on which other rows were missing. The encoders then stay in main memory.
        """
        if not todo:
            return {}
        encoder = _encoder(policy)
        encoder.read(next(policy.denoiser.parameters()).device)
        try:
            for (key,), request in todo:
                cond = policy.encode([request])
                cache.put(key, {name: value[0].cpu() for name, value in cond.items()})
        finally:
            cache.flush()
            encoder.read(torch.device("cpu"))
        self.num_encoded += len(todo)
        return {}


def _encoder(policy: Policy) -> PromptEncoder:
    assert policy.text_encoder, "a run file with a prompt cache for another policy is refused"
    return policy.text_encoder
