"""Load reward models: weighted in a run file, in a YAML list `rewards:`, or by one dotted path.

A plain Python function is a reward model as well.
"""

import copy
import hashlib
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowalign.rewards.checked import check_spec
from flowalign.types import FiniteFloat, MediaBatch, RewardModel, RewardOutput, RewardSpec
from flowalign.types.ranges import ImportPath
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.files import bundled
from flowalign.utils.inline_components import INLINE
from flowalign.utils.local_modules import FIRST_PARAMETERS
from flowalign.utils.setting_errors import describe_wrong_kind
from flowalign.utils.strict_yaml import read_yaml
from flowalign.utils.typed_settings import build


@dataclass(frozen=True)
class WeightedReward:
    """Reward model with the weights of its optimised dimensions."""

    model: RewardModel = field(metadata=INLINE)
    """Reward model, by dotted path."""
    weight: FiniteFloat | dict[str, FiniteFloat] | None = None
    """Weight per dimension, or one number for a model with one dimension. Dimensions without a
    weight are only logged. Null: no dimension has a weight."""

    @property
    def weight_of(self) -> dict[str, float]:
        """Return the weights by dimension, without unweighted dimensions.

        Raises:
            ValueError: A dimension is unknown, a weight is not finite, or one number is given for
                several dimensions.
        """
        check_spec(self.model)
        first, *others = dims = self.model.spec.dims
        weights: dict[str, float] = {}
        if isinstance(self.weight, dict):
            weights |= self.weight
        elif self.weight is not None:
            if others:
                raise ValueError(
                    f"rewards: {self._name} has the weight {self.weight} and the dimensions "
                    f"{', '.join(dims)}: give a weight per dimension, weight: {{{first}: 1.0}}"
                )
            weights[first] = self.weight
        if unknown := sorted(weights.keys() - set(dims)):
            raise ValueError(
                f"rewards: {self._name} has no dimensions {unknown} that its weight names; "
                f"there are {', '.join(dims)}"
            )
        if not all(isfinite(value) for value in weights.values()):
            raise ValueError(f"rewards: weights of {self._name} must be finite, got {weights}")
        return weights

    def resolve(self) -> dict[str, Any]:
        """Return the weights by dimension, the format of a resolved run file."""
        return {"weight": self.weight_of or None}

    @property
    def _name(self) -> str:
        return type(self.model).__name__


def join_weights(rewards: Sequence[WeightedReward]) -> dict[str, float]:
    """Return the weight of each dimension of several rewards."""
    return {dim: value for reward in rewards for dim, value in reward.weight_of.items()}


def read_weights(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the weights by dimension from the resolved settings of a run."""
    weights = [reward.get("weight") for reward in settings.get("rewards") or []]
    return {dim: value for one in weights if isinstance(one, dict) for dim, value in one.items()}


@dataclass(frozen=True)
class RewardFile:
    """Settings of a file that lists reward models."""

    rewards: list[RewardModel]
    """Reward models."""


def load_rewards(source: str) -> tuple[list[RewardModel], str]:
    """Build the reward models of a YAML file, or of a path like `reward_models.JpegSize`.

    Returns the models and the resolved YAML, for the record. Weights are not read.

    Raises:
        ConfigError: The file or a class in it is wrong; the message names it.
    """
    path = Path(bundled(source))
    if path.exists():
        return build_reward_models(read_yaml(path, source), source)
    if source.endswith((".yaml", ".yml")):
        raise ConfigError(f"rewards file {source!r} does not exist (looked in {Path.cwd()})")
    return build_reward_models({"rewards": [{"class_path": source}]}, source)


def build_reward_models(content: object, source: str) -> tuple[list[RewardModel], str]:
    """Build the reward models of settings with one key `rewards:`; see `load_rewards`."""
    if isinstance(content, dict) and (
        wrong := describe_wrong_kind(RewardFile, content.keys(), source)
    ):
        raise ConfigError(wrong)
    if not isinstance(content, dict) or set(content) != {"rewards"} or not content["rewards"]:
        raise ConfigError(f"{source} must hold one key `rewards:` with a list of models")
    rewards = [_drop_weight(entry) for entry in content["rewards"]]
    folders = [path.parent] if (path := Path(bundled(source))).is_file() else []
    file, text = build(RewardFile, {"rewards": rewards}, lambda _: source, (), folders)
    with convert_value_errors(f"{source}:\n"):
        for model in file.rewards:
            check_spec(model)
    return file.rewards, text


def _drop_weight(entry: object) -> object:
    """Return the entry of a reward without its weight, which only training reads."""
    if not isinstance(entry, dict):
        return entry
    return {key: value for key, value in entry.items() if key != "weight"}


_PARAMETERS = ("prompts", "metadata")


class FunctionReward(RewardModel):
    """Reward model that calls `def reward(images, prompts) -> list[float]`.

    A run file names the function as `class_path: my_reward.py:reward`. `images` are float32 RGB
    [n, 3, H, W] in [0, 1]. If the first parameter is `videos`, the function gets [n, F, 3, H, W].
    An optional parameter `metadata` gets a mapping per sample. All are copies. The function returns
    a score per sample, higher is better; a score of NaN or None counts as failed. There is no
    gradient.

    Args:
        function: Dotted path of the function. Its name is also the name of the reward dimension.
    """

    def __init__(self, function: ImportPath):
        self._function = _import_function(function)
        names = list(inspect.signature(self._function).parameters)
        name = self._function.__name__
        unknown = [n for n in names[1:] if n not in _PARAMETERS]
        if not names or names[0] not in FIRST_PARAMETERS or unknown:
            raise ValueError(
                f"{function} takes ({', '.join(names)}); a reward function takes "
                f"{' or '.join(FIRST_PARAMETERS)}, then any of {', '.join(_PARAMETERS)}"
            )
        self._takes_videos, self._names = names[0] == "videos", names[1:]
        self.spec = RewardSpec(
            name=name,
            dims=(name,),
            modality="any" if self._takes_videos else "image",
            scale=(-math.inf, math.inf),
            licence="unknown",
            version=_digest_source(self._function),
        )

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score all samples in one call."""
        failed = self.spec.screen(batch)
        good = [i for i in range(len(batch)) if i not in failed]
        values = torch.full((len(batch), 1), torch.nan, dtype=torch.float32)
        if good:
            scores = self._call(batch.take(good))
            for i, score in zip(good, scores, strict=True):
                values[i] = math.nan if score is None else float(score)
        return RewardOutput.build(self.spec, values, failed)

    def _call(self, batch: MediaBatch) -> Sequence[Any]:
        # Copies, because functions change what they get, and other rewards score the same batch.
        media = batch.media.detach().to(torch.float32, copy=True)
        metadata = [copy.deepcopy(dict(one)) for one in batch.metadata]
        known = {
            "prompts": list(batch.prompts),
            "metadata": metadata or [{} for _ in batch.prompts],
        }
        first = media if self._takes_videos else media[:, 0]
        scores = self._function(first, **{name: known[name] for name in self._names})
        scores = scores.flatten().tolist() if isinstance(scores, Tensor) else list(scores)
        if len(scores) != len(batch):
            raise ValueError(
                f"reward function {self.spec.name} returned {len(scores)} scores for "
                f"{len(batch)} samples"
            )
        return scores


def _import_function(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), name, None)
    except (ImportError, ValueError) as error:
        raise ValueError(f"function {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"function {path!r} is no function")
    return function


def _digest_source(function: Callable[..., Any]) -> str:
    """Return a hash of the source, so that scores of different versions are not mixed."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        source = function.__qualname__
    return hashlib.sha256(source.encode()).hexdigest()[:16]
