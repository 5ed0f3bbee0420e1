"""Define protocol cards: one YAML file in `configs/benchmarks/` per benchmark.

A card states the settings that the authors of a benchmark fix. Null: they leave the setting open.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from flowalign.utils.errors import ConfigError
from flowalign.utils.files import bundled
from flowalign.utils.ranges import DenoisingSteps, PositiveInt, Range, Seed, require_ranges
from flowalign.utils.strict_yaml import read_mapping
from flowalign.utils.typed_settings import build

FOLDER = "configs/benchmarks"
Over = Literal["items", "groups", "rounded_groups", "spread"]
"""Aggregation over items. items: mean. groups: weighted mean of the means of groups.
rounded_groups: the same for means rounded to two decimals. spread: standard deviation."""
Join = Literal["sum", "mean", "rounded_mean", "geometric_mean"]
"""Score of one item from several dimensions. rounded_mean: the mean with two decimals."""


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Official prompt file, which the user provides."""

    file: str
    """Name and place of the official file, for messages."""
    rows: PositiveInt | None = None
    """Number of rows. Null: not known."""
    distinct: PositiveInt | None = None
    """Number of distinct prompts. Null: not known."""
    sha256: str | None = None
    """First digits of the SHA-256 of the file. Null: not known, so it is not checked."""
    licence: str = "not stated"
    """Licence of the file."""
    column: str = "prompt"
    """Column of the prompt in tables."""
    bundled: list[str] = field(default_factory=list)
    """Files of the package that hold the rows, so that no `--data` is needed."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Sampling settings that the authors fix; null for those that they leave open."""

    images_per_prompt: Annotated[int, Range(least=1, most=10_000)] = 1
    """Number of images or videos per row of the file."""
    height: PositiveInt | None = None
    """Height in pixels."""
    width: PositiveInt | None = None
    """Width in pixels."""
    num_steps: DenoisingSteps | None = None
    """Number of denoising steps."""
    guidance: float | None = None
    """Scale of classifier-free guidance, or of distilled guidance."""
    seed: Seed = 0
    """Seed of the initial noises, which are those of flowalign, not of the official script."""
    seed_rule: str = "not fixed"
    """Seeds of the official script, for the record."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Group of items in a weighted mean of groups."""

    weight: float = 1.0
    """Weight of the group."""
    low: float = 0.0
    """Group mean that counts as 0."""
    high: float = 1.0
    """Group mean that counts as 1."""
    skips: bool = False
    """Whether the official script leaves out items without a result, such as clips without an
    object to colour."""
    per_prompt: bool = False
    """Whether the official tool gives one result per prompt, for all of its clips."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Number that the benchmark reports."""

    name: str
    """Name in tables."""
    dims: list[str] = field(default_factory=list)
    """Scored dimensions of an item. Empty only with `combine`."""
    join: Join = "sum"
    """Score of an item from its dimensions."""
    over: Over = "items"
    """Aggregation over items."""
    group: str | None = None
    """Column of the prompt file or of the scores with the group of an item. Null: no groups."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Groups that count, with their weights. Empty: all groups, equally."""
    overall: bool = True
    """Whether the authors report one number, not only one per group."""
    combine: dict[str, float] = field(default_factory=dict)
    """Weights of earlier metrics, which the weighted mean replaces items. Empty: none."""
    scale: float = 1.0
    """Factor of the reported number, such as 100 for percent."""

    def __post_init__(self) -> None:
        """Reject metrics that define no number."""
        if bool(self.dims) == bool(self.combine):
            raise ValueError(f"metric {self.name} needs either dims or combine")
        if self.group is None and (self.over.endswith("groups") or not self.overall):
            raise ValueError(f"metric {self.name} averages over groups; name the column `group`")


@dataclass(frozen=True, kw_only=True)
class Published:
    """Published result of a base model."""

    model: str
    """Name of the model."""
    metric: str
    """Name of the metric."""
    value: float
    """Reported number."""
    settings: str
    """Sampling settings of the report."""
    source: str
    """Paper or page of the report."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Protocol of a benchmark."""

    title: str
    """Name of the benchmark."""
    source: str
    """Paper or repository, with its commit, that the card was read from."""
    prompts: PromptSource
    """Official prompt file."""
    protocol: Protocol
    """Sampling settings."""
    metrics: list[Metric]
    """Numbers to report."""
    scorer: str
    """Official scorer."""
    output: Literal["rows", "vbench"] = "rows"
    """Output of the official scorer. rows: JSONL with a row per score. vbench: JSON with the
    results of each dimension."""
    rewards: list[dict[str, Any]] = field(default_factory=list)
    """Reward models that compute the dimensions. Empty: the official tool scores the images, and
    `--scores` reads its output."""
    differences: str = ""
    """Differences of `rewards` from the official scorer; empty: none."""
    published: list[Published] = field(default_factory=list)
    """Results of base models."""
    notes: str = ""
    """Traps of this benchmark."""

    def __post_init__(self) -> None:
        """Reject settings outside their ranges, and metrics that contradict each other."""
        require_ranges(self.protocol, "protocol")
        names = [metric.name for metric in self.metrics]
        for metric in self.metrics:
            if unknown := sorted(metric.combine.keys() - set(names[: names.index(metric.name)])):
                raise ValueError(f"metric {metric.name} combines {unknown}, which precede it not")
        if unknown := sorted({one.metric for one in self.published} - set(names)):
            raise ValueError(f"published results name unknown metrics {unknown}: {names}")

    @property
    def dims(self) -> list[str]:
        """Return all dimensions that the metrics read, in order."""
        return list(dict.fromkeys(dim for metric in self.metrics for dim in metric.dims))

    @property
    def columns(self) -> list[str]:
        """Return all columns with the groups of items, in order."""
        return list(dict.fromkeys(metric.group for metric in self.metrics if metric.group))


def list_cards() -> dict[str, Path]:
    """Return the cards of the package by name."""
    folder = Path(bundled(FOLDER))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_card(name: str) -> Card:
    """Return a card of the package, or of a YAML file.

    Raises:
        ConfigError: There is no such card, or one of its settings is wrong.
    """
    known = list_cards()
    path = known.get(name, Path(name))
    if not path.is_file():
        raise ConfigError(
            f"--benchmark {name!r} is no benchmark; there are {', '.join(known)},\n"
            "or give the path of a card (YAML)"
        )
    values = read_mapping(str(path))
    rewards = values.pop("rewards", [])  # built only when they score
    if not isinstance(rewards, list):
        raise ConfigError(f"{path}: rewards must be a list of reward models")
    card, _ = build(Card, values, lambda _: str(path))
    return replace(card, rewards=rewards)
