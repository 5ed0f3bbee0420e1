"""What `flowalign check` says of memory: every part by hand, and what would lower it."""

from dataclasses import replace

import pytest
import torch

from flowalign.credit import Branch, Gain
from flowalign.extra import SpanGRPO
from flowalign.runs import run_memory
from flowalign.runs.config import Run, load
from flowalign.runs.planning import memory_parts, plan, settle_kept_blocks
from flowalign.sampling import Fixed, FrameWindow, Storage, Tree
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.training.recipe import MemoryPart, RecipePlan
from flowalign.types import ModelPlan, Quantization, Saving, Sharding, Speed
from tests.fixtures.run_files import CONFIGS, loaded
from tests.fixtures.training import as_recipe, new_recipe

LATENT = 10_000_000
"""Elements of a latent: a video of 16 x 25 x 125 x 200."""
SAVINGS = (
    Saving("activations", "policy.memory.gradient_checkpointing: true", 4_000_000_000),
    Saving("decoding", "policy.memory.decode_frames: 1", 700_000_000),
    Saving("text encoders", "policy.memory.offload_text: true", 5_000_000_000),
)
MODEL = ModelPlan(
    latent_shape=(16, 25, 125, 200),
    parameters=2_000_000_000,
    trainable=30_000_000,
    bytes_per_parameter=2.0,
    activation_bytes=5_000_000_000,
    sigmas=lambda n: torch.linspace(1, 0, n + 1),
    decode_bytes=900_000_000,
    text_bytes=5_000_000_000,
    savings=SAVINGS,
)


def shapes(**sampling):
    """Two prompts of four samples with six steps, two of them trained."""
    run, _ = loaded(CONFIGS / "shapes.yaml")
    cfg = {"num_steps": 6, "sde_window": Fixed(2, 4), "micro_batch": 3} | sampling
    settings = new_recipe(cfg, prompts_per_step=2, micro_batch=2)
    recipe = as_recipe(settings, run.recipe.prompts)
    return replace(run, recipe=recipe, ema=None, evaluation=replace(run.evaluation, micro_batch=2))


def step(run: Run, model: ModelPlan = MODEL, world: int = 1) -> RecipePlan:
    """The recipe's plan of a step on one of `world` processes."""
    return run.recipe.plan(run.context(run.build_rewards()), model, world)


def rollout(run: Run, world: int = 1) -> dict[str, MemoryPart]:
    """The memory of a step's rollouts on one of `world` processes."""
    return by_name(step(run, world=world).parts)


def by_name(parts):
    return {part.name: part for part in parts}


def test_states_are_counted_as_a_rollout_keeps_them():
    """4 of 7 states of 8 samples at 40 MB, in float32."""
    states = rollout(shapes())["states"]
    assert (states.num_bytes, states.stage) == (4 * 8 * 40_000_000, "always")
    assert states.savings == {
        "recipe.sampling.states.device: cpu": 1_280_000_000,
        "recipe.sampling.states.dtype: bfloat16": 640_000_000,
    }


def test_a_process_keeps_the_states_of_its_own_prompts():
    states = rollout(shapes(), world=2)["states"]
    assert states.num_bytes == 4 * 4 * 40_000_000


def test_states_kept_in_main_memory_and_halves_are_counted_as_such():
    run = shapes(states=Storage(device="cpu", dtype="bfloat16"))
    parts = rollout(run)
    states = parts["states"]
    assert (states.num_bytes, states.stage, states.savings) == (640_000_000, "main", {})
    table = run_memory.rows([*parts.values()], None)
    assert "memory of states" not in table
    assert table["main memory, about"] == "640 MB per process: states 640 MB"
    half = rollout(shapes(states=Storage(dtype="bfloat16")))
    assert half["states"].savings == {"recipe.sampling.states.device: cpu": 640_000_000}


def test_states_that_samples_share_are_counted_once():
    """A tree of 4 leaves, 1, 2, 4 and 4 states at the kept points, twice."""
    run = shapes(branching=Tree(splits=[2, 3]))
    run = replace(run, recipe=replace(run.recipe, credit=Branch()))
    states = rollout(run)["states"]
    assert states.num_bytes == 2 * (1 + 2 + 4 + 4) * 40_000_000


