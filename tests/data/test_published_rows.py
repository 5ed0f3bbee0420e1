"""Rows of every published schema become records; what they may not hold is a problem of the row."""

import csv
from pathlib import Path
from typing import Any

import pytest

from flowalign.data import open_dataset
from flowalign.data.preference.preference_data import Segment
from flowalign.data.readers.formats import RowProblem
from flowalign.data.readers.published import parse_ranking
from flowalign.utils.media.encode import write_clip
from flowalign.utils.media.media import Media
from tests.fixtures.stored_pairs import read_pairs
from tests.fixtures.tables import jsonl, only, table
from tests.fixtures.video_pixel import clip

PICKED = {"caption": "p", "jpg_0": b"a", "jpg_1": b"b", "label_0": 0.5, "label_1": 0.5}
HPD_TEST = {
    "prompt": "p",
    "image_path": ["a", "b", "c", "d"],
    "rank": [2.5, 0.5, 2.5, 3.0],
    "raw_annotations": [{"rank": [1, 0], "user_hash": "u"}],
}
HPD3 = {"prompt": "p", "path1": "a", "path2": "b", "choice_dist": [12, 4], "confidence": 0.99}
CLIPS = {"prompt": "p", "path_A": "a", "path_B": "b", "fps_A": 8.0, "fps_B": 24}
ANSWERS = {"VQ": "A", "MQ": "same", "TA": "B", "Overall": "invalid"}
VOTED = {"prompt": "p", "left_video": "a", "right_video": "b", "vote_type": "leftvote"}
VOTED_EDIT = {
    "source_prompt": "a blue ball",
    "target_prompt": "a red ball",
    "instruct_prompt": "p",
    "source_image": b"s",
    "left_output_image": b"a",
    "right_output_image": b"b",
    "vote_type": "leftvote",
}
RATED = {
    "internal_id": "x1",
    "prompt": "p",
    "image": {"bytes": b"a", "path": None},
    "annotation": {"richness": -2, "color aesthetic": 1},
    "meta_result": [1, 0],
}
ANSWERED = {"prompt": "p", "video1_path": "a", "video2_path": "b"}
EDIT = {
    "prompt": "p",
    "choice_dist": None,
    "path_src": "s",
    "path1": "a",
    "path2": "b",
    "model1": "x",
    "model1_dim1_score": 4,
    "model1_dim2_score": 3,
    "model1_overall_score": 7,
    "model2_dim1_score": 4,
    "model2_dim2_score": 2,
    "model2_overall_score": 6,
    "tie_case": False,
}
RANKED = {"prompt": "p", "path_src": "s"}


def ranked(ranking: str, count: int) -> dict[str, Any]:
    return RANKED | {"paths_generated": [*"abcd"[:count]], "human_vote": {"ranking": ranking}}


def answer(*parts: list[str]) -> dict[str, Any]:
    return {"model_name": "m", "response_content": list(parts)}


MMRB2 = {
    "id": "emu-edit_7",
    "prompt_content": [["image", "s"], ["text", "make it"], ["text", "red"]],
    "response_a": answer(["image", "a"]),
    "response_b": answer(["text", "here it is"], ["image", "b"]),
    "chosen": "B",
    "human_annotations": [1, 2, 1],
}
MMRB2_COLUMNS = {
    "pair_id": "hq-edit_1",
    "prompt_text": "<image_1> make the <image_2> of it",
    "prompt_images": [{"bytes": b"s", "path": None}, {"bytes": b"t", "path": None}],
    "response_a_text": "",
    "response_a_images": [{"bytes": b"a", "path": None}],
    "response_b_text": "<image_1>",
    "response_b_images": [{"bytes": b"b", "path": None}],
    "response_a_model": "m",
    "chosen": "a",
}
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
LOCAL = {"caption": "p", "positive": "a", "negative": "b", "mask": "m.safetensors"}
LOCAL_AS_PUBLISHED = {
    "pos_video_path": "a",
    "neg_video_path": "b",
    "mask": "m.safetensors",
    "gen_caption": "p",
}
THUMB = {"prompt": "p", "image": "a", "label": 1}
SEGMENTS = [
    {"start": 0, "stop": 3, "label": -1},
    {"start": 3, "end": 4, "label": 1},
    {"start": 4, "stop": 6, "label": 0},
]
EVEN = [{"start": 0, "stop": 2, "label": -1}, {"start": 2, "stop": 4, "label": 1}]
DENSE = {"prompt": "p", "a": "x", "b": "y", "fps": 8, "segments": SEGMENTS}
OVERALL, LOST, TIED = ({"overall": ranks} for ranks in ([1, 2], [2, 1], [1, 1]))

