"""Loads reward models named outside a run file: a YAML list `rewards:`, or one dotted path."""

from dataclasses import dataclass
from pathlib import Path

from jsonargparse import ArgumentError, ArgumentParser

from flowalign.rewards.checked import check_spec
from flowalign.types import RewardModel
from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled
from flowalign.utils.ranges import out_of_range
from flowalign.utils.setting_groups import check_groups
from flowalign.utils.strict_yaml import read_yaml


@dataclass(frozen=True)
class _File:
    rewards: list[RewardModel]


def load_rewards(source: str) -> tuple[list[RewardModel], str]:
    """Build the reward models of a YAML file, or of a path like `reward_models.jpeg.JpegSize`.

    Returns them with the resolved YAML, as a record of what scored. Weights are not read.

    Raises:
        ConfigError: The file or class, which is named, is wrong.
    """
    path = Path(bundled(source))
    if path.exists():
        return rewards_of(read_yaml(path, source), source)
    if source.endswith((".yaml", ".yml")):
        raise ConfigError(f"rewards file {source!r} does not exist (looked in {Path.cwd()})")
    return rewards_of({"rewards": [{"class_path": source}]}, source)


def rewards_of(content: object, source: str) -> tuple[list[RewardModel], str]:
    """Build the reward models of settings with one key `rewards:`; see `load_rewards`."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(_File, None, fail_untyped=True)
    try:
        if not isinstance(content, dict) or set(content) != {"rewards"} or not content["rewards"]:
            raise ConfigError(f"{source} must hold one key `rewards:` with a list of models")
        parsed = parser.parse_object(content)
        check_groups(parsed.as_dict(), parser)
        for key, what in out_of_range(parsed, _File):
            raise ConfigError(f"{source}: {key} is {what}")
        models = parser.instantiate_classes(parsed)["rewards"]
        for model in models:
            check_spec(model)
        return models, parser.dump(parsed, skip_none=False)
    except (ValueError, TypeError, ArgumentError) as error:
        if isinstance(error, ConfigError):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConfigError("\n".join([f"{source}:", *lines[-3:]])) from error
