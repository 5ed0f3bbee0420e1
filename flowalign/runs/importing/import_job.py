"""Import a configuration: find its format and model, convert it, and write the run file."""

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import yaml

from flowalign.runs.config.compose import compose
from flowalign.runs.importing import dpo_script, flow_factory, flow_grpo
from flowalign.runs.importing.conversion import Draft
from flowalign.runs.library.draft_run_file import models
from flowalign.utils.files import bundled, write_text
from flowalign.utils.strict_yaml import read_mapping

_DPO = {"xl": "sdxl", "3.5": "sd35", "stable-diffusion-3": "sd35", "v1": "sd15", "sd-1": "sd15"}
"""Families of configs/preference by a part of the model's name."""
_TYPES = {
    "sd3-5": "sd35_medium",
    "flux1": "flux1_dev",
    "flux1-kontext": "flux1_kontext",
    "flux2-klein-base": "flux2_klein",
    "flux2": "flux2_dev",
    "qwenimage": "qwen_image",
    "qwen-image": "qwen_image",
    "z-image": "z_image",
}
"""Families by Flow-Factory's `model_type`."""


class ImportOptions(NamedTuple):
    """Options of an import."""

    function: str | None
    """Function of a Python configuration."""
    source_gpus: int | None
    """Number of GPUs of the source, if the file does not name it."""
    gpus: int | None
    """Number of the user's GPUs. None: as many as the source had."""
    family: str | None
    """Name of a file of configs/models, or of a DPO file of configs/preference without `_dpo`."""
    prompts: str | None
    """Prompt file for the run file."""


def import_config(path: Path, options: ImportOptions) -> tuple[Draft, str]:
    """Return the draft and the text of the run file.

    Raises:
        ValueError: The format or the model is unknown, or a setting contradicts another one.
    """
    draft = _convert(path, options)
    gpus = options.gpus or draft.gpus
    prompts = draft.settings["recipe"].get("prompts_per_step")
    prompts = prompts or draft.settings["recipe"].get("data", {}).get("prompts_per_step")
    if prompts and gpus > prompts:
        raise ValueError(f"--gpus {gpus} exceeds the {prompts} prompts of a step")
    if gpus != draft.gpus:
        draft.differences.append(
            f"{draft.gpus} GPUs become {gpus}: sizes are totals over all GPUs, so the batch stays"
        )
    if options.prompts:
        where: dict[str, Any] = draft.settings["recipe"]
        where = where if "prompts_per_step" in where else where["data"]
        where["prompts"] = options.prompts
    with TemporaryDirectory() as folder:
        overlay = Path(folder) / "imported.yaml"
        overlay.write_text(yaml.safe_dump(draft.settings), encoding="utf-8")
        values = compose([*(bundled(layer) for layer in draft.layers), str(overlay)]).values
    values["output_dir"] = f"runs/{path.stem if options.function is None else options.function}"
    text = "".join(f"# {line}\n" for line in describe(path, draft, gpus))
    return draft, text + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def describe(path: Path, draft: Draft, gpus: int) -> Sequence[str]:
    """Return the head of the run file: source, numbers, differences and unsupported settings."""
    facts = [f"{k.replace('_', ' ')} {v}" for k, v in asdict(draft.facts).items() if v is not None]
    lines = [f"[checked only] Imported from {path.name}: {', '.join(facts)}."]
    lines += [f"Train on {gpus} GPUs with --processes {gpus}."]
    lines += [f"Differs: {line}" for line in draft.differences]
    lines += [f"Unsupported: {line}" for line in draft.unsupported]
    return [" ".join(line.split()) for line in lines]


def write(path: Path, text: str) -> None:
    """Write the run file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)


def _convert(path: Path, options: ImportOptions) -> Draft:
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    if path.suffix == ".py":
        source, gpus = flow_grpo.read(path, options.function, options.source_gpus)
        family = options.family or find_family(source.need("pretrained.model"))
        return flow_grpo.convert(source, gpus, family)
    if path.suffix in (".yaml", ".yml"):
        source, gpus = flow_factory.read(path, options.source_gpus)
        known = _TYPES.get(source.get("model.model_type", ""))
        family = options.family or known or find_family(source.need("model.model_name_or_path"))
        return flow_factory.convert(source, gpus, family)
    if path.suffix in (".sh", ".txt"):
        source, gpus = dpo_script.read(path, options.source_gpus)
        model = source.need("pretrained_model_name_or_path").lower()
        found = [family for part, family in _DPO.items() if part in model]
        if not (options.family or found):
            raise ValueError(f"model {model} is unknown: give --family sd15, sdxl or sd35")
        return dpo_script.convert(source, gpus, options.family or found[0])
    raise ValueError(
        f"{path} is neither a Python configuration (flow_grpo, DiffusionNFT), a YAML file\n"
        "(Flow-Factory), nor a shell script (.sh) with the command of a DPO script"
    )


def find_family(model: str) -> str:
    """Return the file of configs/models that trains a model; raise ValueError if there is none."""
    wanted = _shorten(model)
    for name in models():
        content = read_mapping(bundled(f"configs/models/{name}.yaml"))
        path = content.get("policy", {}).get("init_args", {}).get("path", "")
        if _shorten(path) == wanted:
            return name
    raise ValueError(f"no run file trains {model}: give --family, one of {', '.join(models())}")


def _shorten(model: str) -> str:
    return re.sub(r"[^a-z0-9]", "", model.rstrip("/").rpartition("/")[2].lower())
