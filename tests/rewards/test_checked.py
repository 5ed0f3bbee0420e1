"""Errors of a user's reward model end the run with its name or are failures, never numbers."""

import math
import threading
from argparse import Namespace
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowalign.cli.main import MAX_LINES, run_verb
from flowalign.rewards.checked import (
    CheckedReward,
    RewardError,
    RewardFailure,
    check_output,
    check_spec,
    load,
)
from flowalign.rewards.composite import Rewards
from flowalign.types import (
    Loadable,
    MediaBatch,
    RewardModel,
    RewardOutput,
    RewardSpec,
    plain_requests,
)
from flowalign.utils.console import Patience
from tests.fixtures.pixel import Redness, SmoothRedness
from tests.fixtures.training import new_learner, new_recipe, train

SPEC = RewardSpec("warmth", ("warm", "bright"), "any", (0.0, 1.0), "none")
GOOD = RewardOutput.build(SPEC, torch.arange(6.0).view(3, 2))


def changed(value=GOOD, **fields):
    """A copy with fields of any kind: outside tests nothing checks annotations."""
    value = copy(value)
    for name, other in fields.items():
        object.__setattr__(value, name, other)
    return value


class Doing(RewardModel):
    """Reward that returns a given value or raises it."""

    def __init__(self, *results):
        self.spec, self.results = SPEC, list(results)

    def score(self, batch):
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, BaseException):
            raise result
        return result


def batch_of(n=3):
    return MediaBatch(torch.rand(n, 1, 3, 2, 2), ["a"] * n)


WRONG = {
    "None": (None, "returned None instead of a RewardOutput"),
    "a list": ([0.5] * 6, "returned a list instead of a RewardOutput"),
    "a tensor": (torch.zeros(3, 2), r"returned a float32 tensor of shape \(3, 2\) instead of"),
    "a row too few": (GOOD.slice(0, 2), r"values of a float32 tensor of shape \(2, 2\), expected"),
    "a column too few": (changed(values=torch.zeros(3, 1)), r"values of .* shape \(3, 1\)"),
    "values that are a list": (changed(values=[[0.0, 1.0]] * 3), "values of a list"),
    "complex values": (changed(values=torch.zeros(3, 2) * 1j), "values of a complex64"),
    "valid of one dimension": (changed(valid=torch.ones(3).bool()), "valid of a bool"),
    "valid of numbers": (changed(valid=torch.ones(3, 2)), "valid of torch.float32"),
    "uncertainty of another shape": (changed(uncertainty=torch.ones(3)), "uncertainty of a"),
    "reasons of other samples": (changed(reasons={7: "late"}), "reasons {7: 'late'}"),
    "reasons that are a list": (changed(reasons=["late"]), "reasons \\['late'\\]"),
    "extras too few": (changed(extras=[{}]), "1 extras for 3 samples"),
}


