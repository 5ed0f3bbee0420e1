"""Fine-tune on the samples that annotators liked (supervised fine-tuning)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override

from flowalign.losses.matching.weighted_fit import WeightedFit
from flowalign.types import Batch


@dataclass(frozen=True, kw_only=True)
class SFT(WeightedFit):
    """Mean of weight * l over rows; undesirable rows, such as losers of pairs, contribute 0."""

    on: Literal["desirable", "all"] = "desirable"
    """Rows to fit. desirable: desirable and unlabelled rows. all: all rows."""

    @override
    def weigh(self, batch: Batch) -> tuple[Float[Tensor, "n"], Mapping[str, Tensor]]:
        every = torch.ones_like(batch["weight"], dtype=torch.bool)
        fitted = batch.get("desirable", every) if self.on == "desirable" else every
        return fitted.float(), {"fitted": fitted.float().mean()}
