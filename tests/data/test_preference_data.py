"""From published datasets to pairs and samples: every bad row is dropped for its own reason."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowalign.data.preference.preference_data import Pair, Segment
from flowalign.data.preference.validate import DropReport
from flowalign.utils.media.media import Media
from tests.fixtures.encoded import encode
from tests.fixtures.stored_pairs import read_pairs, read_samples
from tests.fixtures.tables import jsonl, table

SIZE = (12, 8)


def png(shade: int, size: tuple[int, int] = SIZE) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, (shade, 3 * shade % 256, 90)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Images a to e of one size and of different shades."""
    for shade, name in enumerate("abcde", 10):
        (tmp_path / f"{name}.png").write_bytes(png(shade))
    return tmp_path


def pair(chosen: str = "a", rejected: str = "b", **columns) -> dict:
    row = {"prompt": "p", "chosen": f"{chosen}.png", "rejected": f"{rejected}.png"}
    return row | columns


def names(found: Pair) -> tuple[str, str]:
    return Path(found.chosen.media.path or "").stem, Path(found.rejected.media.path or "").stem


def dropped(tally: DropReport) -> str:
    """The only reason, with its only example."""
    (line,) = tally.lines()
    return line


# Pairs --------------------------------------------------------------------------------------------


def test_a_row_with_everything_is_a_pair_with_everything(folder):
    for name in ("m", "w"):
        (folder / f"{name}.safetensors").write_bytes(b"")
    row = pair(
        dimension="VQ",
        gap=0.25,
        weight=2,
        stage=1,
        user_id=7,
        mask="m.safetensors",
        weight_map_chosen="w.safetensors",
        segments=[{"start": 0, "end": 3, "label": -1}],
        scores_chosen={"VQ": 2, "TA": 5},
        scores_rejected={"VQ": 1, "TA": 6},
    )
    (found,), tally = read_pairs(jsonl(folder, row))
    assert tally.total == 0
    assert found.prompt == "p"
    assert found.chosen.media == Media(str(folder / "a.png"))
    assert found.chosen.scores == {"VQ": 2, "TA": 5}
    assert found.rejected.scores == {"VQ": 1, "TA": 6}
    assert (found.dimension, found.gap, found.weight, found.stage) == ("VQ", 0.25, 2, 1)
    assert found.segments == [Segment(0, 3, -1)]
    assert found.mask == str(folder / "m.safetensors")
    assert found.chosen.weight_map == str(folder / "w.safetensors")
    assert found.rejected.weight_map is None
    assert (found.user, found.where) == ("7", "data.jsonl row 1")


def test_the_gap_is_that_of_the_scores_where_no_column_says_it(folder):
    rows = [pair(chosen_score="10", rejected_score="9.25"), pair("c", "d")]
    found, _ = read_pairs(jsonl(folder, *rows))
    assert [one.gap for one in found] == [0.75, None]