Case = tuple[dict[str, Any], dict[str, Any]]


def case(row: dict[str, Any], **expected: Any) -> Case:
    return row, expected


GOOD: dict[str, list[Case]] = {
    "pick_a_pic": [
        case(
            PICKED | {"has_label": True, "ranking_id": 9},
            votes={"overall": [0.5, 0.5]},
            ranks=TIED,
            has={"ranking_id": 9},
        ),
        case(PICKED | {"has_label": False}, votes={}, ranks={}, has={}),
        case(
            PICKED | {"label_0": 0.0, "label_1": 1.0},
            votes={"overall": [0, 1]},
            ranks=LOST,
            media="ab",
        ),
    ],
    "hpd_v2_train": [
        case(
            {"prompt": "p", "file_path": ["a", "b"], "human_preference": [0, 1]},
            ranks=LOST,
            media="ab",
            metadata={},
        )
    ],
    "hpd_v2_test": [
        case(
            HPD_TEST,
            ranks={"overall": [2, 1, 2, 4]},
            media="abcd",
            has={"rank": [2.5, 0.5, 2.5, 3]},
        )
    ],
    "hpd_v3": [
        case(HPD3, ranks=OVERALL, votes={"overall": [0.75, 0.25]}, metadata={"confidence": 0.99}),
        case({name: HPD3[name] for name in ("prompt", "path1", "path2")}, references="", votes={}),
    ],
    "videogen_rewardbench": [
        case(CLIPS | ANSWERS, ranks={"VQ": [1, 2], "MQ": [1, 1], "TA": [2, 1]}, fps=[8, 24])
    ],
    "genai_bench": [
        case(VOTED, ranks=OVERALL, both_bad=(), metadata={"vote_type": "leftvote"}),
        case(VOTED | {"vote_type": "rightvote"}, ranks=LOST, both_bad=()),
        case(VOTED | {"vote_type": "tievote"}, ranks=TIED, both_bad=()),
        case(VOTED | {"vote_type": "bothbad_vote"}, ranks=TIED, both_bad=("overall",)),
        case(
            {"prompt": "p", "left_image": b"a", "right_image": b"b", "vote_type": "leftvote"},
            media="ab",
            references="",
        ),
        case(VOTED_EDIT, media="ab", references="s"),
    ],
    "vision_reward": [
        case(
            RATED,
            id="x1",
            media="a",
            ratings={"richness": [-2], "color_aesthetic": [1]},
            metadata={"meta_result": [1, 0]},
        )
    ],
    "vision_reward_pairs": [
        case(ANSWERED | {"standard_answer": 1}, ranks=OVERALL, media="ab"),
        case(ANSWERED | {"standard_answer": "B"}, ranks=LOST),
        case(ANSWERED | {"standard_answer": 0}, ranks=TIED),
    ],
    "edit_reward": [
        case(
            EDIT,
            ranks=OVERALL,
            media="ab",
            references="s",
            ratings={"instruction": [4, 4], "quality": [3, 2], "overall": [7, 6]},
            has={"model1": "x"},
        ),
        case(EDIT | {"tie_case": True, "model1_overall_score": 6}, ranks=TIED),
    ],
    "edit_reward_bench": [
        *(
            case(
                ranked(said, len(ranks)),
                ranks={"overall": ranks},
                media="abcd"[: len(ranks)],
                references="s",
                both_bad=(),
            )
            for said, ranks in {
                "A>B": [1, 2],
                "A<B": [2, 1],
                "B > A": [2, 1],
                "A=B=Good": [1, 1],
                "A=B": [1, 1],
                "C>A>B": [2, 3, 1],
                "D>B>C>A": [4, 2, 3, 1],
            }.items()
        ),
        case(ranked("A=B=Bad", 2), ranks=TIED, both_bad=("overall",)),
    ],
    "mmrb2": [
        case(
            MMRB2,
            id="emu-edit_7",
            prompt="make it\nred",
            ranks=LOST,
            media="ab",
            references="s",
            metadata={"human_annotations": [1, 2, 1]},
        ),
        case(
            MMRB2 | {"prompt_content": [["text", "a cat"]], "chosen": "A"},
            prompt="a cat",
            ranks=OVERALL,
            references="",
        ),
        case(
            MMRB2_COLUMNS,
            id="hq-edit_1",
            prompt="make the\nof it",
            ranks=OVERALL,
            media="ab",
            references="st",
            metadata={"response_a_model": "m"},
        ),
    ],
    "chosen_rejected": [
        case(PAIR | {"seed": 4}, ranks=OVERALL, media="ab", ratings={}, metadata={"seed": 4}),
        case(PAIR | {"chosen": {"bytes": b"a", "path": "x"}, "rejected": b"b"}, media="ab"),
        case(PAIR | {"chosen_score": "9", "rejected_score": 9.0}, ranks=TIED),
        case(PAIR | {"chosen_score": 9.5, "rejected_score": 9.0}, ranks=OVERALL),
        case(
            {
                "prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "p"}],
                "img_win": "a",
                "img_lose": "b",
                "win_score": 0.75,
                "lose_score": 0.5,
            },
            media="ab",
            ratings={"overall": [0.75, 0.5]},
        ),
        case(
            PAIR
            | {
                "dimension": "VQ",
                "gap": "0.25",
                "weight": 2,
                "stage": 3.0,
                "user_id": 7,
                "fps": 8,
                "scores_chosen": {"VQ": "10", "TA": 1, "MQ": None},
                "scores_rejected": {"VQ": 9, "MQ": 4},
                "segments": SEGMENTS[:2],
                "weight_map_rejected": "/w.safetensors",
            },
            ranks={"VQ": [1, 2]},
            ratings={"VQ": [10, 9]},
            fps=[8, 8],
            metadata={
                "dimension": "VQ",
                "gap": 0.25,
                "weight": 2,
                "stage": 3,
                "user_id": 7,
                "fps": 8,
                "segments": [
                    {"start": 0, "stop": 3, "label": -1},
                    {"start": 3, "stop": 4, "label": 1},
                ],
                "weight_map_rejected": "/w.safetensors",
            },
        ),
    ],
    "local_dpo": [
        case(
            LOCAL | {"yita": 0.8, "fps": 16, "sizes": [480, 832]},
            ranks=OVERALL,
            media="ab",
            fps=[16, 16],
            has={"strength": 0.8, "sizes": [480, 832]},
        ),
        case(LOCAL_AS_PUBLISHED, media="ab", has_not="strength"),
        case(
            LOCAL | {"yita": "0.85", "weight": "2.5", "stage": 3.0, "gap": 0.5},
            has={"strength": 0.85, "weight": 2.5, "stage": 3, "gap": 0.5},
        ),
        case(LOCAL | {"yita": 1}, has={"strength": 1}),
    ],
    "kto": [
        *(
            case(
                THUMB | {"label": label, "user_id": "u"},
                media="a",
                metadata={"label": label, "user_id": "u", "desirable": up},
            )
            for label, up in ((1, True), (0, False), (True, True), (False, False), ("1", True))
        ),
        case(THUMB | {"label": "false"}, has={"desirable": False}),
        case(THUMB | {"label": "True"}, has={"desirable": True}),
        case(THUMB | {"label": 0.0}, has={"desirable": False}),
        *(case(THUMB | {"label": other}, metadata={"label": other}) for other in ("cat", 0.5, 2)),
    ],
    "dense_dpo": [
        case(
            DENSE
            | {
                "score_a": 0.25,
                "score_b": 0.5,
                "scores_b": {"g": 2.0},
                "scores_a": {"g": 3.0, "h": 1},
            },
            media="yx",
            fps=[8, 8],
            ranks=OVERALL,
            ratings={"overall": [0.5, 0.25], "g": [2.0, 3.0]},
            labels=[1, -1, 0],
        ),
        case(DENSE | {"score_a": 0.75, "score_b": 0.5}, media="xy", labels=[-1, 1, 0]),
        *(
            case(DENSE | columns | scores, **expected)
            for scores in ({}, {"score_a": 0.5}, {"score_a": 0.5, "score_b": 0.5})
            for columns, expected in (
                ({}, {"media": "yx", "ranks": {"segments": [1, 2]}}),
                ({"segments": EVEN}, {"media": "xy"}),
            )
        ),
    ],
}


