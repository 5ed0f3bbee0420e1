"""`flowalign pairs`, from a table of scores to training data."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from flowalign.cli import pairs as command
from flowalign.cli.main import parse
from flowalign.data.preference.preference_data import samples_of
from flowalign.data.readers import open_dataset
from tests.fixtures.stored_pairs import read_pairs, read_samples
from tests.fixtures.tables import jsonl

pytestmark = pytest.mark.slow

NAN = None


def pairs(*argv: object) -> int:
    return command.run(parse(["pairs", *map(str, argv)]))


def picture(path: Path, shade: int, size: tuple[int, int] = (12, 8)) -> None:
    Image.new("RGB", size, (shade, 7 * shade % 256, 50)).save(path)


def scored(folder: Path, prompts: dict[str, list], kind: str = "jsonl", **columns) -> Path:
    """A folder as written by `flowalign score`, with scores for beauty and alignment."""
    out = folder / "scores"
    out.mkdir(exist_ok=True)
    rows = []
    for k, (prompt, media) in enumerate(prompts.items()):
        for i, scores in enumerate(media):
            path = folder / f"{k}{i}.png"
            picture(path, 16 * k + i)
            beauty, alignment = scores
            rows.append(
                {
                    "record": f"r{k}-{i}",
                    "medium": 0,
                    "prompt": prompt,
                    "path": str(path),
                    "reason": None if scores != (NAN, NAN) else "model refused: too dark",
                    "fingerprint": "f",
                    "beauty": beauty,
                    "beauty_valid": beauty is not None,
                    "alignment": alignment,
                    "alignment_valid": alignment is not None,
                }
                | columns
            )
    if kind == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), out / "scores.parquet")
    else:
        jsonl(out, *rows, name="scores.jsonl")
    return out


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chosen(found: list[dict]) -> list[tuple[str, str]]:
    return [(Path(row["chosen"]).stem, Path(row["rejected"]).stem) for row in found]


TWO = {
    "a cat": [(5.0, 0.5), (4.0, 1.5), (6.5, 0.25), (4.5, 0.75)],
    "a dog": [(1.0, 3.0), (2.5, 2.0)],
}
ALL = ("--held_out", 0)
GAP = ("--rule", "gap")
BEST = ("--rule", "best_worst")
BEAUTY = ("--dimensions", "beauty")
BOTH = ("--weights", "beauty=1", "alignment=1")


def made(
    tmp_path: Path, *options: object, prompts: dict[str, list] = TWO, table: Path | None = None
) -> list[dict]:
    out = tmp_path / "out"
    assert pairs(table or scored(tmp_path, prompts), "--out", out, *ALL, *options) == 0
    return rows(out / "train.jsonl")


@contextmanager
def changed(table: Path) -> Iterator[list[dict]]:
    """Yield the rows of a table, which are written again with their changes."""
    found = rows(table / "scores.jsonl")
    yield found
    jsonl(table, *found, name="scores.jsonl")


# What becomes a pair ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_best_and_worst_of_each_prompt(tmp_path, kind, capsys):
    found = made(tmp_path, *BEST, *BEAUTY, table=scored(tmp_path, TWO, kind))
    assert found[0] == {
        "prompt": "a cat",
        "chosen": str(tmp_path / "02.png"),
        "rejected": str(tmp_path / "01.png"),
        "dimension": "beauty",
        "gap": 2.5,
        "scores_chosen": {"beauty": 6.5},
        "scores_rejected": {"beauty": 4},
    }
    assert chosen(found[1:]) == [("11", "10")]
    assert "2 pairs from 2 prompts" in capsys.readouterr().out


def test_the_weighted_total_decides_and_is_among_the_scores(tmp_path):
    found = made(tmp_path, "--rule", "best_worst", "--weights", "beauty=0.5", "alignment=2")
    assert chosen(found) == [("01", "00"), ("10", "11")]
    assert found[0]["dimension"] == "total"
    assert found[0]["gap"] == 1.5
    assert found[0]["scores_chosen"] == {"beauty": 4, "alignment": 1.5, "total": 5}
    assert found[0]["scores_rejected"] == {"beauty": 5, "alignment": 0.5, "total": 3.5}


def test_any_two_over_a_gap_and_only_the_widest(tmp_path):
    options = (*GAP, *BEAUTY, "--min_gap", 1)
    found = made(tmp_path, *options)
    assert chosen(found) == [("00", "01"), ("02", "00"), ("02", "01"), ("02", "03"), ("11", "10")]
    found = made(tmp_path, *options, "--max_per_prompt", 2)
    assert chosen(found) == [("02", "01"), ("02", "03"), ("11", "10")]


def test_a_dominating_medium_is_worse_nowhere_beyond_the_tolerance(tmp_path):
    options = ("--rule", "dominance", "--weights", "beauty=1", "alignment=1")
    prompts = {"p": [(5.0, 0.5), (4.0, 0.25), (6.0, 0.375)], "q": [(1.0, 2.0), (2.0, 0.5)]}
    assert chosen(made(tmp_path, *options, prompts=prompts)) == [("00", "01"), ("02", "01")]
    found = made(tmp_path, *options, "--tolerance", 0.125, prompts=prompts)
    assert chosen(found) == [("00", "01"), ("02", "00"), ("02", "01")]
    found = made(tmp_path, *options, "--tolerance", 0.125, "--min_gap", 1.5, prompts=prompts)
    assert chosen(found) == [("02", "01")]


def test_each_dimension_has_its_own_pairs_also_of_media_that_lack_another(tmp_path):
    prompts = {"p": [(5.0, 0.5), (4.0, NAN), (NAN, 1.5)]}
    found = made(tmp_path, "--rule", "per_dimension", prompts=prompts)
    assert chosen(found) == [("00", "01"), ("02", "00")]
    assert [row["dimension"] for row in found] == ["beauty", "alignment"]
    assert found[0]["scores_rejected"] == {"beauty": 4}


def test_stages_by_score_and_by_rank(tmp_path):
    options = (*GAP, *BEAUTY, "--stages", 2)
    prompts = {"p": [(9.0, 0.0), (5.0, 0.0), (0.0, 0.0)]}
    found = made(tmp_path, *options, prompts=prompts)
    assert [row["gap"] for row in found] == [4, 9, 5]
    assert [row["stage"] for row in found] == [1, 0, 1]
    found = made(tmp_path, *options, "--stages_by", "rank", prompts=prompts)
    assert [row["stage"] for row in found] == [1, 0, 0]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stages"] == {"0": 2, "1": 1}


def test_stages_are_of_each_dimension_by_itself(tmp_path):
    prompts = {"p": [(9.0, 0.25), (5.0, 0.0), (0.0, 1.0)]}
    found = made(tmp_path, "--rule", "per_dimension", "--stages", 2, prompts=prompts)
    assert [row["gap"] for row in found] == [4, 9, 5, 0.25, 0.75, 1]
    assert [row["stage"] for row in found] == [1, 0, 1, 1, 0, 0]


def test_media_of_a_record_alone_are_compared_where_asked(tmp_path):
    table = scored(tmp_path, {"p": [(1.0, 0.0), (2.0, 0.0), (3.0, 0.0), (4.0, 0.0)]})
    with changed(table) as found:
        for i, row in enumerate(found):
            row |= {"record": f"r{i // 2}", "medium": i % 2}
    assert chosen(made(tmp_path, *BEST, *BEAUTY, table=table)) == [("03", "00")]
    by_record = made(tmp_path, *BEST, *BEAUTY, "--by", "record", table=table)
    assert chosen(by_record) == [("01", "00"), ("03", "02")]


def test_media_without_a_prompt_are_compared_within_their_record_only(tmp_path):
    prompts = {"": [(1.0, 0.0), (2.0, 0.0)], "p": [(3.0, 0.0), (4.0, 0.0)]}
    assert chosen(made(tmp_path, *GAP, *BEAUTY, prompts=prompts)) == [("11", "10")]


def edits(folder: Path, *sources: str) -> Path:
    """A table of edits with one prompt; the beauty of edit k is k, and its source sources[k]."""
    table = scored(folder, {"make it red": [(float(k), 0.0) for k in range(len(sources))]})
    picture(folder / "s.png", 200)
    picture(folder / "t.png", 201)
    with changed(table) as found:
        for row, name in zip(found, sources, strict=True):
            row["references"] = [str(folder / name) if name else None]
    return table


def test_edits_are_compared_with_edits_of_their_own_source_and_keep_it(tmp_path):
    table = edits(tmp_path, "s.png", "t.png", "t.png", "s.png")
    found = made(tmp_path, *GAP, *BEAUTY, table=table)
    assert chosen(found) == [("03", "00"), ("02", "01")]
    sources = [[str(tmp_path / name)] for name in ("s.png", "t.png")]
    assert [row["references"] for row in found] == sources
    records = list(open_dataset(str(tmp_path / "out" / "train.jsonl")))
    assert [[medium.path for medium in record.references] for record in records] == sources
    assert "references" not in records[0].metadata


def test_edits_are_compared_under_their_own_mask_and_their_pairs_keep_it(tmp_path):
    table = edits(tmp_path, *["s.png"] * 6)
    masks = [str(tmp_path / name) for name in ("m.png", "n.png")]
    for mask, shade in zip(masks, (250, 251), strict=True):
        picture(Path(mask), shade)
    given = [masks[0], masks[1], None, masks[1], masks[0], ""]
    with changed(table) as found:
        for row, mask in zip(found, given, strict=True):
            row["request_mask"] = mask
    for labels in ((), ("--labels",)):
        found = made(tmp_path, *GAP, *BEAUTY, *labels, table=table)
        read, _ = (read_samples if labels else read_pairs)(str(tmp_path / "out" / "train.jsonl"))
        asked = [one.request.mask for each in read for one in samples_of(each)]
        assert sorted(mask and mask.name for mask in asked) == sorted(2 * masks)
    assert "request_mask" in found[0]


def test_labels_of_edits_keep_their_source(tmp_path):
    made(tmp_path, *GAP, *BEAUTY, "--labels", table=edits(tmp_path, "s.png", "s.png"))
    for record in open_dataset(str(tmp_path / "out" / "train.jsonl")):
        assert [medium.path for medium in record.references] == [str(tmp_path / "s.png")]


def test_edits_whose_source_is_no_file_are_dropped_with_the_reason(tmp_path, capsys):
    table = edits(tmp_path, "s.png", "s.png", "", "gone.png")
    assert len(made(tmp_path, *GAP, *BEAUTY, table=table)) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "source stored in the dataset" in said
    assert "gone.png" in said


def test_the_trainer_reads_what_was_written(tmp_path):
    made(tmp_path, "--rule", "gap", "--weights", "beauty=1", "alignment=0.3", "--stages", 2)
    found, tally = read_pairs(str(tmp_path / "out" / "train.jsonl"))
    assert tally.total == 0
    assert len(found) == 7
    assert {one.dimension for one in found} == {"total"}
    assert {one.stage for one in found} == {0, 1}
    for one in found:
        gap = one.chosen.scores["total"] - one.rejected.scores["total"]
        assert one.gap == pytest.approx(gap, rel=1e-12)


def test_labels_are_of_single_media_that_only_win_or_only_lose(tmp_path, capsys):
    """Of 5, 4, 6.5 and 4.5, 6.5 wins thrice; 5 loses to it and wins over 4."""
    found = made(tmp_path, "--rule", "gap", "--min_gap", 0.75, "--dimensions", "beauty", "--labels")
    labels = [(Path(row["completion"]).stem, row["label"]) for row in found]
    assert labels == [("01", False), ("02", True), ("03", False), ("10", False), ("11", True)]
    assert found[1] == {
        "prompt": "a cat",
        "completion": str(tmp_path / "02.png"),
        "label": True,
        "scores": {"beauty": 6.5},
    }
    assert "2 true, 3 false" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["labels"] == {"true": 2, "false": 3}
    records = list(open_dataset(str(tmp_path / "out" / "train.jsonl")))
    assert [record.metadata["desirable"] for record in records] == [label for _, label in labels]
    assert records[1].media[0].path == str(tmp_path / "02.png")


def test_relative_paths_begin_at_the_root(tmp_path, monkeypatch):
    table = scored(tmp_path, TWO)
    with changed(table) as found:
        for row in found:
            row["path"] = Path(row["path"]).name
    rooted = made(tmp_path, *BEST, *BEAUTY, "--root", tmp_path, table=table)
    monkeypatch.chdir(tmp_path)
    assert made(tmp_path, *BEST, *BEAUTY, table=table) == rooted
    assert rooted[1]["chosen"] == str(tmp_path / "11.png")


# Held out -----------------------------------------------------------------------------------------


def test_held_out_pairs_are_of_other_prompts_and_depend_on_the_seed_alone(tmp_path):
    prompts = {f"prompt {k}": [(1.0 * i + k, 0.0) for i in range(3)] for k in range(15)}
    table = scored(tmp_path, prompts)

    def halves(seed: int, name: str, rule: str = "gap") -> tuple[set[str], set[str]]:
        options = ("--rule", rule, "--dimensions", "beauty", "--held_out", 0.4, "--seed", seed)
        assert pairs(table, "--out", tmp_path / name, *options) == 0
        files = (tmp_path / name / file for file in ("train.jsonl", "held_out.jsonl"))
        train, held_out = ({row["prompt"] for row in rows(file)} for file in files)
        return train, held_out

    train, held_out = halves(0, "a")
    assert train & held_out == set()
    assert train | held_out == prompts.keys()
    assert 2 <= len(held_out) <= 10
    assert halves(0, "b", "best_worst") == (train, held_out)
    assert halves(1, "c") != (train, held_out)


def test_nothing_held_out_leaves_no_file_also_of_an_earlier_run(tmp_path):
    table, out = scored(tmp_path, TWO), tmp_path / "out"
    options = (*BEST, *BEAUTY, "--out", out)
    assert pairs(table, *options, "--held_out", 0.999) == 0
    assert (out / "held_out.jsonl").exists()
    assert not (out / "train.jsonl").exists()
    assert pairs(table, *options, "--held_out", 0) == 0
    assert not (out / "held_out.jsonl").exists()
    names = ["pairs.html", "summary.json", "train.jsonl"]
    assert sorted(path.name for path in out.iterdir()) == names


# What is dropped ----------------------------------------------------------------------------------


def test_everything_dropped_is_counted_and_named(tmp_path, capsys):
    prompts = {
        "p": [(5.0, 0.5), (4.0, 1.75), (NAN, NAN), (9.0, NAN), (3.0, 0.25), (8.0, 0.0), (1.0, 1.0)],
        "alone": [(1.0, 1.0)],
        "q": [(1.0, 2.0), (3.0, 1.5)],
    }
    table, refused = scored(tmp_path, prompts), ": model refused: too dark"
    (tmp_path / "04.png").unlink()
    (tmp_path / "21.png").write_bytes((tmp_path / "20.png").read_bytes())
    picture(tmp_path / "06.png", 99, (8, 12))
    with changed(table) as found:
        found[5]["path"] = None
        found.append(found[0])
    assert chosen(made(tmp_path, *GAP, *BOTH, table=table)) == [("01", "00")]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    media = {why: (one["count"], one["first"]) for why, one in summary["dropped_media"].items()}
    assert media == {
        "no valid score": (2, [f"record r0-2, medium 0{refused}", "record r0-3, medium 0"]),
        "missing file": (1, [f"record r0-4, medium 0: {tmp_path}/04.png"]),
        "stored in the dataset instead of a file": (1, ["record r0-5, medium 0"]),
        "repeated item": (1, ["record r0-0, medium 0"]),
        "nothing to compare with": (1, ["record r1-0, medium 0"]),
    }
    dropped = {why: known["count"] for why, known in summary["dropped_pairs"].items()}
    assert dropped == {"the media differ in size": 2, "the media are equal": 1}
    told = capsys.readouterr().out
    assert "2 no valid score" in told
    assert "1 the media are equal" in told


def test_a_score_that_is_marked_invalid_takes_no_part_whatever_it_is(tmp_path):
    table = scored(tmp_path, {"p": [(1.0, 0.0), (2.0, 0.0), (9.0, 0.0)]})
    with changed(table) as found:
        found[2]["beauty_valid"] = False
    assert chosen(made(tmp_path, *BEST, *BEAUTY, table=table)) == [("01", "00")]


def test_mixed_shapes_can_be_asked_for(tmp_path):
    table = scored(tmp_path, {"p": [(1.0, 0.0), (2.0, 0.0)]})
    picture(tmp_path / "01.png", 99, (8, 12))
    options = (*GAP, *BEAUTY, "--out", tmp_path / "out", *ALL)
    assert pairs(table, *options) == 1
    assert pairs(table, *options, "--mixed_shapes") == 0


def test_no_pair_is_a_failure_that_says_why_and_writes_nothing(tmp_path, capsys):
    table = scored(tmp_path, {"p": [(1.0, 0.0), (NAN, 0.0)]})
    options = (*BEST, *BEAUTY, "--out", tmp_path / "out")
    assert pairs(table, *options) == 1
    told = capsys.readouterr().err
    assert "gives no pair" in told
    assert "1 no valid score: record r0-1, medium 0" in told
    assert not (tmp_path / "out").exists()
    table = scored(tmp_path, {"p": [(1.0, 0.0), (1.5, 0.0)]})
    assert pairs(table, *options, "--min_gap", 0.75) == 1
    assert "no gap is large enough" in capsys.readouterr().err


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*GAP, "--dimensions", "beuaty"), "no dimension 'beuaty'; did you mean 'beauty'?"),
        ((*GAP, "--weights", "beauty=1", "align=1"), "no dimension 'align'"),
        (GAP, "--weights beauty=1 alignment=1; or select dimensions with --dimensions"),
        ((*GAP, *BEAUTY, *BOTH), "the total of beauty needs exactly one weight for each"),
        ((*GAP, "--weights", "beauty"), "--weights 'beauty' is not NAME=NUMBER"),
        ((*GAP, "--weights", "beauty=much"), "--weights 'beauty=much' is not NAME=NUMBER"),
        ((*GAP, "--weights", "beauty=-1"), "--weights beauty=-1; weights must be above 0"),
        ((*GAP, "--weights", "beauty=nan"), "weights must be above 0"),
        (("--rule", "dominance", *BOTH, "--tolerance", -1), "--tolerance is -1"),
        ((*GAP, *BEAUTY, "--min_gap", -1), "--min_gap is -1; it must be at least 0"),
        ((*GAP, *BEAUTY, "--min_gap", "nan"), "--min_gap is nan"),
        ((*GAP, *BEAUTY, "--root", "/nowhere"), "--root '/nowhere' is no folder"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pairs(scored(tmp_path, TWO), "--out", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def refused(tmp_path: Path, table: Path) -> str:
    with pytest.raises(ValueError, match=r"\S") as error:
        pairs(table, "--out", tmp_path / "out", *GAP, *BEAUTY)
    assert len(str(error.value).splitlines()) <= 5
    return str(error.value)


def test_one_medium_a_prompt_everywhere_is_refused(tmp_path):
    table = scored(tmp_path, {"p": [(1.0, 0.0)], "q": [(2.0, 0.0)]})
    assert "every prompt has only one sample" in refused(tmp_path, table)


def test_scores_of_different_models_are_refused(tmp_path):
    table = scored(tmp_path, TWO)
    with changed(table) as found:
        found[3]["fingerprint"] = "other"
    message = refused(tmp_path, table)
    assert "scores of different models" in message
    assert "scores.jsonl row 4: other" in message


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"record": "1", "medium": 0, "prompt": "p", "path": "a.png"}], "no scored dimension"),
        ([{"record": "1", "medium": 0, "beauty": 1, "beauty_valid": True}], "column prompt, path"),
        ([], "holds no row"),
    ],
)
def test_a_file_that_is_no_table_of_scores_is_refused(tmp_path, lines, message):
    assert message in refused(tmp_path, Path(jsonl(tmp_path, *lines)))


def test_a_score_as_text_and_a_broken_line_are_refused_with_their_row(tmp_path):
    table = scored(tmp_path, TWO)
    with changed(table) as found:
        found[1]["beauty"] = "high"
    assert "scores.jsonl row 2: beauty is 'high', not a number" in refused(tmp_path, table)
    with (table / "scores.jsonl").open("w") as file:
        file.write(json.dumps(found[0]) + '\n{"record": ')
    assert "scores.jsonl row 2 is not JSON" in refused(tmp_path, table)


def test_a_table_that_is_not_there_or_twice_is_refused(tmp_path):
    assert "does not exist" in refused(tmp_path, tmp_path / "nothing")
    assert "holds none of scores.parquet" in refused(tmp_path, tmp_path)
    (tmp_path / "scores.csv").write_text("a,b\n")
    assert "neither a .parquet nor a .jsonl" in refused(tmp_path, tmp_path / "scores.csv")
    table = scored(tmp_path, TWO)
    scored(tmp_path, TWO, "parquet")
    assert "holds several of" in refused(tmp_path, table)


def test_a_folder_of_something_else_is_not_written_into(tmp_path):
    table = scored(tmp_path, TWO)
    before = (table / "scores.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"'scores.jsonl', which `flowalign pairs` did not"):
        pairs(table, "--out", table, *GAP, *BEAUTY)
    assert (table / "scores.jsonl").read_bytes() == before


# The page -----------------------------------------------------------------------------------------


def test_the_page_shows_pairs_gaps_stages_and_what_was_dropped(tmp_path):
    prompts = {"a <cat>": [(5.0, 0.5), (4.0, 1.5), (NAN, NAN)], "a dog": [(1.0, 0.0), (2.25, 0.0)]}
    made(tmp_path, "--rule", "gap", *BEAUTY, "--stages", 2, prompts=prompts)
    page = (tmp_path / "out" / "pairs.html").read_text()
    assert "2 pairs from 2 prompts" in re.sub(r"\s+", " ", page)
    assert page.count("data:image/webp;base64,") == 4
    assert "a &lt;cat&gt;" in page
    assert "<cat>" not in page
    assert "beauty gap 1.25, stage 0" in page
    assert "no valid score" in page
    assert "model refused: too dark" in page
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_the_page_stays_small_and_names_what_it_cannot_show(tmp_path):
    prompts = {f"p{k}": [(1.0 * k, 0.0), (2.0 * k + 1, 0.0)] for k in range(15)}
    prompts["many"] = [(1.0 * i, 0.0) for i in range(7)]
    table = scored(tmp_path, prompts)
    broken = (tmp_path / "01.png").read_bytes()
    (tmp_path / "01.png").write_bytes(broken[:-30])
    assert pairs(table, "--out", tmp_path / "out", *GAP, *BEAUTY, *ALL) == 0
    page = (tmp_path / "out" / "pairs.html").read_text()
    assert page.count("data:image/webp;base64,") == 47
    assert page.count("not readable") == 1
