"""Checklists: the released scores, conditions, dimensions, and fitted weights."""

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowalign.types import MediaBatch, RewardModel, RewardOutput, RewardSpec
from reward_models.questions.checklist import Checklist, vision_reward_image, vision_reward_video
from reward_models.questions.question_set import (
    Item,
    QuestionSet,
    fit_question_set,
    fit_weights,
    pair_accuracy,
    read_question_set,
)
from reward_models.questions.vqa_score import QUESTION
from tests.fixtures.fake_judge import FakeJudge
from tests.fixtures.golden import GOLDEN, load
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch

CASES = json.loads((GOLDEN / "H_visionreward.json").read_text())["values"]
PROMPT = "a red cat"
VIDEO = replace(example_batch(4, frames=3), fps=(8.0,) * 4)


class Fixed(RewardModel):
    """An alignment reward that always gives the same."""

    def __init__(self, value: float, dims: tuple[str, ...] = ("fit",)):
        self.value = value
        self.spec = RewardSpec("fixed", dims, "any", (-1.0, 1.0), "none")

    def score(self, batch: MediaBatch) -> RewardOutput:
        values = torch.full((len(batch), len(self.spec.dims)), self.value)
        return RewardOutput.build(self.spec, values)


def one(frames: int = 1) -> MediaBatch:
    return replace(VIDEO.take([0]), media=VIDEO.media[:1, :frames], prompts=[PROMPT])


def small_question_set(**changes) -> QuestionSet:
    """Two aspects; one item counts only where there is a face."""
    items = [
        Item("sharp?", 0.5, "look"),
        Item("smiles?", 2.0, "people", given="face"),
        Item("bright?", 0.25, "look"),
    ]
    given = {"items": items, "conditions": {"face": "face?"}, "intercept": 0.125}
    return QuestionSet(
        "small", "image", **{"reduction": "sum", "licence": "none"} | given | changes
    )


def written(question_set: QuestionSet, tmp_path) -> str:
    (tmp_path / "question_set.json").write_text(question_set.text())
    return str(tmp_path / "question_set.json")


