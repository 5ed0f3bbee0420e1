"""Judges from pixels to scores, over a real server with image-dependent answers."""

import math
import threading
from dataclasses import replace

import pytest
import torch

from flowalign.types import MAY_PASS, MediaBatch, RewardSpec
from reward_models import (
    Drift,
    EditScore,
    Levels,
    OneReward,
    RationalPair,
    RationalRewards,
    ServedYesNo,
    ShapesDetector,
    UnifiedRewardEdit,
    UnifiedRewardPair,
    UnifiedRewardPoint,
    VideoScore2,
    VQAScore,
    WinRate,
    YesNo,
    deqa,
)
from reward_models.backbones.detection import Detection
from reward_models.backbones.pixels import pad_to_square
from reward_models.chat.chat_client import Server
from reward_models.chat.judge import ChatJudge, Sampling
from reward_models.chat.magic_assessor import ArtefactMap, MagicAssessor, paint_artefacts
from reward_models.chat.template import encode_image, read_template
from reward_models.verifiers.shapes import BACKGROUND
from tests.fixtures.chat_server import MODEL, Reply, Request
from tests.fixtures.reward_contract import check_contract, check_fingerprints, example_batch


def colours(picture):
    """Mean of each channel, in [0, 1]."""
    return (picture.reshape(-1, 3).mean(0) / 255).tolist()


def media_of(*levels, frames=1, size=8):
    """One grey image (or video) per level in [0, 1]."""
    return torch.stack([torch.full((frames, 3, size, size), level) for level in levels])


def batch_of(*levels, frames=1, **columns):
    return MediaBatch(media_of(*levels, frames=frames), ["a cat"] * len(levels), **columns)


def axes(red, green, blue):
    return (
        f"Alignment Score (1-5): {1 + 4 * red:.6f}\nCoherence Score (1-5): {1 + 4 * green:.6f}\n"
        f"Style Score (1-5): {1 + 4 * blue:.6f}"
    )


def edit_answer(request: Request):
    """The first score measures the red of the edit; the second its similarity or its green."""
    means = [colours(picture) for picture in request.pictures]
    first = 25 * means[-1][0]
    second = 25 * (1 - abs(means[0][1] - means[-1][1]) if len(means) == 2 else means[0][1])
    return f'{{"reasoning": "because", "score": [{first:.6f}, {second:.6f}]}}'


def share_of_yes(request: Request):
    red = colours(request.pictures[-1])[0]
    return Reply("Yes", [("Yes", {"Yes": math.log(red), " no": math.log(1 - red)})])


def section_answer(request: Request):
    red, green, blue = (1 + 3 * x for x in colours(request.pictures[-1]))
    named = ["Text Faithfulness", "Physical and Visual Quality", "Text Rendering"]
    if len(request.pictures) == 2:
        named.insert(1, "Image Faithfulness")
    scores = [red, green, blue, 1.5][: len(named)]
    return "# Detailed Judgement\n" + "\n".join(
        f"{k}. {name}:\n## Justification: so\n## Score: {score:.6f}"
        for k, (name, score) in enumerate(zip(named, scores, strict=True), 1)
    )


def video_answer(request: Request):
    red = colours(request.pictures[0])[0]
    text = "(1) visual quality: 5\n(2) text-to-video alignment: 5\n" + (
        "(3) physical/common-sense consistency: 5"
    )
    digits = {"5": math.log(red), "1": math.log(1 - red)}
    return Reply(text, [(c, digits if c == "5" else {c: 0.0}) for c in text])


def level_answer(request: Request):
    red = colours(request.pictures[0])[0]
    return Reply(" good", [(" good", {" Excellent": math.log(red), " bad": math.log(1 - red)})])


