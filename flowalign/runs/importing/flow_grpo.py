"""Convert configurations of flow_grpo and DiffusionNFT, which share a format.

Defaults are those of the base configurations of flow_grpo @ 54809b5fcf and of DiffusionNFT; a file
`base.py` next to the configuration replaces them.
"""

from pathlib import Path
from typing import Any

from flowalign.runs.importing.conversion import Draft, Facts, Source, divide, find_rewards
from flowalign.runs.importing.python_config import PythonConfig

_BASE: dict[str, Any] = {
    "num_epochs": 100000,
    "seed": 42,
    "save_freq": 20,
    "eval_freq": 20,
    "num_checkpoint_limit": 5,
    "mixed_precision": "fp16",
    "use_lora": True,
    "resolution": 768,
    "activation_checkpointing": False,
    "per_prompt_stat_tracking": True,
    "prompt_fn_kwargs": {},
    "reward_fn": {},
    "pretrained": {"model": "", "revision": "main"},
    "sample": {
        "num_steps": 40,
        "eval_num_steps": 40,
        "guidance_scale": 4.5,
        "train_batch_size": 1,
        "num_image_per_prompt": 1,
        "test_batch_size": 1,
        "num_batches_per_epoch": 2,
        "global_std": True,
        "noise_level": 0.7,
        "same_latent": False,
        "sde_window_size": 2,
        "sde_window_range": (0, 10),
    },
    "train": {
        "batch_size": 1,
        "use_8bit_adam": False,
        "learning_rate": 3e-4,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_weight_decay": 1e-4,
        "adam_epsilon": 1e-8,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "num_inner_epochs": 1,
        "cfg": True,
        "adv_clip_max": 5,
        "clip_range": 1e-4,
        "timestep_fraction": 1.0,
        "beta": 0.0,
        "ema": False,
    },
}
_DECAYS = {
    0: 0.0,
    1: {"slope": 0.001, "highest": 0.5},
    2: {"flat": 75, "slope": 0.0075, "highest": 0.999},
}
"""Schedules of DiffusionNFT's old policy, by `decay_type`."""
_WITHOUT_EFFECT = ("run_name", "logdir", "save_dir", "debug", "allow_tf32", "dataset", "prompt_fn")
_WITHOUT_EFFECT += ("base_model", "prompt_fn_kwargs", "sample.test_batch_size", "sample.batch_size")


def read(path: Path, name: str | None, gpus: int | None) -> tuple[Source, int]:
    """Return the settings of a configuration function, and the number of GPUs.

    Raises:
        ValueError: The file has several functions and `name` is None, or the GPUs are unknown.
    """
    base, beside = _BASE, path.with_name("base.py")
    if beside.is_file() and beside != path:
        base = PythonConfig(beside.read_text(encoding="utf-8"), {}).evaluate("get_config")
    config = PythonConfig(path.read_text(encoding="utf-8"), base)
    names = config.names()
    if name is None and len(names) != 1:
        raise ValueError(f"choose a function of {path} with --function: {', '.join(names)}")
    tree = config.evaluate(name or names[0])
    count = gpus or config.gpus
    if count is None:
        raise ValueError(f"{path} names no number of GPUs: give it with --source_gpus")
    return Source(tree, tree.assigned_tree()), count


def convert(source: Source, gpus: int, family: str) -> Draft:
    """Return the draft of a run file for a family of configs/models."""
    get = source.get
    is_nft = source.sets("decay_type")
    accumulated = get("train.gradient_accumulation_steps")
    batch, per_gpu = get("train.batch_size"), get("sample.train_batch_size")
    if batch != per_gpu:
        raise ValueError(f"train.batch_size {batch} must equal sample.train_batch_size {per_gpu}")
    batches, group = get("sample.num_batches_per_epoch"), get("sample.num_image_per_prompt")
    prompts = divide(batches * per_gpu * gpus, group, "samples per epoch by samples per prompt")
    updates = divide(batches, accumulated, "batches per epoch by accumulated batches")
    facts = Facts(
        effective_batch=batch * gpus * accumulated,
        num_steps=get("num_epochs"),
        learning_rate=float(get("train.learning_rate")),
        clip_range=None if is_nft else float(get("train.clip_range")),
        kl_weight=float(get("train.beta")),
        denoising_steps=get("sample.num_steps"),
    )
    layers = [f"configs/models/{family}.yaml", *(["configs/methods/nft.yaml"] if is_nft else [])]
    draft = Draft(layers, facts, gpus)
    sampling = {"num_steps": facts.denoising_steps, "samples_per_prompt": group}
    sampling |= {"micro_batch": per_gpu}
    recipe: dict[str, Any] = {"micro_batch": batch, "updates_per_step": updates}
    recipe["epochs_per_step"] = get("train.num_inner_epochs")
    advantages: dict[str, Any] = {"scale": "batch" if get("sample.global_std") else "group"}
    if is_nft:
        recipe |= _convert_nft(source)
        recipe["data"] = {"prompts_per_step": prompts, "sampling": sampling}
        recipe["data"] |= {"advantages": advantages}
    else:
        recipe |= _convert_grpo(source, sampling, draft)
        advantages["clip"] = float(get("train.adv_clip_max"))
        recipe |= {"prompts_per_step": prompts, "sampling": sampling, "advantages": advantages}
    draft.settings = {"num_steps": facts.num_steps, "recipe": recipe, "seed": get("seed")}
    _convert_common(source, draft, is_nft)
    _note_rest(source, draft)
    return draft


