"""Rows of DenseDPO: the better copy, and the resulting meaning of labels."""

import json

import pytest

from flowalign.data.media.encode import write_clip
from flowalign.data.media.media import Media
from flowalign.data.preference.preference_data import Segment
from flowalign.data.readers import open_dataset
from tests.fixtures.stored_pairs import read_pairs
from tests.fixtures.video_pixel import clip

SEGMENTS = [
    {"start": 0, "stop": 3, "label": -1},
    {"start": 3, "end": 4, "label": 1},
    {"start": 4, "stop": 6, "label": 0},
]
ROW = {"prompt": "a cat", "a": "x.mp4", "b": "y.mp4", "fps": 8, "segments": SEGMENTS}


def only(folder, row: dict):
    path = folder / "data.jsonl"
    path.write_text(json.dumps(row) + "\n")
    dataset = open_dataset(str(path))
    assert dataset.schema.name == "dense_dpo"
    (record,) = dataset
    return record


def names(record) -> list[str]:
    return [medium.path[-5:] for medium in record.media]


def test_the_copy_with_the_higher_score_comes_first_and_labels_speak_of_it(tmp_path):
    record = only(
        tmp_path,
        ROW
        | {"score_a": 0.25, "score_b": 0.5, "scores_b": {"g": 2.0}, "scores_a": {"g": 3.0, "h": 1}},
    )
    assert record.prompt == "a cat"
    assert names(record) == ["y.mp4", "x.mp4"]
    assert record.media[0] == Media(str(tmp_path / "y.mp4"), fps=8.0)
    assert record.ranks == {"overall": [1, 2]}
    assert record.ratings == {"overall": [0.5, 0.25], "g": [2.0, 3.0]}
    assert [s["label"] for s in record.metadata["segments"]] == [1, -1, 0]
    record = only(tmp_path, ROW | {"score_a": 0.75, "score_b": 0.5})
    assert names(record) == ["x.mp4", "y.mp4"]
    assert [s["label"] for s in record.metadata["segments"]] == [-1, 1, 0]


@pytest.mark.parametrize("scores", [{}, {"score_a": 0.5}, {"score_a": 0.5, "score_b": 0.5}])
def test_without_a_higher_score_the_majority_of_frames_decides_under_another_name(tmp_path, scores):
    record = only(tmp_path, ROW | scores)
    assert names(record) == ["y.mp4", "x.mp4"]
    assert record.ranks == {"segments": [1, 2]}
    even = [{"start": 0, "stop": 2, "label": -1}, {"start": 2, "stop": 4, "label": 1}]
    record = only(tmp_path, ROW | {"segments": even} | scores)
    assert names(record) == ["x.mp4", "y.mp4"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"segments": []}, "segments is missing"),
        ({"segments": [{"start": 0, "stop": 1, "label": 3}]}, "expected -1, 0 or 1"),
        ({"score_a": "high"}, "score_a is 'high', not a number"),
        ({"b": None}, "b is missing"),
        ({"scores_a": 3}, "scores_a is 3, not a struct"),
    ],
)
def test_what_a_row_may_not_hold_is_its_problem(tmp_path, columns, message):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW | columns)))
    good, bad = open_dataset(str(path), "dense_dpo")
    assert good.problem == ""
    assert message in bad.problem


def test_an_even_pair_is_kept_for_losses_of_segments_and_left_out_for_those_of_clips(tmp_path):
    for k, name in enumerate("xyz"):
        write_clip(tmp_path / f"{name}.mp4", clip(k), 4.0)
    scored = ROW | {"score_a": 1.0, "score_b": 0.5}
    rows = [ROW, scored | {"b": "z.mp4"}]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, tally = read_pairs(str(path))
    assert tally.total == 0
    assert [pair.dimension for pair in pairs] == ["segments", "overall"]
    assert pairs[0].segments == [Segment(0, 3, 1), Segment(3, 4, -1), Segment(4, 6, 0)]
    assert [pair.gap for pair in pairs] == [None, 0.5]
    (pair,), _ = read_pairs(str(path), dimensions=["overall"])
    assert pair.rejected.media.path == str(tmp_path / "z.mp4")
