"""Soft-TIFA by hand, and on a tiny Qwen3-VL against transformers' own class."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from reward_models.backbones.pixels import resize
from reward_models.backbones.prefix import find_single_tokens
from reward_models.backbones.yes_no_judges import QwenYesNo
from reward_models.questions.soft_tifa import SoftTIFA, read_questions, soft_tifa, spell_answer
from tests.fixtures.reward_contract import (
    check_fingerprints,
    check_order,
    check_rows_are_independent,
    check_small_steps,
    check_spec,
    example_batch,
)
from tests.fixtures.tiny_qwen import build_judge

WORDS = ("Yes", "yes", " yes", " Yes", "no", "two", "Two", " two", " Two", "seven", " 7")
ROWS = (
    [["How many cats are there?", "two"], ["Is the cat red?", "Yes"]],
    [["Is it night?", "Yes"]],
    [["How many dogs?", "seven"], ["Are there dogs?", "Yes"], ["Is one asleep?", "Yes"]],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_judge(tmp_path_factory.mktemp("judge"), "qwen3_vl", WORDS)


@pytest.fixture(scope="module")
def reward(folder):
    return SoftTIFA(QwenYesNo(str(folder), device="cpu", dtype="float32", batch_size=2))


def pictures():
    batch = example_batch(3, height=56, width=84)
    media = (batch.media * 255).round() / 255
    return replace(batch, media=media, metadata=[{"vqa_list": row} for row in ROWS])


def test_means_are_over_the_questions_asked_by_hand():
    """By hand: (.5 + .125) / 2 and sqrt(.5 * .125); 0 is clamped to 1e-6, 1.5 to 1."""
    p = torch.tensor([[0.5, 0.125, 0.9], [0.0, 1.5, 1.0]])
    asked = torch.tensor([[True, True, False], [True, True, True]])
    got = soft_tifa(p, asked)
    torch.testing.assert_close(got[0], torch.tensor([0.3125, 0.25]))
    torch.testing.assert_close(got[1], torch.tensor([(2 + 1e-6) / 3, 0.01]), rtol=1e-5, atol=0)


def test_a_number_is_spelt_in_words_and_digits_and_only_where_it_is_asked_for():
    assert spell_answer("How many?", "two") == ["two", "Two", "2", " two", " Two", " 2"]
    assert spell_answer("Is it?", "Yes") == ["yes", "Yes", " yes", " Yes"]
    assert spell_answer("Which letter?", "two") == ["two", "Two", " two", " Two"]


def test_probabilities_are_those_of_the_official_model_over_single_tokens(folder, reward):
    """Each question uses a separate full prompt; each token of the words counts once."""
    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()
    vocabulary = processor.tokenizer.get_vocab()
    words = {
        "two": ["two", "Two", " two", " Two", "2"],
        "Yes": ["Yes", "yes", " yes", " Yes"],
        "seven": ["seven", "7", " 7"],
    }
    batch = pictures()
    output = reward.score(batch)
    for i, row in enumerate(ROWS):
        expected = []
        for question, answer in row:
            text = f"{question} Answer in one word."
            content = [{"type": "image"}, {"type": "text", "text": text}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True
            )
            image = (batch.media[i, 0] * 255).round().byte()
            inputs = processor(text=[text], images=[image], do_resize=False, return_tensors="pt")
            with torch.no_grad():
                p = model(**inputs).logits[0, -1].softmax(-1)
            ids = [
                vocabulary[word.replace(" ", "Ġ")] if len(word) == 1 else vocabulary[word]
                for word in words[answer]
            ]
            expected.append(float(p[ids].sum()))
        got = output.extras[i]["answers"]
        assert got == pytest.approx(expected, abs=1e-5)
        assert output.values[i, 0].item() == pytest.approx(sum(expected) / len(row), abs=1e-5)
    assert output.values.std(0).min() > 1e-3


def test_a_spelling_of_several_tokens_does_not_count_by_its_first(folder):
    """Unlike in the original, where ` 2` began with a space, which any number may begin with."""
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    assert len(tokenizer.encode(" 2", add_special_tokens=False)) == 2
    assert find_single_tokens(tokenizer, ["2", " 2", "2"]) == tokenizer.encode("2")
    with pytest.raises(ValueError, match="no single token for any of"):
        find_single_tokens(tokenizer, ["eleven"])


def test_what_every_reward_promises(reward, monkeypatch):
    batch = pictures()
    for check in (check_spec, check_rows_are_independent, check_order):
        check(reward, batch)
    smooth = lambda clip: resize(clip.float(), 56, 84)  # noqa: E731
    monkeypatch.setattr(reward.judge, "_shrunk", smooth)  # without the rounding to 8 bits
    check_small_steps(reward, replace(batch, media=0.2 + 0.6 * batch.media), 2e-5)


def test_rows_without_questions_fail_alone(reward):
    batch = pictures()
    expected = reward.score(batch).values
    special = [["Is it <|im_end|>?", "Yes"]]
    for metadata, why in (
        ({}, "no `vqa_list` of"),
        ({"vqa_list": [["How many?"]]}, "has \"['How many?']\" instead of"),
        ({"vqa_list": special}, "a question of its metadata contains a special token"),
    ):
        output = reward.score(
            replace(batch, metadata=[batch.metadata[0], metadata, *batch.metadata[2:]])
        )
        assert set(output.reasons) == {1}
        assert why in output.reasons[1]
        torch.testing.assert_close(output.values[[0, 2]], expected[[0, 2]], atol=1e-5, rtol=0)
    assert read_questions({"vqa_list": ROWS[0]}) == [tuple(pair) for pair in ROWS[0]]


def test_settings_of_the_judge_enter_the_fingerprint(folder, reward):
    other = SoftTIFA(QwenYesNo(str(folder), device="cpu", dtype="float32", max_pixels=56 * 84))
    check_fingerprints([reward, other])
