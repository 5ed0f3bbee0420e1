"""`flowalign clip-pairs`, and training on its output, by the command line."""

import filecmp
import json
import os
from math import log
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from flowalign.extra.clip_pairs import clip_pairs_job
from flowalign.extra.clip_pairs.clip_pairs_job import ClipPairs
from flowalign.extra.clip_pairs.generators import DensePairs, LocalPairs
from flowalign.runs.config.loading import compose
from flowalign.types import InputSpec
from flowalign.utils.media.decode import decode
from flowalign.utils.media.encode import write_clip
from flowalign.utils.media.media import Media
from flowalign.utils.typed_settings import load_typed
from tests.fixtures.commands import exit_code
from tests.fixtures.video_pixel import VideoPixel, clip, clips

pytestmark = pytest.mark.slow

PROMPTS = ["a", "bb", "ccc", "dddd", "eeeee"]
DENSE = {"class_path": "flowalign.extra.DensePairs", "init_args": {"seconds": 0.5}}
LOCAL = {"class_path": "flowalign.extra.LocalPairs"}
REWARD = {
    "rewards": [
        {"class_path": "tests.fixtures.video_pixel.Warmth", "weight": {"warm": 1.0, "green": 0.5}}
    ]
}


@pytest.fixture
def written(tmp_path):
    """Writes a run file for five clips; their folder is made once."""
    clips(tmp_path / "data", PROMPTS)

    def write(method: dict, **changes) -> Path:
        content = {
            "policy": {"class_path": "tests.fixtures.video_pixel.VideoPixel"},
            "method": method,
            "clips": str(tmp_path / "data"),
            "num_steps": 8,
            "batch_size": 2,
            "device": "cpu",
            "output_dir": str(tmp_path / "out"),
        }
        content |= REWARD if method is DENSE else {}
        file = tmp_path / "make.yaml"
        file.write_text(yaml.safe_dump(content | changes))
        return file

    return write


def rows(folder: Path, *names: str) -> list[dict]:
    lists = [folder / name for name in names or (clip_pairs_job.TRAIN, clip_pairs_job.HELD_OUT)]
    return [json.loads(x) for file in lists if file.exists() for x in file.read_text().splitlines()]


def files(folder: Path) -> list[str]:
    """All files except parts, which contain seconds."""
    found = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()]
    return [name for name in found if not name.startswith(("parts", "summary"))]


# A folder of pairs --------------------------------------------------------------------------------


def test_dense_pairs_are_latents_clips_and_labelled_segments(written, tmp_path, capsys):
    assert exit_code("clip-pairs", written(DENSE)) == 0
    found = {row["id"]: row for row in rows(tmp_path / "out")}
    assert sorted(found) == [f"00000{k}" for k in range(5)]
    row = found["000002"]
    assert (row["prompt"], row["source"]) == ("ccc", str(tmp_path / "data" / "02.mp4"))
    assert [(s["start"], s["stop"]) for s in row["segments"]] == [(k, k + 1) for k in range(4)]
    for side in "ab":
        latent = load_file(tmp_path / "out" / row[side])["latent"]
        seen = decode(Media(str(tmp_path / "out" / row[f"{side}_video"])))
        assert seen.fps == row["fps"] == 4.0
        assert (VideoPixel().decode(latent[None])[0] - seen.frames).abs().max() < 0.1
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["pairs"], summary["train"] + summary["held_out"]) == (5, 5)
    # Two copies of five clips; four segments each are scored.
    assert (summary["costs"]["decodes"], summary["costs"]["reward_calls"]) == (10, 40)
    steps = [2 * round(8 * row["level"]) for row in found.values()]
    assert summary["costs"]["sampling_evaluations"] == sum(steps)
    printed = capsys.readouterr().out
    assert "5 pairs" in printed
    assert f"{sum(steps)}" in printed


