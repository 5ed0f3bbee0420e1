"""Write the model card of exported weights, in the format of the Hugging Face hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flowalign.rewards.weighted_reward import read_weights
from flowalign.runs.config import Run
from flowalign.types import ExportTarget, describe_conditioning

_TASKS = {
    (False, "none"): "text-to-image",
    (False, "source"): "image-to-image",
    (True, "none"): "text-to-video",
    (True, "first_frame"): "image-to-video",
}
_FROM_BASE = "pipe = DiffusionPipeline.from_pretrained({base!r})"
_USES = {
    "diffusers": (_FROM_BASE, "pipe.load_lora_weights('PATH')"),
    "peft": (
        "from peft import PeftModel",
        _FROM_BASE,
        "pipe.transformer = PeftModel.from_pretrained(pipe.transformer, 'PATH')",
    ),
    "merged": ("pipe = DiffusionPipeline.from_pretrained('PATH')",),
}


def model_card(
    run: Run,
    config: Path,
    summary: Mapping[str, Any],
    target: ExportTarget,
    license: str | None,
    has_grid: bool,
) -> str:
    """Return the card: front matter, use, training settings and measured rewards."""
    settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    base = settings["policy"]["init_args"].get("path", "")
    task = _TASKS.get((run.policy.fps is not None, run.policy.input_spec.kind), "text-to-image")
    front: dict[str, Any] = {"base_model": base, "library_name": "diffusers", "pipeline_tag": task}
    front |= {"license": license} if license else {}
    front["tags"] = ["flowalign", task, "diffusers", *([] if target == "merged" else ["lora"])]
    if has_grid:
        front["widget"] = [{"text": "samples", "output": {"url": "samples.png"}}]
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {base or 'A model'} aligned by flowalign",
        "![samples of held-out prompts](samples.png)" if has_grid else "",
        _format_use(target, base),
        _format_words(run),
        _format_training(settings, summary),
        _format_metrics(summary),
        "`flowalign.yaml` holds all settings; training started from it repeats the run.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _format_use(target: ExportTarget, base: str) -> str:
    if target == "comfyui":
        return "## Use\n\nPut `comfyui_lora.safetensors` into `models/loras` of ComfyUI."
    lines = ["from diffusers import DiffusionPipeline", *_USES[target]]
    code = "\n".join(lines).format(base=base)
    told = "`PATH` is this repository or a folder with its files."
    return f"## Use\n\n{told}\n\n```python\n{code}\n```"


def _format_words(run: Run) -> str:
    """Return the section on the words that the conditioning adds; empty without conditioning."""
    if not (asked := describe_conditioning(run.conditioning)):
        return ""
    told = "The weights were trained with words added to the prompt. For PROMPT, use"
    return f"## Words\n\n{told}\n\n    {asked}"


def _format_training(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    recipe = settings["recipe"]
    rows = {"recipe": recipe["class_path"], **_list_components(recipe.get("init_args", {}))}
    rows["rewards"] = ", ".join(one["class_path"] for one in settings.get("rewards", [])) or "none"
    weights = read_weights(settings)
    rows["reward weights"] = ", ".join(f"{k} {v}" for k, v in weights.items()) or "none"
    rows["seed"] = str(settings.get("seed", 0))
    names = "status", "steps", "seconds", "network_evaluations", "reward_calls"
    rows |= {name.replace("_", " "): str(summary[name]) for name in names if name in summary}
    return "## Training\n\n" + _format_table(("setting", "value"), rows)


def _list_components(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the components among the arguments of a recipe, by class."""
    return {
        name: value["class_path"]
        for name, value in arguments.items()
        if isinstance(value, dict) and "class_path" in value
    }


def _format_metrics(summary: Mapping[str, Any]) -> str:
    before, after = summary.get("before") or {}, summary.get("after") or {}
    rows = {n: f"{before[n]:.4f} | {after[n]:.4f}" for n in after if n in before}
    if not rows:
        return "## Rewards\n\nThe run had no evaluation before and after training."
    seed = summary.get("seed")
    about = f"On held-out prompts, one run with seed {seed}: no claim about other seeds.\n\n"
    return "## Rewards\n\n" + about + _format_table(("reward", "before | after"), rows)


def _format_table(head: tuple[str, str], rows: Mapping[str, str]) -> str:
    columns = 2 + head[1].count("|")
    lines = [f"| {head[0]} | {head[1]} |", "|" + "---|" * columns]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
