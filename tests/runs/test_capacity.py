"""Seconds of a step on many GPUs, from hand-computed counts and costs."""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml

from flowalign.cli.check import _read_cluster
from flowalign.runs import planning
from flowalign.runs.bench import unit_seconds
from flowalign.runs.capacity import (
    UTILIZATION,
    Cluster,
    UnitCosts,
    backward_passes,
    capacity_rows,
    exchange_seconds,
    gpu_seconds,
    imbalance,
    read_costs,
    recognise_gpu,
    unit_costs,
)
from flowalign.runs.config import load
from flowalign.runs.planning import GPUS, Gpu, find_gpu, plan, prompt_rows
from flowalign.training.recipe import MemoryPart, StepWork, judge_row
from flowalign.types import JudgeCalls, ModelPlan
from reward_models.signals.jpeg import JpegSize
from tests.fixtures.commands import exit_code
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.stopped_runs import PIXELS

COSTS = UnitCosts(evaluation=2.0, update=3.0, decode=5.0, reward=7.0)
WORK = StepWork(
    evaluations={"sampling": 10, "completing": 4, "training": 6, "reference": 1},
    decodes=8,
    reward_calls=9,
)
TINY = Gpu(flops=100.0, memory=1e9, link=10.0, network=1.0, per_machine=4)


def model(trainable=1, recomputes=False, flops=0):
    return ModelPlan(
        latent_shape=(1,),
        parameters=10,
        trainable=trainable,
        bytes_per_parameter=4,
        activation_bytes=0,
        sigmas=lambda n: n,
        recomputes=recomputes,
        evaluation_flops=lambda: flops,
        decode_flops=lambda: 2 * flops,
    )


def test_gpu_seconds_are_counts_times_costs():
    assert gpu_seconds(WORK, COSTS, passes=4) == {
        "sampling": 20,
        "completions": 8,
        "decoding": 40,
        "rewards": 63,
        "update": (6 * 4 + 1) * 3,
    }


def test_gradients_of_rewards_cost_further_passes():
    work = StepWork(decodes=1, reward_calls=1, differentiates_rewards=True)
    found = gpu_seconds(work, COSTS, passes=2)
    assert (found["decoding"], found["rewards"]) == (3 * 5, 2 * 7)


def test_a_backward_pass_costs_more_for_all_weights_and_for_recomputation():
    assert [backward_passes(model(n, r)) for n, r in product((1, 10), (False, True))] == [
        2,
        3,
        3,
        4,
    ]


def test_costs_from_operations_follow_the_utilization_and_the_rows_of_a_call():
    found = unit_costs(model(flops=200), TINY, utilization=0.5, rows=(1, 4), reward=0.1)
    assert found == UnitCosts(evaluation=4.1, update=4.025, decode=40.0, reward=0.1)
    with pytest.raises(ValueError, match="operations of this policy are unknown"):
        unit_costs(model(), TINY, utilization=0.5, rows=(1, 1))


@pytest.mark.parametrize(
    ("part", "tflops", "decode", "rows", "work", "passes", "error"),
    [
        ("flow_grpo", 2.25, 2.51, 8, {"sampling": 48, "training": 40, "reference": 40}, 3, 0.1),
        (
            "nft",
            2.25,
            2.51,
            8,
            {"sampling": 48, "training": 40, "old": 40, "reference": 40},
            3,
            0.1,
        ),
        (
            *("wan, 480 x 832, 81 frames, 2 clips", 283, 220, 2),
            *({"sampling": 8, "training": 6, "reference": 6}, 3, 0.2),
        ),
    ],
)
def test_predicted_steps_are_near_the_recorded_ones(
    part, tflops, decode, rows, work, passes, error
):
    recorded = json.loads(Path("assets/bench/gpu_h100.json").read_text())["parts"][part]
    seconds = recorded["figures"]["a step"]
    plan = replace(
        model(), evaluation_flops=lambda: tflops * 1e12, decode_flops=lambda: decode * 1e12
    )
    costs = unit_costs(plan, GPUS["h100-80gb"], UTILIZATION, (rows, rows))
    samples = round(seconds["seconds/decode"] / seconds["seconds_per/decode"])
    found = gpu_seconds(StepWork(evaluations=work, decodes=samples), costs, passes)
    measured = seconds["seconds/step"] - seconds["seconds/reward"]
    assert sum(found.values()) == pytest.approx(measured, rel=error)


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA H200", "h200-141gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
        ("NVIDIA L40", None),
    ],
)
def test_types_of_gpus_are_recognised_by_their_names(monkeypatch, name, gpu):
    assert recognise_gpu("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    found = recognise_gpu("auto")
    assert found == (GPUS[gpu] if gpu else None)


def test_rings_between_machines_use_the_links_of_all_gpus_of_a_machine():
    assert exchange_seconds(100.0, TINY, 1) == 0
    assert exchange_seconds(100.0, TINY, 4) == pytest.approx(100 * 3 / 4 / 10)
    assert exchange_seconds(100.0, TINY, 8) == pytest.approx(100 * 7 / 8 / 4)


def test_uneven_shares():
    assert imbalance(16, 8) == 1
    assert imbalance(16, 3) == pytest.approx(6 / (16 / 3))
    assert imbalance(0, 3) == 1


def test_measured_unit_costs_reproduce_the_measured_step():
    seconds = {"sample": 14.0, "update": 50.0, "decode": 4.0, "reward": 3.0}
    unit = unit_seconds({f"seconds/{n}": s for n, s in seconds.items()}, WORK, passes=4)
    assert unit["seconds_per/evaluation"] == 1
    assert unit["seconds_per/update"] == 2
    costs = UnitCosts(**{name.partition("/")[2]: value for name, value in unit.items()})
    assert sum(gpu_seconds(WORK, costs, 4).values()) == pytest.approx(sum(seconds.values()))


def test_measured_costs_are_read_and_other_files_are_refused(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({f"seconds_per/{n}": v for n, v in vars(COSTS).items()} | {"x": 1}))
    assert read_costs(str(file)) == COSTS
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"--costs .* has no unit costs[\s\S]*flowalign bench"):
        read_costs(str(file))


