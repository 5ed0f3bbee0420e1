"""Judges of edits over a real server: each sample with its own source, instruction, task, mask."""

import math
from dataclasses import replace

import pytest
import torch

from flowalign.data.compatibility import check_requests
from flowalign.rewards.composite import Rewards
from flowalign.types import Column, MediaBatch, Reference, Request, RewardSpec
from reward_models import (
    EditScore,
    OneReward,
    RationalPair,
    RationalRewards,
    UnchangedPixels,
    WinRate,
)
from reward_models.chat.chat_client import Server
from reward_models.chat.judge import Sampling
from tests.fixtures.chat_server import MODEL, Reply
from tests.fixtures.pixel import PixelPolicy

SECTIONS = ("Text Faithfulness", "Image Faithfulness", "Physical and Visual Quality")
ONCE = Sampling(temperature=0.0)


def picture(level, height=4, width=4):
    return torch.full((3, height, width), level / 255)


def levels(request):
    """The level of every image of a request, in order."""
    return [int(shown[0, 0, 0]) for shown in request.pictures]


def edits(count=6):
    """Edit i has the level of its source plus 1, and its instruction names the source."""
    sources = [20 * i + 10 for i in range(count)]
    return MediaBatch(
        torch.stack([picture(level + 1)[None] for level in sources]),
        [f"make {level} one brighter" for level in sources],
        references=[[picture(level, 4 + i, 6)] for i, level in enumerate(sources)],
        groups=list(range(count)),
    )


def is_right(request):
    """Whether an edit is shown with its own source and its own instruction."""
    source, *results = levels(request)
    named = f"make {source} one brighter" in request.text
    return named and all(result == source + 1 for result in results)


def edit_score(request):
    if len(request.pictures) == 1:
        return '{"reasoning": "", "score": [25, 25]}'
    good = 25 if is_right(request) else 0
    return f'{{"reasoning": "", "score": [{good}, {good}]}}'


def rational(request):
    score = 4 if is_right(request) else 1
    return "\n".join(f"{k}. {name}:\n## Score: {score}" for k, name in enumerate(SECTIONS, 1))


@pytest.mark.parametrize(
    ("make", "answer", "dim", "best"),
    [
        (lambda s: EditScore(s, sampling=ONCE), edit_score, "overall", 10.0),
        (lambda s: RationalRewards(s, "edit"), rational, "overall", 1.0),
    ],
)
def test_every_sample_is_asked_with_its_own_source(serve, make, answer, dim, best):
    """In chunks, in another order, and all at once, like the loops ask."""
    model = make(serve(answer))
    rewards = Rewards([model], {dim: 1.0})
    scoring = rewards.scoring()
    shuffled = edits().take([4, 0, 5, 2, 1, 3])
    for part in (*shuffled.chunks(4), MediaBatch.concat(shuffled.chunks(5))):
        scoring.add(part)
    values = scoring.result().values[:, model.spec.dims.index(dim)]
    assert values.tolist() == [best] * 12
    mixed = replace(edits(), references=edits().references[::-1])
    assert (model.score(mixed).values[:, model.spec.dims.index(dim)] < best).all()


def test_win_rates_show_the_source_that_a_group_shares(serve):
    """Samples 0 to 5 answer two requests; the brighter result of a request wins."""
    media = torch.stack([picture(level)[None] for level in (11, 12, 13, 51, 52, 53)])
    batch = MediaBatch(
        media,
        ["a"] * 3 + ["b"] * 3,
        references=[[picture(10)]] * 3 + [[picture(50)]] * 3,
        groups=[0] * 3 + [1] * 3,
    )

    def answer(request):
        source, first, second = levels(request)
        assert {first, second} < set(range(source + 1, source + 4))
        p = 0.9 if first > second else 0.1
        return Reply("Yes", [("Yes", {"Yes": math.log(p), "No": math.log(1 - p)})])

    reward = WinRate(OneReward(serve(answer), "edits", {"a": "b"}))
    values = reward.score(batch).values.flatten().tolist()
    assert values == [pytest.approx(x) for x in (0.1, 0.5, 0.9, 0.1, 0.5, 0.9)]
    with pytest.raises(ValueError, match="group 0 has samples of different references"):
        reward.score(replace(batch, prompts=["a"] * 6, groups=[0] * 6))


def test_a_pair_without_a_source_fails_and_is_not_asked_about(serve):
    def answer(request):
        return "\n".join(f"{k}. {n}:\nScore A: 3\nScore B: 2" for k, n in enumerate(SECTIONS, 1))

    batch = edits(3).take([0, 0, 1, 1, 2, 2])
    batch = replace(batch, references=[*batch.references[:2], [], [], *batch.references[4:]])
    reward = WinRate(RationalPair(serve(answer), "edit", sampling=replace(ONCE, retries=0)))
    reasons = reward.score(batch).reasons
    assert [reasons[i] for i in (2, 3)] == ["its source image is missing"] * 2
    assert {levels(r)[0] for r in serve.running[0].requests} == {10, 50}


def one_reward(server, **settings):
    return WinRate(OneReward(server, criteria={"a": "b"}, **settings), "one")


def say_yes(request):
    return Reply("Yes", [("Yes", {"Yes": -0.1, "No": -2.4})])


