"""What a pipeline's folder says of its parts, before any weights are read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline


def config_of(pipeline: type[DiffusionPipeline], path: str, part: str) -> dict[str, Any]:
    """The configuration of a part of the pipeline. ValueError where there is no such pipeline."""
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    file = Path(path) / part / name
    if file.is_file():
        return json.loads(file.read_text())
    if Path(path).exists():
        raise ValueError(f"{path} is no {pipeline.__name__} folder: {part}/{name} is missing")
    kind: Any = DDIMScheduler if part == "scheduler" else AutoencoderKL  # or any of its kind
    try:
        return dict(kind.load_config(path, subfolder=part))
    except OSError as error:
        raise ValueError(
            f"policy.path {path!r} is neither a folder nor a model that the hub gives: "
            + str(error).splitlines()[0]
        ) from error


def setting_of(pipeline: type[DiffusionPipeline], path: str, name: str) -> Any:
    """A value of the pipeline's own configuration, None where it does not say."""
    file = Path(path) / "model_index.json"
    if not file.is_file() and Path(path).exists():
        raise ValueError(f"{path} is no {pipeline.__name__} folder: {file.name} is missing")
    config: Any = json.loads(file.read_text()) if file.is_file() else pipeline.load_config(path)
    return config.get(name)


def scheduler_of(config: Mapping[str, Any]) -> Any:
    """The scheduler that a configuration names."""
    return getattr(diffusers, config["_class_name"]).from_config(config)


def shifted(config: Mapping[str, Any], shift: float | None, path: str) -> Mapping[str, Any]:
    """A scheduler's configuration with another shift, or itself where that is None.

    ValueError where the schedule has no shift that one could set: it depends on the video, or there
    is none.
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
    """Values kept for the backward pass: about 34 per token, layer and channel.

    Where they are recomputed, those of one layer at a time, the largest, and one per token, layer
    and channel: what goes into each. A UNet has a quarter of the tokens on each level, and about as
    many layers going up as down, with one more.
    """
    if "block_out_channels" in config:
        depth = 2 * config["layers_per_block"] + 1
        widths = config["block_out_channels"]
        layers = [num_tokens * w // 4**i for i, w in enumerate(widths) for _ in range(depth)]
    else:
        width = config["num_attention_heads"] * config["attention_head_dim"]
        depth = config["num_layers"] + config.get("num_single_layers", 0)
        layers = [num_tokens * width] * depth
    return 34 * max(layers) + sum(layers) if recomputed else 34 * sum(layers)