@pytest.mark.parametrize(("result", "message"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("policy", ["raise", "drop_sample", "drop_group"])
def test_a_result_of_the_wrong_kind_is_an_error_that_names_the_reward(result, message, policy):
    rewards = Rewards([Doing(result)], {"warm": 1.0}, policy)
    with pytest.raises(RewardError, match=message) as caught:
        rewards.score(batch_of())
    assert str(caught.value).startswith("reward 'warmth' (dimensions warm, bright) returned ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("error", [KeyError("red"), RuntimeError("a\nb"), ValueError()])
def test_an_error_of_a_model_is_named_with_its_place_in_one_line(error):
    with pytest.raises(RewardError) as caught:
        Rewards([Doing(error)], {"warm": 1.0}).score(batch_of())
    message = str(caught.value)
    assert f"(dimensions warm, bright) raised {type(error).__name__}: " in message
    source = Path(__file__).read_text().splitlines()
    line = source.index("            raise result") + 1
    assert message.endswith(f"({__file__}:{line})")
    assert len(message.splitlines()) == 1
    assert caught.value.__cause__ is error


def test_a_single_dimension_is_named_as_one():
    assert "(dimension warm)" in str(RewardError(replace(SPEC, dims=("warm",)), "is late"))


@pytest.mark.parametrize("policy", ["drop_sample", "drop_group"])
def test_where_failures_are_dropped_a_call_that_raised_has_failed(policy):
    rewards = Rewards([Doing(GOOD, IndexError("no face"), GOOD)], {"warm": 1.0}, policy)
    first, second, third = (rewards.score(batch_of()) for _ in range(3))
    assert first.valid.all()
    assert third.valid.all()
    assert not second.valid.any()
    assert second.values.isnan().all()
    assert all("raised IndexError: no face" in second.reasons[i] for i in range(3))


def test_a_model_that_never_answered_is_not_dropped_for_ever():
    with pytest.raises(RewardError, match="IndexError: no face"):
        Rewards([Doing(IndexError("no face"))], {"warm": 1.0}, "drop_sample").score(batch_of())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_failed_whatever_its_model_says(bad):
    values = torch.tensor([[0.0, 1.0], [bad, 2.0], [3.0, 4.0]])
    lie = RewardOutput(values, torch.ones(3, 2).bool(), uncertainty=torch.ones(3, 2))
    rewards = Rewards([Doing(lie)], {"warm": 1.0})
    output = rewards.score(batch_of())
    assert output.valid.tolist() == [[True, True], [False, True], [True, True]]
    assert output.values[1].isnan().tolist() == [True, False]
    assert output.reasons == {1: "warmth returned a non-finite value for warm"}
    with pytest.raises(RewardFailure, match="sample 1: warmth returned a non-finite value"):
        rewards.require(output, lambda i: f"sample {i}")


def test_a_failed_score_is_not_a_number_even_if_its_model_left_one_there():
    valid = torch.tensor([[True, False]] * 3)
    output = check_output(SPEC, changed(valid=valid, reasons={0: "dark"}), 3)
    assert output.values[:, 1].isnan().all()
    assert output.values[:, 0].tolist() == [0.0, 2.0, 4.0]
    assert output.reasons == {0: "dark"}


def test_scores_with_a_graph_are_scores_and_none_is_recorded():
    weight = torch.ones(3, 2, requires_grad=True)
    recorded = []

    class Trainable(Doing):
        def score(self, batch):
            recorded.append((2 * weight).requires_grad)
            return RewardOutput(weight, torch.ones(3, 2).bool())

    output = Rewards([Trainable(None)], {"warm": 1.0}).score(batch_of())
    assert not output.values.requires_grad
    assert output.values.tolist() == [[1.0, 1.0]] * 3
    assert recorded == [False]


def test_a_call_that_takes_long_is_announced_while_it_lasts():
    lines, enough = [], threading.Event()

    def log(text):
        lines.append(text)
        if len(lines) == 3:
            enough.set()

    class Slow(Doing):
        def score(self, batch):
            assert enough.wait(60)
            return GOOD

    model = CheckedReward(Slow(None), log=log)
    model.patience.seconds = 0.01
    assert model.score(batch_of()).valid.all()
    assert lines[:3] == [
        f"waiting for reward 'warmth', {seconds} seconds so far"
        for seconds in ("0.01", "0.02", "0.04")
    ]


def test_waits_are_announced_to_the_log_that_the_rewards_have():
    heard = threading.Event()

    class Slow(Doing):
        def score(self, batch):
            assert len(batch) == 1 or heard.wait(60)
            return GOOD.slice(0, len(batch))

    model = Slow(None)
    rewards = Rewards([model], {"warm": 1.0}, log=lambda text: heard.set())
    rewards.score(batch_of(1))
    heard.clear()
    rewards.workers[id(model)].patience.seconds = 0.01
    assert rewards.score(batch_of()).valid.all()
    assert heard.is_set()


def test_a_short_wait_is_not_announced():
    lines = []
    with Patience("nothing", lines.append, seconds=3600.0):
        pass
    assert lines == []


def test_training_ends_with_exit_code_1_and_one_short_message(capsys):
    class Typo(Doing):
        def score(self, batch):
            return batch.medium

    rewards = Rewards([Typo(None)], {"warm": 1.0})
    training = lambda _: train(new_recipe(), new_learner(), rewards)  # noqa: E731
    assert run_verb(Namespace(verb="train", run=training)) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) <= MAX_LINES
    assert "warmth" in said
    assert "AttributeError: 'MediaBatch' object has no attribute 'medium'" in said


def test_a_model_that_cannot_load_is_named_and_its_own_refusal_kept():
    class Loading(Doing, Loadable):
        def load(self):
            raise self.results[0]

    with pytest.raises(RewardError, match=r"warmth.*could not be loaded: KeyError: 'head'"):
        load(Loading(KeyError("head")))
    for own in (ValueError("weights are missing"), FileNotFoundError("head.safetensors")):
        with pytest.raises(type(own), match=str(own)):
            load(Loading(own))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "Doing has the spec None"),
        ({"name": "warmth"}, "Doing has the spec {'name'"),
        (changed(SPEC, dims="warmth"), "has the dims 'warmth'"),
        (changed(SPEC, dims=()), r"has the dims \(\)"),
    ],
)
def test_a_model_without_a_usable_spec_is_refused(spec, message):
    model = Doing(GOOD)
    model.spec = spec
    with pytest.raises(ValueError, match=message):
        Rewards([model], {})


