"""Win rates in a group: judges of pairs over a real server."""

import itertools
import math

import pytest
import torch

from flowalign.types import MediaBatch
from reward_models import EditScore, OneReward, RationalPair, UnifiedRewardPair, WinRate
from reward_models.chat.chat_client import Server
from reward_models.chat.judge import Sampling
from tests.fixtures.chat_server import MODEL, Reply
from tests.fixtures.reward_contract import check_gradient, check_spec, example_batch


def group_of(*levels, groups=None, prompts=None):
    """One grey image per level of 255."""
    media = torch.tensor(levels)[:, None, None, None, None] / 255
    groups = [4] * len(levels) if groups is None else groups
    prompts = ["a cat"] * len(levels) if prompts is None else prompts
    return MediaBatch(media.expand(-1, 1, 3, 4, 4), prompts, groups=groups)


def shown(request):
    """The levels of the two images, in the order of the request."""
    return tuple(int(picture[0, 0, 0]) for picture in request.pictures)


def brighter(request):
    first, second = shown(request)
    if first == second:
        return "Both images are equally good."
    return f"Image {1 if first > second else 2} is better than Image {2 if first > second else 1}."


def values(judge, batch, orders="both"):
    return WinRate(judge, orders).score(batch)


@pytest.mark.parametrize("orders", ["both", "one"])
def test_every_pair_of_a_group_is_compared_and_a_tie_is_half_a_win(serve, orders):
    server = serve(brighter)
    output = values(UnifiedRewardPair(server), group_of(30, 90, 90, 200), orders)
    assert output.values.flatten().tolist() == [0.0, pytest.approx(0.5), pytest.approx(0.5), 1.0]
    pairs = sorted(shown(r) for r in serve.running[0].requests)
    straight = list(itertools.combinations((30, 90, 90, 200), 2))
    both = straight + [(b, a) for a, b in straight]
    assert pairs == sorted(both if orders == "both" else straight)
    assert [e["pairs"] for e in output.extras] == [3] * 4


def test_groups_are_compared_within_themselves_only(serve):
    batch = group_of(
        10, 99, 50, 60, groups=[7, 2, 7, 2], prompts=["a cat", "a dog", "a cat", "a dog"]
    )
    output = values(UnifiedRewardPair(serve(brighter)), batch)
    assert output.values.flatten().tolist() == [0.0, 1.0, 1.0, 0.0]
    asked = {(shown(r), r.text.rpartition("[")[2]) for r in serve.running[0].requests}
    assert asked == {
        ((10, 50), "a cat]"),
        ((50, 10), "a cat]"),
        ((99, 60), "a dog]"),
        ((60, 99), "a dog]"),
    }


def test_a_judge_that_prefers_a_position_gives_every_sample_a_half(serve):
    server = serve(lambda r: "Image 1 is better")
    swapped = values(UnifiedRewardPair(server), group_of(1, 2, 3))
    assert swapped.values.flatten().tolist() == [0.5, 0.5, 0.5]
    assert [e["disagreement"] for e in swapped.extras] == [1.0, 1.0, 1.0]
    fooled = values(UnifiedRewardPair(server), group_of(1, 2, 3), "one")
    assert fooled.values.flatten().tolist() == [1.0, 0.5, 0.0]
    honest = values(UnifiedRewardPair(serve(brighter)), group_of(1, 2, 3))
    assert [e["disagreement"] for e in honest.extras] == [0.0, 0.0, 0.0]


def test_a_pair_that_cannot_be_read_is_missing_and_not_half_a_win(serve):
    def answer(request):
        return "Well, well." if set(shown(request)) == {10, 30} else brighter(request)

    judge = UnifiedRewardPair(serve(answer), sampling=Sampling(retries=0))
    output = values(judge, group_of(10, 20, 30))
    # 10 lost its one pair that was read, 30 won it; half a win each would give 0.25 and 0.75.
    assert output.values.flatten().tolist() == [0.0, 0.5, 1.0]
    assert [len(e["missing"]) for e in output.extras] == [2, 0, 2]


def test_a_pair_read_in_one_of_two_orders_is_missing(serve):
    def answer(request):
        return "?" if shown(request) == (10, 20) else brighter(request)

    judge = UnifiedRewardPair(serve(answer), sampling=Sampling(retries=0))
    output = values(judge, group_of(10, 20, 30))
    assert output.values.flatten().tolist() == [0.0, 0.0, 1.0]
    assert [e["pairs"] - len(e["missing"]) for e in output.extras] == [1, 1, 2]


def test_a_sample_that_nobody_could_be_compared_with_fails_alone(serve):
    def answer(request):
        return Reply(status=400) if 20 in shown(request) else brighter(request)

    batch = group_of(10, 20, 30, 40, groups=[1, 1, 1, 5])
    batch = MediaBatch(
        torch.cat([batch.media, batch.media[:1]]), ["a cat"] * 5, groups=[1, 1, 1, 5, 1]
    )
    batch.media[4, 0, 0, 0, 0] = math.nan
    output = values(UnifiedRewardPair(serve(answer)), batch)
    assert output.values[[0, 2], 0].tolist() == [0.0, 1.0]
    assert output.valid.flatten().tolist() == [True, False, True, False, False]
    assert "400" in output.reasons[1]
    assert output.reasons[3] == "its group has no other sample"
    assert "not finite" in output.reasons[4]


