"""Every sample is scored with the source of its own request, in every stage."""

import base64
import io
import json
import os
import subprocess

import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from flowalign.cli.main import main
from flowalign.curation.scoring.table_rows import assemble, prepare
from flowalign.data.readers import open_dataset
from flowalign.data.requests import Requests, read_requests
from flowalign.reports.samples import samples
from flowalign.rewards.composite import Rewards
from flowalign.runs.sampling_job import Medium, _format_rows
from flowalign.training.held_out_evaluation import Evaluation, evaluate, save_grid
from flowalign.training.matching import Rollouts, StoredDataset
from flowalign.training.matching.source import StreamContext
from flowalign.training.policy_gradient.policy_gradient_loop import PolicyGradientLoop
from flowalign.types.request import Request
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.sources import OwnSource, SourcePolicy, write_sources
from tests.fixtures.stored_pairs import read_pairs
from tests.fixtures.training import ALONE, new_learner, new_recipe
from tests.fixtures.zygote import python

RUN = """
policy: {class_path: tests.fixtures.sources.SourcePolicy}
rewards: [{class_path: tests.fixtures.sources.OwnSource, weight: {red: 1.0}}]
num_steps: 2
recipe:
  class_path: flowalign.training.PolicyGradient
  init_args: {prompts_per_step: 4, sampling: {num_steps: 3, samples_per_prompt: 3}}
device: cpu
threads: 1
"""


def own() -> Rewards:
    return Rewards([OwnSource()], {"red": 1.0})


def test_the_reward_sees_another_source(tmp_path):
    """Or the tests below could not fail."""
    first, second, *_ = read_requests(write_sources(tmp_path))
    batch = own().batch(PixelPolicy().decode(new_noise(2)), [first, second])
    swapped = type(batch)(batch.media, batch.prompts, batch.metadata, (), batch.references[::-1])
    assert own().score(batch).values[:, 0].tolist() == [1, 1]
    assert own().score(swapped).values[:, 0].tolist() == [0, 0]