def test_a_spec_that_was_forgotten_is_refused():
    model = Doing(GOOD)
    del model.spec
    with pytest.raises(ValueError, match="__init__ must set a RewardSpec"):
        check_spec(model)


# Weighted rewards are scored with a gradient to the media; a model that has none says so ----------


def media(requires_grad=True):
    colours = torch.tensor([[0.2, 0.5, 0.9], [0.6, 0.1, 0.3]])[:, None, :, None, None]
    return colours.clone().requires_grad_(requires_grad)


def scored(model, pixels, **weights):
    rewards = Rewards([model], weights or {"redness": 1.0})
    return rewards, rewards.score_with_gradient(rewards.batch(pixels, plain_requests(["a", "bb"])))


def test_values_keep_their_gradient_and_are_counted():
    pixels = media()
    rewards, output = scored(SmoothRedness(), pixels)
    (slope,) = torch.autograd.grad(output.values[:, 0].sum(), pixels)
    assert slope[:, 0, :, 0, 0].tolist() == [[1.0, 0.0, -1.0]] * 2
    assert rewards.costs.reward_calls == 2


def test_a_failed_sample_has_no_value_and_no_gradient():
    pixels = media()
    _, output = scored(SmoothRedness(fail_on="bb"), pixels)
    assert output.valid[:, 0].tolist() == [True, False]
    assert output.values[1].isnan().all()
    (slope,) = torch.autograd.grad(output.values.nan_to_num().sum(), pixels)
    assert slope[0].abs().sum() > 0
    assert not slope[1].any()


class Parametric(Redness):
    """Reward that always keeps its own graph."""

    def score(self, batch):
        with torch.enable_grad():
            scale = torch.ones(1, requires_grad=True)
            return RewardOutput.build(self.spec, scale * super().score(batch).values)


def test_media_without_a_gradient_get_values_without_one():
    assert not scored(SmoothRedness(), media(False))[1].values.requires_grad
    assert not scored(Parametric(), media(False))[1].values.requires_grad


def test_a_model_that_raises_is_named():
    class Refusing(Redness):
        def score(self, batch):
            self.spec.screen(batch)
            return super().score(batch)

    with pytest.raises(RewardFailure, match="has no gradient; its media must not require one"):
        scored(Refusing(), media())


def test_weighted_keeps_the_models_that_have_a_weight():
    watched = SmoothRedness()
    watched.spec = type(watched.spec)("watched", ("truth",), "image", (0.0, 1.0), "Apache-2.0")
    rewards = Rewards([watched, SmoothRedness()], {"green": 0.5, "truth": 0.0}, "drop_sample")
    kept = rewards.weighted()
    assert kept.dims == ("redness", "green")
    assert kept.weights.tolist() == [0.0, 0.5]
    assert kept.on_failure == "drop_sample"
    assert kept.costs is rewards.costs