def holds_bytes(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(holds_bytes, items))


def written(folder: Path, *rows: dict[str, Any]) -> str:
    return (table if holds_bytes([*rows]) else jsonl)(folder, *rows)


def names(media) -> str:
    return "".join(m.data.decode() if m.path is None else Path(m.path).name for m in media)


@pytest.mark.parametrize(
    ("schema", "row", "expected"),
    [(schema, row, expected) for schema, cases in GOOD.items() for row, expected in cases],
)
def test_a_row_becomes_a_record(tmp_path, schema, row, expected):
    record = only(written(tmp_path, row), schema)
    found = {
        "media": names(record.media),
        "references": names(record.references),
        "fps": [medium.fps for medium in record.media],
        "labels": [segment["label"] for segment in record.metadata.get("segments", ())],
        "has": dict(record.metadata) | expected.get("has", {}),
        "has_not": expected.get("has_not"),
        **{name: getattr(record, name) for name in ("id", "ranks", "votes", "ratings", "both_bad")},
        "metadata": record.metadata,
        "prompt": record.prompt,
    }
    expected = {"prompt": "p"} | expected
    expected |= {"has": dict(record.metadata) | expected["has"]} if "has" in expected else {}
    assert {name: found[name] for name in expected} == expected
    for name, value in expected.get("has", {}).items():
        assert record.metadata[name] == value
    assert expected.get("has_not") not in record.metadata


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (HPD3, {"choice_dist": [4, 12]}, "prefers path2, but path1 is the preferred one"),
    (CLIPS | ANSWERS, {"VQ": "C"}, "row 2: VQ is 'C'; expected A, B, same, invalid"),
    (VOTED, {"vote_type": "none"}, "vote_type is 'none'; expected leftvote"),
    (VOTED_EDIT, {"source_image": None}, "row 2: source_image is missing"),
    (EDIT, {"model1_overall_score": 5}, "row 2: path2 has the higher overall score, 6 to 5"),
    (ranked("A>B", 2), ranked("A>B>C", 2), "'A>B>C' does not rank the 2 edits"),
    (ranked("A>B", 2), {"human_vote": {"preference": "A"}}, "human_vote has no ranking"),
    (MMRB2, {"chosen": "C"}, "chosen is 'C'; expected A, a, B, b"),
    (MMRB2, {"response_a": answer(["text", "no"])}, "response_a has 0 images; only pairs of one"),
    (MMRB2, {"response_b": answer(["image", "x"], ["image", "y"])}, "response_b has 2 images"),
    (MMRB2, {"response_b": "text"}, "response_b is not a list of [text or image, content]"),
    (MMRB2, {"prompt_content": [["sound", "x"]]}, "prompt is not a list of [text or image"),
    (PAIR, {"chosen_score": "high", "rejected_score": 1}, "chosen_score is 'high', not a number"),
    (PAIR, {"chosen_score": 1, "rejected_score": "nan"}, "not a finite number"),
    (
        PAIR,
        {"scores_chosen": {"VQ": "x"}, "scores_rejected": {"VQ": 1}},
        "scores_chosen of VQ is 'x'",
    ),
    (PAIR, {"scores_chosen": [1]}, "scores_chosen is [1], not a struct of numbers"),
    (PAIR, {"gap": "wide"}, "gap is 'wide', not a number"),
    (PAIR, {"gap": "inf"}, "gap is 'inf', not a finite number"),
    (PAIR, {"weight": -1}, "weight is -1; it must be at least 0"),
    (PAIR, {"stage": 1.5}, "stage is 1.5, not a whole number from 0"),
    (PAIR, {"stage": -1}, "stage is -1, not a whole number from 0"),
    (PAIR, {"segments": "0-3"}, "segments is not a list"),
    (PAIR, {"segments": [{"start": 3, "stop": 3, "label": 1}]}, "segments[0] goes from 3 to 3"),
    (PAIR, {"segments": [{"start": 0, "stop": 3, "label": 2}]}, "expected -1, 0 or 1"),
    (PAIR, {"segments": [{"start": 0, "label": 1}]}, "stop of segments[0] is None, not a number"),
    (PAIR, {"mask": "m.pt"}, "mask is 'm.pt'; convert it to .safetensors; pickle is not supported"),
    (PAIR, {"rejected": ""}, "rejected is missing"),
    (PAIR, {"chosen": "https://host/a.png"}, "chosen is a URL; download it first"),
    (PAIR, {"prompt": 7}, "prompt is 7, not text"),
    (PAIR, {"prompt": ["a"]}, "prompt is ['a'], neither text nor a conversation"),
    (LOCAL_AS_PUBLISHED, {"mask": "m.pt"}, "pickle is not supported"),
    (LOCAL, {"yita": 0.6}, "strength is 0.6; it is a noise level above 0.6, at most 1"),
    (LOCAL, {"strength": -2}, "strength is -2; it is a noise level"),
    (LOCAL, {"yita": 80}, "strength is 80; it is a noise level"),
    (LOCAL, {"strength": "strong"}, "strength is 'strong', not a number"),
    (LOCAL, {"yita": "nan"}, "yita is 'nan', not a finite number"),
    (LOCAL, {"weight": "heavy"}, "weight is 'heavy', not a number"),
    (LOCAL, {"stage": 0.5}, "stage is 0.5, not a whole number from 0"),
    (LOCAL, {"segments": [{"start": 2, "stop": 1, "label": 1}]}, "segments[0] goes from 2 to 1"),
    (LOCAL, {"weight_map_chosen": "w.pt"}, "pickle is not supported"),
    (LOCAL, {"mask": None}, "mask is ''"),
    (DENSE, {"segments": []}, "segments is missing"),
    (DENSE, {"segments": [{"start": 0, "stop": 1, "label": 3}]}, "expected -1, 0 or 1"),
    (DENSE, {"score_a": "high"}, "score_a is 'high', not a number"),
    (DENSE, {"b": None}, "b is missing"),
    (DENSE, {"scores_a": 3}, "scores_a is 3, not a struct"),
]


