"""Convert command lines of diffusers' Diffusion-DPO scripts and of scripts with the same options.

Defaults are those of diffusers' `train_diffusion_dpo.py` @ 071190daca.
"""

import re
import shlex
from pathlib import Path
from typing import Any

from flowalign.runs.importing.conversion import Draft, Facts, Source

_BASE: dict[str, Any] = {
    "resolution": 512,
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "beta_dpo": 2500,
    "loss_type": "sigmoid",
    "learning_rate": 5e-4,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 500,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-2,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "checkpointing_steps": 500,
}
_LINKS = {"hinge": "Hinge", "ipo": "IPO"}
_DECAYS = {"constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_WITHOUT_EFFECT = ("output_dir", "report_to", "tracker_name", "logging_dir", "cache_dir")
_WITHOUT_EFFECT += ("run_validation", "validation_steps", "dataloader_num_workers", "allow_tf32")
_WITHOUT_EFFECT += ("push_to_hub", "hub_model_id", "vae_encode_batch_size", "dataset_split_name")
_WITHOUT_EFFECT += ("enable_xformers_memory_efficient_attention", "num_train_epochs", "sdxl")


def read(path: Path, gpus: int | None) -> tuple[Source, int]:
    """Return the options of the training command in a shell script, and the number of GPUs.

    Variables that the script sets are replaced.

    Raises:
        ValueError: There is no command that starts a Python file.
    """
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    variables = {}
    for name, value in re.findall(r"^\s*(?:export\s+)?(\w+)=(\S*|\"[^\"]*\")\s*$", text, re.M):
        variables[name] = value.strip("\"'")
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
        if scripts and any(word.startswith(("accelerate", "python")) for word in words):
            filled = [
                re.sub(r"\$\{?(\w+)\}?", lambda m: variables.get(m[1], m[0]), w) for w in words
            ]
            launcher, options = filled[: scripts[0]], filled[scripts[0] + 1 :]
            return _parse(launcher, options, gpus, filled[scripts[0]])
    raise ValueError(f"{path} holds no command such as accelerate launch train.py")


def _parse(
    launcher: list[str], options: list[str], gpus: int | None, script: str
) -> tuple[Source, int]:
    launched, chosen = _options(launcher), _options(options)
    count = gpus or launched.get("num_processes") or _visible(launcher)
    if count is None:
        raise ValueError("the command names no number of GPUs: give it with --source_gpus")
    if "mixed_precision" in launched:
        chosen.setdefault("mixed_precision", launched["mixed_precision"])
    if "train_diffusion_dpo" in script:  # diffusers' scripts always train a LoRA
        chosen.setdefault("rank", 4)
    if "sdxl" in script.lower():
        chosen.setdefault("resolution", 1024)
    return Source(_BASE | chosen, chosen), count


def _visible(words: list[str]) -> int | None:
    found = [word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")]
    return len(found[0].split(",")) if found else None


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a command by name; a flag without a value is True."""
    found: dict[str, Any] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < len(words) else "--"
            given = value if equals else (True if following.startswith("--") else following)
            found[name] = _number(given)
    return found


def _number(value: Any) -> Any:
    for kind in (int, float):
        try:
            return value if value is True else kind(value)
        except ValueError:
            continue
    return value


def convert(source: Source, gpus: int, family: str) -> Draft:
    """Return the draft of a run file; `family` is sd15, sdxl or sd35."""
    get = source.get
    batch = get("train_batch_size") * gpus * get("gradient_accumulation_steps")
    rate = get("learning_rate") * (batch if get("scale_lr") else 1)
    facts = Facts(batch, get("max_train_steps"), float(rate), kl_weight=float(get("beta_dpo")))
    draft = Draft([f"configs/preference/{family}_dpo.yaml"], facts, gpus)
    side, rank = get("resolution"), get("rank")
    policy: dict[str, Any] = {"path": source.need("pretrained_model_name_or_path")}
    policy |= {
        "height": side,
        "width": side,
        "lora": {"rank": rank, "alpha": rank} if rank else None,
    }
    policy["gradient_checkpointing"] = bool(get("gradient_checkpointing"))
    precision = get("mixed_precision", "no")
    policy["precision"] = {"no": "fp32"}.get(precision, precision)
    data: dict[str, Any] = {"path": get("dataset_name", "data/pickapic_v2/train")}
    data |= {"batch_size": batch, "flip": 0.0 if get("no_hflip") else 0.5}
    data["prompt_dropout"] = float(get("proportion_empty_prompts", 0.0))
    loss: dict[str, Any] = {"beta": float(facts.kl_weight or 0)}
    if get("loss_type") in _LINKS:
        loss["link"] = {"class_path": f"flowalign.losses.{_LINKS[get('loss_type')]}"}
    elif get("loss_type") != "sigmoid":
        draft.unsupported.append(f"loss_type {get('loss_type')}: sigmoid instead")
    optimizer = _convert_optimizer(source, draft)
    recipe = {"data": data, "loss": loss, "micro_batch": get("train_batch_size")}
    draft.settings = {"policy": policy, "recipe": recipe, "optimizer": optimizer}
    draft.settings |= {"seed": get("seed", 0), "checkpoints": {"every": get("checkpointing_steps")}}
    if facts.num_steps:
        draft.settings["num_steps"] = facts.num_steps
    else:
        draft.differences.append(
            "the source sets epochs, not steps; num_steps is the bundled file's"
        )
    draft.differences.append("data: download the dataset; recipe.data.path names its files")
    draft.differences.append("images are center-cropped to the size of the policy")
    source.skip(*_WITHOUT_EFFECT, "learning_rate", "train_batch_size", "lr_warmup_steps")
    draft.unsupported += source.unread()
    return draft


def _convert_optimizer(source: Source, draft: Draft) -> dict[str, Any]:
    get = source.get
    schedule = get("lr_scheduler")
    if schedule not in ("constant", *_DECAYS):
        draft.unsupported.append(f"lr_scheduler {schedule}: constant instead")
    optimizer: dict[str, Any] = {"learning_rate": float(draft.facts.learning_rate)}
    optimizer["decay"] = _DECAYS.get(schedule, "constant")
    optimizer["warmup"] = 0 if schedule == "constant" else get("lr_warmup_steps")
    optimizer |= {"betas": [get("adam_beta1"), get("adam_beta2")], "eps": get("adam_epsilon")}
    optimizer["weight_decay"] = get("adam_weight_decay")
    optimizer["max_grad_norm"] = float(get("max_grad_norm"))
    if get("use_8bit_adam"):
        optimizer["kind"] = "adamw_8bit"
    return optimizer
