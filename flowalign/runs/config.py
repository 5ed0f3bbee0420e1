"""YAML and command line to a typed `Run`. A component's schema is its own constructor."""

import difflib
import importlib
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser
from typing_extensions import override

from flowalign.sampling.calibration import Calibration
from flowalign.training.checkpoint import Checkpoints
from flowalign.utils.costs import Costs
from flowalign.data.prompts import read_metadata
from flowalign.utils.errors import ConfigError
from flowalign.training.evaluate import Evaluation
from flowalign.functional.transition import FlowSDE
from flowalign.training.learner import Optimizer
from flowalign.utils.files import bundled
from flowalign.training.matching.recipe import Preference
from flowalign.training.matching.source import Source, check_together
from flowalign.training.matching.stored import Stored
from flowalign.training.policy_gradient.recipe import Online
from flowalign.rewards.composite import OnFailure, Rewards
from flowalign.types import Personal, Policy, RewardModel
from flowalign.sampling.sde_windows import AllButLast, Fixed


@dataclass(frozen=True, kw_only=True)
class Ema:
    """Averaged weights, used for evaluation and saved beside the live ones."""

    decay: float = 0.9
    every: int = 1
    """Optimizer updates between two averagings."""

    def __post_init__(self) -> None:
        """Refuse what averages nothing, before weights are read."""
        if not 0 <= self.decay < 1 or self.every < 1:
            raise ValueError(
                f"ema.decay {self.decay}, every {self.every}: need 0 <= decay < 1, every >= 1"
            )


@dataclass(frozen=True, kw_only=True)
class RunFile(ABC):
    """What every run has. One YAML file sets every field it needs; nothing inherits."""

    policy: Policy
    """The model, by dotted path of a class in `pipelines` or of your own."""
    num_steps: int
    """Steps of the loop: rollouts, each with its updates, or batches of pairs."""
    rewards: list[RewardModel] = field(default_factory=list)
    """Reward models, by dotted path."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weight per reward dimension; unnamed dimensions are only logged."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    ema: Ema | None = field(default_factory=Ema)
    evaluation: Evaluation | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    trackers: list[Literal["tensorboard", "wandb"]] = field(default_factory=list)
    """Besides metrics.jsonl, which is always written."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    """CPU threads per process; null: torch's choice. One is best for small models on few cores."""
    output_dir: str = "runs/latest"

    def _check(self) -> None:
        """Checks that need no weights: files, numbers."""
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}; it must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1, or null")
        if self.device == "cpu" and self.policy.precision == "fp16":
            raise ValueError("policy.precision fp16 needs a GPU; on the CPU choose fp32 or bf16")
        if self.evaluation:
            self.evaluation.items()

    @property
    @abstractmethod
    def training_prompts(self) -> Sequence[str]:
        """Files whose prompts are sampled for training."""

    def judges(self, costs: Costs | None = None, on_failure: OnFailure = "raise") -> Rewards:
        """The reward models with their weights and what the prompt files say beside prompts."""
        metadata: dict[str, dict[str, Any]] = {}
        held_out = self.evaluation.prompts.values() if self.evaluation else ()
        for path in (*self.training_prompts, *held_out):
            for prompt, fields in read_metadata(path).items():
                if metadata.setdefault(prompt, fields) != fields:
                    raise ValueError(f"{path}: prompt {prompt!r} has other fields elsewhere")
        rewards = Rewards(self.rewards, self.reward_weights, on_failure, costs or Costs(), metadata)
        rewards.check_policy(self.policy)
        return rewards


@dataclass(frozen=True, kw_only=True)
class Run(RunFile):
    """Online training: rewards of rollouts, credited to denoising steps."""

    prompts: str
    """Training prompts: a text file, one a line, or JSONL with a field `prompt`."""
    recipe: Online
    calibration: Calibration | None = None
    """Find the noise level of every step before the first one (DenseGRPO); sampling.eta is where
    it starts, of the kernel FlowSDE."""

    def __post_init__(self) -> None:
        """Checks that need no weights."""
        self._check()
        if self.calibration:
            _check_calibration(self.recipe)
        rewards = self.judges()
        rewards.check_weights()
        self.recipe.check(rewards)

    @property
    @override
    def training_prompts(self) -> Sequence[str]:
        """Its own."""
        return [self.prompts]


@dataclass(frozen=True, kw_only=True)
class PreferenceRun(RunFile):
    """Training on pairs or labels, stored or made by the policy. Its file has a key `data`."""

    data: Source
    """Where examples come from, by dotted path."""
    recipe: Preference = field(default_factory=Preference)

    def __post_init__(self) -> None:
        """Checks that need no weights."""
        self._check()
        check_together(self.recipe, self.data)
        if isinstance(self.data, Stored):
            self._check_used(self.data)
        self.data.check(self.judges())

    def _check_used(self, data: Stored) -> None:
        """No option of the data is ignored."""
        if data.held_out and not self.evaluation:
            raise ValueError(
                "data.held_out is read for evaluations, but evaluation is null: "
                "set evaluation, or data.held_out to null"
            )
        if data.user_dropout and not isinstance(self.policy, Personal):
            raise ValueError(
                f"data.user_dropout is {data.user_dropout:g}, but the policy "
                f"{type(self.policy).__name__} is never told whose judgement a pair is"
            )

    @property
    @override
    def training_prompts(self) -> Sequence[str]:
        """Those that the data samples."""
        return self.data.prompt_files