def test_local_pairs_are_a_clip_its_copy_and_the_mask_between_them(written, tmp_path):
    assert exit_code("clip-pairs", written(LOCAL)) == 0
    for row in rows(tmp_path / "out"):
        winner, loser = (
            load_file(tmp_path / "out" / row[side])["latent"] for side in ("positive", "negative")
        )
        (mask,) = load_file(tmp_path / "out" / row["mask"]).values()
        assert torch.equal((winner != loser).any(0), mask.bool())
        assert row["strength"] in (0.75, 0.8, 0.85)


def test_clips_and_prompts_are_read_from_columns_of_other_names(written, tmp_path, capsys):
    plain, named = written(DENSE), tmp_path / "named"
    lines = [f"{k:02}.mp4,{prompt}" for k, prompt in enumerate(PROMPTS)]
    table = tmp_path / "data" / "clips.csv"
    table.write_text("\n".join(["clip,words", *lines]))
    options = [f"clips={table}", f"output_dir={named}", "--columns", "video=clip", "prompt=words"]
    assert exit_code("clip-pairs", plain, *options) == 0
    assert exit_code("clip-pairs", plain, f"clips={table}", "columns={video: gone}") == 2
    assert "no column 'gone'; there are clip, words" in capsys.readouterr().err
    table.unlink()
    assert exit_code("clip-pairs", plain) == 0
    for one, other in zip(rows(named), rows(tmp_path / "out"), strict=True):
        assert (one["prompt"], one["level"]) == (other["prompt"], other["level"])
        sides = named / one["a"], tmp_path / "out" / other["a"]
        assert torch.equal(*(load_file(side)["latent"] for side in sides))
    assert "words" in (named / clip_pairs_job.MANIFEST).read_text()


def test_the_same_command_after_a_kill_makes_the_same_files(written, tmp_path, monkeypatch):
    config, whole, broken = written(DENSE), tmp_path / "whole", tmp_path / "broken"
    assert exit_code("clip-pairs", config, f"output_dir={whole}") == 0
    make, made = DensePairs.make, []

    def once(self, regenerator, some):
        if made:
            raise KeyboardInterrupt
        made.append(some)
        return make(self, regenerator, some)

    monkeypatch.setattr(DensePairs, "make", once)
    assert exit_code("clip-pairs", config, f"output_dir={broken}") == 130
    assert not (broken / clip_pairs_job.TRAIN).exists()
    monkeypatch.setattr(DensePairs, "make", make)
    assert exit_code("clip-pairs", config, f"output_dir={broken}") == 0
    names = files(whole)
    assert files(broken) == names
    assert filecmp.cmpfiles(whole, broken, names, shallow=False) == (names, [], [])
    costs = [json.loads((f / "summary.json").read_text())["costs"] for f in (whole, broken)]
    assert costs[0] | {"seconds": 0} == costs[1] | {"seconds": 0}


def test_a_finished_folder_reads_no_weights_and_refuses_other_settings(
    written, tmp_path, monkeypatch, capsys
):
    config = written(DENSE)
    assert exit_code("clip-pairs", config) == 0
    before = (tmp_path / "out" / clip_pairs_job.TRAIN).read_bytes()
    monkeypatch.setattr(VideoPixel, "load", lambda *_: pytest.fail("weights are read"))
    assert exit_code("clip-pairs", config) == 0
    assert (tmp_path / "out" / clip_pairs_job.TRAIN).read_bytes() == before
    assert exit_code("clip-pairs", config, "seed=1") == 2
    assert "seed was '0', now '1'" in capsys.readouterr().err


def test_a_video_that_changed_gets_new_pairs_with_its_batch(written, tmp_path):
    config, out = written(LOCAL), tmp_path / "out"
    assert exit_code("clip-pairs", config) == 0
    before = [(out / row["positive"]).read_bytes() for row in rows(out)]
    write_clip(tmp_path / "data" / "02.mp4", clip(7), 4.0)
    assert exit_code("clip-pairs", config) == 0
    after = [(out / row["positive"]).read_bytes() for row in rows(out)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, True, False, True, True]