@pytest.mark.parametrize(("row", "columns", "message"), BAD)
def test_what_a_row_may_not_hold_is_its_problem(tmp_path, row, columns, message):
    good, bad = open_dataset(written(tmp_path, row, row | columns))
    assert (good.problem, bad.media) == ("", ())
    assert bad.problem.startswith("invalid row: data.")
    assert message in bad.problem


@pytest.mark.parametrize("ranking", ["A>B<C", "A", "A>", "A and B", "", "A>B=Better"])
def test_what_is_no_ranking_is_refused(ranking):
    with pytest.raises(RowProblem, match="expected one such as A>B>C"):
        parse_ranking(ranking)


def test_image_reward_db_rows_of_a_prompt_are_one_record(tmp_path):
    def row(prompt_id, path, rank, overall):
        return {
            "prompt_id": prompt_id,
            "prompt": f"about {prompt_id}",
            "image_path": path,
            "rank": rank,
            "overall_rating": overall,
            "image_text_alignment_rating": 7 - overall,
            "fidelity_rating": 4,
            "classification": "animals",
        }

    rows = [row("p1", "a", 3, 2), row("p1", "b", 1, 6), row("p1", "c", 1, 5), row("p2", "d", 1, 1)]
    first, second = open_dataset(jsonl(tmp_path, *rows))
    assert (first.id, first.prompt, second.id) == ("p1", "about p1", "p2")
    assert (names(first.media), first.ranks) == ("abc", {"overall": [3, 1, 1]})
    ratings = {"overall": [2, 6, 5], "alignment": [5, 1, 2], "fidelity": [4, 4, 4]}
    assert (first.ratings, first.metadata["classification"]) == (ratings, "animals")
    again = open_dataset(jsonl(tmp_path, *rows, row("p1", "e", 1, 1)))
    assert [record.problem[:12] for record in again] == ["", "", "duplicate id"]


