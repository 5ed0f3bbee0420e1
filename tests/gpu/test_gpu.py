"""What only a GPU can show. `pytest -m gpu tests/gpu`."""

import pytest
import torch

from flowalign.runs.config import load
from tests.fixtures.run_files import METHODS, files_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loop_trains_in_every_precision(tmp_path, precision):
    from flowalign import runs

    run, text = load(
        "configs/shapes.yaml",
        [
            "device=cuda",
            f"policy.precision={precision}",
            "num_steps=2",
            "evaluation.num_prompts=32",
            f"output_dir={tmp_path / 'run'}",
            "recipe.on_failed_check=warn",
        ],
    )
    summary = runs.train(runs.start(run, text, lambda _: None))
    assert summary["status"] == "finished"


def test_initial_noise_is_the_same_on_every_device():
    run, _ = load("configs/shapes.yaml", ["device=cuda"])
    run.policy.load(torch.device("cuda"))
    noise = run.policy.noise(2, torch.Generator().manual_seed(0))
    expected = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.cpu(), expected)


@pytest.mark.parametrize("method", [*METHODS, "flow_grpo_all_steps"])
def test_every_credit_method_trains_on_a_gpu(tmp_path, method):
    from flowalign import runs

    run, text = load(
        [str(path) for path in files_of("shapes", method)],
        [
            "device=cuda",
            "num_steps=2",
            "recipe.prompts_per_step=2",
            "evaluation=null",
            "recipe.on_failed_check=warn",
            f"output_dir={tmp_path / 'run'}",
        ],
    )
    assert runs.train(runs.start(run, text, lambda _: None))["status"] == "finished"


def test_values_of_all_states_beat_finishing_them_one_state_after_another(tmp_path):
    """An SD3.5-shaped random model at 512 pixels; peak memory grows with the budget."""
    from assets.random_sd3 import build
    from flowalign.runs.bench_values import measure_values

    build(layers=24, heads=24, joint=4096).save_pretrained(tmp_path / "sd3")
    peaks = []
    for budget in (4, 12):
        run, _ = load(
            [str(path) for path in files_of("sd35_medium", "dense_grpo")],
            [
                "device=cuda",
                f"policy.path={tmp_path / 'sd3'}",
                "rewards=[{class_path: tests.fixtures.pixel.Redness}]",
                "reward_weights={redness: 1.0}",
                "recipe.prompts_per_step=2",
                "recipe.sampling.samples_per_prompt=6",
                f"recipe.sampling.micro_batch={budget}",
            ],
        )
        torch.cuda.reset_peak_memory_stats()
        result = measure_values(run, 1)
        peaks.append(torch.cuda.max_memory_allocated())
        print(budget, result, peaks[-1])  # noqa: T201
        assert result["share_of_one_by_one"] < 1
    assert peaks[0] < peaks[1]
