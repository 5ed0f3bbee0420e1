"""Load reward models: weighted in a run file, in a YAML list `rewards:`, or by one dotted path."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowalign.rewards.checked import check_spec
from flowalign.types import RewardModel
from flowalign.utils.errors import ConfigError, convert_value_errors, require_known
from flowalign.utils.files import bundled
from flowalign.utils.ranges import FiniteFloat
from flowalign.utils.setting_errors import describe_wrong_kind
from flowalign.utils.strict_yaml import read_yaml
from flowalign.utils.typed_settings import build


@dataclass(frozen=True)
class WeightedReward:
    """Reward model with the weights of its optimised dimensions."""

    model: RewardModel
    """Reward model, by dotted path."""
    weight: FiniteFloat | dict[str, FiniteFloat] | None = None
    """Weight per dimension, or one number for a model with one dimension. Dimensions without a
    weight are only logged. Null: no dimension has a weight."""

    @property
    def weight_of(self) -> dict[str, float]:
        """Return the weights by dimension, without unweighted dimensions.

        Raises:
            ValueError: A dimension is unknown, or one number is given for several dimensions.
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
        require_known(
            f"rewards: the weight of {self._name} names the unknown dimension", weights, dims
        )
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


def load_rewards(*sources: str) -> tuple[list[RewardModel], str]:
    """Build the reward models of YAML files, and of paths like `reward_models.JpegSize`.

    Returns the models and the resolved YAML, for the record. Weights are not read.

    Raises:
        ConfigError: A file or a class in it is wrong; the message names it.
    """
    found = [_load_source(source) for source in sources]
    return [model for models, _ in found for model in models], "---\n".join(t for _, t in found)


def _load_source(source: str) -> tuple[list[RewardModel], str]:
    path = Path(bundled(source))
    if path.exists():
        return build_reward_models(read_yaml(path, source), source)
    if source.endswith((".yaml", ".yml")):
        raise ConfigError(f"rewards file {source!r} does not exist (looked in {Path.cwd()})")
    if "." not in source:
        raise ConfigError(
            f"rewards {source!r} is no file (looked in {Path.cwd()}) and no class with its module, "
            f"such as reward_models.{source}"
        )
    return build_reward_models({"rewards": [{"class_path": source}]}, source)


def build_reward_models(content: object, source: str) -> tuple[list[RewardModel], str]:
    """Build the reward models of settings with one key `rewards:`; see `load_rewards`."""
    keys = set(content) if isinstance(content, dict) else set()
    if wrong := describe_wrong_kind(RewardFile, keys, source):
        raise ConfigError(wrong)
    if not isinstance(content, dict) or keys != {"rewards"} or not content["rewards"]:
        raise ConfigError(f"{source} must hold one key `rewards:` with a list of models")
    rewards = [_drop_weight(entry) for entry in content["rewards"]]
    folders = [path.parent] if (path := Path(bundled(source))).is_file() else []
    file, text = build(RewardFile, {"rewards": rewards}, lambda _: source, folders)
    with convert_value_errors(f"{source}:\n"):
        for model in file.rewards:
            check_spec(model)
    return file.rewards, text


def _drop_weight(entry: object) -> object:
    """Return the entry of a reward without its weight, which only training reads."""
    if not isinstance(entry, dict):
        return entry
    return {key: value for key, value in entry.items() if key != "weight"}
