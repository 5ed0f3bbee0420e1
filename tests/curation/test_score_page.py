"""The page of a scoring job shows the numbers of the table and the right images."""

import base64
import io
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from flowalign.curation.scoring.scores_page import make_thumbnails, render, verdict, write_page
from flowalign.curation.scoring.stats import EXAMPLES, RunningStats
from flowalign.data.readers import open_dataset
from flowalign.utils.media.encode import write_clip
from tests.fixtures.pages import addresses

SUMMARY = {
    "rows": 9,
    "failed": 2,
    "reasons": {"missing file": 2},
    "rows_per_second": 12.34,
    "data": "pictures",
    "schema": "generic",
}


def row(record, score, other=0.5, reason="", **more):
    known = score is not None
    return {
        "record": record,
        "medium": 0,
        "prompt": f"prompt of {record}",
        "path": f"{record}.png",
        "reason": reason,
        "fingerprint": "f",
        "level": score,
        "level_valid": known,
        "other": other,
        "other_valid": True,
    } | more


def findings(*rows):
    found = RunningStats()
    for each in rows:
        found.add(each)
    return found


def test_the_best_and_the_worst_are_kept_and_of_equal_ones_the_first():
    scores = [3.0, 9.0, 1.0, 9.0, 5.0, 2.0, 8.0, 9.0, 7.0, 6.0]
    found = findings(*(row(f"r{i}", s) for i, s in enumerate(scores)))
    best, worst = found.ends["level"]
    order = lambda heap: [e[2]["record"] for e in sorted(heap, reverse=True)]  # noqa: E731
    assert order(best) == ["r1", "r3", "r7", "r6", "r8", "r9"]
    assert order(worst) == ["r2", "r5", "r0", "r4", "r9", "r8"]
    same = findings(*(row(f"r{i}", 4.0) for i in range(20)))
    assert order(same.ends["level"][0]) == order(same.ends["level"][1])
    assert order(same.ends["level"][0]) == [f"r{i}" for i in range(EXAMPLES)]


def test_what_could_not_be_scored_is_in_no_end_and_is_named():
    found = findings(row("a", 1.0), row("b", None, reason="missing file: b.png"), row("c", 2.0))
    ends = {dim: {row["record"] for _, _, row in found.ends[dim][0]} for dim in found.ends}
    assert ends == {"level": {"a", "c"}, "other": {"a", "b", "c"}}
    assert math.isnan(found.columns["level"][1])
    page = " ".join(render("x", found, {}, SUMMARY).split())
    assert "b, medium 0" in page
    assert "missing file: b.png" in page


def test_the_verdict_counts():
    assert verdict(2, SUMMARY) == (
        "9 samples scored in 2 dimensions, 12.3 a second. 2 (22.2 %) could not be scored."
    )
    assert "None failed." in verdict(2, SUMMARY | {"failed": 0})


def test_the_page_stands_alone_escapes_and_speaks_of_people_where_they_judged():
    nasty = row("a", 1.0, **{"prompt": "<script>alert(1)</script>", "rank/overall": 1.0})
    page = render("runs/x", findings(nasty, row("b", 2.0, 0.1), row("c", 4.0, 0.9)), {}, SUMMARY)
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page
    assert "flowalign reward eval" in page
    assert addresses(page) == []
    assert page.count("not readable now") == 2 * 2 * 3
    plain = render("x", findings(row("a", 1.0)), {}, SUMMARY)
    assert "flowalign reward eval" not in plain


def test_one_dimension_has_no_correlations_and_a_dead_one_no_chart():
    rows = [
        {k: v for k, v in row(f"r{i}", None).items() if not k.startswith("other")} for i in range(3)
    ]
    page = render("x", findings(*rows), {}, SUMMARY)
    assert "Correlation between" not in page
    assert "No valid score" in page


@pytest.fixture
def dataset(tmp_path):
    lines = []
    for i in range(9):
        colour = (28 * i, 10, 255 - 28 * i)
        Image.new("RGB", (6, 4), colour).save(tmp_path / f"p{i}.png")
        lines.append({"id": f"r{i}", "prompt": f"number {i}", "image": f"p{i}.png"})
    lines[4]["image"] = "gone.png"
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return open_dataset(str(file))


def test_thumbnails_are_of_the_wanted_media_and_only_of_them(dataset):
    found = make_thumbnails(dataset, {("r2", 0), ("r7", 0), ("r4", 0)})
    assert set(found) == {("r2", 0), ("r7", 0), ("r4", 0)}
    assert found["r4", 0] == "", "its file is gone"
    content = base64.b64decode(found["r7", 0].partition(",")[2])
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    assert max(picture.size) == 160
    assert np.allclose(np.array(picture)[5, 5], (196, 10, 59), atol=12)
    assert make_thumbnails(dataset, set()) == {}


def test_a_video_plays_in_a_loop_for_as_long_as_it_lasts(tmp_path):
    frames = torch.zeros(81, 3, 32, 48)
    frames[:, 1] = torch.linspace(0.1, 0.9, 81)[:, None, None]
    write_clip(tmp_path / "v.mp4", frames, 27.0)
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"id": "r", "prompt": "p", "video": "v.mp4"}))
    found = make_thumbnails(open_dataset(str(file)), {("r", 0)})["r", 0]
    picture = Image.open(io.BytesIO(base64.b64decode(found.partition(",")[2])))
    shown = list(ImageSequence.all_frames(picture))
    assert (picture.size, len(shown)) == ((160, 107), 24)
    assert sum(frame.info["duration"] for frame in shown) == 3000
    light = [np.asarray(frame.convert("RGB"))[..., 1].mean() for frame in shown]
    assert light == sorted(light)
    assert light[-1] - light[0] > 150


def test_writing_leaves_one_file(dataset, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "summary.json").write_text(json.dumps(SUMMARY))
    stats = findings(*(row(f"r{i}", float(i)) for i in range(9)))
    write_page(out, dataset, stats)
    assert sorted(p.name for p in out.iterdir()) == ["scores.html", "summary.json"]
    thumbnails = (out / "scores.html").read_text().count("data:image/webp")
    assert thumbnails == 4 * EXAMPLES - 4, "r4 is at all four ends"