def test_passes_of_a_pair_are_averaged(serve):
    def answer(request):
        return f"Image {1 if request.body['seed'] < 3 else 2} is better"

    judge = UnifiedRewardPair(serve(answer), sampling=Sampling(passes=4, seed=0))
    output = values(judge, group_of(10, 20), "one")
    assert output.values.flatten().tolist() == [0.75, 0.25]


def test_criteria_are_dimensions_and_probabilities_are_averaged_over_both_orders(serve):
    """P(yes) by hand: 0.9 for the brighter where it is first, 0.3 where it is second."""

    def answer(request):
        first, second = shown(request)
        p = (0.9 if first > second else 0.3) if "how beautiful" in request.text else 0.5
        return Reply("Yes", [("Yes", {"Yes": math.log(p), "No": math.log(1 - p)})])

    criteria = {"beauty": "how beautiful it is", "structure": "whether it stands"}
    output = values(OneReward(serve(answer), "image fill", criteria), group_of(10, 20))
    # beauty: the brighter beats the other with 0.9 first and with 1 - 0.3 = 0.7 second.
    assert output.values.tolist() == [pytest.approx([0.2, 0.5]), pytest.approx([0.8, 0.5])]
    texts = {r.text for r in serve.running[0].requests}
    assert len(texts) == 2
    assert all("The task is image fill. The request is: a cat" in text for text in texts)


def section(k, title, a, b):
    return f"{k}. {title}:\n## Justification: so\n## Score A: {a}\n## Score B: {b}\n"


def test_sections_of_both_are_added_up_per_dimension(serve):
    """By hand: equal in text, the brighter one looks better and has the higher sum."""

    def answer(request):
        source, first, second = shown(request)
        assert source == 99
        looks = (1.5, 3.5) if first < second else (3.5, 1.5)
        return (
            section(1, "Text Faithfulness", 4, 4)
            + section(2, "Image Faithfulness", *looks)
            + section(3, "Physical Quality", "2 (blur)", "**2**")
            + section(4, "Text Rendering", "N/A", "N/A")
        )

    batch = group_of(10, 20)
    sources = [[torch.full((3, 2, 2), 99 / 255)]] * 2
    batch = MediaBatch(batch.media, batch.prompts, references=sources, groups=batch.groups)
    output = values(RationalPair(serve(answer), "edit"), batch)
    assert output.values.tolist() == [[0.5, 0.0, 0.0], [0.5, 1.0, 1.0]]
    text = serve.running[0].requests[0].text
    assert "\n2. Image Faithfulness:\n3. Physical Quality:\n4. Text Rendering:" in text


def test_samples_of_one_group_must_share_their_prompt_and_groups_are_needed(serve):
    judge = WinRate(UnifiedRewardPair(serve(brighter)))
    with pytest.raises(ValueError, match="group 4 has samples of 2 different prompts"):
        judge.score(group_of(1, 2, prompts=["a", "b"]))
    with pytest.raises(ValueError, match="needs groups"):
        judge.score(group_of(1, 2, groups=()))


def test_win_rates_keep_what_the_contract_asks_of_rewards_that_compare(serve):
    judge = WinRate(UnifiedRewardPair(serve(brighter)))
    batch = example_batch(num_samples=3, height=8, width=12)
    batch = MediaBatch(batch.media, ["a cat"] * 3, groups=[0, 0, 0])
    check_spec(judge, batch)
    check_gradient(judge, batch)
    two = MediaBatch(batch.media.repeat(2, 1, 1, 1, 1), ["a cat"] * 6, groups=[0, 0, 0, 1, 1, 1])
    output = judge.score(two).values
    assert torch.equal(output[:3], output[3:])
    assert torch.equal(judge.score(two.take([5, 3, 1, 4, 0, 2])).values, output[[5, 3, 1, 4, 0, 2]])


@pytest.mark.parametrize(("orders", "passes"), [("both", 1), ("one", 2)])
def test_planned_judge_calls_are_the_requests_that_the_server_gets(serve, orders, passes):
    server = serve(brighter)
    judge = UnifiedRewardPair(server, sampling=Sampling(passes=passes, max_tokens=10))
    batch = group_of(30, 90, 120, 10, 20, groups=[1, 1, 1, 2, 2])
    reward = WinRate(judge, orders)
    planned = reward.judge_calls([3, 2])
    reward.score(batch)
    assert planned.answers == len(serve.running[0].requests) == 8  # four pairs, twice
    assert planned.tokens == 80


def test_the_questions_of_judges_about_a_sample_or_a_pair_are_counted():
    server = Server("http://127.0.0.1:1/v1", MODEL)
    pairs = OneReward(server, task="filling")
    assert pairs.conversations == len(pairs.ask(group_of(1), group_of(2))) == 4
    assert WinRate(pairs).judge_calls([24] * 24).answers == 52_992
    judge = EditScore(server, sampling=Sampling(passes=4))
    edit = MediaBatch(torch.rand(1, 1, 3, 8, 8), ["red"], references=[[torch.rand(3, 8, 8)]])
    assert judge.conversations == len(judge.ask(edit)) == 2
    assert judge.judge_calls([3, 2]).answers == 5 * 2 * 4
