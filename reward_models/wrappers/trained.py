"""Loads rewards of pixels and of noisy latents from folders that `flowalign reward train` wrote."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from jaxtyping import Float
from jsonargparse import ArgumentError, ArgumentParser
from torch import Tensor, nn

from flowalign.functional.rating import Features, Rater
from flowalign.types import (
    Backbone,
    Cond,
    Head,
    LatentReward,
    MediaBatch,
    Need,
    Policy,
    Refreshable,
    RewardSpec,
)
from flowalign.utils.errors import require_known
from flowalign.utils.files import read_object
from reward_models.backbones.checkpoints import find_file, load_exactly, read_tensors
from reward_models.backbones.first_blocks import BlockFeatures, FirstBlocks
from reward_models.backbones.reward_bases import BatchScores, NetworkReward

FORMAT = "flowalign trained reward 1"
_FILE = "model.safetensors"


@dataclass(eq=False, repr=False)
class TrainedReward(NetworkReward, Refreshable):
    """Scores with a trained head on its backbone, with a gradient to the pixels.

    `units` are the units of the scores: `z-score` over the training samples, or `calibrated`, in
    which the difference of two scores is the log odds of a preference (for rated dimensions, the
    units of the ratings). `path` is the folder or a hub repository. It may name only classes of the
    packages in `trusted`, because a class named by a folder is executed as code. `prefix` is put
    before the names of its dimensions, for runs in which another reward has the same names.
    """

    path: str
    units: Literal["z-score", "calibrated"] = "z-score"
    trusted: Sequence[str] = ("reward_models",)
    prefix: str = ""

    def declare(self) -> RewardSpec:
        """Return the declaration."""
        described = find_file(self.path, "config.json")
        self.config = read_description(described, self.trusted)
        self.weights, self.z_score = find_file(self.path, _FILE), self.units == "z-score"
        dims = tuple(f"{self.prefix}{dim}" for dim in self.config["dims"])
        hashed = hashlib.sha256(described.read_bytes() + self.weights.read_bytes()).hexdigest()
        return RewardSpec(
            name=self.config["name"],
            dims=dims,
            modality=self.config["modality"],
            licence=self.config["licence"],
            differentiable=True,
            needs=_read_needs(self.config),
            normalisation=self.units,
            version=hashed[:16],
        )

    def read(self) -> nn.Module:
        """Read the backbone and the head; every saved tensor is accounted for.

        Raises:
            ValueError: The folder is damaged, or its backbone has other weights than in training.
        """
        self.backbone: Backbone = _build(Backbone, self.config["backbone"], self.path)
        self.backbone.load()
        wanted, found = self.config["backbone_fingerprint"], self.backbone.fingerprint
        _require_fingerprint(self.path, "a backbone", wanted, found)
        tensors = read_tensors(self.weights)
        self.rater = build_rater(self.config, tensors, self.path)
        whole = nn.ModuleDict({"rater": self.rater, "backbone": self.backbone.network})
        adapters = {n for n, p in self.backbone.network.named_parameters() if p.requires_grad}
        state = self.backbone.network.state_dict()
        frozen = {f"backbone.{n}": value for n, value in state.items() if n not in adapters}
        if saved := frozen.keys() & tensors.keys():
            raise ValueError(f"{self.path} holds frozen weights of the backbone: {min(saved)}")
        load_exactly(whole, frozen | tensors, self.path)
        return whole

    def head(self) -> Mapping[str, nn.Parameter]:
        """Return the parameters of the head by name, without statistics and units."""
        return dict(self.rater.head.named_parameters())

    @torch.no_grad()
    def features(self, batch: MediaBatch) -> Features:
        """Return the inputs of the head for each sample."""
        self.network.to(self.place)
        parts = [self.backbone.embed(part) for part in batch.chunks(self.batch_size)]
        joint, prompt = (torch.cat([getattr(p, n) for p in parts]) for n in ("joint", "prompt"))
        return Features(joint, prompt).to(self.place)

    def score_features(self, features: Features) -> Tensor:
        """Return the scores of samples with these features, with a gradient to the head."""
        return self.rater.in_units(self.rater(features.to(self.place)), self.z_score)[0]

    def rate(self, batch: MediaBatch) -> BatchScores:
        """Return scores, and standard deviations of the dimensions that learned one."""
        ratings = self.rater(self.backbone.embed(batch).to(self.place))
        values, deviation = self.rater.in_units(ratings, self.z_score)
        if deviation is not None:
            learned = torch.tensor([d in self.config["uncertain"] for d in self.config["dims"]])
            deviation = deviation.masked_fill(~learned.to(deviation.device), torch.nan)
        return BatchScores(values, deviation)


def _require_fingerprint(path: str, what: str, wanted: str, found: str) -> None:
    """Raise ValueError if frozen weights are not those of the training."""
    if wanted != found:
        raise ValueError(
            f"{path} was trained on {what} with fingerprint {wanted}; the fingerprint here is "
            f"{found}"
        )


def _read_needs(config: Mapping[str, Any]) -> tuple[Need, ...]:
    """Return the inputs that samples need; folders from before source images name none."""
    keys: dict[Need, str] = {"prompt": "needs_prompt", "references": "needs_references"}
    return tuple(need for need, key in keys.items() if config.get(key))


def read_description(path: Path, trusted: Sequence[str], noisy: bool = False) -> dict[str, Any]:
    """Read the description of a trained reward, for finished samples or for noisy latents.

    Raises:
        ValueError: It is damaged, of the other kind, or names classes that are not trusted.
    """
    config = _read_config(path)
    if noisy != ("noise" in config):
        other = "latent.TrainedLatentReward" if "noise" in config else "trained.TrainedReward"
        raise ValueError(
            f"{path.parent} scores {'finished samples' if noisy else 'noisy latents'}: load it "
            f"with reward_models.{other}"
        )
    # The policy of a latent reward's backbone is not built, so it may be of any package.
    backbone = {"class_path": config["backbone"]["class_path"]}
    named = {"head": config["head"], "backbone": backbone if noisy else config["backbone"]}
    foreign = [c for c in _class_paths(named) if c.split(".")[0] not in trusted]
    if foreign:
        remedy = "add its package to `trusted` if you trust it"
        known = ", ".join(trusted)
        raise ValueError(f"{path.parent} names {foreign[0]}, which is not in {known}; {remedy}")
    return config


def _read_config(path: Path) -> dict[str, Any]:
    config = read_object(path)
    if config.get("format") != FORMAT:
        raise ValueError(f"{path} is not in the format {FORMAT!r}")
    wanted = (
        "name",
        "dims",
        "modality",
        "licence",
        "needs_prompt",
        "backbone",
        "backbone_fingerprint",
        "head",
        "uncertain",
    )
    require_known(f"{path} lacks", wanted, config)
    for part in ("backbone", "head"):
        if not isinstance(config[part], dict) or "class_path" not in config[part]:
            raise ValueError(f"{path}: {part} must have a class_path")
    return config


def _class_paths(value: Any) -> Iterator[str]:
    """Yield every class that a description names, at any depth.

    A plain text names one if its first word is an installed module, as in `package.Class`.
    """
    if isinstance(value, str):
        words = value.split(".")
        if len(words) > 1 and all(map(str.isidentifier, words)) and find_spec(words[0]):
            yield value
    elif isinstance(value, Mapping):
        if "class_path" in value:
            yield str(value["class_path"])
        for part in value.values():
            yield from _class_paths(part)
    elif isinstance(value, list):
        for part in value:
            yield from _class_paths(part)


def _build(kind: type, part: Mapping[str, Any], path: str) -> Any:
    """Build the backbone or head that a description names; raise ValueError if it cannot be."""
    parser, name = ArgumentParser(exit_on_error=False), kind.__name__.lower()
    parser.add_argument(f"--{name}", type=kind, required=True)
    try:
        return parser.instantiate_classes(parser.parse_object({name: part}))[name]
    except (ArgumentError, ValueError, TypeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError("\n".join([f"{path} cannot be built:", *lines[-3:]])) from error


def build_rater(config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> Rater:
    """Build the described head for features of the saved widths; raise ValueError without them."""
    saved = ["rater.joint.mean", "rater.prompt.mean"]
    require_known(f"{path} lacks", saved, tensors)
    joint, prompt = (len(tensors[name]) for name in saved)
    head: Head = _build(Head, config["head"], path)
    return Rater(head.build(joint, prompt, config["dims"]), joint, prompt, len(config["dims"]))


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
        backbone: type[FirstBlocks] = resolve_name(self.config["backbone"]["class_path"])
        features = backbone.reader(policy, self.config["backbone"]["init_args"])
        wanted, found = self.config["noise"]["weights_fingerprint"], features.fingerprint()
        _require_fingerprint(self.path, f"blocks of {type(policy).__name__}", wanted, found)
        tensors = read_tensors(find_file(self.path, _FILE))
        rater = build_rater(self.config, tensors, self.path)
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