@pytest.mark.parametrize("case", CASES["image_cases"])
def test_images_get_the_released_score(case):
    questions = read_question_set("vision_reward_image").questions
    said = [float(answer == "yes<|end_of_text|>") for answer in case["answers"]]
    judge = FakeJudge(dict(zip(questions, said, strict=True)))
    output = vision_reward_image(judge, Fixed(case["alignment"])).score(one())
    torch.testing.assert_close(output.values[0, 0].item(), case["score"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES["video_cases"])
def test_videos_get_the_released_score(case):
    questions = [
        q.replace("[[prompt]]", PROMPT) for q in read_question_set("vision_reward_video").questions
    ]
    said = [float(answer == "yes") for answer in case["answers"]]
    judge = FakeJudge(dict(zip(questions, said, strict=True)))
    output = vision_reward_video(judge).score(one(frames=2))
    torch.testing.assert_close(output.values[0, 0].item(), case["score"], rtol=1e-6, atol=0)


def test_the_released_lists_have_the_recorded_weights():
    image, video = (
        read_question_set("vision_reward_image"),
        read_question_set("vision_reward_video"),
    )
    golden = load("H_visionreward")
    assert [image.alignment, *(i.weight for i in image.items)] == golden["image_coef"].tolist()
    assert [i.weight for i in video.items] == golden["video_weights"].tolist()
    assert len(image.questions) == len(set(image.questions)) == CASES["n_image_questions"]
    assert len(video.questions) == len(set(video.questions)) == CASES["n_video_questions"]
    names = list(image.conditions)
    for k, rows in CASES["mask_feature_map"].items():
        masked = [i for i, item in enumerate(image.items) if item.given == names[int(k)]]
        assert masked == [row - 3 for row in rows]


def test_hard_and_soft_scores_by_hand(tmp_path):
    path = written(small_question_set(), tmp_path)
    judge = FakeJudge({"face?": 0.75, "sharp?": 0.25, "smiles?": 1.0, "bright?": 0.75})
    hard, soft = (Checklist(judge, path, how).score(one()).values[0] for how in ("hard", "soft"))
    assert Checklist(judge, path).spec.dims == ("overall", "look", "people")
    assert hard.tolist() == [0.125 - 0.5 + 2 + 0.25, -0.25, 2.0]
    assert soft.tolist() == [0.125 - 0.125 + 1.5, -0.25 + 0.125, 1.5]


def test_items_whose_condition_is_not_met_are_worth_nothing(tmp_path):
    path = written(small_question_set(), tmp_path)
    for smiles in (0.0, 1.0, torch.nan):
        judge = FakeJudge({"face?": 0.25, "sharp?": 1.0, "smiles?": smiles, "bright?": 1.0})
        assert Checklist(judge, path).score(one()).values[0].tolist() == [0.875, 0.75, 0.0]


def test_an_unanswered_question_that_counts_makes_the_sample_invalid(tmp_path):
    path = written(small_question_set(), tmp_path)
    for silent in ("face?", "sharp?"):
        output = Checklist(FakeJudge({silent: torch.nan}), path).score(one())
        assert not output.valid.any()
        assert silent in output.reasons[0]


def test_dimensions_add_up_to_the_overall_score_and_answers_are_reported():
    model = vision_reward_image(FakeJudge(), "judge", "soft")
    output = model.score(example_batch())
    values = output.values
    torch.testing.assert_close(values[:, 0], values[:, 1:].sum(1))
    assert model.spec.dims[:3] == ("overall", "alignment", "composition")
    said = output.extras[1]["yes"]
    assert len(said) == 31
    assert 0 < said["Is the image not empty?"] < 1


def test_alignment_comes_from_the_judge_a_model_or_is_left_out():
    judge = FakeJudge({QUESTION.replace("[[prompt]]", PROMPT): 0.25})
    image = read_question_set("vision_reward_image")
    by_judge, by_model, without = (
        vision_reward_image(judge, how).score(one()).values[0, 0].item()
        for how in ("judge", Fixed(0.25), "omit")
    )
    assert by_judge == pytest.approx(by_model)
    assert by_judge == pytest.approx(without + 0.25 * image.alignment)
    assert QUESTION.replace("[[prompt]]", PROMPT) in judge.asked[0]
    assert "alignment" not in vision_reward_image(judge, "omit").spec.dims
    assert "without alignment" in vision_reward_image(judge, "omit").spec.normalisation


def test_alignment_must_be_said_where_it_is_weighed_and_only_there():
    with pytest.raises(ValueError, match="alignment"):
        Checklist(FakeJudge(), "vision_reward_image")
    with pytest.raises(ValueError, match="alignment"):
        Checklist(FakeJudge(), "vision_reward_video", alignment="judge")
    with pytest.raises(ValueError, match="one dimension"):
        vision_reward_image(FakeJudge(), Fixed(0.0, ("a", "b")))


def test_a_failed_alignment_makes_the_sample_invalid():
    output = vision_reward_image(FakeJudge(), Fixed(torch.nan)).score(one())
    assert not output.valid.any()
    assert "fixed" in output.reasons[0]


def test_prompts_enter_their_questions_and_answers_are_reported_by_template():
    judge = FakeJudge()
    output = vision_reward_video(judge).score(one(frames=2))
    assert f'stated in the text "{PROMPT}"?' in judge.asked[0][0]
    assert any("[[prompt]]" in question for question in output.extras[0]["yes"])


@pytest.mark.parametrize(
    "model",
    [
        vision_reward_image(FakeJudge(), "judge"),
        vision_reward_image(FakeJudge(), "omit", "soft"),
        vision_reward_image(FakeJudge(), Fixed(0.5), "soft"),
    ],
    ids=["judge", "omit", "model"],
)
def test_image_checklists_keep_the_contract(model):
    check_contract(model, example_batch())


def test_video_checklists_keep_the_contract():
    judge = FakeJudge()
    judge.video_needs = ("fps",)
    check_contract(vision_reward_video(judge, "soft"), VIDEO)


def test_models_with_other_questions_judges_or_answers_have_other_fingerprints(tmp_path):
    path = written(small_question_set(), tmp_path)
    models = [
        Checklist(FakeJudge(), path),
        Checklist(FakeJudge(), path, "soft"),
        Checklist(FakeJudge({"face?": 1.0}), path),
        vision_reward_image(FakeJudge(), "judge"),
        vision_reward_image(FakeJudge(), "omit"),
        vision_reward_image(FakeJudge(), Fixed(0.0)),
    ]
    models.append(Checklist(FakeJudge(), written(small_question_set(intercept=1.0), tmp_path)))
    check_fingerprints(models)


@pytest.mark.parametrize(
    "changes",
    [
        {"items": [Item("a?", -0.1, "x")]},
        {"items": []},
        {"items": [Item("a?", 1.0, "x", "wings")]},
        {"alignment": 1.0, "items": [Item("a?", 1.0, "alignment")]},
    ],
)
def test_lists_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match="small"):
        small_question_set(**changes)


@pytest.mark.parametrize("content", ["{", "[]", '{"items": [{"question": "a?"}]}', "{}"])
def test_files_that_are_no_question_set_are_refused(tmp_path, content):
    (tmp_path / "question_set.json").write_text(content)
    with pytest.raises(ValueError, match=r"question_set\.json is not a checklist"):
        read_question_set(str(tmp_path / "question_set.json"))


def simulated(num: int = 1795, items: int = 29) -> tuple[Tensor, Tensor, Tensor]:
    """Differences of the answers to pairs, who was preferred, and the weights behind it."""
    generator = torch.Generator().manual_seed(11)
    weights = torch.linspace(0.02, 1.2, items)[torch.randperm(items, generator=generator)]
    rate = torch.rand(items, generator=generator) * 0.6 + 0.2
    first, second = (
        (torch.rand(num, items, generator=generator) < rate).float() * 2 - 1 for _ in range(2)
    )
    p = ((first - second) / 2 @ weights * 0.5).sigmoid()
    return first - second, torch.bernoulli(p, generator=generator), weights