def compared(sample: str, kind: str, ranking: str) -> dict[str, Any]:
    """A row of the hub's table: edits A, B, C of a sample are the bytes a, b, c."""
    first, second = kind.lower().split("vs")
    return {
        "id": f"{sample}_{kind}",
        "instruction": f"edit {sample}",
        "source_image": {"bytes": b"s", "path": None},
        "candidate_1": {"bytes": first.encode(), "path": None},
        "candidate_2": {"bytes": second.encode(), "path": None},
        "ranking": ranking,
        "comparison_type": kind,
        "dataset": "3pair",
        "score_1": 1.0,
    }


def test_the_comparisons_of_a_sample_are_one_ranking(tmp_path):
    said = (("s1", "AvsB", "B>A"), ("s1", "AvsC", "C>A"), ("s1", "BvsC", "B>C"))
    rows = [compared(*one) for one in (*said, ("s2", "AvsB", "A=B"))]
    dataset = open_dataset(table(tmp_path, *rows))
    assert dataset.schema.name == "edit_reward_bench_pairs"
    first, second = dataset
    assert (first.id, first.prompt) == ("s1", "edit s1")
    assert (names(first.media), names(first.references)) == ("abc", "s")
    assert (first.ranks, first.metadata) == ({"overall": [3, 1, 2]}, {"dataset": "3pair"})
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


