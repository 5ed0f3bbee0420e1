"""Parsed judge texts equal those of reference parsers, with a reason if the reference guesses."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_models.chat.chat_client import ChatAnswer, _parse_completion
from reward_models.chat.edit_score import DIMS, HIGHEST, parse_answers, reduce_passes
from reward_models.chat.magic_assessor import parse_assessment
from reward_models.chat.parsers import (
    Unparsable,
    find_boxed,
    parse_score,
    parse_scores,
    strip_thoughts,
    word_probabilities,
)
from reward_models.chat.rational_rewards import (
    EDIT,
    T2I,
    average_sections,
    parse_pair,
    parse_sections,
    sum_sections,
)
from reward_models.chat.unified_answers import parse_better, parse_better_after_thinking
from reward_models.chat.unified_reward import parse_axes, parse_final_score
from reward_models.chat.video_score2 import find_scores, soft_scores
from tests.fixtures.golden import GOLDEN, load

CORPUS = json.loads((GOLDEN / "H_judge_parsers.json").read_text())["values"]


def reading(parse, *args):
    """The result of a parser, or None if it raises Unparsable."""
    try:
        return parse(*args)
    except Unparsable:
        return None


def scores_of(row, parser):
    """The reference's scores as numbers, empty where it found none."""
    found = row[parser]
    return [float(x) for x in found.get("score", [])] if found else []


DRAFTS = {
    "axes": (parse_axes, "Alignment Score (1-5): 1\nCoherence Score (1-5): 1"),
    "final": (parse_final_score, "Final Score: 4"),
    "pair": (parse_better, "image 1 is better, but wait"),
    "edit": (lambda text: parse_scores(text, 0.0, 25.0), '{"reasoning": "", "score": [20, 20]}'),
    "sections": (lambda text: parse_sections(text, T2I), "1. Text Faithfulness:\n## Score: 4"),
    "box": (parse_assessment, r'\boxed{"Whether Normal": true}'),
    "video": (
        lambda text: [digit for _, digit in find_scores(text)],
        "visual quality: 3\ntext-to-video alignment: 3\nphysical/common-sense consistency: 3",
    ),
}


@pytest.mark.parametrize(("parse", "verdict"), DRAFTS.values(), ids=DRAFTS)
def test_thoughts_without_an_end_are_no_answer(parse, verdict):
    """A server with a reasoning parser sends no thoughts, or none of their opening tag."""
    expected = parse(verdict)
    assert parse(f"hm</think>{verdict}") == expected
    assert parse(f"<think>hm</think>{verdict}") == expected
    for draft in (f"<think>{verdict}", f"<think>so</think>no, <think>{verdict}"):
        with pytest.raises(Unparsable, match="thoughts have no end"):
            parse(draft)
    assert strip_thoughts("<think>a</think>b</think> c") == " c"


def first_token(**likeliest: float) -> ChatAnswer:
    shown = [
        (text.replace("space_", "\u0120").replace("mark_", "\u2581"), math.log(p))
        for text, p in likeliest.items()
    ]
    return ChatAnswer("", tokens=[(shown[0][0], shown)])


def test_words_without_most_of_the_probability_are_no_answer():
    thinking = ChatAnswer(
        "", tokens=[("<think>", [("<think>", -1e-4), ("Yes", -12.0), ("No", -9.0)])]
    )
    with pytest.raises(Unparsable, match=r"none of yes, no is likely: together 0\.0%.*'<think>'"):
        word_probabilities(thinking, 0, ("yes", "no"))
    with pytest.raises(Unparsable, match=r"together 49\.0%"):
        word_probabilities(first_token(yes=0.4, no=0.09, so=0.51), 0, ("yes", "no"))
    found = word_probabilities(first_token(yes=0.4, no=0.1, so=0.5), 0, ("yes", "no"))
    assert found == pytest.approx([0.8, 0.2])


def test_spellings_and_space_marks_of_a_word_add_up_and_others_are_left_out():
    answer = first_token(Yes=0.1, space_Yes=0.1, mark_yes=0.2, NO=0.1, mark_NO=0.1, maybe=0.4)
    assert word_probabilities(answer, 0, ("yes", "no")) == pytest.approx([2 / 3, 1 / 3])
    with pytest.raises(Unparsable, match="none of good, bad"):
        word_probabilities(answer, 0, ("good", "bad"))
    with pytest.raises(Unparsable, match="no log-prob"):
        word_probabilities(ChatAnswer("Yes"), 0, ("yes", "no"))


