"""GPUs that fit a run, and the message after running out of memory; every number by hand."""

import pytest
import torch

from flowalign.runs import planning
from flowalign.runs.config import load
from flowalign.runs.planning import plan
from flowalign.training.recipe import MemoryPart
from tests.fixtures.commands import exit_code

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
