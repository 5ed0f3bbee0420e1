"""A served chat model answers checklists: every question its own conversation, none lost."""

import math

import pytest
import torch

from flowalign.types import MAY_PASS, MediaBatch
from reward_models.chat.first_token import ServedYesNo
from reward_models.chat.judge import Sampling
from reward_models.questions.checklist import vision_reward_video
from reward_models.questions.vqa_score import VQAScore
from tests.fixtures.chat_server import Reply


def answer(request):
    """Yes as far as the asked colour is there; questions about `sound` are not answered."""
    red, green, _ = request.pictures[-1].reshape(-1, 3).mean(0) / 255
    if "sound" in request.text:
        return Reply("Maybe", [("Maybe", {"Maybe": 0.0})])
    p = red if "red" in request.text else green
    return Reply("Yes", [("Yes", {"yes": math.log(p), "No": math.log(1 - p), "Maybe": -0.1})])


def judge_at(server):
    return ServedYesNo(server, sampling=Sampling(retries=0))


def test_each_question_about_each_sample_gets_its_own_probability(serve):
    media = torch.tensor([[0.2, 0.6, 0.0], [0.8, 0.4, 0.0]])[:, None, :, None, None]
    batch = MediaBatch(media.expand(2, 3, 3, 8, 8).clone(), ["a", "b"], fps=[1.0, 1.0])
    questions = [["is it red?", "is it lush?", "any sound?"], ["lush", "red, yes?", "sound"]]
    judge = judge_at(serve(answer))
    found = judge.ask(batch, questions)
    assert len(serve.running[0].requests) == 6
    alone = judge.ask(batch.take([1]), questions[1:])
    wanted = torch.tensor([[0.2, 0.6, torch.nan], [0.4, 0.8, torch.nan]])
    torch.testing.assert_close(found, wanted, atol=0.005, rtol=0, equal_nan=True)
    torch.testing.assert_close(alone[0], found[1], equal_nan=True)


@pytest.mark.slow
def test_the_released_video_checklist_runs_on_a_server_that_says_yes_to_everything(serve):
    def yes(request):
        return Reply("Yes", [("Yes", {"Yes": -0.01, "No": -5.0})])

    batch = MediaBatch(torch.rand(2, 2, 3, 8, 8), ["a cat", "a dog"], fps=[1.0, 1.0])
    reward = vision_reward_video(judge_at(serve(yes)))
    output = reward.score(batch)
    texts = {request.text for request in serve.running[0].requests}
    assert output.valid.all()
    assert len(texts) == 29 + 3, "three questions contain the prompt"
    total = output.values[0, reward.spec.dims.index(reward.spec.dims[-1])]
    assert torch.isfinite(total)
    assert torch.equal(output.values[0], output.values[1])


def test_a_server_that_fails_leaves_no_number_and_a_reason_that_may_pass(serve):
    batch = MediaBatch(torch.rand(1, 1, 3, 8, 8), ["a cat"])
    judge = judge_at(serve(lambda request: Reply(status=500), attempts=1))
    assert judge.ask(batch, [["is it red?", "is it lush?"]]).isnan().all()
    failed = VQAScore(judge).score(batch)
    serve.running[0].answer = answer
    mute = VQAScore(judge, "any sound? [[prompt]]").score(batch)
    assert failed.reasons == {0: f"HTTP 500, after 1 attempts {MAY_PASS}"}
    assert mute.reasons == {0: "the judge gave no answer"}