JUDGES = {
    "point": (UnifiedRewardPoint, lambda r: axes(*colours(r.pictures[0])), {}),
    "final": (
        lambda server: UnifiedRewardPoint(server, form="final", squash=16),
        lambda r: f"Final Score: {1 + 4 * colours(r.pictures[0])[0]:.6f}",
        {},
    ),
    "point of a video": (
        lambda server: UnifiedRewardPoint(server, form="video", frames=2),
        lambda r: axes(*colours(r.pictures[1])).replace("Coherence", "Physics"),
        {"frames": 3},
    ),
    "edit_score": (EditScore, edit_answer, {"references": True}),
    "rational": (RationalRewards, section_answer, {}),
    "rational edit": (lambda s: RationalRewards(s, "edit"), section_answer, {"references": True}),
    "video_score2": (VideoScore2, video_answer, {"frames": 3, "fps": True}),
    "yes_no": (YesNo, share_of_yes, {}),
    "yes_no of a video": (YesNo, share_of_yes, {"frames": 2}),
    "levels": (Levels, level_answer, {}),
    "magic": (
        lambda server: MagicAssessor(server, side=16),
        lambda r: rf'\boxed{{"Whether Normal": {int(colours(r.pictures[0])[0] > 0.4)}}}',
        {},
    ),
}


def contract_batch(references=False, fps=False, frames=1):
    batch = example_batch(num_samples=3, frames=frames, height=16, width=24)
    brighter = torch.tensor([0.2, 0.9, 0.5])[:, None, None, None, None]
    batch = replace(batch, media=batch.media * 0.3 + brighter * 0.6)
    sources = [[torch.full((3, 6, 6), x)] for x in (0.1, 0.5, 0.8)]
    return replace(batch, references=sources if references else (), fps=[2.0] * 3 if fps else ())


@pytest.mark.parametrize(("make", "answer", "columns"), JUDGES.values(), ids=JUDGES)
def test_judges_keep_the_contract_of_rewards(serve, make, answer, columns):
    judge = make(serve(answer, cache="memory"))
    check_contract(judge, contract_batch(**columns), atol=1e-4)


def cut_off(answer):
    """The same answer, which ended at `max_tokens`."""

    def answer_cut_off(request):
        reply = answer(request)
        return replace(Reply(reply) if isinstance(reply, str) else reply, finish="length")

    return answer_cut_off


@pytest.mark.parametrize("name", JUDGES)
def test_a_cut_answer_is_no_verdict_in_text_and_whole_in_its_first_token(serve, name):
    make, answer, columns = JUDGES[name]
    batch = contract_batch(**columns)
    output = make(serve(cut_off(answer))).score(batch)
    if name.startswith(("yes_no", "levels")):
        whole = make(serve(answer)).score(batch)
        torch.testing.assert_close(output.values, whole.values)
        assert output.valid.all()
    else:
        assert not output.valid.any()
        assert set(output.reasons.values()) == {output.reasons[0]}
        assert "cut off at" in output.reasons[0]


def test_a_cut_comparison_is_no_vote_and_a_first_token_is(serve):
    batch = batch_of(0.2, 0.8, groups=[0, 0], metadata=[{"task": "image_edit"}] * 2)
    vote = Reply("image 1 is better, but wait", finish="length")
    output = WinRate(UnifiedRewardPair(serve(lambda r: vote))).score(batch)
    assert not output.valid.any()
    assert output.reasons[0] == "cut off at 4096 tokens"
    assert WinRate(OneReward(serve(cut_off(share_of_yes)))).score(batch).valid.all()


BAD_ANSWERS = {
    "null": Reply(None),
    "empty": Reply(""),
    "unreadable": Reply("hm"),
    "cut off": Reply(axes(1, 1, 1), finish="length"),
}


