"""Check that names of the packages have types; `make lint` runs pyright on this file."""

from typing import assert_type

import flowalign.losses
import pipelines
import reward_models

assert_type(flowalign.losses.GRPO().kl_coef, float)
assert_type(pipelines.SD3.pipeline_class, str)
assert_type(reward_models.JpegSize().spec.name, str)
