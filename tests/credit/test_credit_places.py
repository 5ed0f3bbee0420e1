"""The correlation of maps with true errors on Shapes and Words."""

import importlib
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend("assets/figures")
    return importlib.import_module("credit_places")


def test_correlations_are_within_images_that_have_right_and_wrong_places(script):
    right = torch.tensor([[0.0, 1, 0.5, 1], [1, 1, 0.5, 1], [0.1, 0.2, 1, 0.5]])
    known = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 1], [1, 1, 1, 0]]).bool()
    rows = SimpleNamespace(prompt=torch.tensor([4, 5, 6]))
    bench = SimpleNamespace(right=right, known=known, trajectory=rows)
    values, prompts = script.correlate(torch.tensor([[9.0, 1, 99, 2]] * 3), bench)
    # Ranks 3 1 2 against wrong places 1 0 0, and ranks 2 1 3 against 1 1 0.
    assert prompts.tolist() == [4, 6]
    torch.testing.assert_close(values, torch.tensor([3**0.5 / 2, -(3**0.5) / 2]))


def test_the_interval_contains_the_mean_and_is_a_point_for_equal_values(script):
    values, prompts = torch.tensor([0.2, 0.2, 0.2]), torch.tensor([0, 1, 2])
    assert script.summarise(values, prompts) == [0.2, 0.2, 0.2]