@pytest.mark.parametrize("bad", BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_answers_that_could_not_be_read_are_not_cached(serve, tmp_path, bad):
    server = serve(lambda r: bad, cache=str(tmp_path))
    sampling = Sampling(retries=1)
    assert not UnifiedRewardPoint(server, sampling=sampling).score(batch_of(0.5)).valid.any()
    assert not list(tmp_path.rglob("*.json"))
    serve.running[0].answer = lambda r: axes(0.5, 0.5, 0.5)
    for _ in range(2):
        fixed = UnifiedRewardPoint(server, sampling=sampling)
        assert fixed.score(batch_of(0.5)).values.tolist() == [[3.0, 3.0, 3.0]]
    assert len(serve.running[0].requests) == 3  # two bad answers, and one that was kept


def test_a_first_token_is_cached_although_the_answer_ends_there(serve, tmp_path):
    server = serve(cut_off(share_of_yes), cache=str(tmp_path))
    scores = [YesNo(server).score(batch_of(0.5)).values.item() for _ in range(2)]
    assert scores[0] == scores[1]
    assert len(serve.running[0].requests) == 1


def test_a_pass_that_failed_by_an_outage_may_pass(serve):
    def answer(request):
        return "hm" if request.body["seed"] == 42 else Reply(status=503)

    server = serve(answer, attempts=1)
    output = UnifiedRewardPoint(server, sampling=Sampling(passes=2, retries=0)).score(batch_of(0.5))
    assert output.reasons == {0: f"HTTP 503, after 1 attempts {MAY_PASS}"}


def test_a_score_is_read_from_the_picture_that_was_sent(serve):
    """By hand: 1 + 4 * level, of 8-bit levels."""
    judge = UnifiedRewardPoint(serve(lambda r: axes(*colours(r.pictures[0]))))
    media = torch.tensor([[51, 102, 255], [0, 204, 153]])[:, None, :, None, None] / 255
    output = judge.score(MediaBatch(media.expand(-1, -1, -1, 5, 7), ["a", "b"]))
    assert output.values.tolist() == [
        pytest.approx([1.8, 2.6, 5.0]),
        pytest.approx([1.0, 4.2, 3.4]),
    ]
    assert output.uncertainty is None
    sent = serve.running[0].requests
    assert {r.pictures[0].shape for r in sent} == {(5, 7, 3)}
    assert sorted(r.text[-17:] for r in sent) == ["Text Caption: [a]", "Text Caption: [b]"]


def test_pictures_are_sent_without_loss(serve):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(0, 256, (1, 1, 3, 9, 13), generator=generator)
    judge = UnifiedRewardPoint(serve(lambda r: axes(0, 0, 0)))
    judge.score(MediaBatch(bits / 255, ["a"]))
    (request,) = serve.running[0].requests
    assert torch.equal(torch.tensor(request.pictures[0]).permute(2, 0, 1), bits[0, 0])


def test_a_prompt_that_looks_like_a_slot_is_only_a_prompt(serve):
    judge = UnifiedRewardPoint(serve(lambda r: axes(0, 0, 0)))
    judge.score(replace(batch_of(0.5), prompts=["{media} {prompt} <image> {x}"]))
    (request,) = serve.running[0].requests
    assert request.text.endswith("[{media} {prompt} <image> {x}]")
    assert len(request.pictures) == 1


def test_all_samples_and_passes_are_in_flight_together(serve):
    twelve = threading.Barrier(12)  # nobody is answered before all are there

    def answer(request):
        twelve.wait(20)
        return axes(0.5, 0.5, 0.5)

    server = serve(answer, concurrency=12)
    judge = UnifiedRewardPoint(server, sampling=Sampling(passes=3, temperature=0.5))
    assert judge.score(batch_of(0.1, 0.2, 0.3, 0.4)).valid.all()


def test_passes_have_their_own_seeds_and_give_mean_and_standard_deviation(serve):
    by_seed = {7: 0.0, 8: 0.5, 9: 1.0}
    server = serve(lambda r: axes(by_seed[r.body["seed"]], 0.25, by_seed[r.body["seed"]] ** 2))
    sampling = Sampling(passes=3, temperature=0.9, seed=7, max_tokens=99)
    output = UnifiedRewardPoint(server, sampling=sampling).score(batch_of(0.5, 0.6))
    assert output.values.tolist() == [[3.0, 2.0, pytest.approx(8 / 3)]] * 2
    squares = torch.tensor([1.0, 2.0, 5.0])
    expected = [2.0, 0.0, squares.std().item()]
    assert output.uncertainty.tolist() == [pytest.approx(expected)] * 2
    assert len(output.extras[0]["texts"]) == 3
    body = serve.running[0].requests[0].body
    assert (body["temperature"], body["max_tokens"]) == (0.9, 99)


def test_an_answer_that_cannot_be_read_is_asked_for_again_with_a_new_seed(serve):
    def answer(request):
        return "hm" if request.body["seed"] < 4 else axes(0.5, 0.5, 0.5)

    server = serve(answer)
    judge = UnifiedRewardPoint(server, sampling=Sampling(passes=2, seed=1, retries=2))
    output = judge.score(batch_of(0.5))
    assert output.valid.all()
    assert sorted(r.body["seed"] for r in serve.running[0].requests) == [1, 2, 3, 4, 5]


def test_one_sample_that_cannot_be_read_leaves_the_others_alone(serve):
    def answer(request):
        red, green, blue = colours(request.pictures[0])
        if red < 0.3:
            return Reply("I cannot judge this", finish="length")
        if red < 0.5:
            return Reply(status=500)
        return "Style: 9" if red < 0.7 else axes(red, green, blue)

    server = serve(answer, attempts=2)
    batch = batch_of(0.2, 0.4, 0.6, 0.8, 1.0)
    batch.media[4, 0, 0, 0, 0] = torch.nan
    output = UnifiedRewardPoint(server, sampling=Sampling(retries=1)).score(batch)
    assert output.valid.all(1).tolist() == [False, False, False, True, False]
    assert output.values[[0, 1, 2, 4]].isnan().all()
    assert output.reasons[0] == "cut off at 1024 tokens"
    assert output.reasons[1] == f"HTTP 500, after 2 attempts {MAY_PASS}"
    assert "outside [1, 5]" in output.reasons[2]
    assert "not finite" in output.reasons[4]
    assert output.extras[0]["texts"] == ["I cannot judge this"]


class Careless(ChatJudge):
    """Reads whatever number there is."""

    def read_wording(self):
        return read_template("yes_no", ("question", "media"))

    def declare(self):
        return RewardSpec("careless", ("x",), "any", (0.0, 1.0), "MIT")

    def ask(self, sample):
        return [self.wording.render(question="?", media=[])]

    def read(self, answers):
        return [float(answers[0].text)]


def test_no_judge_can_return_a_score_outside_its_scale(serve):
    said = iter(["1.5", "-0.1", "1.0"])
    output = Careless(serve(lambda r: next(said))).score(batch_of(0.5))
    assert output.values.tolist() == [[1.0]]  # the first two were asked for again
    output = Careless(serve(lambda r: "inf")).score(batch_of(0.5))
    assert output.reasons == {0: "its score inf is outside [0, 1]"}


def test_an_axis_that_is_missing_is_missing_alone(serve):
    judge = UnifiedRewardPoint(serve(lambda r: "Alignment: 4\nStyle: 2"))
    output = judge.score(batch_of(0.5))
    assert output.valid.tolist() == [[True, False, True]]
    assert output.reasons == {0: "unified_reward_point returned a non-finite value for coherence"}


def test_passes_that_fail_do_not_count(serve):
    def answer(request):
        return axes(1, 1, 1) if request.body["seed"] % 3 == 0 else "no"

    judge = UnifiedRewardPoint(serve(answer), sampling=Sampling(passes=3, seed=0, retries=0))
    output = judge.score(batch_of(0.5))
    assert output.values.tolist() == [[5.0, 5.0, 5.0]]
    assert output.uncertainty.isnan().all()  # one pass has no deviation
    assert len(output.extras[0]["missing"]) == 2


def test_edits_are_shown_with_their_source_first_and_scored_by_their_weakest_side(serve):
    server = serve(edit_answer)
    media = torch.tensor([204, 102, 51])[None, None, :, None, None].expand(1, 1, 3, 4, 4) / 255
    source = torch.tensor([0, 255, 0])[:, None, None].expand(3, 6, 6) / 255
    output = EditScore(server).score(MediaBatch(media, ["make it red"], references=[[source]]))
    # SC text: 25 * 0.8 and 25 * (1 - 0.6); PQ text: 25 * 0.8 and 25 * 0.4.
    expected = [8.0, 4.0, 4.0, 4.0]
    assert output.values.tolist() == [pytest.approx(expected)]
    pair, alone = sorted(serve.running[0].requests, key=lambda r: -len(r.pictures))
    assert [p.shape for p in pair.pictures] == [(6, 6, 3), (4, 4, 3)]
    assert "Editing instruction: make it red" in pair.text
    assert "both from 0 to 25" in pair.text
    assert "make it red" not in alone.text
    assert [p.shape for p in alone.pictures] == [(4, 4, 3)]


def test_averaging_first_and_last_differ_where_passes_do(serve):
    def answer(request):
        score = 25 if (request.body["seed"] == 42) == (len(request.pictures) == 2) else 1
        return f'{{"reasoning": "", "score": [{score}, {score}]}}'

    batch = batch_of(0.5, references=[[torch.full((3, 4, 4), 0.2)]])
    server, sampling = serve(answer), Sampling(passes=2, temperature=0.7)
    found = {
        reduction: EditScore(server, reduction, sampling=sampling).score(batch).values[0, 3].item()
        for reduction in ("average_last", "average_first")
    }
    assert found["average_last"] == pytest.approx(2.0)  # sqrt(10 * 0.4) both times
    assert found["average_first"] == pytest.approx(5.2)


@pytest.mark.parametrize("judge", [EditScore, lambda s: RationalRewards(s, "edit")])
def test_an_edit_without_a_usable_source_fails_alone(serve, judge):
    answer = edit_answer if judge is EditScore else section_answer
    good, broken = torch.full((3, 4, 4), 0.2), torch.full((3, 4, 4), torch.inf)
    output = judge(serve(answer)).score(batch_of(0.2, 0.5, 0.8, references=[[good], [], [broken]]))
    assert output.valid.all(1).tolist() == [True, False, False]
    assert "source image is missing" in output.reasons[1]
    assert "not finite" in output.reasons[2]


def test_a_section_that_does_not_apply_is_not_valid_and_the_mean_is_of_the_others(serve):
    text = (
        "1. Text Faithfulness:\n## Score: 4\n2. Physical and Visual Quality:\n## Score: 9\n"
        "3. Text Rendering:\n## Score: N/A\n# Summary: fine"
    )
    output = RationalRewards(serve(lambda r: text)).score(batch_of(0.5))
    assert output.valid.tolist() == [[True, True, False, True]]
    assert output.values[0, [0, 1, 3]].tolist() == [1.0, 1.0, 1.0]  # 9 is clamped to 4
    assert output.reasons == {
        0: "rational_rewards_t2i returned a non-finite value for text_rendering"
    }
    messages = serve.running[0].requests[0].body["messages"]
    assert [m["role"] for m in messages] == ["system", "user"]


def test_a_video_is_shown_at_the_rate_of_the_model(serve):
    server = serve(video_answer)
    video = torch.linspace(0.1, 0.9, 33)[None, :, None, None, None].expand(1, 33, 3, 4, 4)
    batch = MediaBatch(torch.cat([video, video]), ["a", "b"], fps=[8.0, 16.0])
    output = VideoScore2(server).score(batch)
    shown = {r.text.partition("prompt: ")[2][0]: len(r.pictures) for r in serve.running[0].requests}
    assert shown == {"a": 8, "b": 4}  # 33 frames at 8 or 16 per second, looked at twice a second
    body = serve.running[0].requests[0].body
    assert (body["logprobs"], body["top_logprobs"]) == (True, 20)
    red = round(0.1 * 255) / 255
    assert output.values.tolist() == [pytest.approx([1 + 4 * red] * 3)] * 2


def test_a_frame_rate_that_is_none_fails_its_own_sample(serve):
    batch = batch_of(0.4, 0.6, frames=4, fps=[0.0, 4.0])
    output = VideoScore2(serve(video_answer), mode="integer").score(batch)
    assert output.valid.all(1).tolist() == [False, True]
    assert "frame rate" in output.reasons[0]
    assert output.values[1].tolist() == [5.0, 5.0, 5.0]
    assert "logprobs" not in serve.running[0].requests[0].body


def test_yes_is_counted_in_every_spelling_per_question(serve):
    def answer(request):
        p = {"Yes": math.log(0.2), " yes": math.log(0.4), "NO": math.log(0.2), "well": -1.6}
        if "dog" in request.text:
            p = {"No": math.log(0.9), "no": math.log(0.1)}
        return Reply("Yes", [("Yes", p)])

    judge = YesNo(serve(answer), {"cat": 'Is it "{prompt}"?', "dog": "Is it a dog?"})
    output = judge.score(batch_of(0.5))
    assert output.values.tolist() == [[pytest.approx(0.75), 0.0]]
    texts = {r.text for r in serve.running[0].requests}
    assert texts == {'Is it "a cat"? Answer Yes or No.', "Is it a dog? Answer Yes or No."}
    assert {r.body["max_tokens"] for r in serve.running[0].requests} == {1}


def test_an_answer_that_is_neither_yes_nor_no_is_a_failure(serve):
    judge = YesNo(serve(lambda r: Reply("Well", [("Well", {"Well": 0.0})])))
    output = judge.score(batch_of(0.5))
    assert not output.valid.any()
    assert "none of yes, no" in output.reasons[0]
    silent = YesNo(serve(lambda r: "Yes")).score(batch_of(0.5))
    assert "no log-probabilities" in silent.reasons[0]


def test_levels_are_an_expectation_and_continue_the_sentence(serve):
    p = {" excellent": math.log(0.3), " Good": math.log(0.1), "bad": math.log(0.1), " a": -0.7}
    server = serve(lambda r: Reply(" excellent", [(" excellent", p)]))
    output = Levels(server).score(batch_of(0.5))
    assert output.values.item() == pytest.approx((0.3 + 0.1 * 0.75) / 0.5)
    body = serve.running[0].requests[0].body
    assert body["messages"][-1] == {"role": "assistant", "content": "The quality of the image is"}
    assert body["continue_final_message"]
    assert not body["add_generation_prompt"]
    five = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}
    judge = Levels(server, five, beginning="")
    assert judge.score(batch_of(0.5)).values.item() == pytest.approx(
        (0.3 * 5 + 0.1 * 4 + 0.1) / 0.5
    )
    assert judge.spec.scale == (1.0, 5.0)
    assert "continue_final_message" not in serve.running[0].requests[-1].body


