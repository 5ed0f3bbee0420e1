"""Write the model card of exported weights, in the format of the Hugging Face hub."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flowalign.reports.pages import PALETTE, render
from flowalign.reports.panels import num_smoothed, to_arrays
from flowalign.reports.records import Lines, Series, collect
from flowalign.rewards.config import read_weights
from flowalign.runs.config import Run
from flowalign.runs.sampling_job import hash_weights
from flowalign.types import ExportDtype, ExportTarget, describe_conditioning
from flowalign.utils.files import read_object
from flowalign.utils.imports import import_optional
from flowalign.utils.live_objects import PREFIX
from flowalign.utils.run_events import hide_folders
from flowalign.utils.tracking import read_metrics

SAMPLES, SAMPLES_BEFORE = "samples.png", "samples_before.png"
"""Names of the grids of samples after and before training."""
_TASKS = {
    (False, "none"): "text-to-image",
    (False, "source"): "image-to-image",
    (True, "none"): "text-to-video",
    (True, "first_frame"): "image-to-video",
}


@dataclass(frozen=True)
class Trained:
    """Trained weights, and the files of their run."""

    weights: Path
    """Folder that `Policy.save_weights` wrote."""
    config: Path
    """Complete settings of the run."""
    run_folder: Path | None
    """Run directory. None for a checkpoint that was copied without its run."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """Return the summary of the run; empty before it ends."""
        file = self.run_folder and self.run_folder / "summary.json"
        return read_object(file) if file and file.is_file() else {}

    @property
    def grids(self) -> dict[str, Path]:
        """Return the newest grid of samples and the one before training, by their exported names.

        Without an evaluation before training there is only the newest one.
        """
        found = sorted((self.run_folder / "samples").glob("*.png")) if self.run_folder else []
        named = {SAMPLES: found[-1]} if found else {}
        before = [file for file in found[:-1] if file.stem == "step-000000"]
        return named | dict(zip([SAMPLES_BEFORE], before, strict=False))


@dataclass(frozen=True)
class Form:
    """Format and folder of an export."""

    target: ExportTarget
    dtype: ExportDtype
    out: Path
    """New folder."""
    license: str | None = None
    """Licence of the weights, for the model card."""
    benchmarks: Sequence[tuple[str, str]] = ()
    """Titles and Markdown of benchmark results, for the model card."""


@dataclass(frozen=True)
class Subject:
    """Task and prompt words of the weights of a run."""

    task: str
    """Task, by its name on the hub."""
    words: str
    """Words that are added to a prompt; "": none."""


def describe_subject(run: Run) -> Subject:
    """Return the subject of a run, which outlives its models."""
    task = _TASKS.get((run.policy.fps is not None, run.policy.input_spec.kind), "text-to-image")
    return Subject(task, describe_conditioning(run.conditioning))


def model_card(subject: Subject, trained: Trained, form: Form, has_curves: bool = False) -> str:
    """Return the card: front matter, use, training settings, measured rewards and benchmarks.

    `has_curves` says whether `curves.png` is next to the card.
    """
    text, summary = trained.config.read_text(encoding="utf-8"), trained.summary
    settings = yaml.safe_load(hide_folders(text))
    path, task = str(settings["policy"]["init_args"].get("path", "")), subject.task
    base = "" if path.startswith(PREFIX) else path
    front: dict[str, Any] = {"base_model": base} if "/" in base else {}  # the hub takes only ids
    front |= {"library_name": "diffusers", "pipeline_tag": task}
    front |= {"license": form.license} if form.license else {}
    front["tags"] = ["flowalign", task, "diffusers", *([] if form.target == "merged" else ["lora"])]
    if trained.grids:
        front["widget"] = [{"text": "samples", "output": {"url": SAMPLES}}]
    before, after = summary.get("before") or {}, summary.get("after") or {}
    text = render(
        "model_card.md.j2",
        {"quoted": repr},
        front=yaml.safe_dump(front, sort_keys=False),
        base=base,
        target=form.target,
        grids=trained.grids,
        has_curves=has_curves,
        benchmarks=form.benchmarks,
        words=subject.words,
        training=_describe_training(settings, summary),
        rewards={
            name: (before[name], value)
            for name, value in after.items()
            if value is not None and before.get(name) is not None
        },
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


_HELD_OUT = "eval/"
_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
}
_MOST = 4
"""Largest number of held-out values that the figure shows."""


def read_benchmarks(folders: Sequence[str], weights: Path) -> list[tuple[str, str]]:
    """Return title and Markdown of the results that `flowalign eval --benchmark` wrote.

    Raises:
        ValueError: A folder has no results, or evaluated other weights.
    """
    digest = f"weights-{hash_weights(weights)}" if folders else ""
    return [_read_benchmark(Path(folder), digest, weights) for folder in folders]


def _read_benchmark(folder: Path, digest: str, weights: Path) -> tuple[str, str]:
    file = folder / "results.json"
    if not file.is_file():
        raise ValueError(
            f"--benchmark {folder} has no results.json: name the output folder of "
            "`flowalign eval --benchmark`, after all of its shards"
        )
    content = read_object(file)
    if digest not in content["weights"].values():
        evaluated = ", ".join(content["weights"])
        raise ValueError(
            f"--benchmark {folder} evaluated {evaluated}, not the exported weights: repeat "
            f"`flowalign eval --benchmark` with --weights {weights}"
        )
    return content["title"], (folder / "results.md").read_text(encoding="utf-8").strip()


def check_plots() -> None:
    """Raise ValueError if the library is missing that draws the curves of a card."""
    import_optional("matplotlib", "plots")


def draw_curves(folder: Path) -> bytes | None:
    """Return a PNG with the reward of every step and the held-out values; None without metrics."""
    matplotlib = import_optional("matplotlib", "plots")
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    lines = collect(read_metrics(folder)) if (folder / "metrics.jsonl").is_file() else {}
    reward = {"reward": lines["reward_mean"]} if "reward_mean" in lines else {}
    panels = [("reward of training samples", reward), ("held-out prompts", _held_out(lines))]
    shown = [(title, some) for title, some in panels if some]
    if not shown:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.5 * len(shown), 3.6), layout="constrained", dpi=110)
        for i, (title, some) in enumerate(shown):
            axes = figure.add_subplot(1, len(shown), i + 1)
            for label, colour in zip(some, PALETTE, strict=False):
                _draw_line(axes, label, some[label], colour)
            axes.set(title=title, xlabel="training step")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if len(some) > 1:
                axes.legend(frameon=False)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    return drawn.getvalue()


def _draw_line(axes: Any, label: str, series: Series, colour: str) -> None:
    """Draw a series; of the training reward, also its moving average over a tenth of the steps."""
    steps, values = to_arrays(series)
    n = num_smoothed(len(steps)) if label == "reward" else 1
    axes.plot(steps, values, color=colour, alpha=0.3 if n > 1 else 1.0, label=label)
    if n > 1:
        means = [values[max(0, k - n) : k].mean() for k in range(1, len(values) + 1)]
        axes.plot(steps, means, color=colour)


def _held_out(lines: Lines) -> Lines:
    """Return the first held-out means that were measured at least twice."""
    found = {
        name.removeprefix(_HELD_OUT): line
        for name, line in lines.items()
        if name.startswith(_HELD_OUT) and "/" not in name.removeprefix(_HELD_OUT) and len(line) > 1
    }
    return dict(list(found.items())[:_MOST])
