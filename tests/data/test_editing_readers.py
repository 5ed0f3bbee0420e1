"""Editing benchmarks and preferences become records with their source as the reference."""

import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from flowalign.data.readers import open_dataset
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.published_edits import parse_ranking


def listing(folder: Path, content: object, name: str = "data.json") -> str:
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)


def table(folder: Path, *rows: dict) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / "data.parquet")
    return str(folder / "data.parquet")


def only(path: str, schema: str):
    dataset = open_dataset(path)
    assert dataset.schema.name == schema
    (record,) = dataset
    assert record.problem == ""
    return record


def names(media) -> list[str]:
    return [Path(medium.path or "").name for medium in media]


PAIR = {
    "prompt": "make it a hot dog",
    "choice_dist": None,
    "confidence": None,
    "path_src": "s.png",
    "path1": "a.png",
    "path2": "b.png",
    "model1": "x",
    "model2": "y",
    "model1_dim1_score": 4,
    "model1_dim2_score": 3,
    "model1_overall_score": 7,
    "model2_dim1_score": 4,
    "model2_dim2_score": 2,
    "model2_overall_score": 6,
    "tie_case": False,
}


def test_edit_reward_pairs_have_scores_in_two_dimensions_and_a_source(tmp_path):
    record = only(listing(tmp_path, [PAIR]), "edit_reward")
    assert record.prompt == "make it a hot dog"
    assert (names(record.media), names(record.references)) == (["a.png", "b.png"], ["s.png"])
    assert record.ranks == {"overall": [1, 2]}
    assert record.ratings == {"instruction": [4, 4], "quality": [3, 2], "overall": [7, 6]}
    assert record.metadata["model1"] == "x"
    tie = PAIR | {"tie_case": True, "model1_overall_score": 6}
    assert only(listing(tmp_path, [tie]), "edit_reward").ranks == {"overall": [1, 1]}


def test_an_edit_reward_pair_whose_scores_prefer_the_other_is_a_bad_row(tmp_path):
    (record,) = open_dataset(listing(tmp_path, [PAIR | {"model1_overall_score": 5}]))
    assert record.problem.endswith("row 1: path2 has the higher overall score, 6 to 5")


def test_pairs_without_a_source_are_still_those_of_hpd_v3(tmp_path):
    row = {name: PAIR[name] for name in ("prompt", "path1", "path2", "model1", "model2")}
    assert only(listing(tmp_path, [row]), "hpd_v3").references == ()


@pytest.mark.parametrize(
    ("ranking", "ranks"),
    [
        ("A>B", [1, 2]),
        ("A<B", [2, 1]),
        ("B > A", [2, 1]),
        ("A=B=Good", [1, 1]),
        ("A=B", [1, 1]),
        ("C>A>B", [2, 3, 1]),
        ("D>B>C>A", [4, 2, 3, 1]),
    ],
)
def test_a_row_of_the_edit_reward_benchmark_ranks_two_to_four_edits(tmp_path, ranking, ranks):
    row = {
        "prompt": "add a bowl",
        "path_src": "s.png",
        "paths_generated": [f"{k}.png" for k in range(len(ranks))],
        "human_vote": {"ranking": ranking},
    }
    record = only(listing(tmp_path, [row]), "edit_reward_bench")
    assert record.ranks == {"overall": ranks}
    assert names(record.media) == [f"{k}.png" for k in range(len(ranks))]
    assert (names(record.references), record.both_bad) == (["s.png"], ())


def test_two_bad_edits_are_a_tie_that_says_so(tmp_path):
    row = {
        "prompt": "add a bowl",
        "path_src": "s.png",
        "paths_generated": ["a.png", "b.png"],
        "human_vote": {"ranking": "A=B=Bad"},
    }
    record = only(listing(tmp_path, [row]), "edit_reward_bench")
    assert (record.ranks, record.both_bad) == ({"overall": [1, 1]}, ("overall",))


@pytest.mark.parametrize("ranking", ["A>B<C", "A", "A>", "A and B", "", "A>B=Better"])
def test_what_is_no_ranking_is_refused(ranking):
    with pytest.raises(RowProblem, match="expected one such as A>B>C"):
        parse_ranking(ranking)


def test_a_ranking_of_other_edits_than_the_row_has_is_a_bad_row(tmp_path):
    row = {"path_src": "s.png", "paths_generated": ["a.png", "b.png"], "prompt": "p"}
    rows = [row | {"human_vote": vote} for vote in ({"ranking": "A>B>C"}, {"preference": "A"})]
    problems = [record.problem for record in open_dataset(listing(tmp_path, rows))]
    assert "'A>B>C' does not rank the 2 edits" in problems[0]
    assert "human_vote has no ranking" in problems[1]


