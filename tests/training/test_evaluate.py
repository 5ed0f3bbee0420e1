"""Files of an evaluation in addition to its means, and the train command's notes on a run."""

import json
from dataclasses import replace

import pytest
import torch
from torch import tensor

from flowalign.distributed.processes import ALONE
from flowalign.rewards.composite import Rewards
from flowalign.sampling.reward_guidance import FlowNRG
from flowalign.training.divergence import BASE, describe_media, distance_to_base, measure_distance
from flowalign.training.held_out_evaluation import Evaluation, evaluate, save_grid
from flowalign.types import EmbedsImages, plain_requests, prompts_of
from tests.fixtures.commands import exit_code
from tests.fixtures.latent import LatentRedness
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.run_files import write_pixels
from tests.fixtures.training import new_rewards


@pytest.fixture
def cfg(tmp_path):
    for split, prompts in (("seen", "a\nbb\nccc"), ("unseen", "dddd")):
        (tmp_path / f"{split}.txt").write_text(prompts)
    files = {split: str(tmp_path / f"{split}.txt") for split in ("seen", "unseen")}
    return Evaluation(prompts=files, num_prompts=8, num_steps=2, micro_batch=3, grid=4)


def test_the_scores_of_all_samples_are_those_of_the_means_and_of_the_pictures(cfg, tmp_path):
    """An image is one pixel, so the grid determines its scores."""
    found = evaluate(PixelPolicy(), new_rewards(), cfg, ALONE)
    save_grid(tmp_path, 3, found)
    content = json.loads((tmp_path / "samples" / "step-000003.json").read_text())
    rows = content["samples"]
    assert content["dims"] == ["redness", "green"]
    assert [row["split"] for row in rows] == ["seen"] * 4 + ["unseen"] * 4
    assert [row["prompt"] for row in rows] == ["a", "bb", "ccc", "a"] + ["dddd"] * 4
    scores = torch.tensor([row["scores"][0] for row in rows])
    assert found.metrics["eval/redness"] == pytest.approx(float(scores.mean()))
    assert found.metrics["eval/unseen/redness"] == pytest.approx(float(scores[4:].mean()))
    assert [rows[i]["prompt"] for i in content["shown"]] == prompts_of(found.grid_requests)
    reds = new_rewards().models[0].score(new_rewards().batch(found.grid, found.grid_requests))
    assert torch.allclose(scores[content["shown"]], reds.values[:, 0], atol=1e-6)


def test_an_evaluation_is_guided_by_its_latent_reward(cfg):
    guidance = FlowNRG(reward=LatentRedness(), weights={"redness": 1.0}, scale=4.0)
    plain, guided = (
        evaluate(PixelPolicy(), new_rewards(), each, ALONE).metrics["eval/redness"]
        for each in (cfg, replace(cfg, reward_guidance=guidance))
    )
    assert guided > plain + 0.1


@pytest.fixture
def run_file(tmp_path, cfg):
    prompts = str(tmp_path / "seen.txt")
    sampling = {"num_steps": 4, "samples_per_prompt": 4, "eta": 0.8}
    return write_pixels(
        tmp_path / "run.yaml",
        prompts,
        {"prompts_per_step": 2, "sampling": sampling},
        num_steps=2,
        optimizer={"learning_rate": 1e-3},
        evaluation={"prompts": {"all": prompts}, "num_prompts": 3, "num_steps": 2},
        checkpoints={"every": 1},
        output_dir=str(tmp_path / "run"),
    )


@pytest.mark.slow
def test_a_run_keeps_the_commands_that_trained_it_and_its_report_shows_them(run_file):
    assert exit_code("train", run_file, "--num_steps", 1) == 0
    folder = run_file.parent / "run"
    assert (folder / "commands.txt").read_text() == f"flowalign train {run_file} --num_steps 1\n"
    assert exit_code("train", run_file) == 2
    assert exit_code("train", run_file, "--resume") == 0
    commands = (folder / "commands.txt").read_text().splitlines()
    assert commands[1:] == [f"flowalign train {run_file} --resume"]
    page = (folder / "report.html").read_text()
    assert "\n".join(commands) in page
    assert "Lowest at the end" in page
    assert not (folder / "failure.txt").exists()


@pytest.mark.slow
def test_a_run_that_fails_says_why_in_its_folder(run_file, monkeypatch):
    def disk_is_full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("flowalign.runs.train_session.save_grid", disk_is_full)
    assert exit_code("train", run_file) == 1
    assert (run_file.parent / "run" / "failure.txt").read_text() == "no space left on device\n"


@pytest.mark.slow
def test_the_report_is_written_at_each_evaluation(run_file, monkeypatch):
    written = []

    def write(folder, running=False, rows=None):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        assert rows is None or rows == [json.loads(line) for line in lines]
        written.append((running, len(lines)))

    monkeypatch.setattr("flowalign.runs.train_session.write_report", write)
    assert exit_code("train", run_file, "--num_steps", 2, "--evaluation.every", 1) == 0
    assert [running for running, _ in written] == [True, True, True, False]
    assert [lines for _, lines in written] == sorted(lines for _, lines in written)


