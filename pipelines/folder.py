"""Reads the configuration files of a pipeline folder, before any weights are read."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
from diffusers import DiffusionPipeline

from flowalign.utils.hub import file_of


def config_of(pipeline: type[DiffusionPipeline], path: str, part: str) -> dict[str, Any]:
    """Return the configuration of one part of the pipeline.

    Raises:
        ValueError: `path` is neither such a pipeline's folder nor a model on the hub.
    """
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    file = Path(path) / part / name
    if file.is_file():
        return read_json(file)
    if Path(path).exists():
        raise ValueError(f"{path} is no {pipeline.__name__} folder: {part}/{name} is missing")
    return read_json(file_in(path, name, part))


def file_in(path: str, name: str, part: str | None = None) -> Path:
    """Return a file of a pipeline's folder, or a copy of it from the hub.

    Raises:
        ValueError: `path` is neither a folder with this file nor a model on the hub.
    """
    file = Path(path, part or "", name)
    if file.is_file():
        return file
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ValueError(f"policy.path {path!r} is neither a folder nor the id of a model")
    return file_of(path, name, part)


def read_json(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        ValueError: it is damaged, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ValueError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged: it holds no object, but {str(found)[:40]}")
    return found


def setting_of(pipeline: type[DiffusionPipeline], path: str, name: str) -> Any:
    """Return a value of `model_index.json`, or None where it has no such key."""
    file = Path(path) / "model_index.json"
    if not file.is_file() and Path(path).exists():
        raise ValueError(f"{path} is no {pipeline.__name__} folder: {file.name} is missing")
    return read_json(file_in(path, file.name)).get(name)


def scheduler_of(config: Mapping[str, Any]) -> Any:
    """Build the scheduler that a configuration names."""
    return getattr(diffusers, config["_class_name"]).from_config(config)


def shifted(config: Mapping[str, Any], shift: float | None, path: str) -> Mapping[str, Any]:
    """Return a scheduler's configuration with another shift; unchanged where `shift` is None.

    Raises:
        ValueError: the schedule has no shift to set, or computes it from the video's size.
    """
    if shift is None:
        return config
    name = next((n for n in ("flow_shift", "shift") if n in config), None)
    if name is None or config.get("use_dynamic_shifting"):
        raise ValueError(
            f"video.shift is {shift}, but the scheduler of {path} ({config['_class_name']}) "
            + ("finds its shift from the size of the video" if name else "has none")
            + ": leave it out"
        )
    if shift <= 0:
        raise ValueError(f"video.shift is {shift}; it must be above 0, and 1 shifts nothing")
    return {**config, name: shift}


def activations(config: Mapping[str, Any], num_tokens: int, recomputed: bool) -> int:
    """Estimate how many values the backward pass keeps: about 34 per token, layer and channel.

    With recomputation (`recomputed`) only the largest layer keeps its 34, plus one input value per
    token, layer and channel. A UNet has a quarter of the tokens on each level, and one more layer
    on the way up than on the way down.
    """
    if "block_out_channels" in config:
        depth = 2 * config["layers_per_block"] + 1
        widths = config["block_out_channels"]
        layers = [num_tokens * w // 4**i for i, w in enumerate(widths) for _ in range(depth)]
    elif "n_layers" in config:  # Z-Image; its refiners see a part of the tokens each
        layers = [num_tokens * config["dim"]] * (config["n_layers"] + config["n_refiner_layers"])
    else:
        width = config["num_attention_heads"] * config["attention_head_dim"]
        depth = config["num_layers"] + config.get("num_single_layers", 0)
        layers = [num_tokens * width] * depth
    return 34 * max(layers) + sum(layers) if recomputed else 34 * sum(layers)