def test_shards_make_what_one_process_makes_the_last_writes_the_lists(written, tmp_path):
    config, whole, parts = written(LOCAL), tmp_path / "whole", tmp_path / "parts"
    assert exit_code("clip-pairs", config, f"output_dir={whole}") == 0
    assert exit_code("clip-pairs", config, "--shard", "1/2", f"output_dir={parts}") == 0
    assert rows(parts) == []
    assert exit_code("clip-pairs", config, "--shard", "0/2", f"output_dir={parts}") == 0
    names = files(whole)
    assert filecmp.cmpfiles(whole, parts, names, shallow=False) == (names, [], [])


def test_a_process_that_ends_while_another_writes_lists_changes_nothing(
    written, tmp_path, monkeypatch
):
    """The other finishes wholly before each rename of the first; every list is always whole."""
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.5)) == 0
    out = tmp_path / "out"
    cfg, _ = load_typed(ClipPairs, str(tmp_path / "make.yaml"))
    lists = {
        name: (out / name).read_bytes() for name in (clip_pairs_job.TRAIN, clip_pairs_job.HELD_OUT)
    }
    replace, unlink, own = Path.replace, Path.unlink, os.getpid()
    whole = []

    def interleaved(self, target):
        if os.getpid() == own:
            monkeypatch.setattr(os, "getpid", lambda: own + 1)
            clip_pairs_job.finish(cfg, 3)
            monkeypatch.setattr(os, "getpid", lambda: own)
        whole.append({name: (out / name).read_bytes() for name in lists} == lists)
        return replace(self, target)

    def kept(self, missing_ok=False):
        assert self.name not in lists, "a list that has rows is gone for a moment"
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "replace", interleaved)
    monkeypatch.setattr(Path, "unlink", kept)
    assert clip_pairs_job.finish(cfg, 3) is not None
    assert len(whole) == 3 + 3 * 3, "three files, before each of which the other writes three"
    assert all(whole)
    assert not [path for path in out.iterdir() if path.name.endswith(".tmp")]


def test_a_list_that_has_no_rows_any_more_is_removed(written, tmp_path):
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.5)) == 0
    assert (tmp_path / "out" / clip_pairs_job.HELD_OUT).exists()
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.0)) == 0
    assert not (tmp_path / "out" / clip_pairs_job.HELD_OUT).exists()
    assert len(rows(tmp_path / "out", clip_pairs_job.TRAIN)) == 5


def test_held_out_pairs_are_of_other_prompts(written, tmp_path):
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.5)) == 0
    train, held = (
        rows(tmp_path / "out", name) for name in (clip_pairs_job.TRAIN, clip_pairs_job.HELD_OUT)
    )
    assert train
    assert held
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held}


# What cannot be used ------------------------------------------------------------------------------


def test_bad_clips_are_named_counted_and_do_not_stop_the_others(written, tmp_path, capsys):
    data = tmp_path / "data"
    write_clip(data / "short.mp4", clip(1, 4), 4.0)
    (data / "short.txt").write_text("short")
    (data / "broken.mp4").write_bytes((data / "00.mp4").read_bytes()[:300])
    (data / "broken.txt").write_text("broken")
    write_clip(data / "mute.mp4", clip(1), 4.0)
    assert exit_code("clip-pairs", written(DENSE, max_dropped_fraction=0.4)) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["pairs"], summary["faults"]) == (5, 3)
    told = json.dumps(summary["dropped"])
    for why in ("broken.mp4", "4 frames", "no prompt"):
        assert why in told
    capsys.readouterr()
    assert exit_code("clip-pairs", written(DENSE, output_dir=str(tmp_path / "strict"))) == 1
    assert "3 of 8 videos cannot be used; max_dropped_fraction is 0.05" in capsys.readouterr().err
    assert len(rows(tmp_path / "strict")) == 5


def test_pairs_that_the_method_drops_are_told_and_are_no_fault(written, tmp_path, capsys):
    method = {**DENSE, "init_args": {"seconds": 0.5, "margin": 0.02, "min_decided": 0.7}}
    assert exit_code("clip-pairs", written(method, **REWARD, max_dropped_fraction=0.0)) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    (kind,) = summary["dropped"]
    assert kind == "too few segments with a preference"
    assert 0 < summary["pairs"] == 5 - summary["dropped"][kind]["count"] < 5
    assert summary["faults"] == 0
    assert "too few segments with a preference" in capsys.readouterr().out


