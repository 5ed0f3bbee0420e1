"""What every reward model promises, as checks that any reward's test may call.

`check_contract(model, batch)` runs all of them but `check_fingerprints`. A batch needs at least
three samples that the model scores differently; `example_batch` makes one.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flowalign.types import MediaBatch, RewardModel, RewardOutput

PROMPTS = ("a photo of a cat", "two dogs in the snow", "an old red car", "rain over a city", "tea")


def example_batch(
    num_samples: int = 4, frames: int = 1, height: int = 40, width: int = 56, seed: int = 7
) -> MediaBatch:
    """Smooth pictures away from 0 and 1, not square, no two alike, each with its own prompt."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(num_samples * frames, 3, 5, 7, generator=generator)
    fine = torch.rand(num_samples * frames, 3, height, width, generator=generator)
    smooth = F.interpolate(coarse, (height, width), mode="bilinear")
    media = (0.1 + 0.7 * smooth + 0.1 * fine).unflatten(0, (num_samples, frames))
    prompts = [
        f"{PROMPTS[i % len(PROMPTS)]}{' again' * (i // len(PROMPTS))}" for i in range(len(media))
    ]
    return MediaBatch(media, prompts)


def check_contract(
    model: RewardModel,
    batch: MediaBatch,
    atol: float = 1e-5,
    rtol_gradient: float = 0.05,
    levels: float = 2.0,
) -> None:
    """All promises that one model and one batch can show."""
    check_spec(model, batch)
    check_rows_are_independent(model, batch, atol)
    check_order(model, batch, atol)
    check_failures(model, batch, atol)
    check_gradient(model, batch, rtol_gradient, levels)


def check_spec(model: RewardModel, batch: MediaBatch) -> None:
    """Names, licence and scale are there, and the scores lie within the scale."""
    spec = model.spec
    assert spec.name
    assert spec.licence
    assert spec.dims
    assert len(set(spec.dims)) == len(spec.dims)
    assert all(dim == dim.strip() != "" for dim in spec.dims)
    low, high = spec.scale
    assert low < high
    values = _good(model.score(batch))
    assert values.shape == (len(batch), len(spec.dims))
    assert values.dtype == torch.float32
    assert not values.requires_grad
    assert (values >= low - 1e-5).all()
    assert (values <= high + 1e-5).all()


def check_rows_are_independent(model: RewardModel, batch: MediaBatch, atol: float = 1e-5) -> None:
    """A sample scored alone gets what it gets in a batch; and samples get different scores."""
    together = _good(model.score(batch))
    assert len(together.unique(dim=0)) > 1, "the batch tells nothing: all rows have one score"
    alone = torch.cat([_good(model.score(batch.take([i]))) for i in range(len(batch))])
    torch.testing.assert_close(alone, together, atol=atol, rtol=1e-5)


def check_order(model: RewardModel, batch: MediaBatch, atol: float = 1e-5) -> None:
    """Samples in another order, one of them twice, get the same scores in that order."""
    order = [*range(1, len(batch)), 0, 1]
    expected = _good(model.score(batch))[order]
    torch.testing.assert_close(
        _good(model.score(batch.take(order))), expected, atol=atol, rtol=1e-5
    )


def check_failures(model: RewardModel, batch: MediaBatch, atol: float = 1e-5) -> None:
    """What cannot be scored is NaN with a reason, and leaves the other rows alone."""
    clean = _good(model.score(batch))
    media, prompts = batch.media.clone(), list(batch.prompts)
    media[0, 0, 1, 2, 3] = torch.nan
    bad = {0}
    if "prompt" in model.spec.needs:
        prompts[1] = ""
        bad.add(1)
    output = model.score(replace(batch, media=media, prompts=prompts))
    _check_failed(output, bad)
    good = [i for i in range(len(batch)) if i not in bad]
    torch.testing.assert_close(output.values[good], clean[good], atol=atol, rtol=1e-5)
    _check_failed(model.score(replace(batch, media=batch.media[:, :0])), set(range(len(batch))))
    _check_modality(model, batch)
    for need in {"fps", "references", "groups"} & set(model.spec.needs):
        with pytest.raises(ValueError, match=need):
            model.score(replace(batch, **{need: ()}))


def check_gradient(
    model: RewardModel, batch: MediaBatch, rtol: float = 0.05, levels: float = 2.0
) -> None:
    """Media that require a gradient are refused, or get the right one, each from its own row.

    Finite differences of a few 8-bit levels along the gradient's sign: there, what quantised
    preprocessing rounds off cancels over the pixels (of a batch that is not itself rounded). Where
    a tiny network is far from linear on that scale, ask for fewer levels.
    """
    media = batch.media.clone().requires_grad_()
    asking = replace(batch, media=media)
    if not model.spec.differentiable:
        with pytest.raises(ValueError, match="gradient"):
            model.score(asking)
        return
    values = _good(model.score(asking), detach=False)
    torch.testing.assert_close(values.detach(), _good(model.score(batch)), atol=1e-5, rtol=1e-5)
    for dim, name in enumerate(model.spec.dims):
        (gradient,) = torch.autograd.grad(values[:, dim].sum(), media, retain_graph=True)
        assert gradient.isfinite().all()
        assert (gradient.flatten(1).abs().sum(1) > 0).all(), f"{name} has a zero gradient"
        step = levels / 255 * gradient.sign()
        up = _good(model.score(replace(batch, media=batch.media + step)))[:, dim]
        down = _good(model.score(replace(batch, media=batch.media - step)))[:, dim]
        expected = 2 * (gradient * step).flatten(1).sum(1)
        torch.testing.assert_close(up - down, expected, rtol=rtol, atol=1e-6)
    (first,) = torch.autograd.grad(values[0].sum(), media)
    assert (first[1:] == 0).all(), "a row's score depends on another row's pixels"


def check_fingerprints(models: Sequence[RewardModel]) -> None:
    """Models whose weights or settings differ have different fingerprints."""
    prints = [model.spec.fingerprint() for model in models]
    assert len(set(prints)) == len(prints), f"fingerprints repeat: {prints}"


def _check_modality(model: RewardModel, batch: MediaBatch) -> None:
    if model.spec.modality == "image":
        with pytest.raises(ValueError, match="image"):
            model.score(replace(batch, media=batch.media.repeat(1, 2, 1, 1, 1)))
    if model.spec.modality == "video":
        _check_failed(model.score(replace(batch, media=batch.media[:, :1])), set(range(len(batch))))


def _check_failed(output: RewardOutput, bad: set[int]) -> None:
    for i in range(len(output.values)):
        assert output.valid[i].all() == (i not in bad)
        assert output.values[i].isnan().all() == (i in bad)
    assert set(output.reasons) == bad
    assert all(reason.strip() for reason in output.reasons.values())


def _good(output: RewardOutput, detach: bool = True) -> Tensor:
    assert output.valid.all(), f"rows that should be scored failed: {output.reasons}"
    return output.values.detach() if detach and not output.values.requires_grad else output.values