def test_probabilities_of_tokens_with_one_text_add_up():
    """Several tokens may have one text; a server may also list the same token twice."""
    shown = [("No", 0.3), ("No", 0.1), ("Yes", 0.6), ("Yes", 0.6)]
    listed = [{"token": text, "logprob": math.log(p)} for text, p in shown]
    content = [{"token": "Yes", "top_logprobs": listed}]
    choice = {"message": {"content": "Yes"}, "logprobs": {"content": content}}
    answer = _parse_completion({"choices": [choice]})
    assert word_probabilities(answer, 0, ("yes", "no")) == pytest.approx([0.6, 0.4])


def in_range(scores):
    return len(scores) in (1, 2) and all(0 <= x <= HIGHEST for x in scores)


@pytest.mark.parametrize("row", CORPUS["editscore_texts"], ids=lambda row: row["text"][:30])
def test_edit_scores_are_read_where_a_reference_reads_legal_ones(row):
    read = reading(parse_scores, row["text"], 0.0, HIGHEST)
    strict, lenient = (
        scores_of(row, p) for p in ("mllm_output_to_dict", "parse_vlm_output_to_dict")
    )
    cut_off = row["text"].count("[") > row["text"].count("]")
    if in_range(lenient) and not cut_off:
        assert read == lenient
        assert strict in ([], lenient)
    else:
        assert read is None


def test_a_score_out_of_range_is_a_failure_and_not_better_than_a_perfect_one():
    """The reference gives 12.5 of 10 to this, more than to a perfect edit."""
    with pytest.raises(Unparsable, match="outside"):
        parse_scores('{"score": [30, 40], "reasoning": "x"}', 0.0, HIGHEST)
    assert parse_scores('{"score": [25, 25]}', 0.0, HIGHEST) == [25, 25]


@pytest.mark.parametrize("row", CORPUS["editscore_evaluate"], ids=lambda r: r["reduction"])
def test_passes_of_edit_score_reduce_as_the_reference_does_for_one_image(row):
    texts = row["outputs_in_call_order"]
    rows = [parse_answers(sc, pq) for sc, pq in zip(texts[::2], texts[1::2], strict=True)]
    reduction = row["reduction"]
    reduction = "average_first_following" if reduction == "average_first" else reduction
    found = reduce_passes(torch.tensor(rows, dtype=torch.float64), reduction)
    expected = [row["result"][dim] for dim in DIMS]
    torch.testing.assert_close(found.tolist(), expected, atol=1e-6, rtol=0)


def test_an_edit_that_changes_too_much_costs_its_overall_score_unless_only_following_counts():
    """By hand: following 10, faithfulness 2, quality 4.5; sqrt(2 * 4.5) = 3."""
    passes = torch.tensor([[10.0, 2.0, 2.0, 4.5]], dtype=torch.float64)
    assert reduce_passes(passes).tolist() == [10, 2, 4.5, 3]
    assert reduce_passes(passes, "average_first").tolist() == [10, 2, 4.5, 3]
    following = reduce_passes(passes, "average_first_following")
    assert following[3].item() == pytest.approx(math.sqrt(45))


def _edits(row):
    """(passes that could be read, all of them, result) of every edit in a batch."""
    half = len(row["passes"][0]) // 2
    for i, result in enumerate(row["result"]):
        read = [reading(parse_answers, texts[i], texts[half + i]) for texts in row["passes"]]
        yield [r for r in read if r is not None], read, result


@pytest.mark.parametrize("row", CORPUS["editscore_batch_evaluate"], ids=lambda r: r["reduction"])
def test_batches_of_edit_score_agree_where_the_reference_did_not_invent_a_score(row):
    for good, read, result in _edits(row):
        if len(good) < len(read):
            continue
        passes = torch.tensor(good, dtype=torch.float64)
        assert passes[:, 2].mean().item() == pytest.approx(result["SC_score"], abs=1e-6)
        _, _, pq, found = reduce_passes(passes, row["reduction"]).tolist()
        assert pq == pytest.approx(result["PQ_score"], abs=1e-6)
        assert found == pytest.approx(result["O_score"], abs=1e-6)