def test_fitted_weights_recover_order_and_accuracy_and_are_never_negative():
    lead, preferred, planted = simulated()
    fitted = fit_weights(lead, preferred).float()
    assert (fitted >= 0).all()
    ranks = torch.stack([w.argsort().argsort().float() for w in (fitted, planted)])
    assert torch.corrcoef(ranks)[0, 1] > 0.85
    question_set = read_question_set("vision_reward_video")
    _, figures = fit_question_set(question_set, lead, preferred)
    assert (figures["train pairs"], figures["held-out pairs"]) == (1436, 359)
    held = pair_accuracy(planted, lead, preferred)
    assert figures["held-out accuracy"] > held - 0.04
    assert figures["train accuracy"] > held - 0.01


def test_items_are_dimensions_that_weights_are_fitted_to(tmp_path):
    path = written(small_question_set(alignment=1.5), tmp_path)
    judge = FakeJudge({"face?": 1.0, "smiles?": 0.9, "sharp?": 0.2, "bright?": 0.7})
    plain = Checklist(judge, path, alignment=Fixed(0.5))
    model = Checklist(judge, path, alignment=Fixed(0.5), items=True)
    assert model.fitted_dims == ["item_alignment", "item_00", "item_01", "item_02"]
    values = model.score(one()).values[0]
    torch.testing.assert_close(values[:-4], plain.score(one()).values[0])
    assert values[-4:].tolist() == [0.5, -1.0, 1.0, 1.0]
    assert model.spec.scale[0] <= -1.0
    check_fingerprints([plain, model])
    with pytest.raises(ValueError, match="set items: true"):
        _ = plain.fitted_dims
    with pytest.raises(ValueError, match="alignment other than omit"):
        _ = Checklist(judge, path, alignment="omit", items=True).fitted_dims


def newton(x: Tensor, y: Tensor) -> Tensor:
    """Logistic regression without bounds."""
    w = torch.zeros(x.shape[1], dtype=torch.float64)
    for _ in range(30):
        p = (x @ w).sigmoid()
        w = w + torch.linalg.solve(x.T @ (x * (p * (1 - p))[:, None]), x.T @ (y - p))
    return w


def test_the_bound_changes_nothing_where_the_free_fit_is_positive():
    lead, preferred, planted = simulated()
    lead = lead[:, planted > 0.5]
    free = newton(lead.double() / 2, preferred.double())
    assert (free > 0).all()
    torch.testing.assert_close(fit_weights(lead, preferred), free, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_the_bound_is_met_where_the_free_fit_is_negative_and_the_loss_is_least(ridge):
    lead, preferred, _ = simulated()
    lead[:, 3] *= -1
    x, y = lead.double() / 2, preferred.double()
    assert newton(x, y)[3] < 0
    fitted = fit_weights(lead, preferred, ridge)
    assert fitted[3] == 0
    gradient = x.T @ ((x @ fitted).sigmoid() - y) / len(x) + ridge * fitted
    assert (gradient[fitted == 0] >= -1e-6).all()  # Kuhn-Tucker: going below 0 would be needed
    assert gradient[fitted > 0].abs().max() < 1e-6


def test_shares_of_votes_and_ties_are_fitted_and_ridge_shrinks():
    lead = torch.tensor([[2.0], [2.0], [-2.0], [-2.0]])
    shares = torch.tensor([0.75, 0.75, 0.25, 0.5])
    weight = fit_weights(lead, shares)
    assert weight.item() == pytest.approx(torch.tensor(0.6875).logit().item(), abs=1e-5)
    assert fit_weights(lead, shares, ridge=1.0).item() < weight.item()
    assert pair_accuracy(weight, lead, shares) == 1.0
    assert pair_accuracy(weight * 0, lead, shares) == 0.5


def test_a_fit_is_written_as_the_question_set_that_a_checklist_reads(tmp_path):
    lead, preferred, _ = simulated(400, 4)
    lead[:, 1] = preferred * -4 + 2  # yes to it is always worse
    question_set = small_question_set(alignment=1.0)
    fitted, figures = fit_question_set(question_set, lead, preferred, ridge=0.01)
    assert [item.question for item in fitted.items] == ["smiles?", "bright?"]
    assert figures["items kept"] == 2
    judge = FakeJudge({"face?": 1.0, "smiles?": 1.0, "bright?": 0.0})
    model = Checklist(judge, written(fitted, tmp_path), alignment=Fixed(0.5))
    smiles, bright = (item.weight for item in fitted.items)
    expected = 0.5 * fitted.alignment + smiles - bright + question_set.intercept
    assert model.score(one()).values[0, 0].item() == pytest.approx(expected, rel=1e-5)


def test_a_fit_of_other_features_or_bad_numbers_is_refused():
    lead, preferred, _ = simulated(50, 3)
    with pytest.raises(ValueError, match="has 4 features, not 3"):
        fit_question_set(small_question_set(alignment=1.0), lead, preferred)
    with pytest.raises(ValueError, match="finite"):
        fit_weights(lead * torch.nan, preferred)
    with pytest.raises(ValueError, match="held_out"):
        fit_question_set(small_question_set(), lead, preferred, held_out=1.0)
