"""Questions, votes and their table: order, repeats, agreement, and what readers make of them."""

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from flowalign.curation.score_table import find_table, read_table
from flowalign.curation.votes.poll import Poll, PollSettings, measure_agreement
from flowalign.curation.votes.questions import (
    Question,
    VoteTable,
    divide,
    find_run_questions,
    make_questions,
    read_votes,
)
from flowalign.data.media_record import Record
from flowalign.data.preference.convert import read_pairs
from flowalign.data.preference.validate import DropReport
from flowalign.data.readers import open_dataset
from flowalign.functional.agreement import krippendorff_alpha
from flowalign.functional.pairing import beaten_share
from flowalign.utils.media.media import Media
from tests.fixtures.fake_run import fake_run

NAN = math.nan
PUBLISHED = torch.tensor(  # four observers, twelve units (Krippendorff, 2011)
    [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, NAN, NAN, NAN],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, NAN, 3],
        [NAN, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, NAN],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, NAN],
    ]
).T


def make_poll(tmp_path, count=3, **settings):
    table = VoteTable(tmp_path / "votes.jsonl")
    return Poll(PollSettings(**settings), table, [make_question(tmp_path, i) for i in range(count)])


def make_question(folder, number):
    files = []
    for i in range(3):
        files.append(folder / f"{number}-{i}.png")
        Image.new("RGB", (8, 8), (40 * i, 20 * number, 0)).save(files[-1])
    return Question(f"q{number}", f"prompt {number}", [Media(str(file)) for file in files])


def answer(poll, annotator, id, values=(1, 2, 2), dim="overall"):
    poll.vote(annotator, id, {dim: list(values)}, 1.0)


@pytest.mark.parametrize(
    ("distance", "expected"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)]
)
def test_alpha_equals_the_published_example(distance, expected):
    assert krippendorff_alpha(PUBLISHED, distance) == pytest.approx(expected, abs=5e-4)


def test_alpha_is_one_for_equal_annotators_and_undefined_without_two_values():
    assert krippendorff_alpha(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), "nominal") == 1
    assert math.isnan(krippendorff_alpha(torch.tensor([[1.0, NAN], [2.0, NAN]]), "interval"))
    assert math.isnan(krippendorff_alpha(torch.ones(3, 2), "interval"))
    opposed = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    # Observed disagreement 4, expected 4 * 2 / 3.
    assert krippendorff_alpha(opposed, "interval") == pytest.approx(-0.5)


def test_the_share_of_beaten_candidates_counts_ties_half_and_averages_votes():
    assert beaten_share(torch.tensor([[1, 2, 2]])).tolist() == [1, 0.25, 0.25]
    assert beaten_share(torch.tensor([[1, 2, 3], [3, 2, 1]])).tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("count", "most"), [(2, 2), (9, 4), (10, 9), (7, 3), (4, 4)])
def test_groups_are_divided_evenly(count, most):
    parts = list(divide(range(count), most))
    assert [i for part in parts for i in part] == list(range(count))
    assert all(2 <= len(part) <= most for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_samples_of_a_prompt_and_source_form_a_question(tmp_path):
    rows = [{"file_name": f"{i}.png", "prompt": "a", "id": str(i)} for i in range(3)]
    rows += [{"file_name": f"{i}.png", "prompt": "a", "references": ["s.png"]} for i in (3, 4)]
    rows += [{"images": ["5.png", "6.png"], "prompt": "b"}, {"file_name": "7.png", "prompt": "c"}]
    for name in (*map(str, range(8)), "s"):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{name}.png")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metadata.jsonl").write_text(text)
    questions, problems = make_questions(open_dataset(str(tmp_path)), 4)
    assert [(q.prompt, len(q.candidates), len(q.references)) for q in questions] == [
        ("a", 3, 0),
        ("a", 2, 1),
        ("b", 2, 0),
    ]
    assert problems == ["no other sample of its prompt: #7"]
    again, _ = make_questions(open_dataset(str(tmp_path)), 4)
    assert [q.id for q in again] == [q.id for q in questions]


def test_annotators_share_the_questions_and_see_other_ones_first(tmp_path):
    poll = make_poll(tmp_path)
    first = poll.next("anna").question.id
    second = poll.next("ben").question.id
    assert first != second
    answer(poll, "anna", first)
    answer(poll, "ben", second)
    assert poll.next("anna").question.id == poll.next("ben").question.id == "q2"
    answer(poll, "ben", "q2")
    assert poll.next("anna") is None
    assert (poll.count("anna"), poll.count("ben")) == ((1, 0), (2, 0))


def test_the_order_of_candidates_depends_on_the_annotator_alone(tmp_path):
    poll = make_poll(tmp_path, 1)
    orders = {name: tuple(poll.next(name).order) for name in map(str, range(30))}
    assert len(set(orders.values())) == 6
    assert tuple(poll.next("7").order) == orders["7"]


