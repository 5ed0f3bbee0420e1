"""Reads features of noisy latents from the first blocks of a denoiser, without running the rest.

The forward pass stops before the next block, so features of K of N blocks cost about K / N of an
evaluation. Adapters are switched off, so the features depend only on the released weights and not
on training.

Source: the latent reward of VideoAlign, arXiv:2501.13918 (it does not publish the layers);
DiNa-LRM, arXiv:2602.11146 (12 of 24 blocks of `SD3.5 Medium`); PRFL, arXiv:2511.21541 (8 of 40 of
Wan 2.1).
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from flowalign.functional.pooling import pool_regions, token_grid
from flowalign.functional.rating import Features
from flowalign.types import (
    Cond,
    MediaBatch,
    NoisyBackbone,
    Policy,
    PositiveInt,
    plain_requests,
    with_denoiser,
    with_guidance,
)
from flowalign.utils.adapters import adapters_of, adapters_off

STACKS = ("transformer_blocks", "blocks")
"""Names of the first stack of blocks in diffusers' denoisers."""


class FirstBlocks(NoisyBackbone):
    """Pools the outputs of the first `blocks` of a policy's denoiser for noisy latents and prompts.

    `regions` divides an image into rows and columns, or a clip into frames, rows and columns. The
    tokens of each region are averaged; null averages all tokens. Gates read the mean of the text
    tokens. Guidance is off. `at_once` limits the number of latents per call.
    """

    reads_prompts = True

    def __init__(
        self,
        policy: Policy,
        blocks: PositiveInt,
        regions: Sequence[PositiveInt] | None = None,
        at_once: PositiveInt = 64,
    ):
        self.policy, self.blocks, self.regions, self.at_once = policy, blocks, regions, at_once
        self.num_frames = policy.num_frames or 1

    @classmethod
    def reader(cls, policy: Policy, settings: Mapping[str, Any]) -> "BlockFeatures":
        """Return the evaluation of a loaded policy's blocks, with constructor arguments."""
        return BlockFeatures(policy, settings["blocks"], settings.get("regions"))

    def load(self) -> None:
        """Read the policy's weights; raise ValueError if it has fewer blocks."""
        self.policy.load(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self.network = self.policy.denoiser.requires_grad_(False)
        settings = {"blocks": self.blocks, "regions": self.regions}
        self.features = self.reader(self.policy, settings)
        self.evaluation_share = self.features.share
        self.weights_fingerprint = self.features.fingerprint()
        self.fingerprint = "-".join([self.weights_fingerprint, *self.policy.encoders()])
        self.shape = self.policy.plan().latent_shape
        given = self.policy.encode(plain_requests(["a"]))
        self.parts = {name: (value.shape[1:], value.dtype) for name, value in given.items()}

    @torch.no_grad()
    def embed(self, batch: MediaBatch) -> Features:
        """Return clean latents and conditioning, each flattened."""
        latents, texts = [], []
        for part in batch.chunks(self.at_once):
            x, cond = (
                self.policy.embed(part.media),
                self.policy.encode(plain_requests(part.prompts)),
            )
            latents.append(x.flatten(1).float())
            texts.append(torch.cat([cond[n].flatten(1).float() for n in self.parts], 1))
        return Features(torch.cat(latents), torch.cat(texts))

    @torch.no_grad()
    def add_noise(
        self, clean: Features, sigma: Float[Tensor, "n"], noise: Float[Tensor, "n D"]
    ) -> Features:
        """Return features of the noised latents, with the conditioning of the clean ones."""
        device = next(self.network.parameters()).device
        level = sigma.to(device)
        x = (1 - level[:, None]) * clean.joint.to(device) + level[:, None] * noise.to(device)
        rows = zip(*(t.split(self.at_once) for t in (x, level, clean.prompt)), strict=True)
        found = [
            self.features(a.unflatten(1, self.shape), s, self._cond(c.to(device)))
            for a, s, c in rows
        ]
        joint, prompt = ([getattr(f, n) for f in found] for n in ("joint", "prompt"))
        return Features(torch.cat(joint), torch.cat(prompt))

    def _cond(self, flat: Float[Tensor, "n E"]) -> dict[str, Tensor]:
        """Return the conditioning, given its flattened form from `embed`."""
        sizes = [prod(shape) for shape, _ in self.parts.values()]
        parts = zip(self.parts.items(), flat.split(sizes, 1), strict=True)
        return {name: v.unflatten(1, shape).to(dtype) for (name, (shape, dtype)), v in parts}


class BlockFeatures:
    """Evaluation of the first blocks of a loaded policy with its released weights."""

    reads_output: ClassVar[bool] = False
    """Whether the features also depend on the layers after the blocks."""

    def __init__(self, policy: Policy, blocks: int, regions: Sequence[int] | None):
        self.policy = with_guidance(policy, 1.0)
        if not adapters_of(policy.denoiser):
            own = copy.deepcopy(policy.denoiser).requires_grad_(False)
            self.policy = with_denoiser(self.policy, own)
        self.stacks = find_stacks(self.policy.denoiser)
        self.blocks, self.regions = blocks, regions
        fewest = min(len(stack) for stack in self.stacks)
        if not blocks < fewest:
            raise ValueError(
                f"blocks is {blocks}; {type(policy.denoiser).__name__} has {fewest}, so it must be "
                f"at most {fewest - 1}"
            )
        self.share = blocks / fewest

    def __call__(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Features:
        """Return the features of states, with a gradient to states that require one."""
        handles = [
            stack[self.blocks].register_forward_pre_hook(_raise_block_input, with_kwargs=True)
            for stack in self.stacks
        ]
        try:
            with adapters_off(self.policy.denoiser):
                self.policy.velocity(x, sigma, cond)
        except _BlockInput as reached:
            return self._pooled(reached.tokens, reached.text, x.shape[2:])
        finally:
            for handle in handles:
                handle.remove()
        raise AssertionError("an evaluation has passed the block without its hook")

    def fingerprint(self) -> str:
        """Return a hash of the settings and of the used weights, rounded to bfloat16."""
        names = [name for name, _ in self.policy.denoiser.named_modules()]
        beyond = tuple(
            f"{name}.{k}."
            for name in names
            if name.rpartition(".")[2] in STACKS
            for k in range(self.blocks, 1000)
        )
        digest = hashlib.sha256(f"{self.blocks} {self.regions}".encode())
        for name, value in sorted(self.policy.denoiser.state_dict().items()):
            unused = name.startswith(beyond) or (_is_last(name) and not self.reads_output)
            if "lora_" in name or unused:
                continue
            digest.update(name.replace(".base_layer", "").encode())
            digest.update(value.detach().cpu().bfloat16().view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _pooled(self, tokens: Tensor, text: Tensor | None, places: Sequence[int]) -> Features:
        prompt = tokens.new_zeros(len(tokens), 0) if text is None else text.mean(1)
        if self.regions is None:
            return Features(tokens.float().mean(1), prompt.float())
        if len(self.regions) != len(places):
            needs = f"latents of {tuple(places)} need {len(places)} numbers"
            raise ValueError(f"regions are {list(self.regions)}; {needs}")
        grid = token_grid(tokens.shape[1], places)
        joint = pool_regions(tokens.float(), grid, self.regions)
        return Features(joint.flatten(1), prompt.float())


class _BlockInput(Exception):
    """Ends an evaluation, and carries the input of the next block."""

    def __init__(self, tokens: Tensor, text: Tensor | None):
        super().__init__()
        self.tokens, self.text = tokens, text


def _raise_block_input(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """Raise the block's input: latent tokens first, text tokens second."""
    tokens = given["hidden_states"] if "hidden_states" in given else args[0]
    text = given.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
    raise _BlockInput(tokens, text)


def find_stacks(denoiser: nn.Module) -> list[Any]:
    """Return the first stack of blocks of a network, or of each network that it joins.

    Raises:
        ValueError: No list of layers has one of the names in STACKS.
    """
    found = [
        layers
        for name, layers in denoiser.named_modules()
        if isinstance(layers, nn.ModuleList)
        and name.rpartition(".")[2] in STACKS
        and name.count(".") <= 1
    ]
    if not found:
        raise ValueError(
            "a latent reward reads the first blocks of a transformer, but "
            f"{type(denoiser).__name__} "
            f"has no list of layers called {' or '.join(STACKS)}"
        )
    return found


def _is_last(name: str) -> bool:
    """Return whether a weight belongs to the layers after the blocks."""
    return name.rpartition(".")[0].startswith(("proj_out", "norm_out", "single_transformer_blocks"))
