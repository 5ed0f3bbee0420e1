"""A scoring job: every row once, in order and correct; it resumes after any stop."""

import json
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from flowalign.curation.scoring import scoring_job as scoring
from flowalign.curation.scoring.part_files import PartFiles
from flowalign.curation.scoring.ray_data import BlockScorer
from flowalign.curation.scoring.scoring_job import ScoringJob, finish, run
from flowalign.curation.scoring.stats import Progress, RunningStats, TooManyFailures
from flowalign.curation.scoring.table_rows import DecodedMedium, make_unscored_row
from flowalign.data.media_record import Record
from flowalign.data.readers import open_dataset
from flowalign.rewards.checked import RewardError
from flowalign.rewards.function_reward import CallableReward
from flowalign.types import MAY_PASS, RewardModel, RewardOutput
from flowalign.utils.folders import compare_settings, hold_lock, record_settings
from reward_models.chat.chat_client import Server
from reward_models.chat.judge import Sampling
from reward_models.chat.unified_reward import AXES, UnifiedRewardPoint
from reward_models.signals.source_consistency import UnchangedPixels
from tests.fixtures.chat_server import MODEL, ChatServer, Reply
from tests.fixtures.ranks import start_ranks
from tests.fixtures.scoring_rewards import (
    Brightness,
    Moving,
    OwnSource,
    Still,
    Wins,
    edited,
    picture,
    video,
)
from tests.fixtures.tables import jsonl

pytestmark = pytest.mark.slow

SIZES = ((12, 8), (8, 12), (9, 9))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(scoring, "RECORDS_PER_PART", 8)


def pairs(folder: Path, count: int) -> str:
    """Records of two images each, of several shapes; their prompts are their numbers."""
    rows = []
    for k in range(count):
        for medium in range(2):
            picture(folder / f"{k}-{medium}.png", 2 * k + medium, SIZES[(k + medium) % 3])
        images = [f"{k}-0.png", f"{k}-1.png"]
        rows.append({"id": f"r{k}", "prompt": f"{k}", "images": images, "ranks": [1, 2]})
    return jsonl(folder, *rows)


def job(data: str, folder: Path, *models: RewardModel, **options) -> ScoringJob:
    return ScoringJob(
        open_dataset(data), models, folder, **{"batch_size": 4, "workers": 2} | options
    )


def whole(what: ScoringJob) -> list[dict]:
    """Run to the end; the rows of the table."""
    finish(what, run(what, Progress()), "jsonl")
    return lines(what.folder)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]


