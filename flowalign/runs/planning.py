"""Plan a run before any weight is read: its work and cost, and the GPUs that it fits.

A GPU of 24 GB is counted as 24 x 10^9 bytes. The remaining 7 % or so is left to the driver and to
gaps between tensors.
"""

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace

from flowalign.data.requests import read_requests
from flowalign.runs import run_memory
from flowalign.runs.config import Run
from flowalign.runs.policy_setup import check_world
from flowalign.runs.run_memory import peak, size
from flowalign.training.divergence import plan_distance
from flowalign.training.learner import check_kind
from flowalign.training.recipe import MemoryPart, RecipePlan
from flowalign.types import ModelPlan, describe_conditioning
from flowalign.utils.errors import require_known
from flowalign.utils.tracking import check_trackers


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU and its links. Sources: data sheets of NVIDIA."""

    flops: float
    """Peak floating-point operations per second in bf16, without sparsity."""
    memory: float
    """Memory in bytes."""
    link: float
    """Bytes per second in each direction to a GPU of the same machine."""
    network: float
    """Bytes per second in each direction to another machine, per GPU."""
    per_machine: int = 8
    """GPUs of one machine."""


_NVLINK_4, _NVLINK_3, _PCIE_5, _PCIE_4 = 450e9, 300e9, 64e9, 32e9
_GIGABITS_400, _GIGABITS_200, _GIGABITS_100 = 50e9, 25e9, 12.5e9

GPUS = {
    "h100-80gb": Gpu(989.4e12, 80e9, _NVLINK_4, _GIGABITS_400),
    "h100-80gb-pcie": Gpu(756e12, 80e9, _PCIE_5, _GIGABITS_400),
    "h200-141gb": Gpu(989.4e12, 141e9, _NVLINK_4, _GIGABITS_400),
    "h800-80gb": Gpu(989.4e12, 80e9, 200e9, _GIGABITS_400),
    "b200-180gb": Gpu(2250e12, 180e9, 900e9, _GIGABITS_400),
    "a100-80gb": Gpu(312e12, 80e9, _NVLINK_3, _GIGABITS_200),
    "a100-40gb": Gpu(312e12, 40e9, _NVLINK_3, _GIGABITS_200),
    "l40s-48gb": Gpu(362e12, 48e9, _PCIE_4, _GIGABITS_200),
    "rtx4090-24gb": Gpu(165.2e12, 24e9, _PCIE_4, _GIGABITS_100),
}
"""Known types. The network is that of the vendor's machine with 8 such GPUs: 400 Gbit/s per GPU for
Hopper and Blackwell, 200 for Ampere and Ada, 100 for consumer cards."""
_COST = re.compile(r"(?!updates|decodes|transitions)(.+) per step")
"""Rows of a plan that count the main work of a step."""
_ASKED = ("sampling asks", "memory of the device")
"""Further rows of the short plan."""
_FASTER = ("rows per network call", "blocks that recompute", "evaluations of the rollout")
"""Last rows of the short plan: what more memory would buy."""


def find_gpu(name: str) -> Gpu:
    """Return a type of GPU.

    Raises:
        ValueError: The name is unknown.
    """
    require_known("--gpu is", [name], GPUS)
    return GPUS[name]


SIZES = (16, 24, 48, 80)
"""GPU sizes for which a plan reports whether the run fits, in GB."""
LOSSY = (
    "quantization.denoiser",
    "quantization.text_encoders",
    "optimizer.kind: adamw_8bit",
    "recipe.sampling.states.dtype",
    "policy.memory.tile",
    "vae_tile",
    "policy.memory.decode_frames",
)
"""Prefixes of settings that change results; advice names them last."""
_NAMED = 3
"""Largest number of settings that an out-of-memory message names."""
_BY_FUNCTION = {
    "verify_weights": "saved weights",
    "read_encoders": "text encoders",
    "score": "reward models",
    "encode": "text encoders",
    "decode": "decoding",
    "render": "decoding",
    "load_policy": "weights",
    "backward": "activations",
    "step": "optimizer",
    "collect_rollouts": "states",
}
"""Memory part that grows in each function; the most specific function comes first."""


def fit_rows(parts: Sequence[MemoryPart], counts_encoders: bool) -> dict[str, str]:
    """Return the rows of the plan table about GPU sizes, and whether encoders are included."""
    whole = peak(parts)
    fit = [gb for gb in SIZES if whole <= gb * 10**9]
    shown = f"{fit[0]} GB ({size(fit[0] * 10**9 - whole)} to spare) or more" if fit else ""
    beside = "" if counts_encoders else "; text encoders and VAE not included"
    table = {"fits a GPU of": (shown or f"none of {SIZES[-1]} GB or less") + beside}
    return table | {f"to fit {gb} GB": advice(parts, gb * 10**9) for gb in SIZES if gb not in fit}


def advice(parts: Sequence[MemoryPart], available: int) -> str:
    """Return the settings that make the run fit, or a note that they do not suffice."""
    settings, left = _choose_settings(parts, available)
    told = ", ".join(settings)
    if left <= available:
        return f"{told} (then about {size(left)})"
    lacking = f"too little by {size(left - available)}"
    return f"{lacking}, even with {told}" if told else lacking


def _choose_settings(parts: Sequence[MemoryPart], available: int) -> tuple[list[str], int]:
    """Return settings in the order of their choice, and the peak with all of them.

    The next setting is the one that suffices and saves least. If none suffices, it is the one that
    saves most. Settings that change results come after all settings that do not.
    """
    chosen: list[str] = []
    while (now := peak(parts)) > available:
        used = {setting.partition(":")[0] for setting in chosen}
        found = {s: peak(_apply_setting(parts, s)) for part in parts for s in part.savings}
        lower = {
            s: then for s, then in found.items() if then < now and s.partition(":")[0] not in used
        }
        if not lower:
            break
        exact = {s: then for s, then in lower.items() if not s.startswith(LOSSY)} or lower
        enough = [s for s, then in exact.items() if then <= available]
        best = max(enough, key=exact.__getitem__) if enough else min(exact, key=exact.__getitem__)
        chosen.append(best)
        parts = _apply_setting(parts, best)
    return chosen, peak(parts)


def _apply_setting(parts: Sequence[MemoryPart], setting: str) -> list[MemoryPart]:
    """Return the parts with a setting applied; other savings shrink in proportion."""

    def shrink(part: MemoryPart) -> MemoryPart:
        saved = part.savings.get(setting, 0)
        if saved <= 0 or not part.num_bytes:
            return part
        share = max(0.0, 1 - saved / part.num_bytes)
        others = {s: round(b * share) for s, b in part.savings.items() if s != setting}
        return replace(part, num_bytes=round(part.num_bytes * share), savings=others)

    return [shrink(part) for part in parts]


def explain_shortage(error: BaseException, parts: Sequence[MemoryPart]) -> str:
    """Return the message for a run out of memory: the part, and settings that would help."""
    called = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    name = next((part for function, part in _BY_FUNCTION.items() if function in called), "")
    sizes = {part.name: f", planned at {size(part.num_bytes)}" for part in parts}
    place = f" for {name}{sizes.get(name, '')}" if name else ""
    now = peak(parts)
    savings = {s: now - peak(_apply_setting(parts, s)) for part in parts for s in part.savings}
    best = sorted(savings, key=lambda s: (s.startswith(LOSSY), -savings[s]))
    tries = [f"{s}, which saves {size(savings[s])}" for s in best if savings[s] > 0][:_NAMED]
    if name == "activations" and not any("gradient_checkpointing" in s for s in savings):
        tries[-1:] = ["speed.kept_blocks: 0, which recomputes the activations of all blocks"]
    if name == "reward models":
        tries = ["serve the rewards from another process (flowalign serve-reward)"]
    return "\n".join(
        [
            f"out of memory on the GPU{place}, of {size(now)} in all without reward models",
            *(f"try: {one}" for one in tries),
            "flowalign check lists settings for 16, 24, 48 and 80 GB",
        ]
    )


def plan(run: Run, world: int = 1) -> dict[str, str]:
    """Return the rows of the plan table; raise ValueError for an unusable model or run file."""
    check_world(run.sharding, world)
    check_trackers(run.trackers)
    groups = run.sharding.groups(world)
    model = run.policy.plan()
    if not model.trusted:
        for count in sorted({1, *_list_steps(run.recipe), *_list_steps(run.evaluation)}):
            model.sigmas(count)
    divided = run.sharding.weights != "replicated" and model.trainable == model.parameters
    check_kind(run.optimizer.kind, divided)
    if run.evaluation and len(run.evaluation.items()) < groups:
        count = run.evaluation.num_prompts
        raise ValueError(f"evaluation.num_prompts is {count}, too few for {groups} processes")
    rewards = run.build_rewards()
    step = run.recipe.plan(run.context(rewards), model, groups)
    samples = run.evaluation.items() if run.evaluation else ()
    parts = parts_of(run, model, step, world)
    updates = run.recipe.updates
    asked = describe_conditioning(run.conditioning)
    return {
        **({"sampling asks": asked} if asked else {}),
        "updates per step": f"{updates}, {run.num_steps * updates} in the whole run",
        **step.rows,
        **step.work.rows(),
        **prompt_rows(run, step.prompts_per_step),
        **({"distance to base": plan_distance(rewards.models, len(samples))} if samples else {}),
        **{f"warning: {one.spec.name}": one.caveat for one in rewards.models if one.caveat},
        "denoiser parameters": f"{model.parameters:,}",
        "trainable parameters": f"{model.trainable:,} ({model.trainable / model.parameters:.1%})",
        **run_memory.rows(parts, run_memory.available(run.device)),
        **run_memory.speed_rows(run, model, parts, step),
        **run_memory.loading(run, model, groups),
        **fit_rows(parts, model.text_bytes > 0),
    }


def shorten_plan(rows: Mapping[str, str]) -> dict[str, str]:
    """Return the trained parts, the cost of a step, the memory and the warnings of a plan."""
    counts = {found[1]: text for name, text in rows.items() if (found := _COST.fullmatch(name))}
    memory, smallest = rows["memory, about"], rows["fits a GPU of"]
    if main := rows.get("main memory, about"):
        memory += f"; main memory {main.partition(':')[0]}"
    if smallest.startswith("none") and (advice := rows.get("to fit 80 GB")):
        smallest += f"; to fit 80 GB: {advice}"
    trained, _, share = rows["trainable parameters"].partition(" ")
    return {
        **{name: rows[name] for name in _ASKED if name in rows},
        "trains": f"{trained} of {rows['denoiser parameters']} parameters {share}; "
        f"updates per step: {rows['updates per step']}",
        "a step": "; ".join(f"{name}: {text}" for name, text in counts.items()),
        "memory": memory,
        "smallest GPU": smallest,
        **{name: rows[name] for name in _FASTER if name in rows},
        **{name: text for name, text in rows.items() if name.startswith("warning")},
    }


def _list_steps(settings: object) -> list[int]:
    """Return all numbers of denoising steps in settings."""
    if isinstance(settings, list | tuple):
        return [count for one in settings for count in _list_steps(one)]
    if not is_dataclass(settings):
        return []
    found = vars(settings)
    counts = [found[name] for name in ("num_steps", "schedule_steps") if name in found]
    return [*counts, *(count for one in found.values() for count in _list_steps(one))]


def prompt_rows(run: Run, prompts_per_step: int) -> dict[str, str]:
    """Return the rows about too few prompts, and about prompts that are trained and evaluated."""
    rows = {}
    trained = {one.key for path in run.recipe.prompt_files for one in read_requests(path)}
    if trained and len(trained) < prompts_per_step:
        rows["warning: few prompts"] = (
            f"a step needs {prompts_per_step}, {' '.join(run.recipe.prompt_files)} has "
            f"{len(trained)}: prompts repeat within a step"
        )
    evaluated = {one.key for _, one in run.evaluation.items()} if run.evaluation else set()
    if shared := len(evaluated & trained):
        rows["warning: evaluation"] = (
            f"{shared} of {len(evaluated)} prompts are training prompts: it measures no "
            "generalization. Set evaluation.prompts to held-out prompts"
        )
    return rows


def settle_kept_blocks(run: Run, world: int = 1) -> None:
    """Give the network of a run the planned share of blocks that keep their activations."""
    network = run.policy.network
    if network and network.gradient_checkpointing and run.speed.kept_blocks is None:
        model, step = plan_step(run, world)
        kept = run_memory.find_kept_blocks(run, model, parts_of(run, model, step, world))
        network.keep_blocks(kept)


def plan_step(run: Run, world: int = 1) -> tuple[ModelPlan, RecipePlan]:
    """Return the plans of the model and of a step on `world` processes."""
    model = run.policy.plan()
    context = run.context(run.build_rewards())
    return model, run.recipe.plan(context, model, run.sharding.groups(world))


def memory_parts(run: Run, world: int = 1) -> list[MemoryPart]:
    """Return the memory parts of a run on each of `world` processes."""
    model, step = plan_step(run, world)
    return parts_of(run, model, step, world)


def parts_of(run: Run, model: ModelPlan, step: RecipePlan, world: int) -> list[MemoryPart]:
    """Return the memory parts of a run with these plans on each of `world` processes."""
    world = run.sharding.groups(world)
    return [
        *run_memory.network(run, model, step.weight_copies, world),
        *step.parts,
        run_memory.decoding(run, model, step.decode_batch),
        *(run_memory.graphs(run, model, step.graphs) if step.keeps_graphs else ()),
        run_memory.update(run, model, step.evaluations_per_example, step.keeps_graphs),
    ]