def gaining(**storage):
    """Gain values states 2, 3 and the outcome; the first two are finished on the way."""
    run = shapes(states=Storage(**storage))
    return replace(run, recipe=replace(run.recipe, credit=Gain()))


def test_what_is_completed_on_the_way_stays_in_float32_until_the_update():
    parts = rollout(gaining(dtype="bfloat16"))
    kept, completing = parts["kept completions"], parts["completing"]
    assert (kept.num_bytes, kept.stage) == (2 * 8 * 40_000_000, "always")
    assert completing.num_bytes == 0, "they are counted already"


@pytest.mark.parametrize(("at_once", "samples"), [(None, 8), (1, 4), (5, 8)])
def test_offloaded_completions_are_on_the_device_while_they_are_sampled(at_once, samples):
    run = gaining(device="cpu")
    run = replace(run, recipe=replace(run.recipe, rollout_batch_prompts=at_once))
    parts = rollout(run)
    kept, completing = parts["kept completions"], parts["completing"]
    assert (kept.num_bytes, kept.stage) == (2 * 8 * 40_000_000, "main")
    assert (completing.num_bytes, completing.stage) == (2 * samples * 40_000_000, "sampling")


@pytest.mark.parametrize(
    ("sampling", "evaluation", "largest"), [(3, 2, 3), (1, 5, 5), (4, 1, 4), (4, None, 4)]
)
def test_decoding_takes_the_larger_micro_batch_of_rollout_and_evaluation(
    sampling, evaluation, largest
):
    run = shapes(micro_batch=sampling)
    held_out = replace(run.evaluation, micro_batch=evaluation) if evaluation else None
    run = replace(run, evaluation=held_out)
    decoding = run_memory.decoding(run, MODEL, step(run).decode_batch)
    assert (decoding.num_bytes, decoding.stage) == (largest * 900_000_000, "sampling")
    assert decoding.savings == {
        "policy.memory.decode_frames: 1": largest * 700_000_000,
        "decode_micro_batch: 1": (largest - 1) * 900_000_000,
    }


def test_a_preference_run_decodes_what_it_evaluates():
    files = [f"recipe.data.{name}={CONFIGS / 'shapes.yaml'}" for name in ("path", "held_out")]
    run, _ = load(str(CONFIGS / "preference" / "shapes_dpo.yaml"), files)
    some = replace(run, evaluation=replace(run.evaluation, micro_batch=7))
    assert run_memory.decoding(some, MODEL, step(some).decode_batch).num_bytes == 7 * 900_000_000
    data = replace(run.recipe.data, held_out=None)
    none = replace(run, evaluation=None, recipe=replace(run.recipe, data=data))
    assert run_memory.decoding(none, MODEL, step(none).decode_batch).num_bytes == 0


def test_where_samples_are_decoded_one_after_another_one_is_counted():
    one = replace(MODEL, decodes_together=False)
    decoding = run_memory.decoding(shapes(), one, step(shapes(), one).decode_batch)
    assert decoding.num_bytes == 900_000_000
    assert decoding.savings == {"policy.memory.decode_frames: 1": 700_000_000}


def test_activations_take_what_a_micro_batch_of_the_update_takes(monkeypatch):
    """2 transitions, each evaluated with and without its prompt."""
    run = shapes()
    monkeypatch.setattr(run.policy, "evaluations_per_velocity", 2)
    part = run_memory.update(run, MODEL, step(run).evaluations_per_example)
    assert (part.num_bytes, part.stage) == (4 * 5_000_000_000, "updating")
    assert part.savings == {
        "policy.memory.gradient_checkpointing: true": 4 * 4_000_000_000,
        "recipe.micro_batch: 1": 2 * 5_000_000_000,
    }


def test_the_activations_of_all_steps_of_a_span_are_kept_at_once():
    """Three trained steps make a span of two and one of one."""
    run = shapes(sde_window=Fixed(2, 5))
    single = run_memory.update(run, MODEL, step(run).evaluations_per_example)
    spans = replace(run, recipe=replace(run.recipe, algorithm=SpanGRPO(span_steps=2)))
    plan = step(spans)
    joined = run_memory.update(spans, MODEL, plan.evaluations_per_example)
    assert joined.num_bytes == 2 * single.num_bytes
    assert joined.savings["recipe.micro_batch: 1"] == 2 * 5_000_000_000
    assert plan.rows["spans of each sample"].startswith("[2, 3], [4]; at most 2 evaluations")
    assert plan.work == step(run).work


