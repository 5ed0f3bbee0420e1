"""Train a reward model from its run file to its folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import yaml

from flowalign.data.media_record import Record
from flowalign.data.readers import open_dataset
from flowalign.functional.rating import Features
from flowalign.reward_training.embeddings import Embeddings
from flowalign.reward_training.labels import PARTS, Preferences, gather_preferences
from flowalign.reward_training.losses import LabelKind
from flowalign.reward_training.model_folder import finish, restore_state, save_state
from flowalign.reward_training.training import RewardTrainer, seeded_draws
from flowalign.reward_training.training_parts import Dimension, NoisedFeatures, Schedule
from flowalign.training.learner import Optimizer
from flowalign.training.matching.states import Times
from flowalign.types import Backbone, Head, NoisyBackbone
from flowalign.utils.errors import require_default
from flowalign.utils.files import write_text
from flowalign.utils.folders import LOCK, Claim, clear, require_removable, require_unused
from flowalign.utils.ranges import Decay, PositiveInt, Range, Seed, require_ranges
from flowalign.utils.tracking import FILE, Tracker
from flowalign.utils.typed_settings import load_typed

STATE, MODEL = "state.safetensors", "model"


@dataclass(frozen=True, kw_only=True)
class Data:
    """Preference dataset."""

    path: str
    """Path of a .jsonl, .json, .csv or .parquet file, or of a folder."""
    schema: str = "auto"
    root: str | None = None
    """Folder where relative paths begin. Null: the folder of the file."""
    columns: dict[str, str | list[str]] | None = None
    """Columns of the dataset by their names in flowalign, such as `prompt: caption`. Null: as they
    are."""


@dataclass(frozen=True, kw_only=True)
class RewardRun:
    """Run file of the training of a reward model; one YAML file sets all fields."""

    name: str
    licence: str
    """Licence of the trained reward, as permitted by its data and its backbone."""
    backbone: Backbone
    """Backbone, by dotted path of a class in `reward_models` or your own class."""
    head: Head
    """Head on the features, by dotted path of a class in `reward_models` or your own class."""
    dimensions: dict[str, Dimension]
    """Dimensions of the reward, named as in the data."""
    data: list[Data]
    held_out: Annotated[float, Range(above=0, below=1)] = 0.1
    """Share of the prompts used for early stopping and calibration; in (0, 1)."""
    test: Decay = 0.1
    """Share of the prompts used only for the final report; in [0, 1)."""
    modality: Literal["image", "video", "any"] = "any"
    times: Times | None = None
    """Noise levels of a reward of noisy latents, drawn for each record and update. Null: the
    backbone reads finished samples."""
    schedule: Schedule = field(default_factory=Schedule)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-3))
    embeddings: str | None = "runs/embeddings"
    """Folder that caches the features of frozen backbones. Null: no cache."""
    max_failed_fraction: Decay = 0.01
    """Largest share of unreadable images or videos, and of invalid rows, in [0, 1)."""
    seed: Seed = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: PositiveInt | None = None
    """CPU threads. Null: torch's choice."""
    output_dir: str = "runs/reward"

    def __post_init__(self) -> None:
        """Check everything that needs neither weights nor data."""
        require_ranges(self)
        if not self.dimensions or not self.data:
            raise ValueError("dimensions and data must each have at least one entry")
        if self.held_out + self.test >= 1:
            raise ValueError(
                f"held_out is {self.held_out} and test {self.test}; their sum must be below 1"
            )
        reads = f"the backbone {type(self.backbone).__name__} reads"
        if not isinstance(self.backbone, NoisyBackbone):
            require_default(self, "", f"{reads} finished samples", "times")
        elif self.times is None:
            remedy = "set it, for example to flowalign.training.matching.Uniform"
            raise ValueError(f"times is null, but {reads} noisy latents: {remedy}")
        require_default(self, "", "the training of a reward has adamw only", "optimizer.kind")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device is cuda, but there is no GPU; set it to auto or cpu")


def load_run(config: str, overrides: Sequence[str] = ()) -> tuple[RewardRun, str]:
    """Load a run file with overrides such as `--schedule.epochs 3`, and the resolved YAML.

    Raises:
        ConfigError: The run file is wrong. The message has at most five lines; it names the key or
            value.
    """
    return load_typed(RewardRun, config, overrides)