@pytest.mark.slow
def test_two_gpus_halve_a_step_and_uneven_shares_are_idle_time():
    run = load("configs/shapes.yaml", [])[0]
    one, two, three = (capacity_rows(run, Cluster(count=n, measured=COSTS)) for n in (1, 2, 3))
    whole, half = (float(rows["seconds per step"].replace(",", "")) for rows in (one, two))
    assert half == pytest.approx(whole / 2, rel=0.01)
    assert two["idle"].startswith("0%")
    assert three["idle"].startswith("11%"), "16 prompts for 3 processes: 6 instead of 5.33"
    linked = capacity_rows(run, Cluster(count=2, gpu=TINY, measured=COSTS))["  communication"]
    exchanged = 2 * run.recipe.updates * 4.0 * run.policy.plan().trainable
    assert linked.split()[0] == f"{exchange_seconds(exchanged, TINY, 2):,.3g}"


def arguments(**given):
    usual = {"gpus": None, "gpu": None, "costs": None, "reward_seconds": None}
    return argparse.Namespace(**usual | {"utilization": 0.4} | given)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match="--gpu is 'h100'; did you mean 'h100-80gb'"):
        _read_cluster(arguments(gpus=2, gpu="h100"))


def test_a_cluster_is_read_from_the_options():
    assert _read_cluster(arguments()) is None
    found = _read_cluster(arguments(gpus=2, gpu="h100-80gb"))
    assert found == Cluster(count=2, name="h100-80gb", gpu=find_gpu("h100-80gb"))


def test_rates_of_gpus_are_plausible():
    for gpu in GPUS.values():
        assert 1e14 < gpu.flops < 1e16
        assert gpu.network <= gpu.link < gpu.memory * 10


# GPUs that fit a run, and the message after running out of memory; every number by hand -----------


GB = 10**9
WEIGHTS = MemoryPart(
    "weights",
    40 * GB,
    savings={"quantization.denoiser: int8": 20 * GB, "quantization.denoiser: nf4": 30 * GB},
)
ACTIVATIONS = MemoryPart(
    "activations",
    30 * GB,
    "updating",
    savings={"recipe.micro_batch: 1": 15 * GB, "policy.gradient_checkpointing: true": 27 * GB},
)
STATES = MemoryPart("states", 4 * GB, savings={"recipe.sampling.states.device: cpu": 4 * GB})
PARTS = [WEIGHTS, ACTIVATIONS, STATES]
"""74 GB at the peak."""


def test_each_size_has_its_verdict_and_the_settings_that_make_it_fit():
    """48: without 26 GB at least, so recomputing's 27. 24: as well 3 of 47 by offloading states,
    and then int8 leaves 20 + 3. 16: nf4 alone leaves 10 + 3."""
    rows = planning.fit_rows(PARTS, counts_encoders=True)
    recomputing, states = (
        "policy.gradient_checkpointing: true",
        "recipe.sampling.states.device: cpu",
    )
    batch = "recipe.micro_batch: 1"
    assert rows["fits a GPU of"] == "80 GB (6 GB to spare) or more"
    assert rows["to fit 48 GB"] == f"{recomputing} (then about 47 GB)"
    exact = f"{recomputing}, {states}, {batch}"
    assert rows["to fit 24 GB"] == f"{exact}, quantization.denoiser: int8 (then about 21.5 GB)"
    assert rows["to fit 16 GB"] == f"{exact}, quantization.denoiser: nf4 (then about 11.5 GB)"


def test_of_settings_that_suffice_the_gentlest_is_named():
    """60 GB need 14 less: both lower activations enough."""
    assert planning.advice(PARTS, 60 * GB) == "recipe.micro_batch: 1 (then about 59 GB)"