class Choosy(InputSpec):
    """Takes every prompt but one."""

    def misfit(self, request):
        return "takes no 'ccc'" if request.prompt == "ccc" else super().misfit(request)


def test_a_request_that_the_policy_does_not_take_is_named_and_skipped(
    written, tmp_path, monkeypatch
):
    monkeypatch.setattr(VideoPixel, "input_spec", Choosy())
    assert exit_code("clip-pairs", written(LOCAL, max_dropped_fraction=0.2)) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["pairs"] == 4
    kind = summary["dropped"]["request that the policy does not take"]
    assert kind["count"] == summary["faults"] == 1
    assert "takes no 'ccc'" in kind["first"][0]


@pytest.mark.parametrize("num_frames", [5, 9])
def test_a_number_of_frames_that_is_not_the_policys_is_refused(num_frames):
    policy = VideoPixel()
    policy.num_frames = 7
    with pytest.raises(
        ValueError, match=rf"num_frames is {num_frames}, but the policy makes 7 frames"
    ):
        ClipPairs(policy=policy, clips="x", method=LocalPairs(), num_frames=num_frames)
    for same in (None, 7):
        ClipPairs(policy=policy, clips="x", method=LocalPairs(), num_frames=same)


def test_a_reward_that_fails_drops_the_pair_with_its_reason(written, tmp_path):
    failing = {"class_path": "tests.fixtures.video_pixel.Warmth", "init_args": {"fail_on": "ccc"}}
    failing["weight"] = {"warm": 1.0}
    config = written(DENSE, rewards=[failing], max_dropped_fraction=0.2)
    assert exit_code("clip-pairs", config) == 0
    (known,) = json.loads((tmp_path / "out" / "summary.json").read_text())["dropped"].values()
    assert known["count"] == 1
    assert "segment 0 of a: told to" in known["first"][0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"policy": {"class_path": "tests.fixtures.pixel.PixelPolicy"}},
            "PixelPolicy makes images",
        ),
        ({"rewards": []}, "rewards is empty"),
        (
            {"rewards": [{"class_path": "tests.fixtures.pixel.Redness", "weight": {"redness": 1}}]},
            "reward 'redness' needs image, and VideoPixel gives fps and video",
        ),
        ({"num_steps": 1}, "num_steps is 1; it must be at least 2"),
        ({"num_frames": 0}, "num_frames is 0"),
        ({"held_out": 1.0}, "held_out is 1.0; it must be at least 0 and below 1"),
        ({"clips": "no/such"}, "'no/such' does not exist"),
        ({"clisp": "x"}, "clisp"),
    ],
)
def test_what_the_user_can_correct_is_said_before_weights_are_read(
    written, capsys, monkeypatch, changes, message
):
    monkeypatch.setattr(VideoPixel, "load", lambda *_: pytest.fail("weights are read"))
    assert exit_code("clip-pairs", written(DENSE, **changes)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert len(told.splitlines()) <= 5


# Training -----------------------------------------------------------------------------------------


def trained(tmp_path: Path, loss: str, path: Path, ema=None, **data) -> tuple[dict, list[dict]]:
    """Summary and losses of two steps of a recipe on stored pairs."""
    content = {
        "policy": {"class_path": "tests.fixtures.video_pixel.VideoPixel"},
        "recipe": {
            "class_path": "flowalign.training.Matching",
            "init_args": {
                "data": {
                    "class_path": "flowalign.training.matching.StoredDataset",
                    "init_args": {"path": str(path), "batch_size": 2, **data},
                },
                "loss": {"class_path": f"flowalign.{loss}"},
            },
        },
        "num_steps": 2,
        "ema": ema,
        "device": "cpu",
        "output_dir": str(tmp_path / loss),
    }
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(content))
    assert exit_code("train", file) == 0
    metrics = (tmp_path / loss / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in metrics]
    return json.loads((tmp_path / loss / "summary.json").read_text()), [
        row for row in found if "policy_loss" in row
    ]