@pytest.mark.parametrize("row", CORPUS["unifiedreward_texts"], ids=lambda row: row["text"][:30])
def test_axes_are_read_as_the_references_read_them_or_not_at_all(row):
    read = reading(parse_axes, row["text"])
    reference = row["verl_omni_scores"]
    named = [axis for axis in reference if axis in row["text"].lower()]
    legal = all(1 <= x <= 5 for x in reference.values())
    if "**" in row["text"]:
        assert read == {"alignment": 4.0}  # both references stumble over bold
    elif named and legal:
        assert read == reference
    else:
        assert read is None  # three numbers of a sentence are no axes, 7 is not on the scale
    if not math.isnan(row["unirl"]["alignment"]):
        assert read == row["unirl"]


@pytest.mark.parametrize("row", CORPUS["unifiedreward_texts"], ids=lambda row: row["text"][:30])
def test_final_scores_are_read_as_flow_grpo_reads_them_and_its_zero_is_a_failure(row):
    assert reading(parse_final_score, row["text"]) == (row["flow_grpo_final_score"] or None)


def test_a_final_score_above_five_is_a_failure_with_or_without_decimals():
    """The reference refuses 6 and lets 5.75 pass."""
    for text in ("Final Score: 6", "Final Score: 5.75", "Final Score: 0", "Final Score: 45"):
        assert reading(parse_final_score, text) is None


def test_axes_that_the_group_mean_would_fill_in_are_missing():
    given = CORPUS["prefgrpo_pointwise"]
    for i, text in enumerate(given["texts"]):
        read = reading(parse_axes, text) or {}
        for axis, column in given["dims"].items():
            if axis.lower() in read and "Score (1-5): " in text:
                assert read[axis.lower()] == column[i]


def _rate(scores):
    given = [x for x in scores if x is not None]
    return sum(given) / len(given) if given else None


@pytest.mark.parametrize("group", CORPUS["prefgrpo_win_rates"], ids=lambda group: str(group["n"]))
def test_win_rates_agree_once_the_missing_pairs_are_given_half_a_win_each(group):
    """The reference counts an unreadable answer as half a win; a tie is half a win in both."""
    scores = {i: [] for i in range(group["n"])}
    for pair in group["responses"]:
        read = reading(parse_better_after_thinking, pair["model_output"])
        scores[pair["first_index"]].append(read)
        scores[pair["second_index"]].append(None if read is None else 1 - read)
    filled = [_rate([0.5 if x is None else x for x in mine]) for mine in scores.values()]
    assert filled == pytest.approx(group["win_rates"], abs=1e-3)


VERDICTS = [
    ("Image 1 is better than Image 2.", 1.0),
    ("I say: image 2 is better than Image 1", 0.0),
    ("Both images are equally good.", 0.5),
    ("Image 1 is better in colour, but Image 2 is better.", None),
    ("Image 3 is better", None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), VERDICTS)
def test_a_plain_comparison_names_one_winner_or_counts_for_nothing(text, expected):
    assert reading(parse_better, text) == expected


def test_a_verdict_within_the_thoughts_does_not_count():
    thought = "<think><answer>Image 1 is better</answer></think>"
    assert reading(parse_better_after_thinking, "<think>Image 1 is better</think>") is None
    assert parse_better_after_thinking("<answer>Video 2 is better</answer>") == 0
    assert reading(parse_better_after_thinking, f"{thought}<answer>Image 2 is better</answer>") == 0


@pytest.mark.parametrize(
    ("row", "sections"),
    [(r, T2I) for r in CORPUS["rational_t2i"]] + [(r, EDIT) for r in CORPUS["rational_edit"]],
)
def test_sections_of_rational_rewards_are_read_and_averaged_as_by_flow_factory(row, sections):
    scores = parse_sections(row["text"], sections)
    given = {name: x if isinstance(x, float) else math.nan for name, x in row["parsed"].items()}
    assert scores == pytest.approx(given, nan_ok=True)
    expected = None if isinstance(row["reward"], dict) else row["reward"]
    assert reading(average_sections, scores) == pytest.approx(expected)


def test_a_score_in_the_summary_belongs_to_no_section():
    text = "1. Text Faithfulness:\n## Score: 3\n3. Text Rendering:\n# Summary: so\n## Score: 1"
    scores = parse_sections(text, T2I)
    assert scores["text_faithfulness"] == 3
    assert math.isnan(scores["text_rendering"])


