"""YAML and command line to a typed `Run`. A component's schema is its own constructor."""

import difflib
import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from flowalign.checkpoint import Checkpoints
from flowalign.data import bundled, read_prompts
from flowalign.evaluate import Evaluation
from flowalign.learner import Optimizer
from flowalign.online import Online
from flowalign.rewards import Rewards
from flowalign.types import Policy, RewardModel


class ConfigError(ValueError):
    """A run file or an override that cannot be used; the message says which value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class Ema:
    """Averaged weights, used for evaluation and saved beside the live ones."""

    decay: float = 0.9
    every: int = 1
    """Optimizer updates between two averagings."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that defines a run. One YAML file sets every field it needs; nothing inherits."""

    policy: Policy
    """The model, by dotted path of a class in `pipelines` or of your own."""
    rewards: list[RewardModel]
    """Reward models, by dotted path."""
    reward_weights: dict[str, float]
    """Weight per reward dimension; unnamed dimensions are only logged."""
    prompts: str
    """Training prompts: a text file, one a line, or JSONL with a field `prompt`."""
    num_steps: int
    """Steps of the loop: rollouts, each with its updates."""
    recipe: Online
    optimizer: Optimizer = field(default_factory=Optimizer)
    ema: Ema | None = field(default_factory=Ema)
    evaluation: Evaluation | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    """CPU threads per process; null leaves torch's choice. One is best for small models on few cores."""
    output_dir: str = "runs/latest"

    def __post_init__(self) -> None:
        """Checks that need no weights: files, weights of rewards, numbers."""
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 1")
        if self.device == "cpu" and self.policy.precision == "fp16":
            raise ValueError("policy.precision fp16 needs a GPU; on the CPU choose fp32 or bf16")
        Rewards(self.rewards, self.reward_weights)
        read_prompts(self.prompts)
        if self.evaluation:
            self.evaluation.items()


def load(config: str, overrides: Sequence[str] = ()) -> tuple[Run, str]:
    """A run file with overrides such as `--recipe.sampling.eta 0.5`, and the resolved YAML.

    Raises:
        ConfigError: in at most five lines, naming the key or value and what is allowed.
    """
    path = Path(bundled(config))
    if not path.is_file():
        raise ConfigError(f"run file {config!r} does not exist (looked in {Path.cwd()})")
    _check_yaml(path)
    parser = _parser()
    try:
        parsed = parser.parse_args(["--config", str(path), *_with_dashes(overrides)])
        text = parser.dump(parsed, skip_none=False)
        built = parser.instantiate_classes(parsed)
        return Run(**{name: built[name] for name in Run.__dataclass_fields__}), text
    except (ValueError, TypeError, ArgumentError) as error:
        raise ConfigError(_readable(str(error), config, parser)) from error


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="flowalign train", exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Run, None, fail_untyped=True)
    return parser


def _with_dashes(overrides: Sequence[str]) -> list[str]:
    """Accept `a.b=c` as well as `--a.b c` and `--a.b=c`."""
    return [o if o.startswith("-") or "=" not in o else f"--{o}" for o in overrides]


def _check_yaml(path: Path) -> None:
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: " + " ".join(str(error).split())[:300]) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(content).__name__}")


def _readable(message: str, config: str, parser: ArgumentParser) -> str:
    """At most four short lines, with a suggestion where a name was misspelt."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not _NOISE.match(line)]
    hint = _did_you_mean(message, parser)
    return "\n".join([f"{config}: {lines[0]}", *lines[1:3], *([hint] if hint else [])])


_NOISE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value type:|Given value: "
)


def _did_you_mean(message: str, parser: ArgumentParser) -> str | None:
    """The nearest allowed names to the one that an error message complains about."""
    if found := re.search(r"unrecognized arguments: -*([\w.]+)", message):
        known = [action.dest for action in parser._actions]
        word = found[1]
    elif found := re.search(r"(?:[Kk]ey|Option) ['\"]([\w.]+)['\"] is not (?:expected|accepted)", message):
        paths = re.findall(r"class_path ['\"]([\w.]+)['\"]", message)
        word = found[1]
        known = _arguments_of(paths[-1]) if paths else [action.dest for action in parser._actions]
    elif found := re.search(r"module ['\"]([\w.]+)['\"] has no attribute ['\"](\w+)['\"]", message):
        word, known = found[2], dir(importlib.import_module(found[1]))
    else:
        return None
    near = difflib.get_close_matches(word, [k for k in known if not k.startswith("_")], n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"allowed here: {', '.join(known)[:200]}"


def _arguments_of(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return [p for p in inspect.signature(cls).parameters if p != "self"]
