"""`flowalign sample`, into a folder that can be scored and gone on with, and as a grid."""

import filecmp
import io
import json
import os
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flowalign.cli import sample as sample_command
from flowalign.cli import score as score_command
from flowalign.cli.main import parse
from flowalign.data.readers import open_dataset
from flowalign.sampling.inference import generate
from flowalign.types import plain_requests
from flowalign.utils.media.decode import decode
from flowalign.utils.media.media import Media
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.preference import painted
from tests.fixtures.ranks import start_ranks
from tests.fixtures.run_files import write_pixels

pytestmark = pytest.mark.slow

TINTED = {"class_path": "tests.cli.test_sample.Tinted"}


class Tinted(PixelPolicy):
    """Policy with prompt-dependent images of 3 x 2 pixels: longer prompts are darker."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: dict[str, Tensor]) -> Tensor:
        return super().velocity(x, sigma, cond) + 0.1 * cond["length"]

    def decode(self, x: Tensor) -> Tensor:
        places = torch.arange(6.0).reshape(2, 3)
        return (x[:, None, :, None, None] + places / 5).sigmoid()


@pytest.fixture
def sample(tmp_path):
    """The command, with five prompts unless others are given."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join("a" * k + "\n" for k in (1, 5, 3, 9, 7)))
    recipe = {"sampling": {"num_steps": 4, "samples_per_prompt": 2, "micro_batch": 4}}
    write_pixels(tmp_path / "run.yaml", prompts, recipe, policy=TINTED, seed=3)
    return partial(run_sample, tmp_path)


def run_sample(folder: Path, *argv: object) -> int:
    """Run the command with the run file and, unless others are given, the prompts of a folder."""
    words = ["sample", str(folder / "run.yaml"), *map(str, argv)]
    if not {"--prompt", "--prompts"} & set(words):
        words += ["--prompts", str(folder / "prompts.txt")]
    return sample_command.run(parse(words))