def test_the_network_is_counted_once_more_while_it_is_verified():
    """Adapters: gradient, two moments and the weights themselves in float32."""
    parts = by_name(run_memory.network(shapes(), MODEL, 0))
    assert parts["weights"].num_bytes == 4_000_000_000
    assert parts["optimizer"].num_bytes == 4 * 4 * 30_000_000
    assert parts["copies"].num_bytes == 0
    beside, again = parts["text encoders and VAE"], parts["saved weights"]
    assert beside.num_bytes == 5_000_000_000
    assert beside.savings == {"policy.memory.offload_text: true": 5_000_000_000}
    assert (again.num_bytes, again.stage) == (4_000_000_000, "verifying")


def test_shared_weights_are_counted_in_parts_beside_the_gathered_block():
    """2 billion parameters at 2 bytes over 4 processes, or 2 of them; .3 billion gathered."""
    model = replace(MODEL, gathered_parameters=300_000_000)
    whole = by_name(run_memory.network(shapes(), model, 0, 4))["weights"]
    assert whole.num_bytes == 4_000_000_000
    assert whole.savings == {"sharding.weights: blocks": 4_000_000_000 - 1_600_000_000}
    for degree, held in ((None, 1_000_000_000), (2, 2_000_000_000)):
        run = replace(shapes(), sharding=Sharding(weights="blocks", shard_degree=degree))
        parts = by_name(run_memory.network(run, model, 0, 4))
        assert (parts["weights"].num_bytes, parts["weights"].stage) == (held, "always")
        assert parts["weights"].savings == {}
        assert parts["gathered block"].num_bytes == 600_000_000
        assert parts["optimizer"].num_bytes == 4 * 4 * 30_000_000, "the adapter is not shared"
        alone = by_name(run_memory.network(run, model, 0, 1))
        assert alone["weights"].num_bytes == 4_000_000_000


def test_a_whole_network_is_trained_in_parts():
    """Weights, a frozen copy, gradients, two moments, in float32, over 4; the block is whole."""
    model = replace(MODEL, trainable=MODEL.parameters, gathered_parameters=300_000_000)
    run = replace(shapes(), sharding=Sharding(weights="blocks"))
    parts = by_name(run_memory.network(run, model, 0, 4))
    assert parts["weights"].num_bytes == 2_000_000_000
    assert parts["copies"].num_bytes == 2_000_000_000
    assert parts["optimizer"].num_bytes == 3 * 2_000_000_000
    assert parts["gathered block"].num_bytes == 1_200_000_000


def test_of_several_networks_one_at_a_time_is_verified():
    part = by_name(run_memory.network(shapes(), replace(MODEL, networks=2), 0))["saved weights"]
    assert part.num_bytes == 2_000_000_000


def test_offloaded_encoders_leave_main_memory_while_prompts_are_encoded():
    offloaded = replace(MODEL, text_bytes=1, offloaded_bytes=7_000_000_000)
    parts = run_memory.network(shapes(), offloaded, 0)
    stages = {part.stage: part.num_bytes for part in parts if part.num_bytes == 7_000_000_000}
    assert set(stages) == {"encoding", "main"}
    table = run_memory.rows(parts, None)
    assert table["memory of text encoders"] == "7 GB while encoding"
    assert table["main memory, about"] == "7 GB per process: offloaded text encoders 7 GB"


TURNS = [
    MemoryPart("weights", 70),
    MemoryPart("decoding", 20, "sampling"),
    MemoryPart("completions", 3, "sampling"),
    MemoryPart("activations", 19, "updating"),
    MemoryPart("states", 1000, "main"),
]


def test_sampling_and_updating_take_turns_on_the_device():
    assert run_memory.peak(TURNS) == 70 + 23
    assert run_memory.peak([*TURNS, MemoryPart("reference", 9, "updating")]) == 70 + 28
    assert run_memory.peak([*TURNS, MemoryPart("saved weights", 31, "verifying")]) == 70 + 31