def test_csv_is_read_too(tmp_path):
    with (tmp_path / "bench.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, CLIPS | ANSWERS)
        writer.writeheader()
        writer.writerow(CLIPS | ANSWERS | {"prompt": "waves, at dusk"})
    record = only(str(tmp_path / "bench.csv"), "videogen_rewardbench")
    assert (record.prompt, [medium.fps for medium in record.media]) == ("waves, at dusk", [8, 24])


def test_records_come_with_their_file_and_row(tmp_path):
    path = Path(jsonl(tmp_path, PAIR, PAIR | {"stage": "x"}, PAIR))
    path.write_text(path.read_text().replace("\n", "\n\n", 1))
    dataset = open_dataset(str(path))
    located = list(dataset.iter_located())
    assert [where for where, _ in located] == [f"data.jsonl row {n}" for n in (1, 3, 4)]
    assert [record for _, record in located] == list(dataset)


def test_an_even_pair_is_kept_for_losses_of_segments_and_left_out_for_those_of_clips(tmp_path):
    for k, name in enumerate("xyz"):
        write_clip(tmp_path / f"{name}.mp4", clip(k), 4.0)
    row = DENSE | {"a": "x.mp4", "b": "y.mp4"}
    path = jsonl(tmp_path, row, row | {"score_a": 1.0, "score_b": 0.5, "b": "z.mp4"})
    pairs, tally = read_pairs(path)
    assert tally.total == 0
    assert [pair.dimension for pair in pairs] == ["segments", "overall"]
    assert pairs[0].segments == [Segment(0, 3, 1), Segment(3, 4, -1), Segment(4, 6, 0)]
    assert [pair.gap for pair in pairs] == [None, 0.5]
    (pair,), _ = read_pairs(path, dimensions=["overall"])
    assert pair.rejected.media == Media(str(tmp_path / "z.mp4"), fps=8.0)
