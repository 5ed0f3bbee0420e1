"""Plan a run: its work and its cost, before any weight is read."""

from flowalign.data.requests import read_requests
from flowalign.runs.config import Run
from flowalign.runs.planning import fits, run_memory
from flowalign.runs.policy_setup import check_world
from flowalign.training.optimizers import check_kind
from flowalign.training.recipe_plan import MemoryPart, RecipePlan
from flowalign.types import ModelPlan, describe_conditioning
from flowalign.utils.tracking import check_trackers


def plan(run: Run, world: int = 1) -> dict[str, str]:
    """Return the rows of the plan table; raise ValueError for an unusable model or run file."""
    check_world(run.sharding, world)
    check_trackers(run.trackers)
    groups = run.sharding.groups(world)
    model = run.policy.plan()
    divided = run.sharding.weights != "replicated" and model.trainable == model.parameters
    check_kind(run.optimizer.kind, divided)
    if run.evaluation and len(run.evaluation.items()) < groups:
        raise ValueError(
            f"evaluation.num_prompts is {run.evaluation.num_prompts}, too few for {groups} "
            "processes"
        )
    rewards = run.build_rewards()
    step = run.recipe.plan(run.context(rewards), model, groups)
    parts = parts_of(run, model, step, world)
    updates = run.recipe.updates
    asked = describe_conditioning(run.conditioning)
    return {
        **({"sampling asks": asked} if asked else {}),
        "updates per step": f"{updates}, {run.num_steps * updates} in the whole run",
        **step.rows,
        **prompt_rows(run, step.prompts_per_step),
        **{f"warning: {one.spec.name}": one.caveat for one in rewards.models if one.caveat},
        "denoiser parameters": f"{model.parameters:,}",
        "trainable parameters": f"{model.trainable:,} ({model.trainable / model.parameters:.1%})",
        **run_memory.rows(parts, run_memory.available(run.device)),
        **run_memory.loading(run, model, groups),
        **fits.rows(parts, model.text_bytes > 0),
    }


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
        run_memory.decoding(run, model, step.decode_batches),
        run_memory.update(run, model, step.evaluations_per_example),
    ]
