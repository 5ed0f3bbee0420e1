"""`flowalign reward eval`: tables with known answers, and the page made of them."""

import json
import math
import re
import subprocess

import pytest
import torch

from flowalign.cli.main import parse
from flowalign.cli.reward import run as run_reward
from flowalign.functional.agreement import list_pairs
from flowalign.reward_training import eval as reward_eval
from flowalign.reward_training.eval import MEASURES, TIES, Settings, evaluate
from flowalign.reward_training.labelled_pairs import pair_rows, read_scores


def medium(record, k, score, valid=True, prompt=None, **said):
    """A row as `flowalign score` writes it."""
    return {
        "record": record,
        "medium": k,
        "prompt": record if prompt is None else prompt,
        "path": f"{record}-{k}.png",
        "reason": None,
        "fingerprint": "abc",
        **{name.replace("__", "/"): value for name, value in said.items()},
        "VQ": score,
        "VQ_valid": valid,
    }


def write(folder, rows):
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*words):
    return run_reward(parse(["reward", "eval", *map(str, words)]))


RANKED = [
    medium("a", 0, 3.0, rank__overall=1),
    medium("a", 1, 1.0, rank__overall=2),
    medium("b", 0, 2.0, rank__overall=2),
    medium("b", 1, 5.0, rank__overall=1),
    medium("c", 0, 4.0, rank__overall=1),
    medium("c", 1, 4.5, rank__overall=2),
    medium("d", 0, 1.0, rank__overall=1),
    medium("d", 1, 1.25, rank__overall=1),
]
"""Leads 2, -3, -0.5, -0.25; annotators choose A, B, A, tie: 2 of 3 decided, 3 of 4 with ties to
.25."""


def test_a_table_with_known_answers(tmp_path, capsys):
    write(tmp_path, RANKED)
    assert run(tmp_path) == 0
    content = json.loads((tmp_path / "eval.json").read_text())
    assert (content["rows"], content["records"], content["prompts"]) == (8, 4, 4)
    (result,) = content["results"]
    assert (result["score"], result["human"]) == ("VQ", "rank/overall")
    assert (result["pairs"], result["human_ties"], result["unscored"]) == (4, 1, 0)
    assert result["tie_threshold"] == 0.25
    measures = result["measures"]
    assert measures["accuracy_without_ties"]["value"] == pytest.approx(2 / 3)
    assert measures["accuracy_without_ties"]["n"] == 3
    assert measures["accuracy_with_ties"]["value"] == 3 / 4
    assert measures["accuracy_videoalign"]["value"] == 3 / 4
    assert measures["kendall"]["value"] == pytest.approx(1 / 3)  # 1, 1, -1; d has no order
    assert measures["spearman"]["value"] is None
    assert list(measures) == list(reward_eval.MEASURES)
    assert measures["accuracy_ties_half"]["value"] == (2 + 0.5) / 4
    assert measures["accuracy_ties_wrong"]["value"] == 2 / 4
    assert measures["accuracy_sets"]["value"] == 3 / 4  # every record is one pair
    printed = spoken(capsys)
    assert "4 pairs (1 ties)" in printed
    assert "ties left out 0.667" in printed
    assert "whole sets 0.750" in printed
    assert "both bad" not in printed