def listing(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def pixels(folder: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(folder / f"{name}.png"))


def assert_same(one: Path, other: Path) -> None:
    names = sorted(os.listdir(one))
    assert sorted(os.listdir(other)) == names
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


# ---------------------------------------------------------------- a folder


def test_a_folder_lists_every_picture_with_its_prompt_and_seed(sample, tmp_path, capsys):
    assert sample("--count", 3, "--out", tmp_path / "out") == 0
    rows = listing(tmp_path / "out")
    assert [row["id"] for row in rows] == [f"{i:06d}-{j:02d}" for i in range(5) for j in range(3)]
    assert rows[7] == {
        "id": "000002-01",
        "file_name": "000002-01.png",
        "prompt": "aaa",
        "seed": 3,
        "copy": 1,
    }
    contents = {(tmp_path / "out" / row["file_name"]).read_bytes() for row in rows}
    assert len(contents) == 15
    files = [row["file_name"] for row in rows] + ["metadata.jsonl", "sample.json"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(files)
    assert "15 images, 15 of them new" in capsys.readouterr().err


def test_a_picture_is_what_the_sampler_makes_of_its_own_noise(sample, tmp_path):
    sample("--out", tmp_path / "out", "--num_steps", 6)
    policy = Tinted()
    latents = generate(policy, plain_requests(["aaa"]), 6, [generator(3, "sample", 2, 1)], 1)
    expected = (policy.decode(latents)[0, 0] * 255).round().byte().permute(1, 2, 0).numpy()
    assert np.array_equal(pixels(tmp_path / "out", "000002-01"), expected)


def test_a_folder_is_a_dataset_that_can_be_scored(sample, tmp_path):
    sample("--count", 2, "--out", tmp_path / "out")
    records = list(open_dataset(str(tmp_path / "out")))
    assert [record.prompt for record in records] == ["a" * k for k in (1, 5, 3, 9, 7) for _ in "ab"]
    assert records[3].id == "000001-01"
    assert records[3].metadata == {"seed": 3, "copy": 1}
    reward, scores = "tests.fixtures.scoring_rewards.Brightness", tmp_path / "scores"
    argv = [
        "score",
        str(tmp_path / "out"),
        "--rewards",
        reward,
        "--out",
        str(scores),
        "--format",
        "jsonl",
    ]
    assert score_command.run(parse(argv)) == 0
    rows = [json.loads(line) for line in (scores / "scores.jsonl").read_text().splitlines()]
    assert [row["brightness_valid"] for row in rows] == [True] * 10
    bright = {row["prompt"]: row["brightness"] for row in rows}
    assert bright["a"] > bright["a" * 9]


def test_prompts_may_hold_any_character(sample, tmp_path):
    odd = [
        '"quoted" \\ and / ..',
        "two\nlines",
        "\u00e9\u4e2d\U0001f600",
        "line\u2028apart",
        "x.png",
    ]
    file = tmp_path / "odd.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in odd))
    sample("--prompts", file, "--count", 1, "--out", tmp_path / "out")
    assert [row["prompt"] for row in listing(tmp_path / "out")] == odd
    assert [record.prompt for record in open_dataset(str(tmp_path / "out"))] == odd
    # The list of a folder is a file of prompts for the next one.
    again = tmp_path / "again"
    sample("--prompts", tmp_path / "out" / "metadata.jsonl", "--count", 1, "--out", again)
    assert listing(again) == listing(tmp_path / "out")


# ---------------------------------------------------------------- going on


def _sample_until_the_end(_: int, folder: Path) -> None:
    saved, save = [], Image.Image.save

    def save_or_end(image: Image.Image, path: Path, format: str) -> None:
        if len(saved) == 6:
            path.write_bytes(b"half a pict")
            os._exit(9)
        saved.append(path)
        save(image, path, format=format)

    with patch.object(Image.Image, "save", save_or_end):
        run_sample(folder, "--count", 3, "--out", folder / "out")


def test_after_a_kill_the_same_command_makes_the_same_files(sample, tmp_path, monkeypatch):
    """Killed within the seventh of 15 files, in the second batch of 4."""
    sample("--count", 3, "--out", tmp_path / "whole")
    (killed,) = start_ranks(_sample_until_the_end, 1, tmp_path, wait=False).processes
    killed.join()
    assert killed.exitcode == 9
    there = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.png")}
    assert len(there) == 6
    sizes, decode = [], Tinted.decode
    monkeypatch.setattr(Tinted, "decode", lambda self, x: sizes.append(len(x)) or decode(self, x))
    assert sample("--count", 3, "--out", tmp_path / "out") == 0
    assert_same(tmp_path / "out", tmp_path / "whole")
    assert all(path.stat().st_mtime_ns == before for path, before in there.items())
    assert sizes == [4, 4, 3]  # whole batches: sums over another number of rows differ in a bit


def test_an_interrupted_folder_lists_what_is_there(sample, tmp_path, monkeypatch, capsys):
    calls, decode = [], Tinted.decode

    def interrupted(policy: Tinted, x: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(policy, x)

    with monkeypatch.context() as patch:
        patch.setattr(Tinted, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sample("--out", tmp_path / "out")
    assert len(listing(tmp_path / "out")) == 8
    sample("--out", tmp_path / "out")
    assert "12 of them new" in capsys.readouterr().err
    sample("--out", tmp_path / "whole")
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_more_copies_and_prompts_can_be_added(sample, tmp_path):
    """Existing images keep their names and equal those of a run that made all at once."""
    sample("--count", 1, "--limit", 2, "--out", tmp_path / "out")
    assert [row["id"] for row in listing(tmp_path / "out")] == ["000000-00", "000001-00"]
    sample("--count", 3, "--out", tmp_path / "out")
    sample("--count", 3, "--out", tmp_path / "whole")
    assert_same(tmp_path / "out", tmp_path / "whole")


def test_nothing_is_loaded_where_all_is_there(sample, tmp_path, monkeypatch, capsys):
    sample("--out", tmp_path / "out")
    monkeypatch.setattr(Tinted, "load", pytest.fail)
    assert sample("--out", tmp_path / "out") == 0
    assert "20 images, 0 of them new" in capsys.readouterr().err


def test_a_folder_of_other_settings_is_refused_before_anything_is_loaded(
    sample, tmp_path, monkeypatch
):
    sample("--out", tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.png").write_bytes(b"keep")
    other = tmp_path / "other.txt"
    other.write_text("b\n")
    monkeypatch.setattr(Tinted, "load", pytest.fail)
    for changed, name in (
        (["--seed", 4], "seed differ;\nseed was '3', now '4'"),
        (["--num_steps", 5], "num_steps differ"),
        (["--prompts", other], "prompts differ"),
        (["--weights", tmp_path / "mine"], "weights_sha256 differ;\nweights was 'None'"),
        (["--policy.width", 16], "policy differ"),
    ):
        with pytest.raises(ValueError, match=name):
            sample("--out", tmp_path / "out", *changed)
    with pytest.raises(ValueError, match="holds files that `flowalign sample` did not write"):
        sample("--out", tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == ["a.png"]


# ---------------------------------------------------------------- options


def test_batches_change_no_picture_and_seeds_change_all(sample, tmp_path):
    sample("--out", tmp_path / "four")
    sample("--out", tmp_path / "seven", "--recipe.sampling.micro_batch", 7)
    assert_same(tmp_path / "four", tmp_path / "seven")
    sample("--out", tmp_path / "other", "--seed", 4)
    for row in listing(tmp_path / "other"):
        name = row["id"]
        assert not np.array_equal(pixels(tmp_path / "four", name), pixels(tmp_path / "other", name))


def test_the_seed_of_the_run_file_can_be_given_either_way(sample, tmp_path):
    sample("--out", tmp_path / "one", "--seed", 4)
    sample("--out", tmp_path / "two", "seed=4")
    assert_same(tmp_path / "one", tmp_path / "two")


def test_trained_weights_are_used(sample, tmp_path):
    policy = Tinted()
    with torch.no_grad():
        policy.denoiser[-1].bias += 3.0
    (tmp_path / "weights").mkdir()
    policy.save_weights(str(tmp_path / "weights"))
    sample("--out", tmp_path / "before")
    sample("--out", tmp_path / "after", "--weights", tmp_path / "weights")
    before, after = (pixels(tmp_path / name, "000000-00") for name in ("before", "after"))
    assert (after < before).all()  # data is noise minus velocity
    (tmp_path / "weights" / "pixel.safetensors").unlink()
    Tinted(width=8).save_weights(str(tmp_path / "weights"))
    with pytest.raises(ValueError, match="belongs to another model"):
        sample("--out", tmp_path / "third", "--weights", tmp_path / "weights")


def test_only_other_weights_of_the_same_name_are_refused(sample, tmp_path):
    weights, out = tmp_path / "weights", tmp_path / "out"
    (weights / "state").mkdir(parents=True)
    Tinted().save_weights(str(weights))
    argv = ["--out", out, "--weights", weights, "--count", 1]
    sample(*argv, "--limit", 2)
    (weights / "state" / "training.safetensors").write_bytes(b"moments")
    sample(*argv, "--limit", 3)
    policy = Tinted()
    policy.denoiser[-1].bias.data[1] += 1e-3
    policy.save_weights(str(weights))
    with pytest.raises(ValueError, match="weights_sha256 differ"):
        sample(*argv, "--limit", 4)
    assert len(listing(out)) == 3
    with pytest.raises(ValueError, match=r"--weights '.*gone' is not a folder"):
        sample("--out", tmp_path / "other", "--weights", tmp_path / "gone")
    assert not (tmp_path / "other").exists()


def test_a_grid_has_a_row_for_each_prompt(sample, tmp_path, capsys):
    out = tmp_path / "folder" / "grid.PNG"
    argv = ["--prompt", "bb", "--prompt", "c" * 9, "--count", 3, "--out", out]
    assert sample(*argv) == 0
    grid = np.asarray(Image.open(out))
    assert grid.shape == (2 * (2 + 2) + 2, 3 * (3 + 2) + 2, 3)
    assert "6 images, 3 per row" in capsys.readouterr().err
    policy = Tinted()
    latents = generate(policy, plain_requests(["c" * 9]), 4, [generator(3, "sample", 4)], 1)
    expected = (policy.decode(latents)[0, 0] * 255 + 0.5).byte().permute(1, 2, 0).numpy()
    assert np.array_equal(grid[6:8, 7:10], expected)


@pytest.mark.parametrize("ending", ["jpg", "JPEG", "webp", "png"])
def test_a_grid_is_of_the_format_that_its_name_says(sample, tmp_path, ending):
    out = tmp_path / f"grid.{ending}"
    sample("--prompt", "bb", "--count", 3, "--out", out)
    found = Image.open(out)
    assert found.format == {"jpg": "JPEG"}.get(ending, ending.upper())
    sample("--prompt", "bb", "--count", 3, "--out", tmp_path / "same.png")
    exact = np.asarray(Image.open(tmp_path / "same.png")).astype(int)
    apart = np.abs(np.asarray(found.convert("RGB")).astype(int) - exact).max()
    assert apart == 0 if ending in ("png", "webp") else apart < 60


def test_a_single_picture_is_written_without_a_frame(sample, tmp_path, capsys):
    sample("--prompt", "bb", "--count", 1, "--out", tmp_path / "new" / "one.png")
    assert "1 image: " in capsys.readouterr().err
    policy = Tinted()
    latents = generate(policy, plain_requests(["bb"]), 4, [generator(3, "sample", 0)], 1)
    expected = (policy.decode(latents)[0, 0] * 255).round().byte().permute(1, 2, 0).numpy()
    assert np.array_equal(np.asarray(Image.open(tmp_path / "new" / "one.png")), expected)


@pytest.mark.parametrize("name", ["out", "sd3.5", "run.final/", "there.png"])
def test_names_of_folders_may_have_dots(sample, tmp_path, name):
    (tmp_path / "there.png").mkdir()
    assert sample("--count", 1, "--limit", 1, "--out", f"{tmp_path}/{name}") == 0
    assert [row["id"] for row in listing(tmp_path / name)] == ["000000-00"]


@pytest.mark.parametrize("name", ["grid.gif", "grid.mp4", "grid.bmp", "grid.tiff", "run.final"])
def test_a_file_of_another_kind_is_refused_before_anything_is_loaded(
    sample, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(Tinted, "load", pytest.fail)
    kinds = r"\.png, \.jpg, \.jpeg, \.webp;"
    with pytest.raises(ValueError, match=rf"{name}: images can be written to {kinds}"):
        sample("--prompt", "bb", "--out", tmp_path / name)
    clips = r"videos can be written to .*\.webp, \.mp4, \.webm, \.gif;"
    if name not in ("grid.gif", "grid.mp4"):
        with pytest.raises(ValueError, match=clips):
            sample("--prompt", "bb", *VIDEO, "--out", tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_file_where_a_folder_is_meant_is_refused(sample, tmp_path, monkeypatch):
    monkeypatch.setattr(Tinted, "load", pytest.fail)
    (tmp_path / "out").write_text("keep")
    with pytest.raises(ValueError, match="out is a file; name a folder"):
        sample("--out", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "keep"


def test_prompts_can_be_piped(sample, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"aaa\nb\n")))
    sample("--prompts", "-", "--count", 1, "--out", tmp_path / "out")
    assert [row["prompt"] for row in listing(tmp_path / "out")] == ["aaa", "b"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompts", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["--policy.widht", 3], "widht"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(sample, tmp_path, argv, message):
    with pytest.raises(ValueError, match=message):
        sample("--out", tmp_path / "out", *argv)
    assert not (tmp_path / "out").exists()


def test_steps_and_batches_are_those_of_the_evaluation_where_there_is_one(sample, tmp_path):
    split = f"{{here: {tmp_path / 'prompts.txt'}}}"
    sample("--out", tmp_path / "out", f"evaluation={{prompts: {split}, num_steps: 7}}")
    assert json.loads((tmp_path / "out" / "sample.json").read_text())["num_steps"] == 7


def test_pictures_are_guided_as_the_evaluation_is_and_the_manifest_says_so(sample, tmp_path):
    def guided(scale: float) -> str:
        reward = "{class_path: tests.fixtures.latent.LatentRedness}"
        given = f"{{reward: {reward}, weights: {{redness: 1.0}}, scale: {scale}}}"
        guidance = f"{{class_path: flowalign.sampling.FlowNRG, init_args: {given}}}"
        prompts = f"{{here: {tmp_path / 'prompts.txt'}}}"
        return f"evaluation={{prompts: {prompts}, num_steps: 4, reward_guidance: {guidance}}}"

    for name, options in {"plain": [], "off": [guided(0.0)], "on": [guided(5.0)]}.items():
        sample("--out", tmp_path / name, "--limit", 2, "--count", 2, *options)
    for number in ("000000-00", "000001-01"):
        plain, off, on = (pixels(tmp_path / n, number) for n in ("plain", "off", "on"))
        assert np.array_equal(off, plain)
        assert on[..., 0].mean() > plain[..., 0].mean()  # redder
    manifest = json.loads((tmp_path / "on" / "sample.json").read_text())
    assert "scale: 5.0" in str(manifest).replace("'", "")
    with pytest.raises(ValueError, match="reward_guidance differ"):
        sample("--out", tmp_path / "on", "--limit", 2, "--count", 2, guided(0.0))


def test_a_run_file_that_says_no_number_of_steps_needs_one(sample, tmp_path):
    stored = "flowalign.training.matching.StoredDataset"
    data = {"class_path": stored, "init_args": {"path": painted(tmp_path, 2)}}
    matching = {"class_path": "flowalign.training.Matching", "init_args": {"data": data}}
    write_pixels(tmp_path / "run.yaml", "", policy=TINTED, rewards=[], recipe=matching)
    with pytest.raises(ValueError, match="sets no number of sampling steps: give --num_steps"):
        sample("--out", tmp_path / "out")
    assert sample("--out", tmp_path / "out", "--num_steps", 2) == 0


# ---------------------------------------------------------------- clips


class Clips(Tinted):
    """Five frames of 4 x 2 pixels that get darker, at 12.5 a second."""

    fps = 12.5

    def decode(self, x: Tensor) -> Tensor:
        time = torch.arange(5.0).view(1, 5, 1, 1, 1)
        return (x[:, None, :, None, None] - time / 2).sigmoid().expand(-1, -1, -1, 2, 4)


EACH_FRAME = """[{class_path: reward_models.PerFrame,
  init_args: {reward: {class_path: tests.fixtures.pixel.Redness}, over: mean},
  weight: {redness_mean: 1.0}}]"""
VIDEO = ["--policy.class_path", "tests.cli.test_sample.Clips", "--rewards", EACH_FRAME]


def clip_of(prompt: str, *place: int) -> Tensor:
    policy = Clips()
    return policy.decode(
        generate(policy, plain_requests([prompt]), 4, [generator(3, "sample", *place)], 1)
    )[0]


def test_a_video_model_leaves_whole_clips_that_can_be_scored(sample, tmp_path, capsys):
    out = tmp_path / "out"
    assert sample("--count", 2, "--limit", 2, "--out", out, *VIDEO) == 0
    rows = listing(out)
    assert rows[3] == {
        "id": "000001-01",
        "file_name": "000001-01.mp4",
        "prompt": "aaaaa",
        "seed": 3,
        "copy": 1,
        "fps": 12.5,
    }
    assert "4 videos, 4 of them new" in capsys.readouterr().err
    assert sorted(os.listdir(out)) == [
        *(row["file_name"] for row in rows),
        "metadata.jsonl",
        "sample.json",
    ]
    records = list(open_dataset(str(out)))
    assert [record.media[0].fps for record in records] == [12.5] * 4
    found = decode(records[3].media[0])
    assert found.fps == 12.5
    assert (found.frames - clip_of("aaaaa", 1, 1)).abs().max() < 2.5 / 255
    written = {path: path.stat().st_mtime_ns for path in out.glob("*.mp4")}
    sample("--count", 2, "--limit", 3, "--out", out, *VIDEO)
    assert "6 videos, 2 of them new" in capsys.readouterr().err
    assert all(path.stat().st_mtime_ns == before for path, before in written.items())


def test_a_grid_of_clips_stands_still_as_png_and_moves_as_anything_else(sample, tmp_path, capsys):
    argv = ["--prompt", "bb", "--prompt", "c" * 9, "--count", 3, *VIDEO, "--out"]
    sample(*argv, tmp_path / "grid.png")
    assert "6 clips, a row of 5 of 5 frames each: " in capsys.readouterr().err
    strips = np.asarray(Image.open(tmp_path / "grid.png"))
    assert strips.shape == (6 * (2 + 2) + 2, 5 * (4 + 2) + 2, 3)
    expected = clip_of("c" * 9, 4)[3].permute(1, 2, 0).numpy()
    assert np.allclose(strips[18:20, 20:24] / 255, expected, atol=1 / 255)
    sample(*argv, tmp_path / "grid.jpg")
    assert Image.open(tmp_path / "grid.jpg").size == strips.shape[1::-1]
    for ending in ("webp", "gif", "mp4", "webm"):
        sample(*argv, tmp_path / f"grid.{ending}")
        assert "6 clips, 3 per row" in capsys.readouterr().err
        found = decode(Media(str(tmp_path / f"grid.{ending}")))
        assert found.pixels.shape == (5, 3, 2 * (2 + 2) + 2, 3 * (4 + 2) + 2)
        assert found.fps == pytest.approx(12.5)
        shade = found.frames[3, :, 6:8, 8:12].mean((1, 2))
        torch.testing.assert_close(shade, torch.tensor(expected[0, 0]), atol=0.02, rtol=0)


# ---------------------------------------------------------------- RewardSDS


def test_latents_are_optimised_into_a_folder_that_goes_on(sample, tmp_path, capsys):
    options = ["--reward_sds", 2, "--noises", 4, "--count", 2, "--latent_rate", 0.5]
    assert sample(*options, "--out", tmp_path / "out") == 0
    assert sample("--count", 2, "--out", tmp_path / "sampled") == 0
    assert len(listing(tmp_path / "out")) == 10
    assert (
        pixels(tmp_path / "out", "000001-01") != pixels(tmp_path / "sampled", "000001-01")
    ).any()
    assert sample(*options, "--out", tmp_path / "out") == 0
    assert "10 images, 0 of them new" in capsys.readouterr().err
    with pytest.raises(ValueError, match="reward_sds"):
        sample("--reward_sds", 3, "--noises", 4, "--count", 2, "--out", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--reward_sds", 5, "--noises", 2], "noises is 2, but weighting min_max needs at least 4"),
        (["--reward_sds", 5, "--rewards.0.weight.redness", "0.0"], "no reward has a weight other"),
    ],
)
def test_options_of_reward_sds_that_cannot_be_used_are_refused(sample, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sample(*options, "--out", tmp_path / "out")


def test_guidance_by_a_reward_does_not_go_with_reward_sds(tmp_path):
    words = ["configs/shapes_flow_nrg.yaml", "--prompt", "a red circle", "--reward_sds", "5"]
    args = parse(["sample", *words, "--out", str(tmp_path / "out")])
    with pytest.raises(ValueError, match="reward_guidance"):
        sample_command.run(args)


# ---------------------------------------------------------------- search


def test_a_search_says_its_cost_before_and_after_and_goes_on(sample, tmp_path, capsys):
    tree = tmp_path / "tree.yaml"
    tree.write_text("{width: 4, prune: [2], keep: 1, branches: 2, value: {max_steps: 1}}")
    assert sample("--search", tree, "--count", 2, "--out", tmp_path / "out") == 0
    said = capsys.readouterr().err
    # a picture: 4 noises take three steps, 2 states the last; 4 estimates and 2 samples are scored
    assert "10 to search: 140 network evaluations, 60 decodes for rewards, 60 reward calls" in said
    assert "spent as planned: 140 network evaluations, 60 decodes" in said
    assert sample("--search", tree, "--count", 2, "--out", tmp_path / "out") == 0
    assert "10 images, 0 of them new" in capsys.readouterr().err
    with pytest.raises(ValueError, match="search"):
        sample("--best_of", 4, "--count", 2, "--out", tmp_path / "out")


def test_the_best_of_several_is_redder_than_one(sample, tmp_path):
    assert sample("--best_of", 16, "--count", 1, "--out", tmp_path / "best") == 0
    assert sample("--best_of", 2, "--count", 1, "--out", tmp_path / "two") == 0

    def redness(folder: str) -> float:
        shown = [pixels(tmp_path / folder, f"{i:06d}-00").mean((0, 1)) for i in range(5)]
        return float(np.mean([one[0] - one[2] for one in shown]))

    assert redness("best") > redness("two") + 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--search", "absent.yaml"], "absent.yaml"),
        (["--best_of", 4, "--rewards.0.weight.redness", "0.0"], "no reward has a weight other"),
    ],
)
def test_searches_that_cannot_be_made_are_refused(sample, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        sample(*options, "--out", tmp_path / "out")
