"""`flowalign reward fit`: checklist weights from a table, and its errors."""

import json
import math

import pytest

from flowalign.cli.main import parse
from flowalign.cli.reward import run as run_reward
from reward_models.questions.question_set import Item, QuestionSet, read_question_set

ITEMS = [
    Item("sharp?", 9.0, "look"),
    Item("smiles?", 9.0, "people", given="face"),
    Item("empty?", 9.0, "look"),
]


def rewards(folder, items="true", **sheet):
    """A rewards file with a checklist of three items and unfitted weights of 9."""
    given = {"reduction": "sum", "licence": "none", "conditions": {"face": "face?"}} | sheet
    (folder / "sheet.json").write_text(QuestionSet("small", "image", items=ITEMS, **given).text())
    (folder / "rewards.yaml").write_text(
        "rewards:\n- class_path: reward_models.Checklist\n  init_args:\n"
        "    judge: {class_path: tests.fixtures.fake_judge.FakeJudge}\n"
        f"    question_set: {folder / 'sheet.json'}\n    items: {items}\n"
    )
    return folder / "rewards.yaml"


def table(folder, pairs, names=("item_00", "item_01", "item_02")):
    """A table as `flowalign score` writes it: per pair, two media's items and who won."""
    rows = []
    for record, (first, second, winner) in enumerate(pairs):
        for medium, values in enumerate((first, second)):
            row = {"record": f"r{record}", "medium": medium, "prompt": f"p{record}"}
            row |= {"rank/overall": 1 if winner in (medium, None) else 2}
            row |= dict(zip(names, values, strict=True)) | {f"{n}_valid": True for n in names}
            rows.append(row)
    file = folder / "scores.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(*words):
    return run_reward(parse(["reward", "fit", *map(str, words)]))


def test_weights_are_those_of_the_formula_and_what_never_helps_goes(tmp_path, capsys):
    """By hand: item 0 leads by 2 and wins 3 of 4, so sigmoid(w) = 3/4; yes to item 2 is worse."""
    yes, no = (1, 0, -1), (-1, 0, 1)
    pairs = [(yes, no, int(k % 4 == 3)) for k in range(200)]  # one in four goes to the second
    pairs += [(no, yes, int(k % 4 != 3)) for k in range(200)]
    out = tmp_path / "fitted.json"
    given = ("--rewards", rewards(tmp_path), "--humans", "rank/overall", "--out", out)
    assert run(table(tmp_path, pairs), *given, "--held_out", "0.01") == 0
    sheet = read_question_set(str(out))
    assert [item.question for item in sheet.items] == ["sharp?"]
    assert sheet.items[0].weight == pytest.approx(math.log(3), abs=0.03)
    assert sheet.conditions == {}
    printed = capsys.readouterr().out
    assert "held-out accuracy" in printed
    assert "items kept" in printed


def test_ridge_shrinks_and_the_seed_draws_the_held_out_pairs(tmp_path):
    pairs = [((1, 0, -1), (-1, 0, 1), int(k % 5 == 0)) for k in range(60)]
    folder = table(tmp_path, pairs)
    given = ("--rewards", rewards(tmp_path), "--humans", "rank/overall", "--out")
    weights = []
    for options in ((), ("--ridge", "0.5"), ("--seed", "7")):
        assert run(folder, *given, tmp_path / "new" / "out.json", *options) == 0
        weights.append(read_question_set(str(tmp_path / "new" / "out.json")).items[0].weight)
    assert weights[1] < weights[0]
    assert weights[2] != weights[0]


@pytest.mark.parametrize(
    ("options", "names", "column", "message"),
    [
        ({"items": "false"}, ("item_00", "item_01", "item_02"), "rank/overall", "set items: true"),
        ({}, ("item_00", "item_01", "other"), "rank/overall", "no dimension 'item_02'"),
        ({}, ("item_00", "item_01", "item_02"), "rank/look", "no column 'rank/look'"),
    ],
)
def test_what_cannot_be_fitted_is_refused_by_name(tmp_path, options, names, column, message):
    folder = table(tmp_path, [((1, 1, 1), (0, 0, 0), 0), ((0, 1, 0), (1, 0, 1), 1)], names)
    given = ("--rewards", rewards(tmp_path, **options), "--out", tmp_path / "out.json")
    with pytest.raises(ValueError, match=message):
        run(folder, *given, "--humans", column)
    assert not (tmp_path / "out.json").exists()


def test_a_list_without_a_reward_that_can_be_fitted_is_refused(tmp_path):
    folder = table(tmp_path, [((1, 1, 1), (0, 0, 0), 0), ((0, 1, 0), (1, 0, 1), 1)])
    given = ("--humans", "rank/overall", "--out", tmp_path / "out.json")
    with pytest.raises(ValueError, match="has 0 rewards with weights to fit"):
        run(folder, "--rewards", "reward_models.JpegSize", *given)
    one = table(tmp_path, [((1, 1, 1), (0, 0, 0), 0)])
    with pytest.raises(ValueError, match="has 1 scored pairs in rank/overall; 2 are needed"):
        run(one, "--rewards", rewards(tmp_path), *given)
