"""What only a GPU can show. `pytest -m gpu tests/gpu`."""

import pytest
import torch

from flowalign.config import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_loop_trains_in_every_precision(tmp_path, precision):
    from flowalign import run as runs

    run, text = load(
        "configs/shapes.yaml",
        [
            "device=cuda", f"policy.init_args.precision={precision}", "num_steps=2",
            "evaluation.num_prompts=32", f"output_dir={tmp_path / 'run'}",
            "recipe.on_failed_check=warn",
        ],
    )  # fmt: skip
    summary = runs.train(runs.start(run, text, lambda _: None))
    assert summary["status"] == "finished"


def test_initial_noise_is_the_same_on_every_device():
    run, _ = load("configs/shapes.yaml", ["device=cuda"])
    run.policy.load(torch.device("cuda"))
    noise = run.policy.noise(2, torch.Generator().manual_seed(0))
    expected = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noise.cpu(), expected)