@pytest.mark.parametrize("row", CORPUS["rational_pairwise"], ids=lambda row: row["text"][60:90])
def test_pairs_of_rational_rewards_have_the_totals_and_ranks_of_the_reference(row):
    sections = EDIT if len(row["aspects"]) == 4 else T2I
    scores = parse_pair(row["text"], sections)
    neutral = {
        name: tuple(2.5 if given[s] == "N/A" else given[s] for s in ("score_a", "score_b"))
        for name, given in row["parsed"].items()
    }
    assert scores == neutral
    found = sum_sections(scores)
    for dim, name in (("text", "text"), ("visual", "visual"), ("overall", "all")):
        assert found[dim] == tuple(row["totals"][name])
        a, b = found[dim]
        assert ("A=B" if a == b else "A>B" if a > b else "B>A") == row["ranking"][name]


def test_a_pair_with_a_section_missing_or_out_of_range_is_not_read():
    text = CORPUS["rational_pairwise"][0]["text"]
    assert reading(parse_pair, text, T2I)
    assert reading(parse_pair, text.replace("Score B: 2.5", "Score B: 7"), T2I) is None
    assert reading(parse_pair, text.replace("3. Text Rendering", "3. Else"), T2I) is None


def answer_of(index, row):
    logits = load("H_judge_parsers")[f"digit_logits{index}"]
    logprobs = torch.log_softmax(logits, 1)
    digits = [list(zip("12345", step.tolist(), strict=True)) for step in logprobs]
    return ChatAnswer(row["text"], "stop", list(zip(row["text"], digits, strict=True)))


@pytest.mark.parametrize(("index", "row"), enumerate(CORPUS["videoscore2"]))
def test_video_scores_are_whole_numbers_from_one_to_five_where_the_port_finds_them(index, row):
    read = reading(find_scores, row["text"])
    hard = [
        row["hard"][f"{d}_hard"]
        for d in ("visual_quality", "text_alignment", "physical_consistency")
    ]
    if None in hard:
        unnumbered = row["text"].startswith("visual quality: 3;")  # the format the prompt asks for
        assert read is None or unnumbered
    elif max(hard) > 5:
        assert read is None
    else:
        assert [int(number) for _, number in read] == hard
        assert all(row["text"][start] == number for start, number in read)


@pytest.mark.parametrize(
    ("index", "row"),
    [
        (i, r)
        for i, r in enumerate(CORPUS["videoscore2"])
        if r["soft"] and r["soft"]["visual_quality"]
    ],
)
def test_upstream_weighing_of_digits_is_the_ports_to_its_rounding(index, row):
    if index == 5:  # its 9 and 10 are outside the scale
        assert reading(soft_scores, answer_of(index, row), "upstream") is None
        return
    found = soft_scores(answer_of(index, row), "upstream")
    assert found == pytest.approx(list(row["soft"].values()), abs=5.1e-5)
    logits = load("H_judge_parsers")[f"digit_logits{index}"]
    at = [start for start, _ in find_scores(row["text"])]
    expected = logits[at].softmax(1) @ torch.arange(1.0, 6.0)
    assert soft_scores(answer_of(index, row), "expectation") == pytest.approx(expected.tolist())


def test_the_unnumbered_format_that_the_prompt_asks_for_is_read():
    (text,) = [r["text"] for r in CORPUS["videoscore2"] if r["text"].startswith("visual quality")]
    thought = "visual quality: 1 perhaps</think>"
    assert [number for _, number in find_scores(thought + text)] == ["3", "2", "4"]


def test_an_expectation_orders_what_upstream_weighing_does_not():
    """A certain 3 beats a 5 with share 0.4 upstream, although everything else there is a 4."""

    def weighed(shares_of_digits, mode):
        step = [(str(d), math.log(p)) for d, p in shares_of_digits.items()]
        text = "(1) visual quality: {0} (2) text-to-video alignment: {0} " + (
            "(3) physical/common-sense consistency: {0}"
        )
        tokens = [(c, step if c == "5" else [(c, 0.0)]) for c in text.format("5")]
        return soft_scores(ChatAnswer(text, "stop", tokens), mode)[0]

    certain, likely = {3: 0.999, 5: 0.001}, {5: 0.4, 4: 0.35, 3: 0.25}
    assert weighed(likely, "upstream") == pytest.approx(2.0)
    assert weighed(likely, "upstream") < weighed(certain, "upstream")
    assert weighed(likely, "expectation") == pytest.approx(4.15)
    assert weighed(likely, "expectation") > weighed(certain, "expectation")


