"""Target-DPO: an expert, told good and bad attributes, says what rows are matched to."""

import json

import pytest
import torch
from PIL import Image

from flowalign.data.preference.dataset import PreferenceDataset
from flowalign.functional.noise_matching import add_noise
from flowalign.losses.matching.pairs import DPO
from flowalign.training.matching import StoredDataset, Teacher
from flowalign.training.matching.matching_loop import MatchingLoop
from flowalign.training.matching.matching_settings import MatchingSettings
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.residuals import matching_residuals, select_fields
from flowalign.training.matching.source import StreamContext
from flowalign.training.matching.states import ForwardNoise
from flowalign.types import Request
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.training import checked, new_learner, new_rewards


@pytest.fixture
def dataset(tmp_path):
    """Two media with attributes, one without."""
    rows = []
    for i, colour in enumerate([(250, 9, 40), (30, 200, 90), (5, 60, 220)]):
        Image.new("RGB", (4, 4), colour).save(tmp_path / f"{i}.png")
        rows.append({"prompt": "a" * (i + 1), "image": f"{i}.png"})
    rows[0] |= {"positive": "sharp", "negative": "blurred, grey"}
    rows[1] |= {"positive": "bright colours", "negative": "dark"}
    file = tmp_path / "attributes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def expert(tmp_path):
    """Weights that answer to the length of prompts."""
    other = PixelPolicy(seed=5)
    torch.nn.init.normal_(other.denoiser[-1].weight, generator=torch.Generator().manual_seed(1))
    folder = tmp_path / "expert"
    folder.mkdir()
    other.save_weights(str(folder))
    return other, Teacher(path=str(folder))


def opened(dataset, expert):
    """A learner with the expert, and the stream of examples."""
    learner = new_learner()
    cfg = StoredDataset(
        path=str(dataset), kind="attributes", batch_size=2, max_dropped_fraction=0.5
    )
    stream = cfg.open(learner, StreamContext(new_rewards(), 0))
    learner.fields["expert"] = expert[1].field(learner)
    return learner, stream


def test_a_row_without_attributes_is_dropped_and_named(dataset):
    pairs, tally = PreferenceDataset(path=str(dataset), kind="attributes").read()
    assert [pair.targets for pair in pairs] == [
        ("a, sharp", "a, blurred, grey"),
        ("aa, bright colours", "aa, dark"),
    ]
    assert tally.dropped == {"missing texts positive and negative": 1}
    assert tally.examples == {"missing texts positive and negative": ["attributes.jsonl row 3"]}


def test_the_expert_learns_from_captions_that_name_all_attributes(dataset):
    samples, tally = PreferenceDataset(path=str(dataset), kind="captions").read()
    captions = [sample.request.policy_prompt for sample in samples]
    assert [sample.request.key for sample in samples] == [Request(p).key for p in ("a", "aa")]
    assert captions == ["a, sharp, blurred, grey", "aa, bright colours, dark"]
    assert tally.dropped == {"missing texts positive and negative": 1}
    cfg = StoredDataset(path=str(dataset), kind="captions", batch_size=2, max_dropped_fraction=0.5)
    assert not cfg.paired
    (batch,) = cfg.open(new_learner(), StreamContext(new_rewards(), 0)).batches([0])
    lengths = sorted(batch.examples["cond"]["length"][:, 0].tolist())
    assert lengths == sorted(float(len(caption)) for caption in captions)


def test_winner_and_loser_share_the_medium_and_miss_what_the_expert_says_of_each(dataset, expert):
    learner, stream = opened(dataset, expert)
    cfg = MatchingSettings(loss=DPO(beta=100.0), teachers={"expert": expert[1]})
    (batch,) = stream.batches([0])
    data = noise_for(cfg, learner.policy, batch.examples, 0, (0, 0)).all()
    latents = data["latents"]
    assert torch.equal(latents[:2], latents[2:])
    states = ForwardNoise().build(data, learner.policy, None)
    errors = matching_residuals(cfg, learner.policy, states, select_fields(cfg, learner))
    noise, sigma = data["noise"], data["sigma"]
    x, cond = add_noise(latents, noise, sigma), data["target_cond"]
    assert not torch.equal(cond["length"][:2], cond["length"][2:])
    expected = learner.policy.velocity(x, sigma, data["cond"])
    expected = expected - expert[0].velocity(x, sigma, cond)
    assert torch.allclose(errors["policy"], expected, atol=1e-6)


def test_the_policy_moves_towards_the_good_and_away_from_the_bad(dataset, expert):
    learner, stream = opened(dataset, expert)
    cfg = MatchingSettings(
        loss=DPO(beta=50.0), displacement_patience=0, teachers={"expert": expert[1]}
    )
    loop = MatchingLoop(cfg, learner, stream, 0)
    rows = list(checked(2, loop.run(range(60))))
    assert rows[0]["policy_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert rows[-1]["policy_loss"] < 0.5 < rows[-1]["implicit_accuracy"]
