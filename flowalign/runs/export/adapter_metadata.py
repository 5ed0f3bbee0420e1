"""Write the base model, method and rewards into the files of an exported adapter."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowalign import __version__
from flowalign.utils.files import write_json

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
        content = json.loads(config.read_text(encoding="utf-8"))
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
