"""Maps of rewards, from `flowalign score` over `flowalign pairs` to the masks of a batch."""

import json

import torch
from PIL import Image
from safetensors.torch import load_file

from flowalign.curation.scoring.scoring_job import ScoringJob, finish, run
from flowalign.curation.scoring.stats import Progress
from flowalign.data.preference.collate import read_map
from flowalign.data.readers import open_dataset
from flowalign.types import RewardModel, RewardOutput, RewardSpec
from tests.fixtures.commands import exit_code
from tests.fixtures.stored_pairs import read_pairs, read_samples
from tests.fixtures.tables import jsonl


class Bright(RewardModel):
    """The mean of an image with the red channel as map; a black image has no score."""

    def __init__(self):
        self.spec = RewardSpec("bright", ("light",), "image", (0.0, 1.0), "MIT", maps=True)

    def score(self, batch):
        media = batch.media[:, 0]
        return RewardOutput.build(self.spec, media.mean((1, 2, 3))[:, None], places=media[:, 0])


def scored(folder):
    """Three images of one prompt, in a table with the files of their maps."""
    rows = []
    for i, (left, right) in enumerate([(200, 40), (90, 10), (0, 0)]):
        picture = Image.new("RGB", (100, 80), (right, 0, 0))
        picture.paste((left, 0, 0), (0, 0, 50, 80))
        picture.save(folder / f"{i}.png")
        rows.append({"id": f"{i}", "prompt": "tea", "image": f"{i}.png"})
    out = folder / "scores"
    job = ScoringJob(open_dataset(jsonl(folder, *rows)), [Bright()], out)
    finish(job, run(job, Progress()), "jsonl")
    return out


def test_maps_are_files_beside_the_scores_of_media_that_have_one(tmp_path):
    out = scored(tmp_path)
    table = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
    files = [row["map/bright"] for row in table]
    assert files[2] is None
    place = load_file(files[0])["map"]
    assert place.shape == (64, 64)
    assert torch.allclose(place[:, :31], torch.tensor(200 / 255))
    assert torch.allclose(
        read_map(files[1], (1, 2)), torch.tensor([[[90.0, 10.0]]]) / 255, atol=0.01
    )


def test_pairs_have_the_maps_as_masks_of_both_media(tmp_path):
    out, made = scored(tmp_path), tmp_path / "pairs"
    words = ["--rule", "best_worst", "--held_out", "0", "--mask", "bright"]
    (tmp_path / "2.png").unlink()
    assert exit_code("pairs", str(out), "--out", str(made), *words) == 0
    (pair,), _ = read_pairs(str(made / "train.jsonl"))
    assert pair.mask == str(out / "maps/bright/000000000-00.safetensors")
    assert pair.mask_rejected == str(out / "maps/bright/000000001-00.safetensors")
    assert exit_code("pairs", str(out), "--out", str(made), *words, "--labels") == 0
    samples, _ = read_samples(str(made / "train.jsonl"))
    assert [sample.weight_map for sample in samples] == [pair.mask, pair.mask_rejected]
    assert exit_code("pairs", str(out), "--out", str(made), *words[:-1], "other") == 2