def test_many_repeats_take_no_longer_than_many_votes(tmp_path):
    poll = make_poll(tmp_path, 0, repeats=1.0)
    question = make_question(tmp_path, 0)
    for k in range(20_000):
        poll.add(replace(question, id=f"q{k}"))
        row = {"id": f"q{k}/a", "question": f"q{k}", "user_id": "a", "repeat": False}
        poll.table.rows[row["id"]] = row
    start = time.perf_counter()
    task = poll.next("a")
    assert task is not None
    assert (task.question.id, task.repeat) == ("q0", True)
    assert poll.count("a") == (20_000, 20_000)
    assert time.perf_counter() - start < 3  # 60 s if every vote were compared with every other


def test_repeats_come_after_ten_other_votes_or_at_the_end(tmp_path):
    poll = make_poll(tmp_path, 12, repeats=1.0)
    seen = []
    while task := poll.next("anna"):
        answer(poll, "anna", task.question.id)
        seen.append((task.question.id, task.repeat))
    assert len(seen) == 24
    assert [repeat for _, repeat in seen[:12]] == [False] * 11 + [True]
    assert seen.index(("q0", True)) == 11
    with pytest.raises(ValueError, match="already answered"):
        answer(poll, "anna", "q0")
    assert measure_agreement(poll)["overall"].repeats == 1


def test_skipped_questions_come_again(tmp_path):
    poll = make_poll(tmp_path)
    assert [poll.next("anna", skip).question.id for skip in range(4)] == ["q0", "q1", "q2", "q0"]


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"other": [1, 2, 2]},
        {"overall": [1, 2]},
        {"overall": [1, 2, 4]},
        {"overall": "122"},
        {"overall": [True, 2, 2]},
        {"overall": [1.0, 2, 2]},
        [1],
        None,
    ],
)
def test_answers_that_do_not_fit_are_not_stored(tmp_path, answers):
    poll = make_poll(tmp_path)
    with pytest.raises(ValueError, match="got"):
        poll.vote("anna", "q0", answers, 1.0)
    with pytest.raises(ValueError, match="no question"):
        answer(poll, "anna", "q9")
    with pytest.raises(ValueError, match="annotator must be"):
        answer(poll, " ", "q0")
    assert not poll.table.rows


def test_a_vote_is_on_the_disk_before_it_is_confirmed(tmp_path, monkeypatch):
    poll, synced = make_poll(tmp_path), []

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", sync)
    answer(poll, "anna", "q0")
    assert synced == [str(tmp_path / "votes.jsonl"), str(tmp_path)]
    assert json.loads((tmp_path / "votes.jsonl").read_text())["ranks"] == {"overall": [1, 2, 2]}


def test_a_line_that_a_kill_cut_is_removed_and_whole_ones_stay(tmp_path):
    poll = make_poll(tmp_path)
    for id in ("q0", "q1"):
        answer(poll, "anna", id)
    whole = poll.table.path.read_bytes()
    poll.table.path.write_bytes(whole + b'{"id": "q2/an')
    again = make_poll(tmp_path)
    assert again.next("anna").question.id == "q2"
    answer(again, "anna", "q2")
    assert poll.table.path.read_bytes().startswith(whole)
    assert len(VoteTable(poll.table.path).rows) == 3
    poll.table.path.write_bytes(b"no vote\n" + whole)
    with pytest.raises(ValueError, match="line 1 is no vote"):
        VoteTable(poll.table.path)


@pytest.mark.parametrize("rest", [b"", b'{"id": "q2/an'])
def test_reading_leaves_a_table_without_a_last_line_end_as_it_is(tmp_path, rest):
    """An editor, `jq` or a copy in progress leaves none; a whole vote counts."""
    poll = make_poll(tmp_path)
    for id in ("q0", "q1"):
        answer(poll, "anna", id)
    table = poll.table.path
    content = table.read_bytes() + rest if rest else table.read_bytes()[:-1]
    table.write_bytes(content)
    assert len(list(read_votes(table))) == 2 * 3
    again = make_poll(tmp_path)
    assert table.read_bytes() == content
    answer(again, "anna", "q2")
    assert [json.loads(line)["id"] for line in table.read_text().splitlines()] == [
        "q0/anna",
        "q1/anna",
        "q2/anna",
    ]


def test_a_prompt_with_a_line_separator_is_one_row(tmp_path):
    poll = make_poll(tmp_path, 1)
    poll.questions["q0"] = replace(poll.questions["q0"], prompt="a\u2028b\x85c\x0cd\re")
    answer(poll, "anna", "q0")
    (row,) = VoteTable(poll.table.path).rows.values()
    assert row["prompt"] == "a\u2028b\x85c\x0cd\re"