def spoken(capsys):
    """The printed output, on one line and without the frame."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())


def test_the_treatment_of_ties_is_chosen_and_named(tmp_path, capsys):
    write(tmp_path, RANKED)
    run(tmp_path, "--bootstrap", "0", "--ties", "half", "wrong", "best")
    printed = spoken(capsys)
    assert "a tie counts half 0.625" in printed
    assert "a tie is wrong 0.500" in printed
    assert "ties by the best threshold 0.750" in printed
    assert "left out" not in printed
    assert "held-out" not in printed
    assert {measure for measure, _ in TIES.values()} <= set(MEASURES)


@pytest.mark.parametrize(
    ("treatment", "pairs", "words", "half"),
    [("tie", 4, "1 both bad: as ties", 0.625), ("drop", 3, "1 both bad: left out", 2 / 3)],
)
def test_pairs_of_which_both_are_bad_are_ties_or_left_out(
    tmp_path, capsys, treatment, pairs, words, half
):
    rows = [row | {"both_bad/overall": True} if row["record"] == "d" else row for row in RANKED]
    write(tmp_path, rows)
    run(tmp_path, "--bootstrap", "0", "--both_bad", treatment)
    (result,) = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert (result["pairs"], result["both_bad"]) == (pairs, 1)
    assert result["measures"]["accuracy_ties_half"]["value"] == pytest.approx(half)
    assert words in spoken(capsys)
    assert words.partition(": ")[2] in (tmp_path / "eval.html").read_text()


def test_a_set_of_several_media_is_right_if_every_pair_is(tmp_path):
    """x: all three pairs right; y: the last two swapped; z: one sample without a score."""
    scores = {"x": (3.0, 2.0, 1.0), "y": (3.0, 1.0, 2.0), "z": (3.0, 2.0, None)}
    rows = [
        medium(record, k, score, score is not None, rank__overall=k + 1)
        for record, some in scores.items()
        for k, score in enumerate(some)
    ]
    table = read_scores(write(tmp_path, rows) / "scores.jsonl")
    (result,) = evaluate(table, Settings(repeats=0))["results"]
    assert (result["pairs"], result["unscored"]) == (7, 2)
    sets = result["measures"]["accuracy_sets"]
    assert (sets["value"], sets["n"]) == (0.5, 2)


def test_ratings_compare_edits_of_one_source_only(tmp_path):
    """One instruction, three sources; the dataset itself holds the last one."""
    sources = (["s.png"], ["s.png"], ["t.png"], [None], [None])
    rows = [
        medium(f"r{k}", 0, float(k), prompt="make it red", rating__q=k) | {"references": source}
        for k, source in enumerate(sources)
    ]
    table = read_scores(write(tmp_path, rows) / "scores.jsonl")
    assert pair_rows(table, "VQ", "rating/q").lead.tolist() == [-1.0]


def test_an_invalid_score_is_neither_right_nor_wrong(tmp_path):
    rows = [
        *RANKED[:4],
        medium("e", 0, 9.0, False, rank__overall=2),
        medium("e", 1, None, True, rank__overall=1),
    ]
    found = pair_rows(read_scores(write(tmp_path, rows) / "scores.jsonl"), "VQ", "rank/overall")
    assert (len(found.lead), found.unscored) == (2, 1)


def test_votes_are_shares_and_the_majority_decides(tmp_path):
    rows = [
        medium("a", 0, 1.0, votes__text=0.7),
        medium("a", 1, 0.0, votes__text=0.3),
        medium("b", 0, 1.0, votes__text=0.5),
        medium("b", 1, 0.0, votes__text=0.5),
        medium("c", 0, 1.0, votes__text=0.0),
        medium("c", 1, 0.0, votes__text=0.2),
    ]
    found = pair_rows(read_scores(write(tmp_path, rows) / "scores.jsonl"), "VQ", "votes/text")
    assert found.share.tolist() == pytest.approx([0.7, 0.5, 0.0])
    assert found.human.tolist() == [1, 0, -1]


def test_ratings_compare_media_of_one_prompt_and_correlate_all(tmp_path):
    rows = [
        medium("a", 0, 1.0, prompt="p", rating__q=2),
        medium("b", 0, 3.0, prompt="p", rating__q=4),
        medium("c", 0, 2.0, prompt="o", rating__q=3),
        medium("d", 0, 9.0, prompt="", rating__q=5),
        medium("e", 0, 0.0, prompt="", rating__q=1),
    ]
    table = read_scores(write(tmp_path, rows) / "scores.jsonl")
    assert pair_rows(table, "VQ", "rating/q").lead.tolist() == [-2.0]
    (result,) = evaluate(table, Settings(repeats=0))["results"]
    assert result["measures"]["spearman"]["value"] == pytest.approx(1.0)
    assert result["measures"]["spearman"]["n"] == 5
    assert math.isnan(result["measures"]["spearman"]["low"])


def noisy(prompts=60):
    """Rows with scores that are right more often than not, with ties and two human columns."""
    g = torch.Generator().manual_seed(0)
    rows = []
    for p in range(prompts):
        true, noise = torch.randn(3, generator=g), torch.randn(3, generator=g)
        for k in range(3):
            better = int((true.round() > true.round()[k]).sum())
            rows.append(
                medium(
                    f"r{p}",
                    k,
                    float(true[k] + noise[k]),
                    rank__overall=1 + better,
                    rating__q=float(true[k].round()),
                )
            )
            rows[-1] |= {
                "<Size>_of_a_long_name": 100 * float(noise[k]),
                "<Size>_of_a_long_name_valid": True,
            }
    return rows


@pytest.mark.slow
def test_parquet_and_jsonl_are_the_same_table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "j").mkdir()
    (tmp_path / "p").mkdir()
    write(tmp_path / "j", noisy(10))
    parquet.write_table(pyarrow.Table.from_pylist(noisy(10)), tmp_path / "p" / "scores.parquet")
    contents = []
    for name in "jp":
        assert run(tmp_path / name, "--out", tmp_path / f"{name}o", "--bootstrap", "5") == 0
        contents.append(json.loads((tmp_path / f"{name}o" / "eval.json").read_text()))
        assert contents[-1].pop("table").startswith(str(tmp_path / name / "scores."))
    assert contents[0] == contents[1]
    assert len(contents[0]["results"]) == 4


def test_intervals_hold_their_value_and_are_the_same_again(tmp_path):
    table = read_scores(write(tmp_path, noisy()) / "scores.jsonl")
    first, again = (evaluate(table, Settings(repeats=200)) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    other = evaluate(table, Settings(repeats=200, seed=1))
    assert other["results"][0]["measures"]["kendall"] != first["results"][0]["measures"]["kendall"]
    for name, measure in first["results"][0]["measures"].items():
        if name not in ("accuracy_videoalign", "spearman"):
            assert measure["low"] < measure["high"], name
            assert measure["low"] - 0.02 <= measure["value"] <= measure["high"] + 0.02, name


def test_the_page_leads_with_the_best_and_needs_no_other_file(tmp_path):
    write(tmp_path, noisy())
    assert run(tmp_path, "--bootstrap", "20") == 0
    page = (tmp_path / "eval.html").read_text()
    best = json.loads((tmp_path / "eval.json").read_text())["results"][0]
    accuracy = best["measures"]["accuracy_without_ties"]
    assert f"VQ agrees best with {best['human']}" in page
    assert f"{100 * accuracy['value']:.1f} % of {accuracy['n']}" in page
    assert "&lt;Size&gt;" in page
    assert "<Size>" not in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert page.count("<figure") == 4
    assert "NaN" not in (tmp_path / "eval.json").read_text()


def test_what_a_reader_must_know_is_said(tmp_path):
    rows = [
        *RANKED,
        medium("e", 0, None, False, rank__overall=1),
        medium("e", 1, 1, rank__overall=2),
    ]
    rows[0]["fingerprint"] = "other"
    write(tmp_path, rows)
    run(tmp_path)
    page = (tmp_path / "eval.html").read_text()
    assert "only 5 prompts" in page
    assert "Scores of 2 different versions are mixed" in page
    assert "at most 1 (VQ in rank/overall)" in page


def test_chosen_columns_only(tmp_path):
    write(tmp_path, noisy(8))
    run(tmp_path, "--scores", "VQ", "--humans", "rating/q", "--bootstrap", "0")
    (result,) = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert (result["score"], result["human"]) == ("VQ", "rating/q")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scores", "MQ"], "no scored dimension 'MQ'; there are VQ"),
        (["--humans", "rank/x"], "no human column 'rank/x'; there are rank/overall"),
    ],
)
def test_wrong_options_are_refused(tmp_path, words, message):
    write(tmp_path, RANKED)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path, *words)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"record": "a"}], "it has no column 'medium'; there are record"),
        ([{k: v for k, v in RANKED[0].items() if k != "VQ_valid"}], "no scored dimension"),
        ([{k: v for k, v in RANKED[0].items() if k != "rank/overall"}], "no column rank/..."),
        (None, "holds none of scores.parquet, scores.jsonl"),
    ],
)
def test_what_is_no_scored_table_is_refused(tmp_path, rows, message):
    if rows:
        write(tmp_path, rows)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(tmp_path)


def test_a_dataset_is_scored_first_by_the_verb_that_does_it(tmp_path, monkeypatch):
    """`flowalign score` accepts the command, and its output is evaluated."""
    seen = []

    def score(command, check, **tied):
        assert command[1:3] == ["-m", "flowalign"]
        seen.append(parse(command[3:]))
        write(tmp_path, RANKED)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", score)
    assert run("pairs.csv", "--rewards", "r.yaml", "--out", tmp_path, "--limit", "4") == 0
    assert (seen[0].data, seen[0].rewards, seen[0].out) == ("pairs.csv", ["r.yaml"], str(tmp_path))
    assert seen[0].limit == 4
    assert (tmp_path / "eval.html").exists()


def test_where_scoring_fails_nothing_is_evaluated(tmp_path, monkeypatch):
    write(tmp_path, RANKED)
    monkeypatch.setattr(subprocess, "run", lambda c, **tied: subprocess.CompletedProcess(c, 1))
    assert run("pairs.csv", "--rewards", "r.yaml", "--out", tmp_path) == 1
    assert not (tmp_path / "eval.json").exists()


def verdict_of(folder):
    page = (folder / "eval.html").read_text()
    return re.search(r'class="verdict">([^<]*)', page)[1]


def test_equal_scores_count_half_in_the_headline_and_chance_is_named(tmp_path):
    rows = [
        medium(f"r{k}", side, 1.0, votes__overall=[3, 1][side] if k % 2 else [0, 4][side])
        for k in range(40)
        for side in range(2)
    ]
    assert run(write(tmp_path, rows)) == 0
    told = verdict_of(tmp_path)
    assert "the order is right in 50.0 % of 40 pairs" in told
    assert "40 equal scores count half" in told
    assert "This is not above chance." in told
    # Pairs of four votes: 6 of 6 agree in one half, 3 of 6 in the other.
    assert "Two annotators agree in 75.0 % of the cases, the ceiling of agreement" in told


def test_people_who_decided_on_nothing_get_a_page_too(tmp_path):
    rows = [medium("a", 0, 3.0, rank__overall=1), medium("a", 1, 1.0, rank__overall=1)]
    assert run(write(tmp_path, rows)) == 0
    assert "has no pair with a human preference" in (tmp_path / "eval.html").read_text()
    rows = [medium("a", 0, 3.0, False, rank__overall=1), medium("a", 1, 1.0, rank__overall=2)]
    assert run(write(tmp_path, rows)) == 0
    assert "has no pair with a human preference" in (tmp_path / "eval.html").read_text()


def test_pairs_of_a_record_are_in_the_order_of_its_media():
    i, j = list_pairs(torch.tensor([0, 0, 0]))
    assert (i < j).all()
