"""Write the model card of exported weights, in the format of the Hugging Face hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowalign.reports.pages import render
from flowalign.rewards.weighted_reward import read_weights
from flowalign.runs.config import Run
from flowalign.types import ExportTarget, describe_conditioning

SAMPLES, SAMPLES_BEFORE = "samples.png", "samples_before.png"
"""Names of the grids of samples after and before training."""
_TASKS = {
    (False, "none"): "text-to-image",
    (False, "source"): "image-to-image",
    (True, "none"): "text-to-video",
    (True, "first_frame"): "image-to-video",
}


@dataclass(frozen=True)
class Evidence:
    """Results that the card shows."""

    grids: Sequence[str]
    """Names of the grids of samples next to the card: SAMPLES, SAMPLES_BEFORE."""
    has_curves: bool
    """Whether `curves.png` is next to the card."""
    benchmarks: Sequence[tuple[str, str]]
    """Titles and Markdown of benchmark results."""


def model_card(
    run: Run,
    config: Path,
    summary: Mapping[str, Any],
    target: ExportTarget,
    license: str | None,
    evidence: Evidence,
) -> str:
    """Return the card: front matter, use, training settings, measured rewards and benchmarks."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    base = settings["policy"]["init_args"].get("path", "")
    task = _TASKS.get((run.policy.fps is not None, run.policy.input_spec.kind), "text-to-image")
    front: dict[str, Any] = {"base_model": base, "library_name": "diffusers", "pipeline_tag": task}
    front |= {"license": license} if license else {}
    front["tags"] = ["flowalign", task, "diffusers", *([] if target == "merged" else ["lora"])]
    if evidence.grids:
        front["widget"] = [{"text": "samples", "output": {"url": SAMPLES}}]
    before, after = summary.get("before") or {}, summary.get("after") or {}
    text = render(
        "model_card.md.j2",
        {"quoted": repr},
        front=yaml.safe_dump(front, sort_keys=False),
        base=base,
        target=target,
        evidence=evidence,
        words=describe_conditioning(run.conditioning),
        training=_describe_training(settings, summary),
        rewards={name: (before[name], after[name]) for name in after if name in before},
        seed=summary.get("seed"),
    )
    return text + "\n"


def _describe_training(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with its components, the rewards, and the costs of the run."""
    recipe = settings["recipe"]
    arguments, weights = recipe.get("init_args", {}), read_weights(settings)
    names = "status", "steps", "seconds", "network_evaluations", "reward_calls"
    return {
        "recipe": recipe["class_path"],
        **{
            name: value["class_path"]
            for name, value in arguments.items()
            if isinstance(value, dict) and "class_path" in value
        },
        "rewards": ", ".join(one["class_path"] for one in settings.get("rewards", [])) or "none",
        "reward weights": ", ".join(f"{k} {v}" for k, v in weights.items()) or "none",
        "seed": settings.get("seed", 0),
        **{name.replace("_", " "): summary[name] for name in names if name in summary},
    }