def train(
    run: RewardRun,
    config: str,
    log: Callable[[str], None],
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Train, calibrate and write `<output_dir>/model`; return the content of its config.json.

    Raises:
        ValueError: The folder is in use, or the run file and the data contradict each other.
        TrainingFailure: Too many updates in a row were skipped, or the first held-out loss is not
            finite.
    """
    folder = Path(run.output_dir)
    if resume and overwrite:
        raise ValueError("--resume and --overwrite exclude each other")
    claim = Claim(folder, log)
    try:
        _check_folder(folder, resume, overwrite)
        return _train(run, config, log, resume, overwrite)
    finally:
        claim.release()


def _train(
    run: RewardRun, config: str, log: Callable[[str], None], resume: bool, overwrite: bool
) -> dict[str, Any]:
    """Train in a claimed folder, which stays unchanged until data and weights are accepted."""
    folder = Path(run.output_dir)
    if run.threads:
        torch.set_num_threads(run.threads)
    preferences, identity = read_preferences(run)
    with seeded_draws(run.seed, torch.device("cpu"), "adapters"):
        run.backbone.load()
    on_gpu = run.device != "cpu" and torch.cuda.is_available()
    run.backbone.network.to("cuda" if on_gpu else "cpu")
    features, preferences = embed_preferences(run, preferences, log)
    if isinstance(run.backbone, NoisyBackbone) and run.times:
        features = NoisedFeatures(run.backbone, features, preferences, run.times, run.seed)
    models = run.backbone, run.head, run.dimensions
    settings = run.optimizer, run.schedule, run.seed
    trainer = RewardTrainer(*models, preferences, features, *settings)
    if resume and (folder / STATE).is_file():
        restore_state(folder / STATE, trainer, identity)
    elif overwrite:
        clear(folder)
    write_text(folder / "config.yaml", config)
    tracker = Tracker(folder, keep_until=trainer.epoch + 1)
    try:
        for metrics in trainer.epochs():
            tracker.log(trainer.epoch, metrics)
            save_state(folder / STATE, trainer, identity)
            log(f"epoch {trainer.epoch}: held-out loss {metrics['held_out/loss']:.4f}")
    finally:
        tracker.close()
    return finish(folder / MODEL, trainer, _describe_run(run, config, preferences, identity))


def read_preferences(run: RewardRun) -> tuple[Preferences, str]:
    """Gather the table of all datasets; return it with its fingerprint."""
    sets = [open_dataset(d.path, d.schema, d.root, d.columns) for d in run.data]
    records: list[Record] = [record for some in sets for record in some]
    kinds: dict[str, LabelKind] = {n: d.labels for n, d in run.dimensions.items()}
    preferences = gather_preferences(records, kinds, run.seed, (run.held_out, run.test))
    _check_failures(run, preferences.problems, len(records), "rows are invalid")
    return preferences, preferences.fingerprint()


def _check_failures(run: RewardRun, problems: Sequence[str], total: int, what: str) -> None:
    """Raise ValueError if more than `max_failed_fraction` of the records or samples failed."""
    if len(problems) > run.max_failed_fraction * total:
        raise ValueError(
            f"{len(problems)} of {total} {what} (max_failed_fraction "
            f"{run.max_failed_fraction:g}); the first: {problems[0]}"
        )


def embed_preferences(
    run: RewardRun, preferences: Preferences, log: Callable[[str], None]
) -> tuple[Features, Preferences]:
    """Embed all samples; return features, and preferences without the failed samples."""
    cache = Path(run.embeddings) if run.embeddings else None
    embeddings = Embeddings(run.backbone, cache)
    features, failed = embeddings(preferences.samples)
    total = len(preferences.samples)
    log(f"{total} samples; {embeddings.num_computed} embedded now, {len(failed)} unreadable")
    _check_failures(run, [failed[row] for row in sorted(failed)], total, "samples failed")
    return features, preferences.exclude(failed)


def _describe_run(
    run: RewardRun, config: str, preferences: Preferences, identity: str
) -> dict[str, Any]:
    """Return the parts of the trained reward's config.json that the run and its data determine."""
    resolved = yaml.safe_load(config)
    about = {
        "name": run.name,
        "modality": run.modality,
        "licence": run.licence,
        "backbone": resolved["backbone"],
        "head": resolved["head"],
        "data": {
            "sources": [d.path for d in run.data],
            "fingerprint": identity,
            "records": {part: len(preferences.rows(part)) for part in PARTS},
            "samples": len(preferences.samples),
            "unlabelled": preferences.num_unlabelled,
            "invalid": len(preferences.problems),
        },
    }
    if isinstance(run.backbone, NoisyBackbone):
        about["noise"] = {
            "times": resolved["times"],
            "evaluation_share": run.backbone.evaluation_share,
            "weights_fingerprint": run.backbone.weights_fingerprint,
        }
    return about


def _check_folder(folder: Path, resume: bool, overwrite: bool) -> None:
    names = {path.name for path in folder.iterdir()} - {LOCK, FILE}
    if not overwrite and names == {"config.yaml"}:
        return  # the first epoch did not end, for example because the disk was full
    if resume and not (folder / STATE).is_file():
        raise ValueError(f"{folder} holds no training to resume")
    if overwrite:
        require_removable(folder)
    elif not resume:
        require_unused(folder)