@pytest.mark.parametrize(
    ("available", "verdict"),
    [(93, "93 B, enough"), (92, "92 B, too little by 1 B"), (60, "60 B, too little by 33 B")],
)
def test_an_estimate_is_held_against_the_memory_of_the_device(available, verdict):
    assert run_memory.rows(TURNS, available)["memory of the device"] == verdict


def test_a_cpu_has_no_memory_of_its_own():
    assert run_memory.available("cpu") is None
    assert "memory of the device" not in run_memory.rows(TURNS, None)


def test_only_a_large_part_is_listed_with_what_would_lower_it():
    """Large is a gigabyte, and a tenth of the whole."""
    parts = [
        MemoryPart("weights", 9_000_000_000, savings={"a: 1": 5}),
        MemoryPart("states", 1_000_000_000, savings={"b: 1": 250_000_000, "c: 1": 0}),
        MemoryPart("small", 999_999_999, savings={"d: 1": 5}),
        MemoryPart("fixed", 3_000_000_000, "sampling"),
    ]
    table = run_memory.rows(parts[:2], None)
    assert table["to lower weights"] == "a: 1 saves 5 B"
    assert table["to lower states"] == "b: 1 saves 250 MB"
    lowered = {row for row in run_memory.rows(parts, None) if row.startswith("to lower ")}
    assert lowered == {"to lower weights"}


def test_the_plan_names_the_setting_that_lowers_each_large_part(monkeypatch):
    """2 micro-batches of 5 GB outweigh 3 of 0.9 GB; with weights 4, text 5, optimizer .48, states
    1.28."""
    run = shapes()
    monkeypatch.setattr(type(run.policy), "plan", lambda _: MODEL)
    rows = plan(run)
    assert rows["memory, about"] == "20.8 GB per process, without reward models"
    assert {row: text for row, text in rows.items() if row.startswith("memory of ")} == {
        "memory of weights": "4 GB",
        "memory of optimizer": "480 MB",
        "memory of text encoders and VAE": "5 GB",
        "memory of saved weights": "4 GB while verifying",
        "memory of states": "1.28 GB",
        "memory of decoding": "2.7 GB while sampling",
        "memory of activations": "10 GB while updating",
    }
    assert rows["to lower activations"] == (
        "policy.memory.gradient_checkpointing: true saves 8 GB; recipe.micro_batch: 1 saves 5 GB"
    )
    assert rows["to lower text encoders and VAE"] == "policy.memory.offload_text: true saves 5 GB"
    assert rows["to lower decoding"].startswith("policy.memory.decode_frames: 1 saves 2.1 GB")
    assert "to lower states" not in rows, "less than a tenth"


def test_a_frame_window_for_pictures_is_refused_before_weights_are_read():
    with pytest.raises(ValueError, match=r"sampling\.frame_window needs frames of a video"):
        plan(shapes(frame_window=FrameWindow(length=1)))


@pytest.mark.parametrize(("trainable", "kept"), [(30_000, 30_000), (30_000_000, 2**16)])
def test_gradients_of_two_steps_over_two_halves_are_counted_where_weights_are_measured(
    trainable, kept
):
    """The weighted sum and one copy are added; large gradients are projected."""
    run = shapes()
    assert "gradients of steps" not in rollout(run)
    measured = replace(run, recipe=replace(run.recipe, step_weight="measured"))
    parts = by_name(step(measured, replace(MODEL, trainable=trainable)).parts)
    assert parts["gradients of steps"].num_bytes == 4 * (2 * 2 * kept + 2 * trainable)
    assert parts["gradients of steps"].stage == "updating"


def test_the_plan_says_how_step_weights_are_measured():
    run = shapes()
    assert "step weights" not in step(run).rows
    weight = MeasuredWeight(measured="update", half_life=30.0, start="std")
    run = replace(run, recipe=replace(run.recipe, step_weight=weight))
    assert step(run).rows["step weights"] == (
        "measured from updates, over half of 2 prompts each; start std, half-life 30 steps, "
        "floor 0.05"
    )


LARGE = replace(MODEL, parameters=10**9, trainable=10**6, bytes_per_parameter=2)


