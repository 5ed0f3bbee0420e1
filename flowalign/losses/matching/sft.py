"""Fine-tune on the samples that annotators liked (supervised fine-tuning)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.losses.matching.weighted_fit import WeightedFit
from flowalign.types import Examples


@dataclass(frozen=True, kw_only=True)
class SFT(WeightedFit):
    """Mean of weight * l over rows; undesirable rows, such as losers of pairs, contribute 0."""

    on: Literal["desirable", "all"] = "desirable"
    """Rows to fit. desirable: desirable and unlabelled rows. all: all rows."""

    @override
    def weigh(self, batch: Examples) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        fitted = batch.desirable if self.on == "desirable" else torch.ones_like(batch.desirable)
        return fitted.float(), {"fitted": fitted.float().mean()}
