"""Load reward models from outside a run file: a YAML list `rewards:`, or one dotted path."""

from dataclasses import dataclass
from pathlib import Path

from flowalign.rewards.checked import check_spec
from flowalign.types import RewardModel
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.files import bundled
from flowalign.utils.setting_errors import describe_wrong_kind
from flowalign.utils.strict_yaml import read_yaml
from flowalign.utils.typed_settings import build


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