AnyRun = Run | PreferenceRun
"""What a run file can be."""


def _check_calibration(recipe: Online) -> None:
    """Whether it is known where a calibration begins, and which steps it is about."""
    sampling = recipe.sampling
    if isinstance(sampling.eta, list) or not isinstance(sampling.kernel, FlowSDE):
        raise ValueError(
            "calibration starts at one level of the kernel FlowSDE: "
            "set recipe.sampling.eta to a number and its kernel to FlowSDE"
        )
    if not isinstance(sampling.window, AllButLast | Fixed):
        raise ValueError(
            "calibration needs the same stochastic steps in every iteration: "
            "set recipe.sampling.window to AllButLast or Fixed"
        )


def load(config: str, overrides: Sequence[str] = ()) -> tuple[AnyRun, str]:
    """A run file with overrides such as `--recipe.sampling.eta 0.5`, and the resolved YAML.

    Raises:
        ConfigError: in at most five lines, naming the key or value and what is allowed.
    """
    path = Path(bundled(config))
    if not path.is_file():
        raise ConfigError(f"run file {config!r} does not exist (looked in {Path.cwd()})")
    kind = PreferenceRun if "data" in _read_yaml(path) else Run
    parser = _parser(kind)
    try:
        parsed = parser.parse_args(["--config", str(path), *_with_dashes(overrides)])
        text = parser.dump(parsed, skip_none=False)
        built = parser.instantiate_classes(parsed)
        return kind(**{name: built[name] for name in kind.__dataclass_fields__}), text
    except (ValueError, TypeError, ArgumentError) as error:
        raise ConfigError(_readable(str(error), config, parser)) from error


@cache
def _parser(kind: type[AnyRun]) -> ArgumentParser:
    parser = ArgumentParser(prog="flowalign train", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind, None, fail_untyped=True)
    return parser


def _with_dashes(overrides: Sequence[str]) -> list[str]:
    """Accept `a.b=c` as well as `--a.b c` and `--a.b=c`."""
    return [o if o.startswith("-") or "=" not in o else f"--{o}" for o in overrides]


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: " + " ".join(str(error).split())[:300]) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(content).__name__}")
    return content


def _readable(message: str, config: str, parser: ArgumentParser) -> str:
    """Where the mistake is, what it is, and a suggestion where a name was misspelt."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    keys = [found[1] for line in lines if (found := _KEY.match(line))]
    wrong = [line for line in lines if not _NOISE.match(line) and not _KEY.match(line)]
    where = f"{config}: {'.'.join(keys)}" if keys else config
    hint = _did_you_mean(message, parser)
    what = (wrong[-1] if keys else "\n".join(wrong)) if wrong else lines[0]
    given = next((line[13:] for line in lines if line.startswith("Given value: ")), what)
    what += "" if given in what or "Got value" in what else f", not {given}"
    return "\n".join([f"{where}: {what}", *([hint] if hint else [])])


_KEY = re.compile(r'Parser key "([\w.]+)":')
_NOISE = re.compile(
    r"Does not validate against any|Subtypes:|Errors:|Expected a <class '(NoneType|list)'>|"
    r"Given value type:|Given value: |Problem with given class_path '[\w.]+':$"
)


def _did_you_mean(message: str, parser: ArgumentParser) -> str | None:
    """The nearest allowed names to the one that an error message complains about."""
    options = [a.dest for a in parser._actions if not a.dest.endswith("help")]
    if found := re.search(r"unrecognized arguments: -*([\w.]+)", message):
        return _nearest(found[1], options)
    if found := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return _nearest(f"{found[1]}.{found[2]}", options)
    if found := re.search(r"Option '([\w.]+)' is not accepted", message):
        paths = re.findall(r"class_path '([\w.]+)'", message)
        return _nearest(found[1], _arguments_of(paths[-1]) if paths else options)
    if found := re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message):
        return _nearest(found[2], dir(importlib.import_module(found[1])))
    return None


def _nearest(word: str, known: Sequence[str]) -> str:
    """Names like `word`, or all that are allowed in its place."""
    parent, last = word.rpartition(".")[0], word.rpartition(".")[2]
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    beside = {name: k for name, k in beside.items() if not name.startswith("_")}
    near = difflib.get_close_matches(last, beside, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(beside[name] for name in near)}?"
    return f"allowed here: {', '.join(beside.values())[:200] or 'nothing'}"


def _arguments_of(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    return [p for p in inspect.signature(cls).parameters if p != "self"]
