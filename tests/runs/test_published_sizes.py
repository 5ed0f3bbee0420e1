"""Values of published models in the package: sizes, sources, and comparison with downloads."""

import json
import re

import diffusers
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from assets.bench.full_size import RESULTS, measure_model, plan_model
from flowalign.runs import run_memory
from flowalign.runs.config import load
from flowalign.runs.planning import memory_parts
from pipelines.families.sd3 import SD3
from pipelines.parts.published import find, names
from tests.fixtures.run_files import CONFIGS

SD35 = "stabilityai/stable-diffusion-3.5-medium"
NAMED = {
    path
    for file in CONFIGS.rglob("*.yaml")
    for path in re.findall(r"\bpath: ([\w-]+/[\w.-]+)", file.read_text())
    if not path.startswith(("assets/", "runs/", "data/", "openai/"))
}
"""Models on the hub that a policy in `configs/` names."""
GATED = SD35, *(f"black-forest-labs/FLUX.{name}-dev" for name in ("1", "1-Fill", "1-Kontext", "2"))
"""Models on the hub that need an accepted licence."""


UNRECORDED = {"Tongyi-MAI/Z-Image-Turbo"}
"""Models whose configurations were not read: `check` needs their files."""


def test_every_model_of_a_run_file_is_known():
    assert sorted(NAMED - UNRECORDED) == names()


def test_run_files_say_which_models_are_gated():
    """Without access, the hub refuses these after a long plan; the line of the path says why."""
    lines = [line for file in CONFIGS.rglob("*.yaml") for line in file.read_text().splitlines()]
    for model in GATED:
        found = [line for line in lines if re.search(rf"path: {re.escape(model)}\b", line)]
        assert found
        assert [line for line in found if "# gated: accept its licence" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize("model", names())
def test_networks_have_the_published_number_of_parameters(model):
    known = find(model)
    assert known
    name = "unet" if "unet" in known.components else "transformer"
    config = known.config(name)
    assert config
    with torch.device("meta"):
        network = getattr(diffusers, config["_class_name"]).from_config(config)
    found = sum(value.numel() for value in network.state_dict().values())
    exact = known.parameters["exact"]
    assert found == pytest.approx(known.parameters["count"], rel=0 if exact else 0.16)


ENCODERS = {
    "clip_l": 123_060_480,
    "clip_g_projected": 694_659_840,
    "t5_xxl": 4_762_310_656,
    "clip_h_vision": 630_766_080,
    "umt5_xxl": 5_680_910_336,
    "qwen2_5_vl_7b": 8_292_166_656,
}
"""Values of text encoders of several models, as in the files of the hub."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_shared_text_encoders_have_the_published_number_of_parameters(name):
    file = CONFIGS.parent / "pipelines/parts/published/parts.json"
    part = json.loads(file.read_text())[name]
    config = CONFIG_MAPPING[part["config"]["model_type"]].from_dict(part["config"])
    with torch.device("meta"):
        encoder = getattr(transformers, part["class"][1])(config)
    assert sum(p.numel() for p in encoder.parameters()) == ENCODERS[name]


def test_changes_of_a_config_stay_outside_of_the_package():
    """Building a network changes nested values of its config."""
    known = find("Qwen/Qwen-Image")
    config = known.config("text_encoder")
    name = next(name for name, value in config.items() if isinstance(value, dict))
    config[name]["changed"] = True
    assert "changed" not in known.config("text_encoder")[name]


def download(monkeypatch, folder, component, values):
    """Let one configuration file of SD3.5 be in the cache of the hub."""
    file = folder / (component or "") / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(values))
    monkeypatch.setattr(
        "pipelines.parts.folder.cached_file",
        lambda model, name, part: file if part == component else None,
    )
    return file


def test_downloaded_values_that_equal_the_package_are_accepted(monkeypatch, tmp_path):
    download(monkeypatch, tmp_path, "transformer", {"num_layers": 24, "other": 1})
    assert SD3(SD35).folder.config("transformer")["num_layers"] == 24


def test_a_downloaded_value_that_differs_is_named_with_the_folder(monkeypatch, tmp_path):
    file = download(monkeypatch, tmp_path, "transformer", {"num_layers": 38})
    with pytest.raises(ValueError, match=rf"{file} has another num_layers .*[\s\S]*{tmp_path}$"):
        SD3(SD35).folder.config("transformer")


def test_nested_values_are_compared():
    known = find("Qwen/Qwen-Image")
    assert known
    local = {"text_config": {"hidden_size": 1}}
    assert known.differing_key("text_encoder", local) == "text_config.hidden_size"


def test_a_published_model_of_another_family_is_refused_without_files():
    with pytest.raises(ValueError, match="belongs to another family than StableDiffusion3Pipeline"):
        SD3("black-forest-labs/FLUX.1-dev").plan()


SIMULATED = {"sd35_medium": 26.4e9, "flux1_dev": 62.4e9}
"""Peaks of one process at published size on a simulated GPU, in bytes, without reward models."""


@pytest.mark.slow
@pytest.mark.parametrize("model", SIMULATED)
def test_the_peak_of_image_models_counts_encoders_vae_and_decoding(model):
    run = load([str(CONFIGS / f"models/{model}.yaml")])[0]
    parts = {part.name: part for part in memory_parts(run, 8)}
    assert run_memory.peak([*parts.values()]) == pytest.approx(SIMULATED[model], rel=0.15)
    assert "prompt_cache: FOLDER" in parts["text encoders and VAE"].savings
    assert "checkpoints.verify: never" in parts["saved weights"].savings
    assert "decode_micro_batch: 1" in parts["decoding"].savings


@pytest.mark.slow
def test_in_fp16_layers_of_t5_are_counted_in_float32():
    """The last projections of 24 blocks take 2 more bytes for each of 4096 x 10240 weights."""
    sizes = {
        precision: SD3(SD35, precision=precision).text_encoder.stored_bytes()
        for precision in ("bf16", "fp16")
    }
    assert sizes["fp16"] - sizes["bf16"] == 2 * 24 * 4096 * 10240


# The measurement of memory at full size, on a small model -----------------------------------------


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
    """At published sizes, on the simulated GPU, where no attention backend can be timed."""
    changes = [f"speed.kept_blocks={kept}", "speed.attention=native"]
    found = measure_model(model, *changes)["measured"]["updating"]
    planned = plan_model(model, *changes)["planned"]["updating"]
    assert found == pytest.approx(planned, rel=0.1)