@pytest.mark.slow
def test_a_run_measures_its_distance_also_after_it_was_resumed(tmp_path, run_file, capsys):
    folder = tmp_path / "run"
    assert exit_code("train", str(run_file), "--num_steps", "1") == 0
    assert (folder / BASE).is_file()
    assert json.loads((folder / "summary.json").read_text())["before"]["pixel_distance"] == 0
    assert exit_code("train", str(run_file), "--resume") == 0
    after = json.loads((folder / "summary.json").read_text())["after"]["pixel_distance"]
    assert after > 0
    weights = folder / "checkpoints" / "step-000002"
    assert exit_code("eval", run_file, "--distance") == 2
    capsys.readouterr()
    assert exit_code("eval", run_file, "--weights", weights, "--distance") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["eval/pixel_distance"] == pytest.approx(after, rel=1e-6)


# Distance to the samples before training: its values, its file, and its cost ----------------------


class Encoder(Redness, EmbedsImages):
    """Embeds an image by its mean colour."""

    def embed(self, batch):
        return batch.media.mean((1, 3, 4))


def test_distances_are_means_over_samples_and_then_over_requests():
    """Prompt a has the distances 1 and 0, prompt b has 0.5 and 0.5 (pixels), or 1, 0 and .2, .2."""
    requests = plain_requests(["a", "a", "b", "b"])
    base = {
        "pixel_distance": torch.zeros(4, 1, 3, 2, 2).byte(),
        "clip_distance": tensor([[1.0, 0.0]] * 4),
    }
    grey = tensor([255, 0, 255, 255]).reshape(4, 1, 1, 1, 1).expand(4, 1, 3, 2, 2).clone()
    grey[2:, :, :, 0] = 0  # half of the pixels, so the root mean square is sqrt(1/2)
    turned = tensor([[0.0, 2.0], [3.0, 0.0], [0.8, 0.6], [0.8, 0.6]])
    found = measure_distance(
        base, {"pixel_distance": grey.byte(), "clip_distance": turned}, requests
    )
    assert found == {
        "eval/pixel_distance": pytest.approx((0.5 + 0.5**0.5) / 2),
        "eval/clip_distance": pytest.approx((0.5 + 0.2) / 2),
    }
    unlike = measure_distance(
        base, {"pixel_distance": grey.byte()}, plain_requests(["a", "b", "b", "b"])
    )
    assert unlike["eval/pixel_distance"] == pytest.approx((1 + 2 * 0.5**0.5 / 3) / 2)


def test_equal_samples_have_distance_zero_exactly():
    draw = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    now = {"clip_distance": draw}
    assert measure_distance(now, now, plain_requests(["a"] * 8)) == {"eval/clip_distance": 0.0}


def test_media_are_described_by_small_pixels_and_by_every_encoder():
    media = torch.rand(2, 9, 3, 96, 128, generator=torch.Generator().manual_seed(0))
    rewards = Rewards([Encoder(), *new_rewards().models[1:]], {})
    found = describe_media(rewards, rewards.batch(media, plain_requests(["a", "b"]), fps=8.0))
    assert [*found] == ["pixel_distance", "redness_distance"]
    assert found["pixel_distance"].shape == (2, 4, 3, 48, 64)
    assert found["pixel_distance"].dtype == torch.uint8
    assert found["pixel_distance"][1, 3].float().mean() == pytest.approx(
        255 * float(media[1, 8].mean()), abs=0.5
    )
    assert torch.equal(found["redness_distance"], media.mean((1, 3, 4)))


def test_another_sampling_has_no_distance(tmp_path):
    requests, now = plain_requests(["a"]), {"clip_distance": tensor([[1.0, 0.0]])}
    assert distance_to_base(tmp_path, 3, "one", now, requests) == {}
    assert distance_to_base(tmp_path, 0, "one", now, requests) == {"eval/clip_distance": 0.0}
    turned = {"clip_distance": tensor([[0.0, 1.0]]), "other_distance": tensor([[1.0]])}
    assert distance_to_base(tmp_path, 3, "one", turned, requests) == {"eval/clip_distance": 1.0}
    assert distance_to_base(tmp_path, 3, "two", turned, requests) == {}


def test_the_digest_of_the_sampling_covers_prompts_seed_and_steps(tmp_path):
    (tmp_path / "a.txt").write_text("a\nb")
    (tmp_path / "b.txt").write_text("a\nc")

    def digest(file="a", **settings):
        return Evaluation(prompts={"all": str(tmp_path / f"{file}.txt")}, **settings).sampling

    same = digest(micro_batch=3, grid=2)
    assert digest() == same
    others = digest("b"), digest(seed=7), digest(num_steps=3), digest(num_prompts=3)
    assert len({same, *others}) == 5


def test_an_evaluation_describes_all_samples_in_their_order(tmp_path):
    (tmp_path / "a.txt").write_text("a\nbb\nccc")
    cfg = Evaluation(
        prompts={"all": str(tmp_path / "a.txt")}, num_prompts=5, num_steps=2, micro_batch=2, grid=5
    )
    found = evaluate(PixelPolicy(), new_rewards(), cfg, ALONE)
    assert torch.equal(found.features["pixel_distance"], (found.grid * 255).round().byte())
