"""Implements the heads of `flowalign reward train`: linear, MLP, and gated by the prompt."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import override

from flowalign.functional.rating import Features, Ratings
from flowalign.types import Decay, Head, HeadNetwork, PositiveFloat, PositiveInt
from flowalign.utils.errors import require_known

_LOG_VARIANCE = 8.0
"""Bound on the absolute log variance, applied smoothly (tanh)."""


class _Score(nn.Module):
    """Layer that maps hidden features to scores, and optionally to log variances."""

    def __init__(self, size: int, num_dims: int, uncertainty: bool):
        super().__init__()
        self.score = nn.Linear(size, num_dims)
        self.log_variance = nn.Linear(size, num_dims) if uncertainty else None
        nn.init.normal_(self.score.weight, std=0.01)
        nn.init.zeros_(self.score.bias)
        if self.log_variance is not None:  # all samples start with variance 1
            nn.init.zeros_(self.log_variance.weight)
            nn.init.zeros_(self.log_variance.bias)

    def forward(self, hidden: Tensor) -> Ratings:
        if self.log_variance is None:
            return Ratings(self.score(hidden))
        spread = _LOG_VARIANCE * torch.tanh(self.log_variance(hidden) / _LOG_VARIANCE)
        return Ratings(self.score(hidden), spread)


class Linear(Head):
    """Linear map to every dimension; `uncertainty` adds a log variance to each."""

    def __init__(self, uncertainty: bool = False):
        self.uncertainty = uncertainty

    @override
    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        return _FeedForward(
            nn.Identity(), _Score(joint, len(dims), self.uncertainty), is_linear=True
        )


class MLP(Head):
    """Layers of the given widths, each with GELU and dropout, followed by a linear map."""

    def __init__(
        self,
        hidden: Sequence[PositiveInt] = (256,),
        dropout: Decay = 0.0,
        uncertainty: bool = False,
    ):
        if not hidden:
            raise ValueError("hidden is empty; use the head Linear instead")
        self.hidden, self.dropout, self.uncertainty = hidden, dropout, uncertainty

    @override
    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        body = _layers(joint, self.hidden, self.dropout)
        score = _Score(self.hidden[-1], len(dims), self.uncertainty)
        return _FeedForward(body, score, is_linear=False)


class _FeedForward(HeadNetwork):
    def __init__(self, body: nn.Module, score: _Score, is_linear: bool):
        super().__init__()
        self.body, self.out, self.is_linear = body, score, is_linear

    def linear_layer(self) -> tuple[nn.Linear, Sequence[int]] | None:
        layer = self.out.score
        return (layer, range(layer.out_features)) if self.is_linear else None

    def forward(self, features: Features) -> Ratings:
        return self.out(self.body(features.joint))


class PromptGated(Head):
    """Linear scores, and totals that weight other dimensions depending on the prompt.

    `groups` lists, for each total, the dimensions that it weights. The total is the sum over them
    of softmax(gate(prompt) / temperature) * score. A total may include totals listed before it, for
    example criteria into aspects into an overall score.

    Source: the gates of MJ-VIDEO, and of ArmoRM with ridge as first stage.
    """

    def __init__(
        self,
        groups: Mapping[str, Sequence[str]],
        hidden: Sequence[PositiveInt] = (64,),
        dropout: Decay = 0.0,
        temperature: PositiveFloat = 1.0,
    ):
        if not groups or any(len(set(g)) != len(g) or len(g) < 2 for g in groups.values()):
            wanted = "a total must weight at least two dimensions"
            raise ValueError(f"groups are {dict(groups)}; {wanted}")
        self.groups, self.hidden = groups, hidden
        self.dropout, self.temperature = dropout, temperature

    def build(self, joint: int, prompt: int, dims: Sequence[str]) -> HeadNetwork:
        """Build the network; raise ValueError if `groups` does not fit the dimensions."""
        if prompt == 0:
            raise ValueError("PromptGated needs a backbone that reads prompts")
        known = [d for d in dims if d not in self.groups]
        for total, parts in self.groups.items():
            require_known("groups name the unknown dimension", (total, *parts), dims)
            if late := [d for d in parts if d not in known]:
                raise ValueError(
                    f"{total} weights {late}, which come after it in groups; reorder groups"
                )
            known.append(total)
        return _GatedTotals(self, joint, prompt, dims)


class _GatedTotals(HeadNetwork):
    def __init__(self, head: PromptGated, joint: int, prompt: int, dims: Sequence[str]):
        super().__init__()
        own = [i for i, d in enumerate(dims) if d not in head.groups]
        self.score = nn.Linear(joint, len(own))
        nn.init.normal_(self.score.weight, std=0.01)
        nn.init.zeros_(self.score.bias)
        self.own = own
        place = {d: i for i, d in enumerate(dims)}
        self.totals = [(place[t], [place[d] for d in parts]) for t, parts in head.groups.items()]
        self.gates = nn.ModuleList(
            nn.Sequential(
                _layers(prompt, head.hidden, head.dropout),
                nn.Linear(head.hidden[-1] if head.hidden else prompt, len(parts)),
            )
            for _, parts in self.totals
        )
        self.temperature = head.temperature

    def linear_layer(self) -> tuple[nn.Linear, Sequence[int]] | None:
        return self.score, self.own

    def weights(self, prompt: Float[Tensor, "n E"]) -> list[Float[Tensor, "n k"]]:
        """Return the prompt-dependent weights of each total over its parts; every row sums to 1."""
        return [(gate(prompt) / self.temperature).softmax(1) for gate in self.gates]

    def forward(self, features: Features) -> Ratings:
        columns = dict(zip(self.own, self.score(features.joint).unbind(1), strict=True))
        gates = self.weights(features.prompt)
        for (total, parts), gate in zip(self.totals, gates, strict=True):
            columns[total] = (gate * torch.stack([columns[i] for i in parts], 1)).sum(1)
        return Ratings(torch.stack([columns[i] for i in range(len(columns))], 1))


def _layers(size: int, hidden: Sequence[int], dropout: float) -> nn.Module:
    widths = [size, *hidden]
    return nn.Sequential(
        *[
            nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(dropout))
            for a, b in pairwise(widths)
        ]
    )