def test_an_assessor_sees_the_shortest_side_at_its_size(serve):
    server = serve(lambda r: r'<think>hm</think>\boxed{"Whether Normal": false}')
    output = MagicAssessor(server, side=20).score(MediaBatch(torch.rand(1, 1, 3, 10, 15), ["a"]))
    assert output.values.tolist() == [[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]]
    assert serve.running[0].requests[0].pictures[0].shape == (20, 30, 3)


ARTEFACTS = ("normal", "interaction", "human_anatomy", "animal_anatomy", "object_morphology")


def boxed_kinds(kinds):
    return rf'<think>hm</think>\boxed{{"Whether Normal": false, "Type of Deformity": {kinds}}}'


def test_an_assessor_scores_every_kind_of_artefact(serve):
    """The published form: a kind is true, or a list of its refinements."""
    hand = '"L2: Abnormal Human Anatomy": ["L3: Hand Structure Deformity"]'
    answer = boxed_kinds(f'{{{hand}, "L2: Abnormal Object Morphology": true}}')
    judge = MagicAssessor(serve(lambda r: answer), side=16)
    assert judge.score(contract_batch()).values.tolist() == [[0, 1, 0, 1, 0, 1, 1]] * 3
    assert judge.spec.dims == (*ARTEFACTS, "attributes", "other")