BOXES = [
    (r'<think>x</think>\boxed{"Whether Normal": true, "Type of Deformity": {}}', (True, ())),
    (r'\boxed{{"Whether Normal": true}}', (True, ())),
    (
        r"\boxed{{“Whether Normal”: false, “Type of Deformity”: "
        "{“L2: Abnormal Human Anatomy”: true,"
        "“L3: Hand Structure”: false}}}",
        (False, ("L2: Abnormal Human Anatomy",)),
    ),
    (r'\boxed{old} then \boxed{"Whether Normal": "No"}', (False, ())),
    (r'\boxed{"Whether Normal": true, "Type of Deformity": {"L2: x": true}}', None),
    (r'\boxed{"Whether Normal": 3}', None),
    (r'\boxed{"Whether Normal": true', None),
    (r'{"Whether Normal": true}', None),
    (r"\boxed{[1, 2]}", None),
    (r'\boxed{"Whether Normal": false, "Type of Deformity": "hands"}', None),
    ("", None),
]


@pytest.mark.parametrize(("text", "expected"), BOXES)
def test_an_assessment_is_read_from_the_last_complete_box(text, expected):
    found = reading(parse_assessment, text)
    assert found == expected


def test_a_box_ends_at_its_own_brace():
    assert find_boxed(r"a \boxed{x {y {z}} w} } b") == "x {y {z}} w"


@pytest.mark.parametrize(
    "text", ["4,5", "4.5.6", "4x", "45%", "4/10", "four", "", "-", "1e1", "nan"]
)
def test_what_only_begins_like_a_score_is_none(text):
    assert reading(parse_score, text, 1.0, 5.0) is None


@pytest.mark.parametrize("text", ["4", "4.", "4/5", "4 / 5", "4, because", "+4", "4)"])
def test_a_score_may_be_followed_by_punctuation_or_its_own_scale(text):
    assert parse_score(text, 1.0, 5.0) == 4


PIECES = (
    *("Alignment Score (1-5): ", "Coherence Score: ", "Style: ", "Final Score: ", "score"),
    *('"score": ', "[", "]", "{", "}", ", ", "\n", "**", "/", "5", "25", "-3", "4.5", "1e9"),
    *("NaN", "inf", "\\boxed{", '"Whether Normal": ', "true", "<think>", "</think>", "<answer>"),
    *("</answer>", "Image 1 is better", "Image 2 is better", "equally good", "tie"),
    *("1. Text Faithfulness:\n", "2. Physical and Visual Quality", "## Score: ", "N/A"),
    *("# Summary:", "(1) visual quality: ", "(2) text-to-video alignment: "),
    *("(3) physical/common-sense consistency: ", "٣", "“"),
)
NUMBERS = st.just("9" * 40) | st.floats().map(str)
WORDS = st.sampled_from(PIECES) | st.text(max_size=5)
TEXTS = st.lists(WORDS | NUMBERS, max_size=14).map("".join)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_no_text_gives_a_number_outside_its_range_or_an_exception_of_another_kind(text):
    for number in reading(parse_scores, text, 0.0, 25.0) or ():
        assert 0 <= number <= 25
    for number in (reading(parse_axes, text) or {}).values():
        assert 1 <= number <= 5
    for parse, low, high in (
        (parse_final_score, 1, 5),
        (parse_better, 0, 1),
        (parse_better_after_thinking, 0, 1),
    ):
        number = reading(parse, text)
        assert number is None or low <= number <= high
    for sections in (T2I, EDIT):
        mean = reading(lambda s: average_sections(parse_sections(text, s)), sections)
        assert mean is None or 0 <= mean <= 1
        for pair in (reading(parse_pair, text, sections) or {}).values():
            assert all(1 <= score <= 4 for score in pair)
    for _, digit in reading(find_scores, text) or ():
        assert digit in "12345"
    for number in reading(parse_answers, text, text) or ():
        assert 0 <= number <= 10 or math.isnan(number)
    reading(parse_assessment, text)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=4), st.floats()), max_size=6), st.sampled_from("135"))
def test_no_log_probabilities_give_shares_outside_zero_to_one(likeliest, digit):
    answer = ChatAnswer(digit, "stop", [(digit, [*likeliest, (digit, -1.0)])])
    for words in (("1", "2", "3", "4", "5"), ("yes", "no")):
        found = reading(word_probabilities, answer, 0, words)
        assert found is None or sum(found) == pytest.approx(1)
        assert found is None or all(0 <= share <= 1 for share in found)