def test_the_last_vote_of_an_annotator_can_be_undone(tmp_path):
    poll = make_poll(tmp_path, annotators=2)
    answer(poll, "anna", "q0")
    answer(poll, "ben", "q0")
    poll.undo("anna")
    assert list(poll.table.rows) == list(VoteTable(poll.table.path).rows) == ["q0/ben"]
    assert poll.next("anna").question.id == "q0"
    poll.undo("nobody")


def test_agreement_of_rankings_and_ratings(tmp_path):
    poll = make_poll(tmp_path, annotators=2, kind="rank")
    for name in ("anna", "ben"):
        answer(poll, name, "q0", (1, 2, 3))
    assert measure_agreement(poll)["overall"].alpha == 1
    answer(poll, "anna", "q1", (1, 2, 3))
    answer(poll, "ben", "q1", (3, 2, 1))
    # 12 ordered pairs, 24 values: the 6 of q1 contradict each other. Observed disagreement:
    # 12 values paired at distance 4. By chance: 2 * 12 * 12 * 4 / 23.
    assert measure_agreement(poll)["overall"].alpha == pytest.approx(1 - 12 * 4 / (1152 / 23))
    (tmp_path / "rated").mkdir()
    rated = make_poll(tmp_path / "rated", annotators=2, kind="rate", dimensions=("a", "b"))
    for name, values in (("anna", [1, 3, 5]), ("ben", [1, 3, 5])):
        rated.vote(name, "q0", {"a": values, "b": values[::-1]}, 0.0)
    assert {dim: one.alpha for dim, one in measure_agreement(rated).items()} == {"a": 1, "b": 1}
    with pytest.raises(ValueError, match="one dimension"):
        PollSettings(kind="rank", dimensions=("a", "b"))


def test_agreement_ignores_missing_annotators_and_candidates(tmp_path):
    poll = make_poll(tmp_path, annotators=3, kind="rate", dimensions=("overall",))
    rows = {"q0": ("anna", "ben", "cem"), "q1": ("anna", "ben"), "q2": ("anna",)}
    ratings = iter(([1, 3, 5], [1, 3, 4], [2, 3, 5], [1, 1, 2], [2, 1, 2], [5, 5, 5]))
    expected = []
    for id, names in rows.items():
        given = [next(ratings) for _ in names]
        for name, values in zip(names, given, strict=True):
            answer(poll, name, id, values)
        expected += [[*unit, *[NAN] * (3 - len(unit))] for unit in zip(*given, strict=True)]
    agreement = measure_agreement(poll)["overall"]
    assert agreement.alpha == krippendorff_alpha(torch.tensor(expected), "interval")
    assert math.isnan(agreement.repeats)


def test_training_and_pairs_read_the_table(tmp_path):
    poll = make_poll(tmp_path, 2, annotators=2)
    answer(poll, "anna", "q0", (1, 2, 2))
    answer(poll, "ben", "q0", (2, 1, 2))
    answer(poll, "anna", "q1", (2, 2, 1))
    pairs = read_pairs(open_dataset(str(poll.table.path)), [], False, lambda m: m, DropReport())
    found = [(pair.chosen.media.path[-7:], pair.rejected.media.path[-7:]) for pair in pairs]
    assert found[:2] == [("0-0.png", "0-1.png"), ("0-0.png", "0-2.png")]
    assert ("0-1.png", "0-0.png") in found  # the other annotator's order
    assert {pair.user for pair in pairs} == {"anna", "ben"}
    table = read_table(find_table(tmp_path), [])
    assert table.dims == ["overall"]
    assert table.scores[:, 0].tolist() == [0.625, 0.625, 0.25, 0.25, 0.25, 1]
    assert [medium.record for medium in table.media] == ["q0"] * 3 + ["q1"] * 3
    assert table.media[5].path == str(tmp_path / "1-2.png")


def test_fixed_prompts_of_a_run_are_compared_between_steps(tmp_path):
    run = fake_run(tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    questions = find_run_questions(run, out, 3)
    steps = sorted(json.loads((run / "samples" / "index.json").read_text())["steps"])
    assert len(questions[0].candidates) == min(3, len(steps))
    assert f"step-{steps[-1]:06}" in questions[0].candidates[-1].path
    with Image.open(questions[0].candidates[0].path) as image:
        assert image.width == image.height
    (run / "samples" / "index.json").write_text("{}")
    with pytest.raises(ValueError, match="samples of 0 evaluations"):
        find_run_questions(run, out, 3)


def test_samples_that_cannot_be_read_are_no_candidates(tmp_path):
    make_question(tmp_path, 0)
    (tmp_path / "0-2.png").write_bytes((tmp_path / "0-2.png").read_bytes()[:30])
    records = [Record(f"r{i}", "p", [Media(str(tmp_path / f"0-{i}.png"))]) for i in range(3)]
    (question,), (problem,) = make_questions(records, 3)
    assert [Path(one.path or "").name for one in question.candidates] == ["0-0.png", "0-1.png"]
    assert problem.startswith("unreadable image: ")