def test_artefacts_without_a_published_label_are_asked_about_again(serve):
    answer = boxed_kinds('{"L2: Odd": true}')
    output = MagicAssessor(serve(lambda r: answer), side=16).score(contract_batch())
    assert not output.valid.any()
    assert "'L2: Odd' is not a label" in output.reasons[0]


def test_artefacts_lie_where_a_detector_finds_their_kind():
    """By hand: a person with a bad hand, a sound cup before them, and light that is odd."""
    free = dict.fromkeys((*ARTEFACTS, "attributes", "other"), 1.0)
    free |= {"human_anatomy": 0.25, "interaction": 0.5}
    person = Detection("person", 0.9, (0.0, 0.0, 2.0, 2.0))
    found = [person, Detection("cup", 0.8, (1.0, 0.0, 4.0, 1.0))]
    assert paint_artefacts(found, free, 2, 4).tolist() == [[0.125, 0.125, 0.5, 0.5]] * 2
    sheep = [Detection("sheep", 0.9, (0.0, 0.0, 1.0, 2.0))]
    scores = free | {"animal_anatomy": 0.0, "interaction": 1.0}
    assert paint_artefacts(sheep, scores, 2, 2).tolist() == [[0.0, 1.0]] * 2


def test_a_map_of_artefacts_comes_with_the_scores_of_the_judge(serve):
    """A blue square that is told to be ill formed, left of nothing."""
    answer = boxed_kinds('{"L2: Abnormal Object Morphology": true}')
    media = (torch.tensor(BACKGROUND) / 255).view(1, 1, 3, 1, 1).repeat(1, 1, 1, 32, 32)
    media[..., 8:20, 4:16] = torch.tensor([0.1, 0.2, 0.9])[:, None, None]
    reward = ArtefactMap(MagicAssessor(serve(lambda r: answer), side=32), ShapesDetector())
    output = reward.score(MediaBatch(media, ["a blue square"]))
    assert output.values[:, 4].tolist() == [0.0]
    place = output.maps["artefact_map"][0]
    assert (place[9:19, 5:15] == 0).all()
    assert (place[:, 20:] == 1).all()


