"""The likelihood of a text, and the torch version of the recognizer's network."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save

from flowalign.types import MediaBatch
from reward_models.detection.ocr import RapidOCRLine
from reward_models.detection.text_likelihood import OnnxNetwork, TextLikelihood, log_likelihood
from reward_models.verifiers.words import Label, draw
from tests.fixtures.reward_contract import check_scores

SUN = Label("SUN", "red", "yellow", "serif")
RUN = replace(SUN, word="RUN")


@pytest.fixture(scope="module")
def model():
    model = TextLikelihood()
    model.load()
    return model


@pytest.fixture(scope="module")
def image():
    return torch.from_numpy(draw(SUN, 6, 8))[None, None]


def test_ctc_sums_the_paths_of_a_target():
    # Three columns of blank and one letter with probability 0.5: six of the eight paths read "a".
    half = torch.full((2, 3, 2), 0.5).log()
    values = log_likelihood(half, [[1], [1, 1]])
    assert values[0].item() == pytest.approx(math.log(6 / 8))
    # "aa" needs a blank between the letters, so it is one path of eight.
    assert values[1].item() == pytest.approx(math.log(1 / 8) / 2)
    assert log_likelihood(half[:1], [[1, 1, 1]]).item() == -math.inf


def test_the_network_gives_the_probabilities_of_onnxruntime(model, image):
    reader = RapidOCRLine()
    reader.load()
    x = np.random.default_rng(0).uniform(-1, 1, (1, 3, 48, 64)).astype(np.float32)
    expected = torch.from_numpy(reader._recognizer.session(x)[0])
    torch.testing.assert_close(model._network(torch.from_numpy(x)), expected, atol=1e-5, rtol=1e-3)


def test_the_likelihood_prefers_the_shown_word_and_has_a_gradient(model, image):
    image = image.clone().requires_grad_()
    output = model.score(MediaBatch(image.repeat(2, 1, 1, 1, 1), [SUN.prompt, RUN.prompt]))
    right, wrong = output.values[:, 0]
    assert right > -0.1
    assert wrong < right - 1
    (gradient,) = torch.autograd.grad(wrong, image)
    better = image + 0.02 * gradient / gradient.abs().max()
    assert model.score(MediaBatch(better.detach(), [RUN.prompt])).values > wrong


def test_a_character_that_the_network_does_not_know_is_a_failure(model, image):
    output = model.score(MediaBatch(image, ['the word "\u16a0"']))
    assert not output.valid.any()
    assert "cannot read" in output.reasons[0]


def test_the_likelihood_keeps_the_contract_of_rewards(model, image):
    words = [SUN, RUN, replace(SUN, word="SUM")]
    batch = MediaBatch(image.repeat(3, 1, 1, 1, 1), [word.prompt for word in words])
    check_scores(model, batch, 1e-3)


def test_an_operator_without_a_torch_function_is_refused_by_name(tmp_path):
    value = numpy_helper.from_array(np.ones(1, np.float32), "one")
    some = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in "xy"]
    node = helper.make_node("Mod", ["x", "one"], ["y"])
    save(
        helper.make_model(helper.make_graph([node], "g", some[:1], some[1:], [value])),
        tmp_path / "m",
    )
    with pytest.raises(ValueError, match="'Mod'"):
        OnnxNetwork(tmp_path / "m")
