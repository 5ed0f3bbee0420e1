"""Loads a reward of noisy latents from a folder that `flowalign reward train` wrote."""

from collections.abc import Sequence
from importlib import import_module
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flowalign.functional.rating import Rater
from flowalign.types import Cond, LatentReward, Policy
from reward_models.backbones.checkpoints import find_file, load_exactly, read_tensors
from reward_models.backbones.first_blocks import BlockFeatures, FirstBlocks
from reward_models.wrappers.trained import build_head, find_width, read_description


class TrainedLatentReward(LatentReward):
    """Scores noisy latents with a trained head on the first blocks of the attached policy.

    `units` are the units of the scores: `z-score` over the training samples at all noise levels, or
    `calibrated`, in which the difference of two scores is the log odds of a preference. `path` is
    the folder or a hub repository. It may name only classes of the packages in `trusted`. `prefix`
    is put before the names of its dimensions.
    """

    def __init__(
        self,
        path: str,
        units: Literal["z-score", "calibrated"] = "z-score",
        trusted: Sequence[str] = ("reward_models",),
        prefix: str = "",
    ):
        self.path, self.z_score = path, units == "z-score"
        self.config = read_description(find_file(path, "config.json"), trusted, noisy=True)
        self.dims = tuple(f"{prefix}{dim}" for dim in self.config["dims"])
        self.evaluation_share = float(self.config["noise"]["evaluation_share"])
        self.features: BlockFeatures | None = None

    def attach(self, policy: Policy) -> None:
        """Read the head and attach it to the first blocks of this policy."""
        if self.features is not None:
            return
        module, _, name = self.config["backbone"]["class_path"].rpartition(".")
        backbone: type[FirstBlocks] = getattr(import_module(module), name)
        features = backbone.reader(policy, self.config["backbone"]["init_args"])
        wanted, found = self.config["noise"]["weights_fingerprint"], features.fingerprint()
        if wanted != found:
            raise ValueError(
                f"{self.path} was trained on blocks with fingerprint {wanted}; those of "
                f"{type(policy).__name__} have {found}"
            )
        tensors = read_tensors(find_file(self.path, "model.safetensors"))
        joint, prompt = (
            find_width(tensors, f"rater.{n}.mean", self.path) for n in ("joint", "prompt")
        )
        head = build_head(self.config, self.path).build(joint, prompt, self.config["dims"])
        rater = Rater(head, joint, prompt, len(self.dims))
        values = {name.removeprefix("rater."): value for name, value in tensors.items()}
        load_exactly(rater, values, self.path)
        device = next(policy.denoiser.parameters()).device
        self.rater = rater.to(device).eval().requires_grad_(False)
        self.features = features

    def score(
        self, x: Float[Tensor, "n *latent"], sigma: Float[Tensor, "*n"], cond: Cond
    ) -> Float[Tensor, "n L"]:
        """Score states with the blocks of the attached policy."""
        assert self.features is not None, "attach comes first"
        ratings = self.rater(self.features(x, sigma, cond))
        return self.rater.in_units(ratings, self.z_score)[0]