def new_noise(count: int) -> Tensor:
    return PixelPolicy().noise(count, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("at_once", [None, 1])
def test_policy_gradient_scores_each_sample_with_its_own_source(tmp_path, at_once):
    """Also where chunks of rewards hold several requests of one prompt, and rollouts one."""
    requests = Requests(read_requests(write_sources(tmp_path)), 3)
    cfg = new_recipe({"micro_batch": 5}, rollout_batch_prompts=at_once)
    loop = PolicyGradientLoop(cfg, new_learner(SourcePolicy()), own(), requests, 0)
    for metrics in loop.run([0, 1]):
        assert metrics["reward/own"] == 1
        assert 0 < metrics["reward/red"] < 1


def test_online_dpo_scores_each_sample_with_its_own_source(tmp_path):
    cfg = Rollouts(
        prompts=write_sources(tmp_path), prompts_per_step=5, samples_per_prompt=3, micro_batch=4
    )
    stream = cfg.open(new_learner(SourcePolicy()), StreamContext(own(), 0))
    batches = list(stream.batches([0, 1]))
    assert [batch.metrics["reward/own"] for batch in batches] == [1, 1]
    told = batches[0].examples["cond"]["length"]
    assert len(told.unique()) == 5, "each pair is learned with its own source"


def test_evaluation_scores_each_sample_with_its_own_source(tmp_path):
    files = {"held": write_sources(tmp_path)}
    cfg = Evaluation(prompts=files, num_prompts=12, num_steps=2, micro_batch=5, grid=4)
    found = evaluate(SourcePolicy(), own(), cfg, ALONE)
    assert found.metrics["eval/own"] == 1
    assert found.metrics["eval/diversity"] > 0, "two samples of each request"
    assert found.scores is not None
    keys = [row["request"] for row in found.scores.as_json()["samples"]]
    assert len(set(keys)) == 6
    assert keys[:6] == keys[6:]


def test_scoring_files_gives_each_its_own_source(tmp_path):
    requests = read_requests(write_sources(tmp_path))
    rows = [
        {"file_name": f"source-{k}.png", "prompt": r.prompt, "number": k}
        | {"references": [os.path.basename(r.references[0].name)]}
        for k, r in enumerate(requests)
    ]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = list(open_dataset(str(tmp_path / "metadata.jsonl")))
    batch = assemble([prepare(record, i, 0) for i, record in enumerate(records)])
    assert OwnSource().score(batch).values[:, 0].tolist() == [1] * 6


def test_stored_pairs_are_conditioned_on_their_own_source_and_refused_without(tmp_path):
    requests = read_requests(write_sources(tmp_path, 3))
    rows = [
        {"prompt": "make it red", "images": ["source-0.png", f"source-{k}.png"], "ranks": [1, 2]}
        | {"references": [f"source-{k}.png"]}
        for k in (1, 2)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, _ = read_pairs(str(tmp_path / "pairs.jsonl"))
    assert [pair.chosen.request.input_digest for pair in pairs] == [
        one.input_digest for one in requests[1:]
    ]
    data = StoredDataset(path=str(tmp_path / "pairs.jsonl"), batch_size=2)
    stream = data.open(new_learner(SourcePolicy()), StreamContext(own(), 0))
    (batch,) = stream.batches([0])
    told = (255 * batch.examples["cond"]["length"][:, 0]).round().tolist()
    assert sorted(told) == [15, 15, 25, 25]
    assert told[:2] == told[2:], "winner and loser of a pair answer one request"
    for row in rows:
        del row["references"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="takes 1 source references, and the request has 0"):
        data.open(new_learner(SourcePolicy()), StreamContext(own(), 0))


def test_a_report_shows_the_source_beside_the_result(tmp_path):
    cfg = Evaluation(prompts={"held": write_sources(tmp_path)}, num_prompts=6, num_steps=2, grid=3)
    save_grid(tmp_path, 0, evaluate(SourcePolicy(), own(), cfg, ALONE))
    cards = samples(tmp_path / "samples")["cards"]
    found = [Image.open(io.BytesIO(base64.b64decode(c.source.partition(",")[2]))) for c in cards]
    assert [picture.getpixel((1, 1))[0] for picture in found] == [5, 25, 55]


def test_a_grid_has_the_sources_first_and_a_listing_names_them(tmp_path):
    run = yaml.safe_load(RUN) | {"output_dir": str(tmp_path / "run")}
    run["recipe"]["init_args"]["prompts"] = write_sources(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    argv = ["sample", str(tmp_path / "run.yaml"), "--prompts", str(tmp_path / "edits.jsonl")]
    for more in (["--limit", "2", "--out", str(tmp_path / "grid.png")], ["--count", "2"]):
        where = [] if "--out" in more else ["--out", str(tmp_path / "out")]
        with pytest.raises(SystemExit) as ended:
            main([*argv, *more, *where])
        assert ended.value.code == 0
    with Image.open(tmp_path / "grid.png") as grid:
        assert grid.size == (2 + 5 * 3, 2 + 2 * 3), "a source and four pictures of a pixel a row"
        assert [grid.getpixel((2, y))[0] for y in (2, 5)] == [5, 15]
    listed = read_requests(str(tmp_path / "out" / "metadata.jsonl"))
    wanted = [request.input_digest for request in read_requests(str(tmp_path / "edits.jsonl"))]
    assert [request.input_digest for request in listed] == [one for one in wanted for _ in range(2)]


@pytest.mark.slow
def test_a_training_of_two_processes_scores_each_sample_with_its_own_source(tmp_path):
    file = write_sources(tmp_path)
    run = yaml.safe_load(RUN) | {"output_dir": str(tmp_path / "run")}
    run["recipe"]["init_args"]["prompts"] = file
    run["evaluation"] = {"prompts": {"held": file}, "num_prompts": 6}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    command = [python(), "-m", "flowalign", "train", str(tmp_path / "run.yaml"), "--processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["reward/own"] for row in rows if "reward/own" in row] == [1, 1]
    assert {row["eval/own"] for row in rows if "eval/own" in row} == {1}


def test_the_listing_of_samples_has_the_further_columns_of_their_requests():
    request = Request("a", metadata={"target": [1, 2], "id": "theirs"})
    (line,) = _format_rows([Medium(request, 3, 1)], 0)
    row = json.loads(line)
    assert row["target"] == [1, 2]
    assert row["id"] == "000003-01"