def test_settings_that_do_not_suffice_are_named_with_what_lacks():
    told = planning.advice([MemoryPart("copies", 20 * GB), STATES], 16 * GB)
    assert told == "too little by 4 GB, even with recipe.sampling.states.device: cpu"
    assert planning.advice([MemoryPart("copies", 20 * GB)], 16 * GB) == "too little by 4 GB"


def test_a_setting_of_two_parts_lowers_both():
    key = "policy.gradient_checkpointing: true"
    recast = MemoryPart("recast weights", 10 * GB, "updating", savings={key: 9 * GB})
    assert planning.advice([ACTIVATIONS, recast], 5 * GB) == f"{key} (then about 4 GB)"


def test_the_plan_says_it_of_the_embedded_model():
    told = plan(load("configs/shapes.yaml")[0])["fits a GPU of"]
    assert told.startswith("16 GB (")
    assert "not included" not in told


def out_of(function):
    """An error that came out of a function of this name."""
    namespace = {"torch": torch}
    exec(f"def {function}():\n    raise torch.OutOfMemoryError('CUDA out of memory.')", namespace)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        namespace[function]()
    return caught.value


def test_what_ran_out_is_told_with_the_next_settings_in_five_lines():
    told = planning.explain_shortage(out_of("backward"), PARTS).splitlines()
    assert told[0] == (
        "out of memory on the GPU for activations, planned at 30 GB, of 74 GB in all without "
        "reward models"
    )
    assert told[1] == "try: policy.gradient_checkpointing: true, which saves 27 GB"
    assert [line.split()[1] for line in told[2:4]] == [
        "recipe.micro_batch:",
        "recipe.sampling.states.device:",
    ]
    assert len(told) == 5


def test_a_reward_model_that_ran_out_is_named():
    assert "serve the rewards" in planning.explain_shortage(out_of("score"), PARTS)
    assert "GPU, of 74 GB" in planning.explain_shortage(out_of("anything"), PARTS)


@pytest.mark.slow
def test_training_that_runs_out_of_memory_says_what_lowers_it(tmp_path, capsys, monkeypatch):
    def backward(self, loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("flowalign.training.learner.Learner.backward", backward)
    small = ["--num_steps", "1", "--evaluation", "null", "--output_dir", str(tmp_path / "out")]
    assert exit_code("train", "configs/shapes.yaml", *small, "--recipe.prompts_per_step", 2) == 1
    said = capsys.readouterr().err
    last = said[said.index("out of memory") :]
    assert "for activations" in last
    assert "try: " in last
    assert "Traceback" not in said
    assert len(last.splitlines()) <= 5


# The plan counts judge answers, updates of all roles, and prompts that do not suffice -------------


class Judged(JpegSize):
    def judge_calls(self, group_sizes):
        return JudgeCalls(10 * sum(group_sizes), 1000 * sum(group_sizes))


def test_judge_answers_and_tokens_have_a_row_where_there_is_a_judge():
    assert judge_row([JpegSize()], [3, 2]) == judge_row([], [3]) == {}
    assert judge_row([JpegSize(), Judged()], [300, 200]) == {
        "judge answers per step": "5,000, of at most 500,000 tokens together"
    }


def test_updates_of_every_role_are_planned():
    rows = plan(load("configs/shapes_tdm_r1.yaml")[0])
    assert rows["updates per step"].startswith("1 of the generator, ")
    assert "of the fake score, 1 of the surrogate reward" in rows["updates per step"]


@pytest.fixture
def run_of(tmp_path):
    def load_with(trained: list[str], evaluated: list[str]):
        train, test = tmp_path / "train.txt", tmp_path / "test.txt"
        train.write_text("\n".join(trained) + "\n")
        test.write_text("\n".join(evaluated) + "\n")
        options = [f"--recipe.prompts={train}", f"--evaluation.prompts={{held: {test}}}"]
        return load("configs/shapes.yaml", options)[0]

    return load_with


def test_too_few_prompts_and_evaluation_on_training_prompts_are_reported(run_of):
    run = run_of(["a red circle", "a blue square"], ["a blue square", "a green star"])
    rows = prompt_rows(run, 3)
    assert "a step needs 3, " in rows["warning: few prompts"]
    assert "has 2: prompts repeat" in rows["warning: few prompts"]
    assert rows["warning: evaluation"].startswith("1 of 2 prompts are training prompts")
    assert "warning: few prompts" in plan(run)
    apart = run_of(["a red circle", "a blue square"], ["a green star"])
    assert prompt_rows(apart, 2) == {}


def test_the_plan_builds_the_schedule_of_every_number_of_steps(tmp_path, monkeypatch):
    asked, made = [], PixelPolicy.plan
    monkeypatch.setattr(PixelPolicy, "plan", lambda self: replace(made(self), sigmas=asked.append))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(PIXELS))
    evaluation = {"prompts": {"held": "assets/shapes/prompts/unseen.txt"}, "num_steps": 7}
    plan(load(str(tmp_path / "run.yaml"), [f"--evaluation={evaluation}"])[0])
    assert asked == [1, 3, 7]