def test_rows_come_in_the_order_of_the_dataset_with_the_scores_of_their_own_medium(tmp_path):
    data = pairs(tmp_path, 21)
    rows = whole(job(data, tmp_path / "out", Brightness()))
    assert [(row["record"], row["medium"]) for row in rows] == [
        (f"r{k}", medium) for k in range(21) for medium in range(2)
    ]
    for k, row in enumerate(rows):
        pixels = picture(tmp_path / "same.png", k, SIZES[(k // 2 + k % 2) % 3]) / 255
        assert row["brightness"] == pytest.approx(pixels.mean(), abs=1e-6)
        assert row["contrast"] == pytest.approx(pixels.std(ddof=1), abs=1e-6)
        assert (row["brightness_valid"], row["reason"]) == (True, None)
        assert row["rank/overall"] == 1 + k % 2
        assert row["path"] == str(tmp_path / f"{k // 2}-{k % 2}.png")


def test_batches_are_of_one_shape_and_full_where_they_can_be(tmp_path):
    data = pairs(tmp_path, 8)
    seen = []

    class Watching(RewardModel):
        spec = Brightness(contrast=False).spec

        def score(self, batch):
            seen.append(tuple(batch.media.shape))
            return RewardOutput.build(self.spec, torch.zeros(len(batch), 1))

    whole(job(data, tmp_path / "out", Watching()))
    shapes = Counter(shape[1:] for shape in seen for _ in range(shape[0]))
    assert set(shapes) == {(1, 3, height, width) for width, height in SIZES}
    for shape, count in shapes.items():
        sizes = [found[0] for found in seen if found[1:] == shape]
        assert sizes == [4] * (count // 4) + ([count % 4] if count % 4 else [])


def test_little_memory_makes_batches_smaller_not_scores_different(tmp_path, monkeypatch):
    data = pairs(tmp_path, 12)
    expected = whole(job(data, tmp_path / "a", Brightness(str(tmp_path / "log"))))
    monkeypatch.setattr(scoring, "_MEMORY", 600)
    assert whole(job(data, tmp_path / "b", Brightness())) == expected


def test_large_items_make_smaller_batches(tmp_path, monkeypatch):
    counts = []

    class Counting(Brightness):
        def score(self, batch):
            counts.append(len(batch))
            return super().score(batch)

    item = 3 * 12 * 8
    monkeypatch.setattr(scoring, "_BATCH_BYTES", 2 * item)
    whole(job(pairs(tmp_path, 5), tmp_path / "out", Counting()))
    assert counts == [3, 3, 3, 1]


def test_each_model_fails_for_itself_and_says_why(tmp_path):
    video(tmp_path / "v.mp4", 6)
    picture(tmp_path / "p.png", 1, (32, 32))
    (tmp_path / "cut.png").write_bytes((tmp_path / "p.png").read_bytes()[:200])
    rows = [
        {"prompt": "moves", "video": "v.mp4"},
        {"prompt": "stands", "image": "p.png"},
        {"image": "p.png"},
        {"prompt": "cut", "image": "cut.png"},
        {"prompt": "none"},
        {"prompt": "refuse this", "image": "p.png"},
    ]
    data = jsonl(tmp_path, *rows)
    rows = whole(job(data, tmp_path / "out", Still(), Moving(), max_failed_fraction=1.0))
    moves, stands, silent, cut, none, refused = rows
    assert moves["reason"] == "still scores images, not videos"
    assert (moves["redness"], moves["redness_valid"], moves["speed_valid"]) == (None, False, True)
    assert moves["speed"] == pytest.approx(8 * 10 / 255, rel=0.1)
    assert stands["reason"] == "moving needs frames per second, which are unknown"
    red = picture(tmp_path / "same.png", 1, (32, 32))[..., 0].mean() / 255
    assert stands["redness"] == pytest.approx(red, abs=1e-6)
    assert silent["reason"].startswith("its prompt is missing; ")
    assert cut["reason"].startswith("truncated or damaged image: ")
    assert none["reason"].startswith("invalid row: data.jsonl row 5: ")
    assert refused["reason"].startswith("still refused: a prompt that cannot be read; ")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["rows"], summary["failed"]) == (6, 6)
    assert summary["reasons"]["truncated or damaged image"] == 1
    assert summary["reasons"]["invalid row"] == 1
    assert summary["dimensions"]["redness"]["valid"] == 1


def test_media_that_are_compared_are_in_one_batch(tmp_path):
    rows = []
    for k in range(9):
        for medium in range(3):
            picture(tmp_path / f"{k}-{medium}.png", 3 * k + medium)
        rows.append({"prompt": "p", "images": [f"{k}-{medium}.png" for medium in range(3)]})
    picture(tmp_path / "8-2.png", 0, (5, 5))
    data = jsonl(tmp_path, *rows)
    found = whole(job(data, tmp_path / "out", Wins(), Brightness(contrast=False)))
    for k in range(8):
        light = np.array([row["brightness"] for row in found[3 * k : 3 * k + 3]])
        assert [row["wins"] for row in found[3 * k : 3 * k + 3]] == [
            (light[i] > light).sum() / 2 for i in range(3)
        ]
    assert {row["reason"] for row in found[24:]} == {
        "wins compares whole groups of readable samples of one shape"
    }
    assert all(row["brightness_valid"] for row in found)


def edits(folder: Path, count: int, **columns) -> str:
    """Records of two edits of one source, all with one instruction."""
    rows = []
    for k in range(count):
        source, images = edited(folder, k, SIZES[k % 3])
        rows.append({"prompt": "make it brighter", "images": images, "references": [source]})
    rows[-1] |= columns
    return jsonl(folder, *rows)


def test_every_edit_is_scored_with_its_own_source(tmp_path):
    rows = whole(job(edits(tmp_path, 11), tmp_path / "out", OwnSource()))
    assert [row["own"] for row in rows] == [1.0] * 22
    assert [row["references"] for row in rows[::2]] == [
        [str(tmp_path / f"source-{k}.png")] for k in range(11)
    ]
    wrong = edits(tmp_path, 3, references=["source-0.png"])
    assert [row["own"] for row in whole(job(wrong, tmp_path / "b", OwnSource()))] == [1.0] * 4 + [
        0.0
    ] * 2


def test_an_edit_without_its_source_fails_alone(tmp_path):
    rows = whole(job(edits(tmp_path, 3, references=None), tmp_path / "a", OwnSource()))
    assert [row["own"] for row in rows] == [1.0] * 4 + [None] * 2
    assert rows[4]["reason"] == "own_source needs reference images"
    gone = edits(tmp_path, 3, references=["gone.png"])
    rows = whole(job(gone, tmp_path / "b", OwnSource()))
    assert "gone.png" in rows[4]["reason"]
    assert rows[3]["own"] == 1.0


def test_pixels_under_the_mask_of_a_row_do_not_count(tmp_path):
    """The edits differ from their source by one level, and by another in one pixel of row 0."""
    hole = np.zeros((8, 12, 3), np.uint8)
    hole[1:] = 255
    Image.fromarray(hole).save(tmp_path / "mask.png")
    source, images = edited(tmp_path, 0)
    row = {"prompt": "p", "images": images, "references": [source]}
    data = jsonl(tmp_path, row, row | {"request_mask": "mask.png"})
    rows = whole(job(data, tmp_path / "out", UnchangedPixels()))
    assert [row["request_mask"] for row in rows[::2]] == [None, str(tmp_path / "mask.png")]
    bare, masked = rows[0]["unchanged_pixels"], rows[2]["unchanged_pixels"]
    assert bare == pytest.approx(1 - (1 + 1 / 96) / 255, abs=1e-5)
    assert masked == pytest.approx(1 - (1 + 1 / 12) / 255, abs=1e-5)


def test_parquet_has_lists_of_references_and_marks_pairs_that_are_both_bad(tmp_path):
    bench = [
        {
            "prompt": "make it brighter",
            "path_src": edited(tmp_path, k)[0],
            "paths_generated": edited(tmp_path, k)[1],
            "human_vote": {"ranking": ranking},
        }
        for k, ranking in enumerate(("A>B", "A=B=Bad"))
    ]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    what = job(str(tmp_path / "bench.json"), tmp_path / "out", OwnSource())
    finish(what, run(what, Progress()), "parquet")
    rows = parquet.read_table(what.folder / "scores.parquet").to_pylist()
    assert [row["references"] for row in rows[::2]] == [
        [str(tmp_path / f"source-{k}.png")] for k in range(2)
    ]
    assert [row["both_bad/overall"] for row in rows] == [None, None, True, True]
    assert [row["own"] for row in rows] == [1.0] * 4


def test_two_columns_of_one_name_are_refused(tmp_path):
    data = pairs(tmp_path, 1)
    with pytest.raises(ValueError, match=r"\['brightness'\] would share a column"):
        job(data, tmp_path / "out", Brightness(), Brightness(contrast=False))


def test_shards_are_disjoint_and_make_the_same_table(tmp_path):
    data, log = pairs(tmp_path, 37), tmp_path / "log"
    expected = whole(job(data, tmp_path / "one", Brightness()))
    for i in (2, 0, 1):
        what = job(data, tmp_path / "three", Brightness(str(log)), shard=(i, 3))
        blocks = run(what, Progress())
    finish(what, blocks, "jsonl")
    assert lines(tmp_path / "three") == expected
    prompts = Counter(line.split()[1] for line in log.read_text().splitlines())
    assert prompts == {f"{k}": 2 for k in range(37)}


def test_a_table_cannot_be_made_while_a_shard_is_missing(tmp_path):
    data = pairs(tmp_path, 20)
    what = job(data, tmp_path / "out", Brightness(), shard=(0, 2))
    blocks = run(what, Progress())
    with pytest.raises(ValueError, match=r"block 1 of .* has not been scored yet"):
        finish(what, blocks, "jsonl")


def test_a_stopped_job_goes_on_and_scores_no_saved_row_twice(tmp_path):
    data, log = pairs(tmp_path, 40), tmp_path / "log"
    expected = whole(job(data, tmp_path / "whole", Brightness()))

    class Stopped(Progress):
        def show(self):
            if self.stats.rows >= 32:
                raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(job(data, out, Brightness()), Stopped())
    saved = {row["record"] for row in rows_in(out)}
    assert len(saved) == 16
    assert whole(job(data, out, Brightness(str(log)))) == expected
    again = {f"r{line.split()[1]}" for line in log.read_text().splitlines()}
    assert again == {f"r{k}" for k in range(40)} - saved


def said_by_judge(request) -> Reply:
    """The rating of a picture's red; prompts whose number ends with 0 or 5 are not answered."""
    if request.text.endswith(("0]", "5]")):
        return Reply(status=429)
    return rated(request)


def rated(request) -> Reply:
    red = request.pictures[0][..., 0].mean() / 255
    return Reply("".join(f"{axis}: {1 + 4 * red:.4f}\n" for axis in AXES))


@pytest.mark.parametrize("by_blocks", [False, True])
def test_an_outage_leaves_no_trace_once_the_job_is_repeated(tmp_path, by_blocks):
    """Of 20 records of two images, the outage costs the records 0, 5, 10 and 15."""
    data = pairs(tmp_path, 20)
    with ChatServer(rated) as chat:
        server = Server(chat.url, MODEL, attempts=1, max_failures=99, cache=None)

        def judged(folder: str) -> ScoringJob:
            models = UnifiedRewardPoint(server), Brightness()
            return job(data, tmp_path / folder, *models, max_failed_fraction=1.0)

        expected = whole(judged("whole"))
        chat.answer = said_by_judge
        failed = [row for row in whole(judged("out")) if row["reason"]]
        assert [row["record"] for row in failed] == [f"r{k}" for k in (0, 0, 5, 5, 10, 10, 15, 15)]
        stats = finish(judged("out"), range(3), "jsonl")
        assert stats.reasons[f"HTTP 429, after 1 attempts {MAY_PASS}"] == 8
        chat.answer, before = rated, len(chat.requests)
        if by_blocks:
            worker = BlockScorer(judged("out"))
            for block in (2, 0, 1):
                worker.score(block)
        assert whole(judged("out")) == expected
        assert len(chat.requests) - before == 8
        parts = [sorted((tmp_path / f / "parts").iterdir()) for f in ("whole", "out")]
        assert [p.read_bytes() for p in parts[0]] == [p.read_bytes() for p in parts[1]]


def test_failures_that_last_are_not_scored_again(tmp_path):
    data, log = pairs(tmp_path, 9), tmp_path / "log"
    (tmp_path / "3-1.png").unlink()
    whole(job(data, tmp_path / "out", Brightness()))
    whole(job(data, tmp_path / "out", Brightness(str(log))))
    assert not log.exists()


def test_one_readable_pass_of_two_has_a_score_and_no_uncertainty(tmp_path):
    def answer(request) -> Reply:
        lost = request.text.endswith("[3]") and request.body["seed"] == 43
        return Reply("hm") if lost else rated(request)

    with ChatServer(answer) as chat:
        server, sampling = Server(chat.url, MODEL, cache=None), Sampling(passes=2, retries=0)
        judge = UnifiedRewardPoint(server, sampling=sampling)
        rows = whole(job(pairs(tmp_path, 6), tmp_path / "out", judge))
    assert all(row["alignment_valid"] for row in rows)
    spread = {row["record"]: row["alignment_uncertainty"] for row in rows}
    assert spread == dict.fromkeys(("r0", "r1", "r2", "r4", "r5"), 0.0) | {"r3": None}


def test_a_reason_that_holds_the_separator_is_counted_once():
    model = Brightness()
    record = Record("r", "p", [], problem="row 3: no image; give a path")
    row = make_unscored_row([model], DecodedMedium(record, 0, 0, reason=record.problem))
    stats = RunningStats()
    stats.add(row)
    assert stats.reasons == {"row 3": 1}


def test_a_changed_image_of_an_unchanged_table_is_scored_again_with_its_block(tmp_path, capsys):
    for k in range(20):
        Image.new("RGB", (9, 9), (10 * k,) * 3).save(tmp_path / f"{k}.bmp")
    rows = [{"id": f"r{k}", "prompt": f"{k}", "image": f"{k}.bmp"} for k in range(20)]
    table = jsonl(tmp_path, *rows)
    out, log = tmp_path / "out", tmp_path / "log"
    whole(job(table, out, Brightness()))
    found = whole(job(table, out, Brightness(str(log))))
    assert found[9]["brightness"] == pytest.approx(90 / 255)
    assert not log.exists()
    Image.new("RGB", (9, 9), (255,) * 3).save(tmp_path / "9.bmp")
    (tmp_path / "13.bmp").unlink()
    found = whole(job(table, out, Brightness(str(log))))
    assert "2 rows changed since they were scored: scoring them again" in capsys.readouterr().err
    assert [found[k]["brightness"] for k in (9, 10)] == pytest.approx([1, 100 / 255])
    assert found[13]["reason"] == f"missing file: {tmp_path / '13.bmp'}"
    again = {line.split()[1] for line in log.read_text().splitlines()}
    assert again == {str(k) for k in range(8, 16) if k != 13}, "one block of eight records"
    Image.new("RGB", (9, 9), (51,) * 3).save(tmp_path / "13.bmp")
    assert whole(job(table, out, Brightness()))[13]["brightness"] == pytest.approx(0.2)


def _score(_: int, data: str, out: Path, log: str) -> None:
    scoring.RECORDS_PER_PART = 8
    run(job(data, out, Brightness(log, seconds=0.005)), Progress())


@pytest.mark.slow
def test_kills_at_random_moments_leave_no_trace(tmp_path):
    kills, records = 4, 200
    data = pairs(tmp_path, records)
    expected = whole(job(data, tmp_path / "whole", Brightness()))
    out, log, draw = tmp_path / "out", tmp_path / "log", random.Random(0)
    killed = 0
    while killed < kills:
        saved = {row["record"] for row in rows_in(out)}
        log.write_text("")
        (child,) = start_ranks(_score, 1, data, out, str(log), wait=False).processes
        enough = draw.randint(1, records * 5 // (4 * kills))  # rows: a moment on any machine
        while log.read_text().count("\n") < enough:
            time.sleep(0.001)
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        assert not {f"r{line.split()[1]}" for line in log.read_text().splitlines()} & saved
        assert saved <= {row["record"] for row in rows_in(out)}
    assert 0 < len(rows_in(out)) < 2 * records
    whole(job(data, out, Brightness()))
    assert len(expected) == 2 * records
    tables = [(tmp_path / name / "scores.jsonl").read_bytes() for name in ("out", "whole")]
    assert tables[0] == tables[1]


def rows_in(out: Path) -> list[dict]:
    parts = PartFiles(out / "parts")
    return list(parts.rows(parts.blocks()))


def test_a_job_stops_after_the_block_in_which_too_many_rows_have_failed(tmp_path):
    data = pairs(tmp_path, 80)
    for k in range(40, 80):
        (tmp_path / f"{k}-0.png").unlink()
    what = job(data, tmp_path / "out", Brightness(), max_failed_fraction=0.1)
    with pytest.raises(TooManyFailures, match=r"16 of 112 rows failed, .* missing file \(16\)"):
        run(what, Progress())
    progress = Progress()
    with pytest.raises(TooManyFailures):  # at once: what was saved counts
        run(what, progress)
    assert progress.rows == 0
    rows = whole(replace(what, max_failed_fraction=0.5))
    assert sum(row["reason"] is not None for row in rows) == 40


def test_few_rows_are_judged_at_the_end_only():
    tally = RunningStats()
    tally.add({"medium": 0, "reason": "x: y", "a": None, "a_valid": False})
    tally.check(0.0, at_least=2)
    with pytest.raises(TooManyFailures, match=r"1 of 1 rows failed"):
        tally.check(0.99)
    tally.check(1.0)


def test_the_summary_has_the_moments_of_the_valid_scores():
    tally, values = RunningStats(), [0.5, -2.0, 3.25]
    for value in (*values, None):
        reason, valid = None if value else "b: c; d", value is not None
        tally.add({"medium": 0, "reason": reason, "a": value, "a_valid": valid})
    told = tally.summary()
    assert told["dimensions"]["a"] == {
        "valid": 3,
        "mean": pytest.approx(np.mean(values)),
        "std": pytest.approx(np.std(values)),
        "min": -2.0,
        "max": 3.25,
    }
    assert (told["failed_fraction"], told["reasons"]) == (0.25, {"b": 1, "d": 1})


@pytest.mark.parametrize(("limit", "n"), [(None, 1), (None, 2), (None, 3), (None, 4), (17, 2)])
def test_a_shard_knows_how_many_records_it_will_score(tmp_path, limit, n):
    """21 records are blocks of 8, 8 and 5, which no number of shards divides evenly."""
    data, seen = pairs(tmp_path, 21), []
    for i in range(n):
        what = job(data, tmp_path / "out", Brightness(), shard=(i, n), limit=limit)
        progress = Progress()
        run(what, progress)
        assert what.share() == progress.stats.records
        seen.append(what.share())
    assert sum(seen) == (limit or 21)


def test_a_folder_made_with_other_settings_is_refused_by_name(tmp_path):
    manifest = tmp_path / "out" / "manifest.json"
    manifest.parent.mkdir()
    record_settings(manifest, {"data": "a", "limit": None}, "a scoring job")
    record_settings(manifest, {"data": "a", "limit": None}, "a scoring job")
    with pytest.raises(ValueError, match=r"limit differ;\s+limit was 'None', now '3'"):
        record_settings(manifest, {"data": "a", "limit": 3}, "a scoring job")
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="a scoring job did not write"):
        record_settings(tmp_path / "manifest.json", {"data": "a"}, "a scoring job")


def test_a_manifest_that_another_shard_writes_meanwhile_is_no_foreign_file(tmp_path, monkeypatch):
    manifest = tmp_path / "manifest.json"
    listing = Path.glob

    def list_after_the_other_has_written(folder, pattern):
        manifest.write_text('{"data": "a"}')
        return listing(folder, pattern)

    monkeypatch.setattr(Path, "glob", list_after_the_other_has_written)
    compare_settings(manifest, {"data": "a"}, "a scoring job")
    with pytest.raises(ValueError, match="data differ"):
        compare_settings(manifest, {"data": "b"}, "a scoring job")


def test_two_processes_do_not_score_the_same_shard(tmp_path):
    lock = tmp_path / "lock"
    with hold_lock(lock), pytest.raises(ValueError, match="another process"), hold_lock(lock):
        pass
    with hold_lock(lock):
        pass


def test_no_more_is_decoded_ahead_than_memory_allows(tmp_path, monkeypatch):
    data = pairs(tmp_path, 24)
    decoded, scored, most = [], [], []
    real = scoring.prepare

    def counting(*args):
        item = real(*args)
        decoded.append(item)
        return item

    class Watching(RewardModel):
        spec = Brightness(contrast=False).spec

        def score(self, batch):
            most.append(len(decoded) - len(scored))
            scored.extend(batch.prompts)
            return RewardOutput.build(self.spec, torch.zeros(len(batch), 1))

    monkeypatch.setattr(scoring, "prepare", counting)
    monkeypatch.setattr(scoring, "_MEMORY", 1)
    whole(job(data, tmp_path / "out", Watching(), workers=1, batch_size=32))
    assert max(most) <= 8  # and 34 if it were not for the memory


@pytest.mark.parametrize(
    ("result", "message"),
    [(KeyError("red"), "reward 'still' .*KeyError: 'red'"), (None, "'still' .*returned None")],
)
def test_a_model_that_is_wrong_ends_the_job_by_its_name(tmp_path, result, message):
    class Wrong(Still):
        def score(self, batch):
            if result is not None:
                raise result

    with pytest.raises(RewardError, match=message):
        whole(job(pairs(tmp_path, 4), tmp_path / "out", Wrong()))


def test_a_function_with_too_few_scores_is_no_problem_of_its_samples(tmp_path):
    reward = CallableReward(lambda images: [1.0], "one")
    with pytest.raises(RewardError, match=r"reward one returned 1 scores for \d samples"):
        whole(job(pairs(tmp_path, 4), tmp_path / "out", reward))
