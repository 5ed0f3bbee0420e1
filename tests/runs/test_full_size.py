"""The measurement of memory at full size, on a small model."""

import json

import pytest

from assets.bench.full_size import RESULTS, measure_model, plan_model
from flowalign.runs.config import load

RECORDED = json.loads(RESULTS.read_text())
H100 = RESULTS.with_name("gpu_h100.json")
MEASURED = [name for name, one in RECORDED.items() if "measured" in one]


@pytest.mark.parametrize("model", MEASURED)
def test_simulated_memory_of_published_models_is_within_15_percent_of_the_plan(model):
    planned, measured = dict(RECORDED[model]["planned"]), RECORDED[model]["measured"]
    planned["verifying"] = max(planned["verifying"], planned["encoding"])  # of its prompts
    assert {stage: measured[stage] for stage in planned} == pytest.approx(planned, rel=0.15)


@pytest.mark.slow
def test_recorded_plans_are_those_of_check():
    found = plan_model("sd15")
    assert found["planned"] == pytest.approx(RECORDED["sd15"]["planned"], rel=0.01)
    assert found["planned_divided"] == pytest.approx(RECORDED["sd15"]["planned_divided"], rel=0.01)


@pytest.mark.slow
def test_a_toy_model_takes_at_most_the_planned_memory():
    """Activations of small networks are planned too high; the weights are exact."""
    from assets.bench.full_size_stages import plan

    planned = plan(["configs/models/toy_shapes.yaml"], [])["planned"]
    measured = measure_model("toy_shapes")["measured"]
    assert measured["verifying"] == pytest.approx(planned["verifying"], rel=0.15)
    assert all(measured[stage] <= 1.15 * planned[stage] for stage in planned)
    assert measured["updating"] > measured["sampling"] > measured["loading"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "part", "size"),
    [
        ("sd35_medium", "flow_grpo", ["policy.height=512", "policy.width=512"]),
        (
            "wan21_1_3b",
            "wan, 480 x 832, 81 frames, 2 clips",
            [f"policy.video.{name}" for name in ("height=480", "width=832", "num_frames=81")],
        ),
    ],
)
def test_an_h100_used_the_planned_memory_of_decoding(model, part, size):
    """Weights, optimizer and networks beside the decoder's activations are those in use before."""
    found = json.loads(H100.read_text())["parts"][part]["figures"]["a step"]
    samples = {"sd35_medium": 8, "wan21_1_3b": 2}[model]
    policy = load(f"configs/models/{model}.yaml", [*size, "trackers=[]"])[0].policy
    planned = found["gib/reward"] + samples * policy.plan().decode_bytes / 2**30
    assert found["gib/decode"] == pytest.approx(planned, rel=0.15)


@pytest.mark.slow
def test_kept_graphs_take_the_planned_memory():
    """Of 36 evaluations at SD3.5-M's size, on the simulated GPU."""
    sizes = ["recipe.prompts_per_step=1", "recipe.sampling.samples_per_prompt=4"]
    calls = ["recipe.micro_batch=4", "recipe.sampling.micro_batch=4", "recipe.updates_per_step=1"]
    changes = [*sizes, *calls, "policy.guidance=1.0", "recipe.keep_graphs=true"]
    found = measure_model("sd35_medium", *changes)["measured"]["updating"]
    planned = plan_model("sd35_medium", *changes)["planned"]["updating"]
    assert found == pytest.approx(planned, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kept"),
    [("sd35_medium", 0.35), ("sd35_medium", 1), ("flux1_dev", 0.5), ("wan21_1_3b", 0.5)],
)
def test_blocks_that_keep_activations_take_the_planned_memory(model, kept):
    """At published sizes, on the simulated GPU."""
    changes = [f"speed.kept_blocks={kept}"]
    found = measure_model(model, *changes)["measured"]["updating"]
    planned = plan_model(model, *changes)["planned"]["updating"]
    assert found == pytest.approx(planned, rel=0.1)
