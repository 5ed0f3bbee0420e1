"""Implements a reward that counts only for samples that pass a threshold of another reward."""

from math import isfinite

import torch

from flowalign.types import FiniteFloat, Loadable, MediaBatch, RewardModel, RewardOutput, RewardSpec


class Gated(RewardModel, Loadable):
    """Scores the dimensions of `gate`, and those of `reward` if the gate's `dim` >= `floor`.

    A sample below the floor gets `below` in every dimension of `reward` (null: the lower end of its
    scale), and `reward` does not score it. With `DynamicDegree` as the gate, a still video gains
    nothing by being smooth, consistent and free of flicker.
    """

    def __init__(
        self,
        reward: RewardModel,
        gate: RewardModel,
        dim: str,
        floor: FiniteFloat,
        below: FiniteFloat | None = None,
    ):
        if dim not in gate.spec.dims:
            raise ValueError(
                f"dim of Gated is {dim!r}; {gate.spec.name} has {', '.join(gate.spec.dims)}"
            )
        lowest = reward.spec.scale[0] if below is None else below
        if not isfinite(lowest) or not isfinite(floor):
            raise ValueError(
                f"floor of Gated is {floor:g} and below {lowest:g}; both must be finite. "
                f"Set `below` if {reward.spec.name} has no lowest score"
            )
        self.reward, self.gate, self.floor, self.below = reward, gate, floor, lowest
        self.column = gate.spec.dims.index(dim)
        self.spec = _spec(reward.spec, gate.spec, lowest, f"{dim} >= {floor:g}")

    def load(self) -> None:
        """Load both reward models."""
        for model in (self.gate, self.reward):
            if isinstance(model, Loadable):
                model.load()

    def score(self, batch: MediaBatch) -> RewardOutput:
        """Score every sample with the gate, and samples at or above the floor with the reward."""
        failed = self.spec.screen(batch)
        asked = [i for i in range(len(batch)) if i not in failed]
        gate, reward = (
            torch.full((len(batch), len(m.spec.dims)), torch.nan) for m in (self.gate, self.reward)
        )
        if asked:
            output = self.gate.score(batch.take(asked))
            gate[asked] = output.values
            failed |= {asked[i]: why for i, why in output.reasons.items()}
        reward[gate[:, self.column] < self.floor] = self.below
        passed = [i for i in asked if gate[i, self.column] >= self.floor and i not in failed]
        if passed:
            output = self.reward.score(batch.take(passed))
            reward[passed] = output.values
            failed |= {passed[i]: why for i, why in output.reasons.items()}
        return RewardOutput.build(self.spec, torch.cat([gate, reward], 1), failed)


def _spec(reward: RewardSpec, gate: RewardSpec, below: float, rule: str) -> RewardSpec:
    if {reward.modality, gate.modality} == {"image", "video"}:
        raise ValueError(f"{reward.name} scores {reward.modality}s, {gate.name} {gate.modality}s")
    return RewardSpec(
        name=f"{reward.name}_gated",
        dims=(*gate.dims, *reward.dims),
        modality=reward.modality if gate.modality == "any" else gate.modality,
        scale=(
            min(gate.scale[0], reward.scale[0], below),
            max(gate.scale[1], reward.scale[1], below),
        ),
        licence=reward.licence
        if reward.licence == gate.licence
        else f"{reward.licence}; {gate.licence}",
        needs=tuple(sorted({*reward.needs, *gate.needs})),
        normalisation=reward.normalisation,
        version=f"{reward.fingerprint()} where {rule} of {gate.fingerprint()}, else {below:g}",
    )