@pytest.mark.parametrize("ema", [None, {"decay": 0.5}])
def test_the_end_names_the_weights_that_it_tells_of(written, tmp_path, capsys, ema):
    assert exit_code("clip-pairs", written(DENSE, held_out=0.0)) == 0
    trained(tmp_path, "extra.DenseDPO", tmp_path / "out" / clip_pairs_job.TRAIN, ema)
    saved = tmp_path / "extra.DenseDPO" / "checkpoints" / "step-000002"
    averaged = f"; averaged weights (evaluated): {saved / 'ema'}" if ema else ""
    assert f"weights: {saved}{averaged}\n" in capsys.readouterr().err
    assert (saved / "ema").exists() == bool(ema)


def test_dense_dpo_trains_on_latents_alone_and_starts_where_it_must(written, tmp_path):
    assert exit_code("clip-pairs", written(DENSE, held_out=0.0)) == 0
    for file in (tmp_path / "out" / "clips").iterdir():
        file.unlink()  # for eyes, and for rewards that come later
    summary, metrics = trained(tmp_path, "extra.DenseDPO", tmp_path / "out" / clip_pairs_job.TRAIN)
    assert summary["status"] == "finished"
    assert metrics[0]["policy_loss"] == pytest.approx(log(2), abs=1e-5)
    assert metrics[1]["policy_loss"] != metrics[0]["policy_loss"]
    assert metrics[0]["undecided"] == 0


def test_plain_dpo_trains_on_the_same_pairs_by_the_scores_of_whole_copies(written, tmp_path):
    assert exit_code("clip-pairs", written(DENSE, held_out=0.0)) == 0
    path = tmp_path / "out" / clip_pairs_job.TRAIN
    summary, metrics = trained(tmp_path, "losses.DPO", path, dimensions=["overall"])
    assert summary["status"] == "finished"
    assert metrics[0]["policy_loss"] == pytest.approx(log(2), abs=1e-5)


def test_local_dpo_trains_on_its_pairs_with_errors_of_the_mask_emphasised(written, tmp_path):
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.0)) == 0
    loss = "extra.LocalDPO"
    summary, metrics = trained(tmp_path, loss, tmp_path / "out" / clip_pairs_job.TRAIN)
    assert summary["status"] == "finished"
    # Twice log 2, and the winner's errors.
    assert metrics[0]["policy_loss"] > 2 * log(2)
    assert metrics[1]["masked_margin"] != metrics[0]["masked_margin"] == 0


def test_latents_of_another_policy_are_refused_with_both_encoders(written, tmp_path, capsys):
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.0)) == 0
    for file in (tmp_path / "out" / "latents").iterdir():
        save_file(load_file(file), file, {"encoder": "of yesterday"})
    with pytest.raises(AssertionError):
        trained(tmp_path, "losses.DPO", tmp_path / "out" / clip_pairs_job.TRAIN)
    assert "was encoded by of yesterday, the policy has video-pixel" in capsys.readouterr().err


