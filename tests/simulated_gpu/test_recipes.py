"""One step of recipes on the simulated GPU."""

import pytest

from tests.fixtures.simulated_gpu import on_simulated_gpu
from tests.fixtures.simulated_runs import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("quantity", ["gradient", "update"])
def test_measured_step_weights_train(tmp_path, quantity):
    files = ["configs/models/shapes.yaml", "configs/methods/measured_weights.yaml"]
    changes = ["evaluation=null", "recipe.prompts_per_step=4", "num_steps=2"]
    changes += [f"recipe.step_weight.measured={quantity}"]
    status, usage = on_simulated_gpu(train, files, tmp_path, *changes)
    assert status == "finished"
    assert not usage.float64