def test_one_run_may_have_several_tasks(serve):
    batch = edits(2).take([0, 0, 1, 1])
    batch = replace(batch, metadata=[{"task": t} for t in ("image_fill",) * 2 + ("edit",) * 2])
    reward = one_reward(serve(say_yes), tasks={"image_fill": "filling a hole", "edit": "editing"})
    assert reward.score(batch).valid.all()
    asked = {r.text.partition(" The request is: ")[::2] for r in serve.running[0].requests}
    assert {(task, said.split()[1]) for task, said in asked} == {
        ("The task is filling a hole.", "10"),
        ("The task is editing.", "30"),
    }


def test_a_task_that_is_unknown_or_missing_fails_its_own_samples(serve):
    batch = edits(3).take([0, 0, 1, 1, 2, 2])
    rows = [{"task": "image_fill"}] * 2 + [{"task": "fly"}] * 2 + [{}] * 2
    reward = one_reward(serve(say_yes), tasks={"image_fill": "filling", "edit": "editing"})
    output = reward.score(replace(batch, metadata=rows))
    assert output.valid[:, 0].tolist() == [True] * 2 + [False] * 4
    assert output.reasons[2] == "its metadata has the task 'fly'; there are image_fill, edit"
    assert output.reasons[4] == "its metadata has no task; there are image_fill, edit"
    assert set(reward.score(batch).reasons) == set(range(6))


def test_what_a_request_lacks_is_known_without_pixels():
    def unreadable():
        raise AssertionError("pixels were read")

    source, server = (
        Reference("a.png", "0" * 64, unreadable),
        Server("http://127.0.0.1:1/v1", MODEL),
    )
    judge, edit = WinRate(OneReward(server)).spec, EditScore(server).spec
    assert edit.lacks(Request("make it red")).startswith("needs a source, and the request names")
    assert edit.lacks(Request("", (source,))) == "needs a prompt, and the request has none"
    assert edit.lacks(Request("make it red", (source,))) == ""
    assert judge.lacks(Request("a", metadata={"task": "image_fill"})) == ""
    assert judge.lacks(Request("a", metadata={"task": 7})).startswith(
        "cannot score it: its metadata has the task 7"
    )
    assert judge.lacks(Request("a")).startswith(
        "cannot score it: its metadata has no task; there are text_to_image"
    )
    assert WinRate(OneReward(server, "editing")).spec.lacks(Request("a")) == ""


def test_a_mask_is_shown_after_the_source(serve):
    hole = torch.zeros(1, 4, 4)
    hole[:, 1:3] = 1.0
    batch = replace(edits(1).take([0, 0]), masks=[hole, hole])
    reward = one_reward(serve(say_yes), task="filling")
    reward.score(batch)
    source, mask, *results = serve.running[0].requests[0].pictures
    assert (source == 10).all()
    assert mask[:, 0].tolist() == [[0] * 3, [255] * 3, [255] * 3, [0] * 3]
    assert all((result == 11).all() for result in results)


def test_masks_stay_with_their_samples():
    masks = [torch.full((1, 2, 2), i / 9) if i % 2 else None for i in range(6)]
    batch = replace(edits(), masks=masks)
    assert [m is None for m in batch.take([1, 4, 3]).masks] == [False, True, False]
    assert batch.take([3]).masks[0] is masks[3]
    assert MediaBatch.concat(batch.chunks(4)).masks == masks
    assert edits().take([1]).masks == ()


def test_loops_attach_the_source_and_the_mask_of_each_request():
    def read(level, frames=1):
        return lambda: torch.full((frames, 3, 2, 2), level)

    requests = [
        Request("a", (Reference("a.png", "a", read(0.25)),), Reference("m.png", "m", read(0.5))),
        Request("b", (Reference("b.png", "b", read(0.75)),), metadata={"task": "edit"}),
    ]
    rewards = Rewards([UnchangedPixels()], {"unchanged_pixels": 1.0})
    batch = rewards.batch(torch.zeros(2, 1, 3, 2, 2), requests)
    assert [float(some[0].mean()) for some in batch.references] == [0.25, 0.75]
    assert batch.masks[0].shape == (1, 2, 2)
    assert batch.masks[1] is None
    assert batch.metadata[1] == {"task": "edit"}
    assert rewards.score(batch).values.tolist() == [[0.75], [0.25]]
    assert rewards.batch(torch.zeros(1, 1, 3, 2, 2), [Request("c")]).masks == ()


def test_a_run_whose_requests_lack_a_task_is_refused_with_their_place():
    reward = WinRate(OneReward(Server("http://127.0.0.1:1/v1", MODEL), tasks={"edit": "editing"}))
    located = [
        ("edits.jsonl:1", Request("a", metadata={"task": "edit"})),
        ("edits.jsonl:2", Request("b", metadata={"task": "fly"})),
    ]
    check_requests(PixelPolicy(), [reward], located[:1])
    message = (
        "edits.jsonl:2: reward 'one_reward_win_rate' cannot score it: its metadata has the task"
    )
    with pytest.raises(ValueError, match=message):
        check_requests(PixelPolicy(), [reward], located)


def test_columns_do_not_enter_the_fingerprint():
    spec = RewardSpec("a", ("a",), "any", (0.0, 1.0), "MIT")
    assert replace(spec, columns=(Column("task", ("x",)),)).fingerprint() == spec.fingerprint()