def colours(folder: Path) -> Path:
    """Clips of one prompt with dominance: warm and green of 0..4 are (.5, .2), (.3, .4), (.6, .3),
    (.1, .1), (.3, .4) plus a little."""
    folder.mkdir()
    table = [(0.5, 0.2), (0.3, 0.4), (0.6, 0.3), (0.1, 0.1), (0.31, 0.46)]
    lines = []
    for k, (warm, green) in enumerate(table):
        colour = torch.tensor([0.2 + warm, green, 0.2]).view(1, 3, 1, 1)
        write_clip(folder / f"{k}.mp4", colour.expand(7, 3, 4, 6), 4.0)
        lines.append(json.dumps({"id": str(k), "prompt": "all alike", "video": f"{k}.mp4"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def scored(tmp_path: Path, rule: str) -> list[dict]:
    """Pairs of clips by scores in two dimensions."""
    reward, out = tmp_path / "reward.yaml", tmp_path / "scores"
    reward.write_text(yaml.safe_dump({"rewards": REWARD["rewards"]}))
    data = colours(tmp_path / "colours")
    assert exit_code("score", data, "--rewards", reward, "--out", out, "--format", "jsonl") == 0
    pairs = tmp_path / "pairs"
    argv = ["--rule", rule, "--weights", "warm=1", "green=1", "--held_out", 0, "--out", pairs]
    assert exit_code("pairs", out, *argv) == 0
    return rows(pairs, "train.jsonl")


def pairs_of(found: list[dict]) -> set[tuple[str, str]]:
    return {(Path(row["chosen"]).stem, Path(row["rejected"]).stem) for row in found}


def test_mpo_pairs_of_clips_are_those_that_dominate_in_every_dimension(tmp_path):
    found = pairs_of(scored(tmp_path, "dominance"))
    # 0 and 1, 0 and 4, 1 and 2, 2 and 4: each is better in one of the two.
    assert found == {("2", "0"), ("0", "3"), ("1", "3"), ("2", "3"), ("4", "3"), ("4", "1")}
    summary, metrics = trained(tmp_path, "losses.DPO", tmp_path / "pairs" / "train.jsonl")
    assert summary["status"] == "finished"
    assert metrics[0]["policy_loss"] == pytest.approx(log(2), abs=1e-5)


def test_gapo_weighs_pairs_of_clips_by_their_gap(tmp_path):
    found = scored(tmp_path, "gap")
    assert len(found) == 10
    weighting = {"scores": {"total": 1.0}, "alpha": 2.0}
    path = tmp_path / "pairs" / "train.jsonl"
    summary, metrics = trained(tmp_path, "losses.DPO", path, weighting=weighting, batch_size=10)
    assert summary["status"] == "finished"
    totals = {
        k: v
        for row in found
        for k, v in (
            (row["chosen"], row["scores_chosen"]["total"]),
            (row["rejected"], row["scores_rejected"]["total"]),
        )
    }
    low, high = min(totals.values()), max(totals.values())
    worth = {k: 2 ** ((v - low) / (high - low)) for k, v in totals.items()}
    mean = sum(worth[row["chosen"]] - worth[row["rejected"]] for row in found) / 10
    assert metrics[0]["policy_loss"] == pytest.approx(mean * log(2), abs=1e-4)


# Run files ----------------------------------------------------------------------------------------

MADE = sorted(Path("configs/clip_pairs").glob("*.yaml"))


@pytest.mark.parametrize("file", MADE, ids=[file.stem for file in MADE])
def test_a_training_of_the_package_reads_what_each_run_file_writes(file):
    cfg, _ = load_typed(ClipPairs, str(file))
    assert cfg.output_dir == f"runs/clip_pairs/{file.stem}"
    mine = yaml.safe_load(file.read_text())["policy"]["init_args"]["video"]
    readers = 0
    for training in (file.parents[1] / "preference").rglob("*.yaml"):
        content = compose([str(training)]).values
        data = content["recipe"]["init_args"]["data"]["init_args"]
        if data.get("path") == f"{cfg.output_dir}/{clip_pairs_job.TRAIN}":
            readers += 1
            assert data["held_out"] == f"{cfg.output_dir}/{clip_pairs_job.HELD_OUT}"
            # A latent says which encoder made it: sizes and frames must be those of the training.
            assert content["policy"]["init_args"]["video"] == mine
    assert readers


def test_a_training_with_a_cache_says_that_latents_were_there(written, tmp_path, capsys):
    assert exit_code("clip-pairs", written(LOCAL, held_out=0.0)) == 0
    cache = str(tmp_path / "cache")
    trained(tmp_path, "losses.DPO", tmp_path / "out" / clip_pairs_job.TRAIN, cache=cache)
    told = capsys.readouterr().err
    assert "0 latents: 0 encoded now, 0 from the cache" in told
    assert "latents that the dataset holds: 10" in told