def test_fingerprints_tell_settings_apart(serve, tmp_path):
    server = Server("http://127.0.0.1:1/v1", MODEL)
    own = tmp_path / "own.txt"
    own.write_text("{media} {prompt}?")
    judges = {
        UnifiedRewardPoint: [
            {"template": str(own)},
            *(
                {"squash": 512},
                {"form": "final"},
                {"form": "video"},
                {"form": "video", "frames": 8},
            ),
            *({"sampling": Sampling(passes=2)}, {"sampling": Sampling(temperature=0.5)}),
        ],
        EditScore: [{"reduction": "average_first"}],
        VideoScore2: [{"mode": "upstream"}, {"fps": 1.0}],
        YesNo: [{"questions": {"a": "b?"}}],
        Levels: [{"beginning": ""}, {"square": True}],
        MagicAssessor: [{"side": 512}],
        RationalRewards: [{"task": "edit"}],
    }
    pairs = {
        OneReward: [{"tasks": {"image_fill": "filling"}}, {"task": "image fill"}],
        UnifiedRewardPair: [{"form": form} for form in ("think", "think_image", "score", "flex")],
        UnifiedRewardEdit: [{"form": "score"}],
        RationalPair: [{"task": "edit"}],
    }
    made, compared = (
        [kind(server, **changes) for kind, some in kinds.items() for changes in ({}, *some)]
        for kinds in (judges, pairs)
    )
    other = UnifiedRewardPoint(replace(server, model="other"))
    won = [*map(WinRate, compared), WinRate(compared[0], "one")]
    check_fingerprints([*made, other, deqa(server), *won])
    elsewhere = replace(server, url="http://127.0.0.1:2/v1", concurrency=3, timeout=1.0)
    one, two = UnifiedRewardPoint(server), UnifiedRewardPoint(elsewhere)
    assert one.spec.fingerprint() == two.spec.fingerprint()


