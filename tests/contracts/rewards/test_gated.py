"""A reward that counts only where another lets a sample through."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from flowalign.types import MediaBatch
from reward_models import Gated, PickScore, QwenYesNo, TransformersDetector
from reward_models.backbones.reward_bases import choose_device, require_device
from tests.fixtures.rated import Rated
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch


def channel(name, index, **declared) -> Rated:
    """Mean of one channel, and twice as much; none for a sample with a black channel."""

    def rate(batch):
        level = batch.media[:, :, index].mean((1, 2, 3))
        return torch.stack([level, 2 * level], 1).where(level[:, None] > 0, math.nan)

    return Rated(
        rate, name, (name, f"{name}_twice"), f"no {name}", **{"scale": (0.0, 2.0)} | declared
    )


RED, GREEN = channel("red", 0, scale=(-0.5, 2.0)), channel("green", 1, scale=(0.0, 3.0))


def painted(*colours: tuple[float, float]) -> MediaBatch:
    media = torch.tensor([[r, g, 0.5] for r, g in colours])[:, None, :, None, None]
    return MediaBatch(media.repeat(1, 2, 1, 4, 5), [f"p{i}" for i in range(len(colours))])


def test_below_the_floor_the_reward_is_the_lowest_of_its_scale_and_not_asked():
    red = channel("red", 0, scale=(-0.5, 2.0))
    model = Gated(red, GREEN, "green_twice", 0.8)
    batch = painted((0.9, 0.1), (0.3, 0.7), (0.2, 0.4), (0.6, 0.39))
    output = model.score(batch)
    assert model.spec.dims == ("green", "green_twice", "red", "red_twice")
    assert_close(output.values[:, 0], torch.tensor([0.1, 0.7, 0.4, 0.39]))
    wanted = [[-0.5, -0.5], [0.3, 0.6], [0.2, 0.4], [-0.5, -0.5]]
    assert_close(output.values[:, 2:], torch.tensor(wanted))
    assert [list(asked.prompts) for asked in red.asked] == [["p1", "p2"]]
    given = Gated(red, GREEN, "green", 0.5, below=-7.0).score(batch).values[:, 2]
    assert_close(given, torch.tensor([-7, 0.3, -7, -7]))


def test_a_failure_of_either_is_a_failure_and_not_a_closed_gate():
    batch = painted((0.9, 0.0), (0.0, 0.7), (0.0, 0.2), (0.6, 0.8))
    output = Gated(RED, GREEN, "green", 0.5).score(batch)
    assert output.valid.all(1).tolist() == [False, False, True, True]
    assert output.values[:2].isnan().all()
    assert output.reasons == {0: "no green", 1: "no red"}


def test_it_keeps_the_contract_of_rewards():
    batch = example_batch(5, frames=2)
    levels = batch.media[:, :, 1].mean((1, 2, 3)).sort().values.tolist()
    check_contract(Gated(RED, GREEN, "green", (levels[1] + levels[2]) / 2), batch)
    needs = Gated(
        channel("red", 0, needs=("prompt",)),
        channel("g", 1, modality="video", needs=("fps",)),
        "g",
        0.4,
    )
    assert needs.spec.modality == "video"
    assert needs.spec.needs == ("fps", "prompt")
    check_contract(needs, replace(batch, fps=[8.0] * 5))


def test_every_part_enters_the_fingerprint():
    check_fingerprints(
        [
            Gated(RED, GREEN, "green", 0.5),
            Gated(GREEN, RED, "red", 0.5),
            Gated(RED, GREEN, "green_twice", 0.5),
            Gated(RED, GREEN, "green", 0.4),
            Gated(RED, GREEN, "green", 0.5, below=-1.0),
        ]
    )


def test_both_are_loaded():
    reward, gate = channel("red", 0), channel("green", 1)
    Gated(reward, gate, "green", 0.5).load()
    assert (reward.loads, gate.loads) == (1, 1)


def test_what_it_cannot_use_is_refused():
    with pytest.raises(ValueError, match="'blue'; there are green, green_twice"):
        Gated(RED, GREEN, "blue", 0.5)
    endless = channel("endless", 0, scale=(-math.inf, math.inf))
    with pytest.raises(ValueError, match="below of Gated is -inf; it must be finite"):
        Gated(endless, GREEN, "green", 0.5)
    assert Gated(endless, GREEN, "green", 0.5, below=-3.0).spec.scale == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="floor of Gated is nan"):
        Gated(RED, GREEN, "green", math.nan)
    with pytest.raises(ValueError, match="red scores images, green videos"):
        Gated(
            channel("red", 0, modality="image"), channel("green", 1, modality="video"), "green", 0.5
        )


# Devices of reward models -------------------------------------------------------------------------


MODELS = [PickScore, partial(QwenYesNo, "x"), partial(TransformersDetector, "x")]


@pytest.mark.parametrize("device", ["", "gpu", "cuda:", "cuda:one", "meta"])
@pytest.mark.parametrize("model", MODELS)
def test_an_unknown_device_is_refused_with_the_known_ones(model, device):
    with pytest.raises(ValueError, match=f"device is '{device}'; it must be auto, cpu, cuda"):
        model(device=device)


def test_auto_is_the_gpu_if_there_is_one(monkeypatch):
    for found in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert choose_device("auto") == torch.device("cuda" if found else "cpu")


@pytest.mark.parametrize(
    ("device", "count", "fits"), [("cuda", 0, 0), ("cuda:1", 1, 0), ("cuda:1", 2, 1)]
)
def test_a_missing_gpu_is_reported_before_weights_are_read(monkeypatch, device, count, fits):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if fits:
        require_device(choose_device(device))
        return
    with pytest.raises(ValueError, match=f"{device}, but this machine has {count} CUDA GPUs"):
        PickScore(device=device).load()
