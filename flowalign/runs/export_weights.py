"""Export trained weights: find them, check them, and write them with a model card."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from flowalign import __version__
from flowalign.distributed.processes import join
from flowalign.runs.config import Run, load
from flowalign.runs.model_card import (
    Form,
    Subject,
    Trained,
    check_plots,
    describe_subject,
    draw_curves,
    model_card,
)
from flowalign.training import checkpoint
from flowalign.utils.console import say
from flowalign.utils.files import atomic_write, read_object, write_json
from flowalign.utils.run_events import hide_folders, hide_in_settings


def find_trained(source: Path, averaged: bool) -> Trained:
    """Find the weights of a run directory, of a checkpoint, or of one folder of a checkpoint.

    With `averaged`, return the averaged weights of a checkpoint if it has them.

    Raises:
        ValueError: The source holds no weights.
    """
    folder = checkpoint.latest(source / "checkpoints") or source
    home = folder if (folder / "config.yaml").is_file() else folder.parent
    if not (home / "config.yaml").is_file() or not (home / "state").is_dir():
        raise ValueError(
            f"{source} is neither a run directory nor a checkpoint: "
            "no checkpoints/ and no config.yaml"
        )
    checkpoint.check_weights(folder)
    if folder == home:
        folder = home / "ema" if averaged and (home / "ema").is_dir() else home
    run_folder = home.parent.parent if home.parent.name == "checkpoints" else None
    return Trained(folder, home / "config.yaml", run_folder)


def prepare(trained: Trained, form: Form, base: str | None) -> Run:
    """Return the run of the trained weights, after all checks that need no weights.

    Raises:
        ValueError: The folder exists, the policy exports nothing, or the weights do not fit.
        ConfigError: The settings of the run cannot be read any more.
    """
    check_plots()
    if form.out.exists():
        raise ValueError(f"{form.out} exists and is not overwritten; name another folder by --out")
    overrides = [f"--quantization.{part}=none" for part in ("denoiser", "text_encoders")]
    overrides.append("--offload=none")
    overrides += [] if base is None else ["--policy.path", base]
    run, _ = load(str(trained.config), overrides)
    if run.policy.network is None:
        raise ValueError(f"{type(run.policy).__name__} cannot be exported; use its checkpoints")
    run.policy.plan()
    run.policy.network.check_export(str(trained.weights), form.target)
    return run


def export(run: Run, trained: Trained, form: Form) -> float | None:
    """Write weights, model card, settings and grid to a new folder, all or nothing.

    Returns the largest difference after the target's loader reads the weights back; None without a
    loader.
    """
    policy = run.policy
    assert policy.network, "a policy that exports nothing was refused"
    policy.load(join(run.device).device)
    policy.load_weights(str(trained.weights))
    form.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(form.out) as partial:
        partial.mkdir(parents=True)
        difference = policy.network.export(policy, str(partial), form.target, form.dtype)
        if difference is not None and not difference < float("inf"):
            raise ValueError(f"the exported weights differ by {difference} when read back")
        describe_folder(partial, describe_subject(run), trained, form)
    if form.target == "merged" and (left := policy.network.left_out):
        say(f"left out: {', '.join(left)}, which training does not need; the base model has them")
    return difference


def describe_folder(folder: Path, subject: Subject, trained: Trained, form: Form) -> None:
    """Add model card, settings, curves and grids to weights, and metadata to adapter files."""
    text = hide_folders(hide_in_settings(trained.config.read_text(encoding="utf-8")))
    for file in folder.rglob("*.json"):
        if (content := read_object(file)).pop("_name_or_path", None):
            write_json(file, content)
    if form.target != "merged":
        stamp_adapter(folder, yaml.safe_load(text))
    for name, grid in trained.grids.items():
        shutil.copyfile(grid, folder / name)
    (folder / "flowalign.yaml").write_text(text, encoding="utf-8")
    curves = draw_curves(trained.run_folder) if trained.run_folder else None
    if curves:
        (folder / "curves.png").write_bytes(curves)
    card = model_card(subject, trained, form, bool(curves))
    (folder / "README.md").write_text(card, encoding="utf-8")


_PEFT = "adapter_config.json"


def describe_training(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the base model, the classes of method and rewards, and the version, by name."""
    recipe = settings["recipe"]
    arguments = recipe.get("init_args", {})
    parts = [arguments.get(name) for name in ("credit", "gradient_path", "algorithm", "loss")]
    named = [part["class_path"] for part in parts if isinstance(part, Mapping)]
    rewards = [reward["class_path"] for reward in settings.get("rewards", [])]
    return {
        "flowalign.version": __version__,
        "flowalign.base_model": str(settings["policy"]["init_args"].get("path", "")),
        "flowalign.method": ", ".join([recipe["class_path"], *named]),
        "flowalign.rewards": ", ".join(rewards) or "none",
    }


def stamp_adapter(folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the description to the metadata of all safetensors files, and the base to PEFT's file."""
    about = describe_training(settings)
    for file in folder.glob("*.safetensors"):
        add_metadata(file, about)
    config = folder / _PEFT
    if config.is_file():
        content = read_object(config)
        content["base_model_name_or_path"] = about["flowalign.base_model"]
        write_json(config, content)


def add_metadata(file: Path, entries: Mapping[str, str]) -> None:
    """Add entries to the header of a safetensors file; the tensors stay as they are."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = {**header.get("__metadata__", {}), **entries}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    file.write_bytes(len(head).to_bytes(8, "little") + head + content[end:])
