"""Convert YAML configurations of Flow-Factory with trainer grpo, grpo-guard or nft."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowalign.runs.importing.conversion import Draft, Facts, Source, divide, find_rewards
from flowalign.utils.strict_yaml import read_mapping

_TRAINERS = ("grpo", "grpo-guard", "nft")
_KERNELS = {"Flow-SDE": "FlowSDE", "CPS": "CPS", "Dance-SDE": "DanceSDE"}
_WITHOUT_EFFECT = ("launcher", "config_file", "main_process_port", "data", "log", "eval_rewards")
_WITHOUT_EFFECT += ("model.model_type", "train.ref_param_device", "train.ema_device", "eval.seed")
_WITHOUT_EFFECT += ("eval.resolution", "eval.per_device_batch_size", "scheduler.seed")
_WITHOUT_EFFECT += ("train.reward_optimization_overlap_mode", "optimizers", "rewards")
_WITHOUT_EFFECT += ("train.reward_optimization_overlap_poll_interval", "model.resume_type")


def read(path: Path, gpus: int | None) -> tuple[Source, int]:
    """Return the settings of a file, and the number of GPUs."""
    source = Source(read_mapping(str(path)))
    return source, gpus or source.need("num_processes")


def convert(source: Source, gpus: int, family: str) -> Draft:
    """Return the draft of a run file for a family of configs/models.

    Raises:
        ValueError: The trainer is not supported, or a number of samples does not divide.
    """
    get = source.get
    trainer = get("train.trainer_type", "grpo")
    if trainer not in _TRAINERS:
        raise ValueError(f"train.trainer_type {trainer} is not one of {', '.join(_TRAINERS)}")
    source.skip("num_processes", *_WITHOUT_EFFECT)
    optimizer = _first(get("optimizers", []))
    per_gpu, group = source.need("train.per_device_batch_size"), source.need("train.group_size")
    prompts = source.need("train.unique_sample_num_per_epoch")
    accumulated = get("train.gradient_accumulation_steps", "auto")
    updates = get("train.gradient_step_per_epoch", 1)
    if accumulated != "auto":
        batches = divide(prompts * group, per_gpu * gpus, "samples per epoch by samples per pass")
        updates = divide(batches, accumulated, "passes per epoch by accumulated passes")
    facts = _find_facts(source, trainer, optimizer, (prompts * group, updates))
    layers = [f"configs/models/{family}.yaml"]
    draft = Draft(
        [*layers, *(["configs/methods/nft.yaml"] if trainer == "nft" else [])], facts, gpus
    )
    sampling: dict[str, Any] = {"num_steps": facts.denoising_steps, "samples_per_prompt": group}
    sampling["micro_batch"] = per_gpu
    recipe: dict[str, Any] = {"micro_batch": per_gpu, "updates_per_step": updates}
    recipe["epochs_per_step"] = get("train.num_inner_epochs", 1)
    combine = get("train.advantage_aggregation", "sum")
    advantages: dict[str, Any] = {"scale": "batch" if get("train.global_std", False) else "group"}
    advantages["combine"] = "advantage_of_sum" if combine == "sum" else "sum_of_advantages"
    if trainer == "nft":
        recipe |= _convert_nft(source, draft)
        recipe["data"] = {"prompts_per_step": prompts, "sampling": sampling}
        recipe["data"] |= {"advantages": advantages}
    else:
        recipe |= _convert_grpo(source, sampling, draft, trainer)
        advantages["clip"] = float(get("train.adv_clip_range", 5.0))
        recipe |= {"prompts_per_step": prompts, "sampling": sampling, "advantages": advantages}
    draft.settings = {"recipe": recipe, "seed": get("train.seed", 42)}
    _convert_common(source, draft, optimizer)
    return draft


def _find_facts(
    source: Source, trainer: str, optimizer: Mapping[str, Any], batch: tuple[int, int]
) -> Facts:
    """Return the numbers to keep; `batch` is the samples and updates of an epoch."""
    get = source.get
    clip = get("train.clip_range", 1e-4)
    clip = max(abs(bound) for bound in clip) if isinstance(clip, list) else clip
    return Facts(
        effective_batch=divide(*batch, "samples per epoch by updates"),
        num_steps=get("train.max_epochs"),
        learning_rate=float(get("train.learning_rate", optimizer.get("learning_rate"))),
        clip_range=None if trainer == "nft" else float(clip),
        kl_weight=float(get("train.kl_beta", 0)),
        denoising_steps=source.need("train.num_inference_steps"),
    )


def _first(entries: Any) -> Mapping[str, Any]:
    return entries[0] if isinstance(entries, list) and entries else {}


def _convert_grpo(
    source: Source, sampling: dict[str, Any], draft: Draft, trainer: str
) -> dict[str, Any]:
    get = source.get
    dynamics = get("scheduler.dynamics_type", "Flow-SDE")
    if dynamics not in _KERNELS:
        raise ValueError(f"scheduler.dynamics_type {dynamics} is not one of {', '.join(_KERNELS)}")
    sampling["kernel"] = {"class_path": f"flowalign.functional.{_KERNELS[dynamics]}"}
    sampling["eta"] = get("scheduler.noise_level", 0.7)
    steps = get("scheduler.sde_steps")
    size = get("scheduler.num_sde_steps", 1)
    window: dict[str, Any] = {"class_path": "flowalign.sampling.AllButLast"}
    if steps and size >= len(steps):
        arguments = {"start": min(steps), "stop": max(steps) + 1}
        window = {"class_path": "flowalign.sampling.Fixed", "init_args": arguments}
    elif steps:
        arguments = {"size": size, "low": min(steps), "high": max(steps) - size + 2}
        window = {"class_path": "flowalign.sampling.Random", "init_args": arguments}
        if size > 1:
            draft.differences.append(
                "scheduler.num_sde_steps: consecutive steps, not any of the list"
            )
    sampling["sde_window"] = window
    if draft.facts.kl_weight and get("train.kl_type") == "v-based":
        draft.unsupported.append("train.kl_type v-based: KL of the transitions instead")
    get("train.kl_type")
    if isinstance(get("train.clip_range"), list):
        draft.differences.append("train.clip_range: the larger side on both sides")
    clip = {"clip": draft.facts.clip_range}
    surrogate = {"class_path": "flowalign.losses.PPOClip", "init_args": clip}
    if trainer == "grpo-guard":
        surrogate["class_path"] = "flowalign.losses.RatioNorm"
    loss = {"surrogate": surrogate, "kl_coef": float(draft.facts.kl_weight or 0.0)}
    loss["kl"] = "latent_mse" if dynamics == "CPS" else "gaussian_no_dt"
    return {"algorithm": {"class_path": "flowalign.losses.GRPO", "init_args": loss}}


def _convert_nft(source: Source, draft: Draft) -> dict[str, Any]:
    get, num_steps = source.get, draft.facts.denoising_steps or 1
    decay: Any = get("train.ema_decay", 0.5)
    if get("train.ema_decay_schedule") == "piecewise_linear":
        decay = {"flat": get("train.flat_steps", 0), "slope": get("train.ramp_rate", 0.0)}
        decay["highest"] = get("train.ema_decay", 0.5)
    reach = get("train.timestep_range", 0.99)
    stop = max(1, int(num_steps * (reach[1] if isinstance(reach, list) else reach)))
    count = get("train.num_train_timesteps") or stop
    if get("train.time_sampling_strategy", "discrete") != "discrete":
        draft.differences.append("train.time_sampling_strategy: noise levels of the sampler")
    if not get("train.off_policy", True):
        draft.unsupported.append("train.off_policy false: the old policy samples")
    source.skip("train.time_shift", "train.kl_type", "scheduler.dynamics_type")
    loss = {"beta": float(get("train.nft_beta", 1.0))}
    loss["advantage_max"] = float(get("train.adv_clip_range", 5.0))
    return {
        "loss": {"class_path": "flowalign.losses.NFT", "init_args": loss},
        "old": {"decay": decay, "per": "step"},
        "kl": float(draft.facts.kl_weight or 0.0),
        "times": {"num_steps": num_steps, "stop": stop},
        "times_per_sample": min(count, stop),
    }


def _convert_common(source: Source, draft: Draft, optimizer: Mapping[str, Any]) -> None:
    get, settings = source.get, draft.settings
    path = source.need("model.model_name_or_path")
    sides = get("train.resolution", 512)
    height, width = sides if isinstance(sides, list) else (sides, sides)
    policy: dict[str, Any] = {"path": path, "height": height, "width": width}
    guidance = "embedded_guidance" if "flux" in str(path).lower() else "guidance"
    policy[guidance] = float(get("train.guidance_scale", 1.0))
    policy["precision"] = {"no": "fp32"}.get(get("mixed_precision", "bf16"), get("mixed_precision"))
    policy["gradient_checkpointing"] = get("train.enable_gradient_checkpointing", False)
    if get("model.finetune_type", "lora") == "lora":
        policy["lora"] = {"rank": get("model.lora_rank", 64), "alpha": get("model.lora_alpha", 128)}
    else:
        policy["lora"] = None
    modules = get("model.target_modules", "default")
    if modules != "default":
        draft.unsupported.append(f"model.target_modules {modules}: set policy.lora.target_modules")
    if get("eval.guidance_scale", policy[guidance]) != policy[guidance]:
        draft.unsupported.append("eval.guidance_scale: evaluation samples as training")
    settings["policy"] = policy
    settings["optimizer"] = {
        "learning_rate": float(draft.facts.learning_rate),
        "betas": list(optimizer.get("betas", (0.9, 0.999))),
        "weight_decay": optimizer.get("weight_decay", 1e-4),
        "eps": optimizer.get("eps", 1e-8),
        "max_grad_norm": float(optimizer.get("max_grad_norm", 1.0)),
    }
    if draft.facts.num_steps:
        settings["num_steps"] = draft.facts.num_steps
    else:
        draft.differences.append("the source trains until it is stopped; num_steps is the model's")
    decay, every = get("train.ema_decay", 0), get("train.ema_update_interval", 1)
    if "loss" not in settings["recipe"]:
        updates = every * settings["recipe"]["updates_per_step"]
        settings["ema"] = {"decay": decay, "every": updates} if decay else None
    settings["checkpoints"] = {"every": get("log.save_freq") or 20}
    steps, often = get("eval.num_inference_steps", 40), get("eval.eval_freq", 20)
    settings["evaluation"] = {"num_steps": steps, "every": often}
    rewards = source.get("rewards", [])
    names = {one["reward_model"]: one.get("weight", 1.0) for one in rewards}
    find_rewards(names, draft)
    draft.differences.append("prompts: the dataset becomes --prompts FILE")
    draft.unsupported += source.unread()
