"""Stored pairs whose denoising steps are weighted by credit from stored values of their states."""

from math import log
from pathlib import Path

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from flowalign.credit.branch import Branch
from flowalign.credit.chain import Gain, LambdaReturn, NextValue
from flowalign.functional.noise_matching import step_at
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.stored import StoredDataset
from flowalign.training.matching.stored_credit import lead_of_chosen
from flowalign.training.matching.times import SamplerGrid
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import painted, recipe, stored, train
from tests.fixtures.training import new_learner

CHOSEN = [[0.0, 1.0, 1.0, 4.0], [0.0, 0.0, 2.0, 3.0]]
REJECTED = [[0.0, 0.0, 2.0, 2.0], [0.0, 1.0, 1.0, 1.0]]
LEAD = tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 1.0]])
"""Gains of the chosen (1, 0, 3; 0, 2, 1) minus those of the rejected (0, 2, 0; 1, 0, 0), or 0."""
WEIGHT = LEAD / 1.75
"""The mean lead of the four steps with one is 7 / 4."""


def with_values(folder: Path, chosen=CHOSEN, rejected=REJECTED) -> str:
    """Two pairs of colours with the values of four states."""
    return painted(folder, 2, values_chosen=chosen, values_rejected=rejected)


def test_the_lead_is_the_difference_of_credit_where_it_is_positive():
    sigmas = torch.linspace(1, 0, 4)
    assert torch.equal(lead_of_chosen(Gain(), tensor(CHOSEN), tensor(REJECTED), sigmas), LEAD)
    reached = lead_of_chosen(NextValue(), tensor(CHOSEN), tensor(REJECTED), sigmas)
    assert reached.tolist() == [[1.0, 0.0, 2.0], [0.0, 1.0, 2.0]]


def test_pairs_have_the_noise_levels_of_steps_with_a_lead_and_their_weights(tmp_path):
    stream = stored(with_values(tmp_path), new_learner(), credit=Gain(), batch_size=2)
    (batch,) = stream.batches([0])
    order = batch.examples["cond"]["length"][:2, 0].argsort()
    assert_close(batch.steps.weight[order], WEIGHT)
    cfg = recipe(times=SamplerGrid(num_steps=3, distinct=True), times_per_sample=3)
    levels = noise_for(cfg, PixelPolicy(), batch.examples, 0, (0, 0, 0), batch.steps)
    data = levels.all()
    k = step_at(levels.sigma, batch.steps.sigmas)
    found = torch.zeros(2, 3)
    found[levels.index, k] = data["weight"].chunk(2)[0]
    assert_close(found[order], WEIGHT)
    assert torch.equal(*data["weight"].chunk(2))


def test_the_loss_before_the_first_update_is_the_mean_weight_times_log_2(tmp_path):
    """The mean weights of the steps of either pair are 2 / 1.75 and 1.5 / 1.75."""
    cfg = recipe(times=SamplerGrid(num_steps=3, distinct=True), times_per_sample=3)
    learner = new_learner()
    stream = stored(with_values(tmp_path), learner, credit=Gain(), batch_size=1)
    (metrics,) = train(cfg, learner, stream)
    (batch,) = stream.batches([0])
    pair = int(batch.examples["cond"]["length"][0, 0]) - 1
    expected = (2.0, 1.5)[pair] / 1.75
    assert metrics["policy_loss"] == pytest.approx(expected * log(2), rel=1e-4)
    assert metrics["weight"] == pytest.approx(expected)


def test_data_and_methods_that_cannot_carry_credit_are_refused(tmp_path):
    path = with_values(tmp_path)
    for credit, word in (
        (Branch(), "needs samples that share states"),
        (LambdaReturn(decay=0.5), "needs predictions of a critic"),
    ):
        with pytest.raises(ValueError, match=word) as error:
            StoredDataset(path=path, credit=credit)
        assert "does not fit stored pairs" in str(error.value)
        assert len(str(error.value).splitlines()) <= 5
    with pytest.raises(ValueError, match=r"recipe\.data\.credit needs kind: pairs"):
        StoredDataset(path=path, kind="samples", credit=Gain())
    StoredDataset(path=path, credit=Gain()).check_data(PixelPolicy())
    for values in ({"chosen": [[0.0, 1.0], CHOSEN[1]]}, {"rejected": [REJECTED[0], None]}):
        short = StoredDataset(path=with_values(tmp_path, **values), credit=Gain())
        with pytest.raises(ValueError, match="needs the columns values_chosen and") as error:
            short.check_data(PixelPolicy())
        assert len(str(error.value).splitlines()) <= 5
    plain = StoredDataset(path=painted(tmp_path, 2, "plain"), credit=Gain())
    with pytest.raises(ValueError, match="There are 0 and 0 values"):
        plain.check_data(PixelPolicy())


def test_credit_that_never_leads_is_refused(tmp_path):
    path = with_values(tmp_path, REJECTED, REJECTED)
    with pytest.raises(ValueError, match="gives the chosen item of no pair a lead"):
        stored(path, new_learner(), credit=Gain(), batch_size=2)