def compared(sample: str, kind: str, ranking: str, **columns) -> dict:
    """A row of the hub's table: edits A, B, C of a sample are the bytes a, b, c."""
    first, second = kind.lower().split("vs")
    return {
        "id": f"{sample}_{kind}",
        "instruction": f"edit {sample}",
        "source_image": {"bytes": b"source", "path": None},
        "candidate_1": {"bytes": first.encode(), "path": None},
        "candidate_2": {"bytes": second.encode(), "path": None},
        "ranking": ranking,
        "comparison_type": kind,
        "dataset": "3pair",
        "score_1": 1.0,
    } | columns


def test_the_comparisons_of_a_sample_are_one_ranking(tmp_path):
    rows = [
        compared("s1", "AvsB", "B>A"),
        compared("s1", "AvsC", "C>A"),
        compared("s1", "BvsC", "B>C"),
        compared("s2", "AvsB", "A=B"),
    ]
    dataset = open_dataset(table(tmp_path, *rows))
    assert dataset.schema.name == "edit_reward_bench_pairs"
    first, second = dataset
    assert (first.id, first.prompt) == ("s1", "edit s1")
    assert [medium.data for medium in first.media] == [b"a", b"b", b"c"]
    assert [medium.data for medium in first.references] == [b"source"]
    assert first.ranks == {"overall": [3, 1, 2]}
    assert first.metadata == {"dataset": "3pair"}
    assert (second.id, second.ranks) == ("s2", {"overall": [1, 1]})


@pytest.mark.parametrize(
    ("rankings", "problem"),
    [
        (("A>B", "C>A", "B>C"), "contradict each other"),
        (("A=B", "A=C", "B>C"), "contradict each other"),
        (("A>B", "A>C"), "its rows compare A with B, A with C, not each of A, B, C once"),
        (("A>B", "A>B", "B>C"), "ranking 'A>B' does not compare A and C"),
    ],
)
def test_comparisons_that_make_no_ranking_are_a_bad_row(tmp_path, rankings, problem):
    kinds = ("AvsB", "AvsC", "BvsC")
    rows = [compared("s", kind, said) for kind, said in zip(kinds, rankings, strict=False)]
    (record,) = open_dataset(table(tmp_path, *rows))
    assert problem in record.problem


def answer(*parts: list[str]) -> dict:
    return {"model_name": "m", "response_content": list(parts)}


MMRB2 = {
    "id": "emu-edit_7",
    "prompt_source": "emu-edit",
    "prompt_content": [["image", "in/s.jpg"], ["text", "make it"], ["text", "red"]],
    "prompt_metadata": {"task": "color"},
    "response_a": answer(["image", "images/a.jpg"]),
    "response_b": answer(["text", "here it is"], ["image", "images/b.jpg"]),
    "chosen": "B",
    "human_annotations": [1, 2, 1],
}


def test_mmrb2_pairs_lie_in_a_list_inside_an_object(tmp_path):
    text = MMRB2 | {"id": "t2i_1", "prompt_content": [["text", "a cat"]], "chosen": "A"}
    dataset = open_dataset(listing(tmp_path, {"pairs": [MMRB2, text]}))
    assert dataset.schema.name == "mmrb2"
    edit, picture = dataset
    assert (edit.id, edit.prompt, edit.ranks) == ("emu-edit_7", "make it\nred", {"overall": [2, 1]})
    assert (names(edit.references), names(edit.media)) == (["s.jpg"], ["a.jpg", "b.jpg"])
    assert edit.metadata["human_annotations"] == [1, 2, 1]
    assert (picture.prompt, picture.ranks) == ("a cat", {"overall": [1, 2]})
    assert picture.references == []


def test_mmrb2_of_the_hub_has_its_images_in_columns(tmp_path):
    row = {
        "pair_id": "hq-edit_1",
        "prompt_text": "<image_1> make the <image_2> of it",
        "prompt_images": [{"bytes": b"one", "path": None}, {"bytes": b"two", "path": None}],
        "response_a_text": "",
        "response_a_images": [{"bytes": b"a", "path": None}],
        "response_b_text": "<image_1>",
        "response_b_images": [{"bytes": b"b", "path": None}],
        "response_a_model": "m",
        "chosen": "a",
    }
    record = only(table(tmp_path, row), "mmrb2")
    assert (record.id, record.prompt) == ("hq-edit_1", "make the\nof it")
    assert [medium.data for medium in record.references] == [b"one", b"two"]
    assert [medium.data for medium in record.media] == [b"a", b"b"]
    assert record.ranks == {"overall": [1, 2]}
    assert record.metadata == {"response_a_model": "m"}


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"chosen": "C"}, "chosen is 'C'; expected A or B"),
        ({"response_a": answer(["text", "no"])}, "response_a has 0 images; only pairs of one"),
        ({"response_b": answer(["image", "x"], ["image", "y"])}, "response_b has 2 images"),
        ({"response_b": "text"}, "response_b is not a list of [text or image, content]"),
        ({"prompt_content": [["sound", "x"]]}, "prompt is not a list of [text or image"),
    ],
)
def test_what_mmrb2_may_not_hold_is_a_bad_row(tmp_path, columns, problem):
    (record,) = open_dataset(listing(tmp_path, {"pairs": [MMRB2 | columns]}))
    assert problem in record.problem