@pytest.mark.parametrize(
    ("changes", "model", "world", "told"),
    [
        ({}, LARGE, 8, "one tensor at a time"),
        ({"quantization": Quantization(denoiser="int8")}, LARGE, 8, "2 GB per process"),
        ({"sharding": Sharding(weights="blocks")}, LARGE, 8, "2 GB per machine"),
        ({"sharding": Sharding(weights="blocks")}, replace(LARGE, trainable=10**9), 8, "4 GB per"),
        ({"sharding": Sharding(weights="blocks")}, LARGE, 1, "one tensor at a time"),
        ({"device": "cpu"}, LARGE, 8, None),
        ({}, replace(LARGE, parameters=10**8), 8, None),
    ],
)
def test_main_memory_to_load_weights(changes, model, world, told):
    found = run_memory.loading(replace(shapes(), **{"device": "auto"} | changes), model, world)
    row = found.get("main memory to load weights")
    assert row == told or (told and row and row.startswith(told))


RECOMPUTING = replace(MODEL, activation_bytes=200_000_000, kept_bytes=6_000_000_000)
"""Decoding three samples takes 2.7 GB, and a micro-batch of two would keep 12 GB."""


def test_blocks_keep_activations_as_long_as_another_stage_needs_more_memory():
    run = shapes()
    parts = [
        MemoryPart("weights", 5_000_000_000),
        MemoryPart("decoding", 8_000_000_000, "sampling"),
        run_memory.update(run, RECOMPUTING, 1),
    ]
    before = run_memory.peak(parts)
    kept = run_memory.find_kept_blocks(run, RECOMPUTING, parts)
    assert kept == 0.55, "0.9 x 8 GB without 0.4 GB in use, in steps of 0.05"
    chosen = replace(run, speed=Speed(kept_blocks=kept))
    parts[-1] = run_memory.update(chosen, RECOMPUTING, 1)
    assert parts[-1].num_bytes == 2 * (200_000_000 + 3_300_000_000)
    assert parts[-1].savings["speed.kept_blocks: 0"] == 2 * 3_300_000_000
    assert run_memory.peak(parts) == before


@pytest.mark.parametrize("speed", [Speed(kept_blocks=0.0), Speed(kept_blocks=0.75)])
def test_a_share_in_the_run_file_is_kept(speed):
    run = replace(shapes(), speed=speed)
    assert run_memory.find_kept_blocks(run, RECOMPUTING, []) == speed.kept_blocks


def test_more_memory_for_a_faster_update_is_offered():
    """SD3.5-M: decoding sets the peak, and 8 guided samples are 16 rows."""
    model = ["configs/models/sd35_medium.yaml"]
    rows = plan(load(model, ["trackers=[]"])[0])
    assert rows["blocks that recompute"].endswith("more: speed.kept_blocks: 1")
    assert "rows per network call" not in rows
    rows = plan(load(model, ["trackers=[]", "policy.guidance=1.0", "speed.kept_blocks=1"])[0])
    assert rows["rows per network call"].startswith("8; about 16 fill a GPU and need ")
    assert "blocks that recompute" not in rows


def test_a_started_run_has_the_planned_share():
    run, _ = load("configs/shapes.yaml", ["policy.gradient_checkpointing=true"])
    settle_kept_blocks(run)
    parts = memory_parts(run)
    share = run_memory.find_kept_blocks(run, run.policy.plan(), parts)
    assert run.policy.network.setup.speed.kept_blocks == share
    assert run.speed.kept_blocks is None, "the run file is unchanged"


def test_copies_in_half_precision_and_the_pool_of_graphs_are_planned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {}
    for change in ("speed.graphs=false", "speed.graphs=true", "speed.compile=true"):
        run = load(["configs/models/sd35_medium.yaml"], ["trackers=[]", change])[0]
        model = run.policy.plan()
        parts = by_name(run_memory.network(run, model, 0))
        found[change] = parts["copies"].num_bytes, parts["graph pool"].num_bytes
    copies, pool = 2 * model.trainable, 8 * (model.activation_bytes - model.input_bytes)
    assert [*found.values()] == [(copies, 0), (copies, pool), (0, 0)]
