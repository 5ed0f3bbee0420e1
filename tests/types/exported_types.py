"""Check that names of the packages have types; `make lint` runs pyright on this file."""

from typing import assert_type

import flowalign
import flowalign.losses
import pipelines
import reward_models

assert_type(flowalign.losses.GRPO().kl_coef, float)
assert_type(pipelines.SD3.pipeline_class, str)
assert_type(reward_models.JpegSize().spec.name, str)


def check_script() -> None:
    """Check the types that a script sees; nothing runs."""
    result = flowalign.align(None, num_steps=1)
    assert_type(result, flowalign.Result)
    assert_type(result.history, dict[str, list[float | None]])
    assert_type(flowalign.rewards.JpegSize().spec.name, str)
