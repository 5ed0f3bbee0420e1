"""Results of VBench's toolkit: the official numbers, and one clear error for wrong entries."""

import json
import math

import pytest

from flowalign.studies.benchmark.card import load_card
from flowalign.studies.benchmark.external import link_clips, read_results
from flowalign.studies.benchmark.items import ModelFolder, Place
from flowalign.types import Request
from tests.fixtures.recorded_benchmarks import VBENCH, numbers

DIMENSIONS = [name.replace(" ", "_") for name in VBENCH]
REQUESTS = [Request(f"a clip of {name}", metadata={"dimension": [name]}) for name in DIMENSIONS]
PLACES = [Place(row, copy) for row in range(len(REQUESTS)) for copy in range(2)]


def results():
    """Two clips per dimension, 0.05 around the recorded mean; imaging quality in percent."""
    found = {}
    for name, mean in zip(DIMENSIONS, VBENCH.values(), strict=True):
        unit = 100 if name == "imaging_quality" else 1
        clips = [
            {"video_path": f"x/a clip of {name}-{k}.mp4", "video_results": unit * (mean + spread)}
            for k, spread in enumerate((-0.05, 0.05))
        ]
        found[name] = [mean, clips]
    return found


def read(folder, changed, card="vbench"):
    (folder / "base.json").write_text(json.dumps(changed))
    path = str(folder / "base.json")
    return read_results([path], load_card(card), ["base"], PLACES, REQUESTS)[0]


def totals(items):
    """The numbers of the card."""
    names = [item.groups["dimension"] for item in items]
    scores = {"score": [item.scores["score"] for item in items]}
    return {
        metric: value
        for (metric, _), value in numbers("vbench", scores, {"dimension": names}).items()
    }


def test_the_numbers_are_those_of_the_official_script(tmp_path):
    found = totals(read(tmp_path, results()))
    assert found["quality"] == pytest.approx(61.77571107035266)
    assert found["semantic"] == pytest.approx(32.27658678189042, abs=1e-4)
    assert found["total"] == pytest.approx(55.87588657266022)


def test_clips_without_the_coloured_object_are_left_out_as_in_the_official_script(tmp_path):
    changed = results()
    changed["color"][1].pop()
    changed["color"][0] -= 0.05
    items = read(tmp_path, changed)
    (left_out,) = [item for item in items if math.isnan(item.scores["score"])]
    assert left_out.groups == {"dimension": "color"}
    assert totals(items)["semantic"] == pytest.approx(32.27658678189042 - 5 / 9, abs=1e-4)


def change(name, value=None, clip=None):
    def apply(content):
        if clip:
            content[name][1][0] |= clip
        elif value is None:
            del content[name]
        else:
            content[name] = value(content[name])

    return apply


@pytest.mark.parametrize(
    ("apply", "expected"),
    [
        (change("scene"), "has no results of scene; it has aesthetic_quality"),
        (change("scene", lambda found: found[0]), r"scene: expected \[score, results"),
        (change("scene", lambda found: [found[0], found[1][:1]]), "no result of 1 of 2 clips"),
        (change("scene", lambda found: [0.9, found[1]]), "score is 0.9, but the mean over 2 clips"),
        (change("scene", clip={"video_path": "b-0.mp4"}), "'b-0.mp4' is no clip of this dimension"),
        (change("scene", clip={"video_results": None}), "is None; it must be a finite"),
        (change("scene", clip={"video_path": "a clip of scene-1.mp4"}), "has two results"),
    ],
)
def test_wrong_or_missing_entries_are_one_clear_error(tmp_path, apply, expected):
    content = results()
    apply(content)
    with pytest.raises(ValueError, match=expected) as raised:
        read(tmp_path, content)
    assert len(str(raised.value).splitlines()) <= 5


def test_a_folder_is_read_as_one_result_and_each_model_needs_one(tmp_path):
    content, card = results(), load_card("vbench")
    for name, value in content.items():
        (tmp_path / f"{name}_eval_results.json").write_text(json.dumps({name: value}))
    whole = read(tmp_path, content)
    assert read_results([str(tmp_path)], card, ["base"], PLACES, REQUESTS)[0] == whole
    (tmp_path / "again_eval_results.json").write_text(json.dumps({"scene": content["scene"]}))
    with pytest.raises(ValueError, match="results of scene in several files"):
        read_results([str(tmp_path)], card, ["base"], PLACES, REQUESTS)
    with pytest.raises(ValueError, match="one per model, in this order: base, trained"):
        read_results([str(tmp_path)], card, ["base", "trained"], PLACES, REQUESTS)


def test_clips_get_the_names_that_the_toolkit_expects(tmp_path):
    folder = ModelFolder(tmp_path, "", ".mp4")
    for place in PLACES[:2]:
        folder.media(place).parent.mkdir(exist_ok=True)
        folder.media(place).write_text(place.name)
    official = link_clips(folder, PLACES[:2], REQUESTS)
    assert sorted(path.name for path in official.iterdir()) == [
        "a clip of subject_consistency-0.mp4",
        "a clip of subject_consistency-1.mp4",
    ]
    assert link_clips(folder, PLACES[:2], REQUESTS) == official