def test_a_rejected_one_with_the_higher_score_is_dropped_as_numbers_compare(folder):
    rows = [
        pair(chosen_score="9", rejected_score="10"),
        pair(chosen_score="10", rejected_score="9"),
    ]
    found, tally = read_pairs(jsonl(folder, *rows))
    assert [one.where for one in found] == ["data.jsonl row 2"]
    assert dropped(tally) == (
        "1 the rejected item has the higher score: data.jsonl row 1: overall 9 < 10"
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (pair(chosen_score=1, rejected_score="1.0"), "1 tie: data.jsonl row 1: overall"),
        (pair(gap=0), "1 tie: data.jsonl row 1: overall 0"),
        (pair(gap=-0.5), "1 negative gap: data.jsonl row 1: overall -0.5"),
        (pair(gap="big"), "1 invalid row: data.jsonl row 1: gap is 'big', not a number"),
        (pair(rejected="z"), "1 missing file: data.jsonl row 1: {}/z.png"),
        (pair(mask="m.safetensors"), "1 missing file: data.jsonl row 1: {}/m.safetensors"),
        (pair(rejected="a"), "1 the media are equal: data.jsonl row 1: {0}/a.png and {0}/a.png"),
        (
            pair(rejected="copy"),
            "1 the media are equal: data.jsonl row 1: {0}/a.png and {0}/copy.png",
        ),
        (pair(rejected="tall"), "1 the media differ in size: data.jsonl row 1: 12 x 8 and 8 x 12"),
        (
            pair(rejected="text"),
            "1 unreadable image: data.jsonl row 1: {}/text.png has an unknown format",
        ),
    ],
)
def test_what_is_no_pair_is_dropped_for_its_own_reason(folder, row, reason):
    (folder / "copy.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "tall.png").write_bytes(png(9, (8, 12)))
    (folder / "text.png").write_text("not a picture")
    found, tally = read_pairs(jsonl(folder, row, pair("d", "e")))
    assert [names(one) for one in found] == [("d", "e")]
    assert dropped(tally) == reason.format(folder)


def test_files_of_one_size_with_other_bytes_are_not_equal(folder):
    for name, shade in (("x", 1), ("y", 2)):
        Image.new("RGB", SIZE, (shade, 0, 0)).save(folder / f"{name}.bmp")
    assert (folder / "x.bmp").stat().st_size == (folder / "y.bmp").stat().st_size
    row = {"prompt": "p", "chosen": "x.bmp", "rejected": "y.bmp"}
    found, tally = read_pairs(jsonl(folder, row))
    assert len(found) == 1
    assert tally.total == 0


def test_mixed_sizes_can_be_asked_for(folder):
    (folder / "tall.png").write_bytes(png(9, (8, 12)))
    found, tally = read_pairs(jsonl(folder, pair(rejected="tall")), mixed_shapes=True)
    assert len(found) == 1
    assert tally.total == 0


def video(path: Path, frames: int) -> None:
    shades = [(40 * k % 256, len(path.stem), 5) for k in range(frames)]
    encode(path, [np.full((16, 32, 3), shade, np.uint8) for shade in shades])


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_videos_of_other_lengths_are_dropped(folder, ending):
    for name, frames in (("long", 7), ("short", 4), ("other", 7)):
        video(folder / f"{name}.{ending}", frames)
    rows = [
        {"prompt": "p", "chosen": f"long.{ending}", "rejected": f"{name}.{ending}"}
        for name in ("short", "other")
    ]
    found, tally = read_pairs(jsonl(folder, *rows))
    assert [names(one) for one in found] == [("long", "other")]
    assert dropped(tally) == "1 the media differ in frames: data.jsonl row 1: 7 and 4"


def test_a_damaged_video_is_dropped(folder):
    video(folder / "good.mp4", 4)
    (folder / "bad.mp4").write_bytes(b"\0" * 99)
    row = {"prompt": "p", "chosen": "good.mp4", "rejected": "bad.mp4"}
    found, tally = read_pairs(jsonl(folder, row))
    assert found == []
    assert dropped(tally).startswith("1 unreadable video: data.jsonl row 1: ")


def test_a_pair_is_repeated_only_where_dimension_and_person_are_the_same(folder):
    rows = [
        pair(),
        pair(dimension="VQ"),
        pair(user_id="u"),
        pair(),
        pair("b", "a"),
        pair() | {"prompt": "q"},
    ]
    found, tally = read_pairs(jsonl(folder, *rows))
    assert [one.where[-1] for one in found] == ["1", "2", "3", "5", "6"]
    assert dropped(tally) == "1 repeated pair: data.jsonl row 4"


def test_pick_a_pic_trains_directly_without_its_ties(tmp_path):
    def row(one: int, two: int, label: float, user: int, has_label: bool = True) -> dict:
        return {
            "caption": "a dog",
            "jpg_0": png(one),
            "jpg_1": png(two),
            "label_0": label,
            "label_1": 1 - label,
            "has_label": has_label,
            "user_id": user,
        }

    rows = [
        row(1, 2, 0.0, 5),
        row(1, 3, 0.5, 5),
        row(4, 5, 1.0, 6),
        row(6, 7, 0.5, 6, False),
        row(8, 8, 1.0, 6),
    ]
    found, tally = read_pairs(table(tmp_path, *rows))
    assert [one.chosen.media.data for one in found] == [png(2), png(4)]
    assert [one.rejected.media.data for one in found] == [png(1), png(5)]
    assert [(one.user, one.gap) for one in found] == [("5", 1), ("6", 1)]
    assert tally.dropped == {"tie": 1, "no answer": 1, "the media are equal": 1}


def test_hpd_v3_trains_directly_and_votes_decide(folder):
    rows = [
        {"prompt": "p", "path1": "a.png", "path2": "b.png", "choice_dist": [3, 1]},
        {"prompt": "p", "path1": "c.png", "path2": "d.png", "choice_dist": [2, 2]},
        {"prompt": "p", "path1": "d.png", "path2": "e.png", "choice_dist": [1, 2]},
    ]
    found, tally = read_pairs(jsonl(folder, *rows))
    assert [(names(one), one.gap) for one in found] == [(("a", "b"), 0.5)]
    assert tally.dropped == {"tie": 1, "invalid row": 1}


VIDEO_GEN = [
    {
        "prompt": "p",
        "path_A": "a.png",
        "path_B": "b.png",
        "VQ": "A",
        "MQ": "same",
        "TA": "B",
        "Overall": "B",
    },
    {
        "prompt": "p",
        "path_A": "c.png",
        "path_B": "d.png",
        "VQ": "B",
        "MQ": "A",
        "TA": "invalid",
        "Overall": "A",
    },
]


def test_every_dimension_asked_for_has_its_own_winner(folder):
    path = jsonl(folder, *VIDEO_GEN)
    found, tally = read_pairs(path, dimensions=["VQ", "TA"])
    decided = [(names(one), one.dimension) for one in found]
    assert decided == [(("a", "b"), "VQ"), (("b", "a"), "TA"), (("d", "c"), "VQ")]
    assert tally.total == 0
    found, tally = read_pairs(path, dimensions=["MQ"])
    assert [(names(one), one.dimension) for one in found] == [(("c", "d"), "MQ")]
    assert dropped(tally) == "1 tie: data.jsonl row 1: MQ"


def test_without_a_name_all_dimensions_count(folder):
    found, _ = read_pairs(jsonl(folder, *VIDEO_GEN))
    assert [one.dimension for one in found] == ["VQ", "TA", "Overall", "VQ", "MQ", "Overall"]


def test_an_unknown_dimension_is_refused_with_the_nearest(folder):
    path = jsonl(folder, *VIDEO_GEN)
    with pytest.raises(ValueError, match=r"no dimension 'overall'; did you mean 'Overall'\?"):
        read_pairs(path, dimensions=["VQ", "overall"])
    with pytest.raises(ValueError, match="there are MQ, Overall, TA, VQ"):
        read_samples(path, dimensions=["beauty"])


def test_any_two_of_several_media_are_a_pair_and_ranks_come_before_ratings(folder):
    row = {
        "prompt": "p",
        "images": ["a.png", "b.png", "c.png"],
        "ranks": [2, 1, 2],
        "ratings": {"overall": [5, 1, 4], "beauty": [1.5, 4, 1]},
    }
    found, tally = read_pairs(jsonl(folder, row))
    assert [(names(one), one.dimension, one.gap) for one in found] == [
        (("b", "a"), "overall", 1),
        (("b", "c"), "overall", 1),
    ]
    assert found[0].chosen.scores == {"overall": 1, "beauty": 4}
    assert dropped(tally) == "1 tie: data.jsonl row 1: overall"
    found, _ = read_pairs(jsonl(folder, row), dimensions=["beauty"])
    assert [(names(one), one.gap) for one in found] == [
        (("b", "a"), 2.5),
        (("a", "c"), 0.5),
        (("b", "c"), 3),
    ]


def test_ratings_alone_make_pairs(folder):
    row = {"prompt": "p", "images": ["a.png", "b.png"], "ratings": [0.5, 2.25]}
    (found,), _ = read_pairs(jsonl(folder, row))
    assert (names(found), found.dimension, found.gap) == (("b", "a"), "overall", 1.75)


def test_rows_without_a_prompt_are_dropped_if_others_have_one(folder):
    rows = [
        {"prompt": prompt, "images": ["a.png", "b.png"], "ranks": [1, 2]}
        for prompt in ("p", None, " ")
    ]
    found, tally = read_pairs(jsonl(folder, *rows))
    assert [pair.prompt for pair in found] == ["p"]
    assert dropped(tally) == "2 no prompt: data.jsonl row 2; data.jsonl row 3"
    found, tally = read_pairs(jsonl(folder, rows[1]))
    assert ([pair.prompt for pair in found], tally.total) == ([""], 0)


def test_single_media_are_no_pairs(folder):
    row = {"prompt": "p", "image": "a.png", "annotation": {"good hands": 1}}
    found, tally = read_pairs(jsonl(folder, row))
    assert found == []
    assert dropped(tally) == "1 single item: data.jsonl row 1"


def test_columns_of_other_datasets_do_not_pass_for_those_of_a_pair(folder):
    row = {
        "prompt": "p",
        "images": ["a.png", "b.png"],
        "ranks": [1, 2],
        "weight": "heavy",
        "stage": "final",
        "mask": "mask.png",
        "segments": 1,
        "user_id": None,
    }
    (found,), _ = read_pairs(jsonl(folder, row))
    assert (found.weight, found.stage, found.mask, found.segments) == (1, 0, None, ())
    assert found.user == ""


def test_local_dpo_pairs_have_their_mask(folder):
    (folder / "m.safetensors").write_bytes(b"")
    row = {"caption": "p", "positive": "a.png", "negative": "b.png", "mask": "m.safetensors"}
    found, tally = read_pairs(jsonl(folder, row, row | {"mask": "m.pt"}))
    assert [(names(one), one.mask, one.gap) for one in found] == [
        (("a", "b"), str(folder / "m.safetensors"), None)
    ]
    assert "convert it to .safetensors" in dropped(tally)


def test_the_noise_level_of_local_dpo_says_what_its_mask_counts_and_of_other_pairs_nothing(folder):
    (folder / "m.safetensors").write_bytes(b"")
    row = {"caption": "p", "positive": "a.png", "negative": "b.png", "mask": "m.safetensors"}
    rows = [
        row | {"yita": 0.9},
        row | {"negative": "c.png"},
        row | {"negative": "d.png", "yita": 0},
    ]
    found, tally = read_pairs(jsonl(folder, *rows))
    assert [one.mask_strength for one in found] == pytest.approx([2.0, 1.0])
    assert "strength is 0; it is a noise level above 0.6" in dropped(tally)
    (other,), _ = read_pairs(jsonl(folder, pair(strength="strong", mask="m.safetensors")))
    assert other.mask_strength == 1.0


# Samples ------------------------------------------------------------------------------------------


def test_labels_become_desirable_samples(folder):
    (folder / "w.safetensors").write_bytes(b"")
    rows = [
        {"prompt": "p", "image": "a.png", "label": 1, "user_id": "u"},
        {"prompt": "p", "image": "b.png", "label": "false", "weight_map": "w.safetensors"},
        {"prompt": "p", "image": "c.png", "label": 0.5},
        {"prompt": "p", "image": "z.png", "label": 1},
        {"prompt": "p", "image": "a.png", "label": 1, "user_id": "u"},
        {"prompt": "p", "image": "a.png", "label": 0, "user_id": "v"},
    ]
    found, tally = read_samples(jsonl(folder, *rows))
    assert [(Path(one.media.path or "").stem, one.desirable, one.user) for one in found] == [
        ("a", True, "u"),
        ("b", False, ""),
        ("a", False, "v"),
    ]
    assert found[1].weight_map == str(folder / "w.safetensors")
    assert tally.lines() == [
        "1 no label: data.jsonl row 3: 0.5, must be 0, 1, true or false",
        f"1 missing file: data.jsonl row 4: {folder}/z.png",
        "1 repeated item: data.jsonl row 5",
    ]


def test_of_compared_media_whoever_ever_won_is_desirable(folder):
    rows = [pair("a", "b"), pair("c", "a"), pair("b", "d"), pair("e", "b")]
    rows += [pair("a", "e", chosen_score=1, rejected_score=1)]
    found, _ = read_samples(jsonl(folder, *rows))
    labels = {Path(one.media.path or "").stem: one.desirable for one in found}
    assert labels == {"a": True, "b": True, "c": True, "d": False, "e": True}


def test_of_media_in_ties_nobody_knows(folder):
    found, tally = read_samples(jsonl(folder, pair(chosen_score=1, rejected_score=1)))
    assert [one.desirable for one in found] == [None, None]
    assert [one.scores for one in found] == [{"overall": 1}, {"overall": 1}]
    assert tally.total == 0


def test_a_tie_before_or_after_does_not_hide_that_a_medium_lost(folder):
    tie = {"chosen_score": 1, "rejected_score": 1}
    rows = [pair("a", "b", **tie), pair("c", "b"), pair("c", "d"), pair("d", "e", **tie)]
    found, _ = read_samples(jsonl(folder, *rows))
    labels = {Path(one.media.path or "").stem: one.desirable for one in found}
    assert labels == {"a": None, "b": False, "c": True, "d": False, "e": None}


def test_a_row_that_contradicts_itself_says_nothing_of_its_media(folder):
    found, tally = read_samples(jsonl(folder, pair(chosen_score=1, rejected_score=2)))
    assert found == []
    assert tally.dropped == {"the rejected item has the higher score": 1}


def test_ratings_of_single_media_are_their_scores(folder):
    row = {"prompt": "p", "image": "a.png", "annotation": {"good hands": 1, "sharp": -2}}
    (found,), _ = read_samples(jsonl(folder, row))
    assert found.scores == {"good_hands": 1, "sharp": -2}
    assert found.desirable is None


def test_only_samples_with_a_label_can_be_asked_for(folder):
    tie = {"chosen_score": 1, "rejected_score": 1}
    rows = [pair("a", "b", **tie), pair("c", "b"), pair("c", "d"), pair("d", "e", **tie)]
    found, tally = read_samples(jsonl(folder, *rows), labelled=True)
    labels = {Path(one.media.path or "").stem: one.desirable for one in found}
    assert labels == {"b": False, "c": True, "d": False}
    assert dropped(tally) == f"2 neither liked nor disliked: {folder}/a.png; {folder}/e.png"
    assert tally.unusable == 0


# Tally --------------------------------------------------------------------------------------------


def test_the_first_five_of_a_reason_are_named_and_the_most_frequent_reason_is_first():
    tally = DropReport()
    tally.add("tie", "row 0")
    for row in range(1, 1235):
        tally.add(f"missing file: {row}.png", f"row {row}")
    named = "; ".join(f"row {row}: {row}.png" for row in range(1, 6))
    assert tally.lines() == [f"1,234 missing file: {named}", "1 tie: row 0"]
    assert tally.total == 1235
    assert tally.summary()["tie"] == {"count": 1, "first": ["row 0"]}


def test_what_is_ordinary_is_no_fault_and_is_told_last():
    tally = DropReport()
    ordinary = ("tie: MQ 0", "no answer", "single item", "repeated pair", "repeated item")
    for kind in (*ordinary, "negative gap: -1", "missing file: a.png", "missing file: b.png"):
        tally.add(kind, "row 1")
        tally.add(kind, "row 2")
    assert (tally.total, tally.unusable) == (16, 6)
    kinds = [line.split(": ")[0][2:] for line in tally.lines()]
    assert kinds[:2] == ["missing file", "negative gap"]
    assert sorted(kinds[2:]) == sorted(kind.partition(": ")[0] for kind in ordinary)
