"""Save the training state for resuming, and the folder of the trained reward.

model/
    model.safetensors   rater.* (head, statistics, units) and backbone.* (adapters, if any)
    config.json         how to rebuild it, its training data, and its accuracy
    README.md           model card with the same content
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowalign.reward_training.evaluation_page import render_card
from flowalign.reward_training.labels import (
    PARTS,
    fit_temperature,
    fit_tie_threshold,
    fit_units,
    measure_agreement,
)
from flowalign.reward_training.training import RewardTrainer
from flowalign.training.checkpoint import put_back, put_in_place, state_tensors
from flowalign.utils.errors import explain_errors
from flowalign.utils.files import atomic_write, parse_json, write_json

FORMAT = "flowalign trained reward 1"
_COUNTERS = ("update", "epoch", "best_epoch", "best_loss", "skipped_in_a_row")
"""Attributes of a trainer that its state holds besides tensors."""


def save_state(path: Path, trainer: RewardTrainer, data: str) -> None:
    """Write all state that determines the remaining training, atomically."""
    tensors = {f"now.{n}": p for n, p in trainer.trained().items()}
    tensors |= {f"best.{n}": t for n, t in trainer.best.items()}
    for name, parameter in trainer.trained().items():
        for key, value in state_tensors(trainer.optimizer, parameter).items():
            tensors[f"optimizer.{name}:{key}"] = value
    counters = {key: getattr(trainer, key) for key in _COUNTERS}
    counters |= {"data": data, "backbone": trainer.backbone.fingerprint}
    _write(path, tensors, {"counters": json.dumps(counters)})


def restore_state(path: Path, trainer: RewardTrainer, data: str) -> None:
    """Restore a trainer to the state saved by `save_state`.

    Raises:
        ValueError: The file is damaged, or belongs to other data, another backbone or another head.
    """
    kinds = SafetensorError, OSError, KeyError, ValueError
    with explain_errors(f"{path} cannot be read", *kinds), safe_open(path, "pt") as file:
        counters = parse_json((file.metadata() or {})["counters"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    here = {"data": data, "backbone": trainer.backbone.fingerprint}
    if changed := [key for key, value in here.items() if counters[key] != value]:
        raise ValueError(f"{path} was trained on other {' and '.join(changed)}; use --overwrite")
    trained = trainer.trained()
    shapes = {n.removeprefix("now."): t.shape for n, t in tensors.items() if n.startswith("now.")}
    if shapes != {n: p.shape for n, p in trained.items()}:
        raise ValueError(f"{path} belongs to another head or adapter; use --overwrite")
    _restore_tensors(trainer, tensors)
    for key in _COUNTERS:
        setattr(trainer, key, counters[key])


@torch.no_grad()
def _restore_tensors(trainer: RewardTrainer, tensors: Mapping[str, Tensor]) -> None:
    moments: dict[int, dict[str, Tensor]] = {}
    order = [p for group in trainer.optimizer.param_groups for p in group["params"]]
    place = {id(p): i for i, p in enumerate(order)}
    for name, parameter in trainer.trained().items():
        parameter.copy_(tensors[f"now.{name}"])
        prefix = f"optimizer.{name}:"
        found = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        if found:
            moments[place[id(parameter)]] = found
    put_back(trainer.optimizer, moments)
    best = {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}
    trainer.best = {name: t.to(trainer.device) for name, t in best.items()}


def finish(folder: Path, trainer: RewardTrainer, about: Mapping[str, Any]) -> dict[str, Any]:
    """Load the best weights, calibrate on the held-out records, and write the folder.

    `about` holds the parts of config.json that the run file and the data determine. Returns the
    content of config.json.
    """
    trainer.use_best()
    temperatures, dimensions = _calibrate(trainer), trainer.dimensions.items()
    config = {
        "format": FORMAT,
        **about,
        "dims": list(trainer.dimensions),
        "needs_prompt": trainer.backbone.reads_prompts,
        "needs_references": trainer.backbone.reads_references,
        "backbone_fingerprint": trainer.backbone.fingerprint,
        "labels": {n: d.labels for n, d in dimensions},
        "losses": {n: type(d.loss).__name__ for n, d in dimensions},
        "uncertain": [n for n, d in dimensions if d.loss.needs_variance],
        "learned": {n: dict(d.loss.learned_values()) for n, d in dimensions},
        "temperatures": temperatures,
        "best_epoch": trainer.best_epoch,
        "figures": _measure_parts(trainer),
    }
    new = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    tensors = {f"rater.{n}": t for n, t in trainer.rater.state_dict().items()}
    tensors |= {n: p for n, p in trainer.trained().items() if n.startswith("backbone.")}
    _write(new / "model.safetensors", tensors, {"format": FORMAT})
    write_json(new / "config.json", config)
    (new / "README.md").write_text(render_card(config), encoding="utf-8")
    put_in_place(new, folder)
    return config


def _calibrate(trainer: RewardTrainer) -> dict[str, float | None]:
    """Set the units of every dimension; return its temperature, or None if it has none."""
    preferences, rater = trainer.preferences, trainer.rater
    held = preferences.rows("held_out")
    score, labels = trainer.scores(held).score, preferences.labels[held]
    found: dict[str, float | None] = dict.fromkeys(trainer.dimensions)
    for d, (name, dimension) in enumerate(trainer.dimensions.items()):
        if dimension.loss.compares:
            found[name] = fit_temperature(score[..., d], labels[..., d], dimension.labels)
            rater.factor[d] = 1 / (found[name] or 1.0)
    train = preferences.rows("train")
    mean, std = fit_units(_score_in_units(trainer, train), preferences.labels[train])
    rater.mean.copy_(mean)
    rater.std.copy_(std)
    return found


def _measure_parts(trainer: RewardTrainer) -> dict[str, dict[str, dict[str, float]]]:
    """Return agreement per part and dimension in calibrated units, with held-out tie thresholds."""
    rows = {part: trainer.preferences.rows(part) for part in PARTS}
    labels = {part: trainer.preferences.labels[some] for part, some in rows.items() if len(some)}
    score = {part: _score_in_units(trainer, rows[part]) for part in labels}
    found = {part: {} for part in labels}
    for d, (name, dimension) in enumerate(trainer.dimensions.items()):
        kind = dimension.labels
        threshold = fit_tie_threshold(score["held_out"][..., d], labels["held_out"][..., d], kind)
        known = -1.0 if math.isnan(threshold) else threshold
        for part, values in score.items():
            agreement = measure_agreement(values[..., d], labels[part][..., d], kind, known)
            found[part][name] = dict(agreement)
    return found


def _score_in_units(trainer: RewardTrainer, rows: Int[Tensor, "n"]) -> Float[Tensor, "n m R"]:
    """Return calibrated scores of records, on the CPU."""
    values, _ = trainer.rater.in_units(trainer.scores(rows).to(trainer.device), z_score=False)
    return values.cpu()


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    whole = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    try:
        with atomic_write(path) as partial:
            save_file(whole, partial, metadata)
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error