WRONG = {
    "fps": (lambda s: VideoScore2(s, fps=0.0), "fps of VideoScore2 is 0.0"),
    "no questions": (lambda s: YesNo(s, {}), "questions is empty"),
    "no tasks": (lambda s: OneReward(s, tasks={}), "tasks is empty"),
    "no criteria": (lambda s: OneReward(s, criteria={}), "criteria is empty"),
    "levels": (lambda s: Levels(s, {"Good": 1.0, "bad": 0.0}), "lower-case words"),
    "no such template": (lambda s: YesNo(s, template="yesno"), "'yesno'.*yes_no"),
    "slots": (lambda s: YesNo(s, template="one_reward"), "must have .*question"),
    "form": (lambda s: UnifiedRewardPoint(s, "x"), "form of .* is 'x'; .* one of axes, video"),
    "orders": (lambda s: WinRate(OneReward(s), "two"), "orders of WinRate is 'two'"),
    "url": (lambda s: replace(s, url="localhost:8000"), "localhost:8000"),
    "model": (lambda s: replace(s, model=""), "model is empty"),
    "attempts": (lambda s: replace(s, attempts=0), "attempts is 0"),
}


@pytest.mark.parametrize(("make", "message"), WRONG.values(), ids=WRONG)
def test_wrong_settings_are_refused_by_name_before_anything_is_asked(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make(Server("http://127.0.0.1:1/v1", MODEL))
    assert len(str(caught.value).splitlines()) <= 5


def test_a_template_of_ones_own_may_have_a_system_prompt(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Be kind.\n=== user ===\nLook: {media}. Is it {prompt}? {")
    url = encode_image(torch.zeros(3, 2, 2))
    system, user = read_template(str(path), ("media", "prompt")).render(media=[url], prompt="a {x}")
    assert system == {"role": "system", "content": "Be kind."}
    assert user["content"] == [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": ". Is it a {x}? {"},
    ]


def test_deqa_is_the_expected_level_of_a_square_and_a_meter_of_drift(serve):
    """By hand: P(excellent) is the brightness of the middle, so the score is 1 + 4 of it."""

    def answer(request):
        (picture,) = request.pictures
        assert picture.shape == (9, 9, 3)  # a square
        assert picture[0, 0].tolist() == [122, 116, 104]
        bright = float(picture[4, 4, 0]) / 255
        said = {" excellent": math.log(bright), " bad": math.log(1 - bright)}
        return Reply(" good", [(" good", said)])

    meter = deqa(serve(answer))
    media = torch.tensor([204.0, 51, 102, 153])[None, :, None, None, None] / 255
    media = media.expand(1, 4, 3, 3, 9)
    assert meter.score(MediaBatch(media[:, :1], ["a"])).values.tolist() == [[pytest.approx(4.2)]]
    drift = Drift(meter, share=0.25)
    assert drift.spec.dims == ("quality_drift",)
    output = drift.score(MediaBatch(media, ["a"]))
    assert output.values.item() == pytest.approx(-4 * (204 - 153) / 255, abs=1e-5)
    assert pad_to_square(torch.ones(2, 3, 5, 2)).shape == (2, 3, 5, 5)


# A served chat model answers checklists: every question its own conversation, none lost -----------


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


def test_a_server_that_fails_leaves_no_number_and_a_reason_that_may_pass(serve):
    batch = MediaBatch(torch.rand(1, 1, 3, 8, 8), ["a cat"])
    judge = judge_at(serve(lambda request: Reply(status=500), attempts=1))
    assert judge.ask(batch, [["is it red?", "is it lush?"]]).isnan().all()
    failed = VQAScore(judge).score(batch)
    serve.running[0].answer = answer
    mute = VQAScore(judge, "any sound? [[prompt]]").score(batch)
    assert failed.reasons == {0: f"HTTP 500, after 1 attempts {MAY_PASS}"}
    assert mute.reasons == {0: "the judge gave no answer"}