def _convert_grpo(source: Source, sampling: dict[str, Any], draft: Draft) -> dict[str, Any]:
    """Complete the sampling, and return the settings of the loss."""
    get, num_steps = source.get, sampling["num_steps"]
    trained = int(num_steps * get("train.timestep_fraction"))
    window: dict[str, Any] = {"class_path": "flowalign.sampling.AllButLast"}
    if source.sets("sample.sde_window_size"):
        low, high = get("sample.sde_window_range")
        size = get("sample.sde_window_size")
        window = {"size": size, "low": low, "high": high - size + 1}
        window = {"class_path": "flowalign.sampling.Random", "init_args": window}
    elif trained < num_steps - 1:
        window = {"start": 0, "stop": trained}
        window = {"class_path": "flowalign.sampling.Fixed", "init_args": window}
    elif trained == num_steps:
        draft.differences.append("train.timestep_fraction: the last step has no noise, untrained")
    kernel = "CPS" if get("sample.sde_type", "sde") == "cps" else "FlowSDE"
    sampling |= {"eta": get("sample.noise_level"), "sde_window": window}
    sampling["kernel"] = {"class_path": f"flowalign.functional.{kernel}"}
    if get("sample.same_latent"):
        sampling["seeds_per_prompt"] = 1
    clip = {"clip": float(get("train.clip_range"))}
    loss: dict[str, Any] = {
        "surrogate": {"class_path": "flowalign.losses.PPOClip", "init_args": clip},
        "kl_coef": float(get("train.beta")),
        "kl": "latent_mse" if kernel == "CPS" else "gaussian_no_dt",
    }
    return {"algorithm": {"class_path": "flowalign.losses.GRPO", "init_args": loss}}


def _convert_nft(source: Source) -> dict[str, Any]:
    get, num_steps = source.get, source.get("sample.num_steps")
    kind = get("decay_type")
    if kind not in _DECAYS:
        raise ValueError(
            f"decay_type is {kind!r}; it must be one of {', '.join(map(str, _DECAYS))}"
        )
    trained = int(num_steps * get("train.timestep_fraction"))
    source.skip("sample.deterministic", "train.adv_mode", "sample.noise_level")
    loss = {"beta": float(get("beta")), "advantage_max": float(get("train.adv_clip_max"))}
    return {
        "loss": {"class_path": "flowalign.losses.NFT", "init_args": loss},
        "old": {"decay": _DECAYS[kind], "per": "step"},
        "kl": float(get("train.beta")),
        "times": {"num_steps": num_steps, "stop": trained},
        "times_per_sample": trained,
    }


def _convert_common(source: Source, draft: Draft, is_nft: bool) -> None:
    get, settings = source.get, draft.settings
    side = get("resolution")
    size = {"height": get("height", side), "width": get("width", side)}
    policy: dict[str, Any] = {"path": source.need("pretrained.model")}
    frames = get("frames")
    policy |= {"video": size | {"num_frames": frames}} if frames else size
    if source.sets("activation_checkpointing"):
        policy["gradient_checkpointing"] = get("activation_checkpointing")
    if not get("use_lora"):
        policy["lora"] = None
    scale = get("sample.guidance_scale") if get("train.cfg") or is_nft else 1.0
    embedded = "flux" in str(policy["path"]).lower()
    policy["embedded_guidance" if embedded else "guidance"] = float(scale)
    policy["precision"] = {"no": "fp32"}.get(get("mixed_precision"), get("mixed_precision"))
    settings["policy"] = policy
    settings["optimizer"] = {
        "learning_rate": float(draft.facts.learning_rate),
        "betas": [get("train.adam_beta1"), get("train.adam_beta2")],
        "weight_decay": get("train.adam_weight_decay"),
        "eps": get("train.adam_epsilon"),
        "max_grad_norm": float(get("train.max_grad_norm")),
    }
    if get("train.use_8bit_adam"):
        settings["optimizer"]["kind"] = "adamw_8bit"
    settings["ema"] = {"decay": 0.9, "every": 8} if get("train.ema") else None
    keep = get("num_checkpoint_limit", 5)
    settings["checkpoints"] = {"every": get("save_freq"), "keep": keep}
    steps, every = get("sample.eval_num_steps"), get("eval_freq")
    settings["evaluation"] = {"num_steps": steps, "every": every}
    find_rewards(dict(get("reward_fn", {})), draft)


def _note_rest(source: Source, draft: Draft) -> None:
    get, scale = source.get, draft.settings["policy"]
    evaluated = get("sample.eval_guidance_scale", get("sample.guidance_scale"))
    if evaluated != scale.get("guidance", scale.get("embedded_guidance")):
        draft.unsupported.append(
            f"sample.eval_guidance_scale {evaluated}: evaluation samples as training"
        )
    if get("sample.solver"):
        draft.differences.append(f"sample.solver {get('sample.solver')}: DPM-Solver++ (2M)")
    draft.differences.append(f"prompts: {get('dataset') or 'the dataset'} becomes --prompts FILE")
    if draft.facts.num_steps and draft.facts.num_steps >= 100000:
        draft.differences.append("num_epochs is a placeholder: stop the run or lower num_steps")
    source.skip(*_WITHOUT_EFFECT, "per_prompt_stat_tracking", "pretrained.revision")
    draft.unsupported += source.unread()
