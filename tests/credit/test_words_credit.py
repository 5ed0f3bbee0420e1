"""The ground truth of the credit benchmark on Words."""

import importlib
from types import ModuleType

import pytest
import torch

from flowalign.functional.agreement import spearman


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend("assets/figures")
    return importlib.import_module("words_credit")


@pytest.mark.parametrize(
    ("shown", "right"),
    [
        ("SUN", [True, True, True]),
        ("UN", [False, True, True]),
        ("SVN", [True, False, True]),
        ("SSUN", [True, True, True]),
        ("SN", [True, False, True]),
        ("", [False, False, False]),
    ],
)
def test_letters_are_right_if_the_word_contains_them_in_order(script, shown, right):
    assert script.match_letters("SUN", shown) == right


def test_the_true_credit_of_a_sample_sums_to_its_change_of_value(script):
    values = torch.rand(9, 5, 4, generator=torch.Generator().manual_seed(0))
    change = values[-1].mean(1) - values[0].mean(1)
    torch.testing.assert_close(script.true_credit(values).sum(1), change)


def test_the_variance_of_steps_excludes_the_noise_of_completions(script):
    drawn = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.0, 0.5, 2.0])
    steps = torch.randn(3, 40_000, generator=drawn) * scale[:, None]
    value = torch.cat([torch.zeros(1, 40_000), steps.cumsum(0)])
    values = value[..., None] + torch.randn(4, 40_000, 2, generator=drawn)
    torch.testing.assert_close(script.variance_of_steps(values), scale**2, atol=0.08, rtol=0)
    assert script.true_credit(values)[:, 0].square().mean() > 0.9


def test_the_ceiling_is_the_correlation_of_the_noiseless_credit(script):
    drawn = torch.Generator().manual_seed(0)
    truth = torch.randn(20_000, generator=drawn)
    halves = truth + torch.randn(2, 20_000, generator=drawn)
    expected = spearman(truth, halves.mean(0))
    assert script.reliability(*halves) == pytest.approx(expected, abs=0.02)


def test_credit_is_centred_in_its_group_unless_the_method_normalises_it(script):
    value, group = torch.tensor([[1.0, 5.0], [3.0, 7.0]]), torch.tensor([[0, 1], [0, 1]])
    mask = torch.tensor([[True, False], [True, False]])
    centred = script.centred_credit(value, group, mask, False)
    assert centred.tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert script.centred_credit(value, group, mask, True).tolist() == [[1.0, 0.0], [3.0, 0.0]]
