"""Runs with prompt conditioning: evaluated, summarised and resumed with it."""

import json

import pytest
import torch

from flowalign.extra import RewardLevels, RewardWords
from flowalign.runs.model_card import Evidence, describe_subject, model_card
from flowalign.runs.planning import plan
from flowalign.runs.sampling_job import SamplingJob, write_folder
from flowalign.training.held_out_evaluation import Evaluation, evaluate
from flowalign.types import Request
from flowalign.utils.seeds import generator
from tests.fixtures.pixel import PixelPolicy
from tests.fixtures.small_run import go, new_run
from tests.fixtures.training import ALONE, new_rewards

LEVELS = RewardLevels(thresholds={"redness": [0.1]}, words={"redness": ["dull", "vivid"]})


def test_the_folder_of_a_run_says_how_to_ask(tmp_path):
    run = new_run(tmp_path / "run", conditioning=LEVELS, num_steps=1)
    assert plan(run)["sampling asks"] == "PROMPT, vivid"
    assert go(run)["sampling_asks"] == "PROMPT, vivid"
    config = tmp_path / "config.yaml"
    config.write_text("policy: {init_args: {path: base}}\nrecipe: {class_path: Recipe}\n")
    nothing = Evidence(grids=(), has_curves=False, benchmarks=())
    card = model_card(describe_subject(run), config, {}, "diffusers", None, nothing)
    assert "## Words" in card
    assert "\n    PROMPT, vivid\n" in card
    plain = new_run(tmp_path / "plain", num_steps=1)
    assert "sampling asks" not in plan(plain)
    subject = describe_subject(plain)
    assert "## Words" not in model_card(subject, config, {}, "diffusers", None, nothing)
    parrot = RewardWords(words={"redness": "<r>"})
    told = plan(new_run(tmp_path / "parrot", conditioning=parrot))["sampling asks"]
    assert told == "<r> PROMPT; weight 5, PROMPT alone 5, the empty prompt the remaining weight"


def test_held_out_prompts_are_asked_for_with_words_and_scored_without(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("tea\n")
    conditioned = tmp_path / "conditioned.txt"
    conditioned.write_text("tea, vivid\n")
    policy = PixelPolicy(seed=2)
    torch.nn.init.normal_(policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1))

    def found(path, conditioning=None):
        cfg = Evaluation(prompts={"all": str(path)}, num_prompts=2, num_steps=3)
        return evaluate(policy, new_rewards(), cfg, ALONE, conditioning)

    with_words = found(file, LEVELS)
    same = found(conditioned)
    assert with_words.metrics == same.metrics
    assert with_words.metrics != found(file).metrics
    assert [r.prompt for r in with_words.grid_requests] == ["tea", "tea"]


def test_sampled_folders_ask_with_words_and_list_the_prompt(tmp_path):
    def job(prompt, conditioning):
        run = new_run(tmp_path / "run", conditioning=conditioning)
        torch.nn.init.normal_(
            run.policy.denoiser[-1].weight, generator=torch.Generator().manual_seed(1)
        )
        asked = [Request(prompt)]
        return SamplingJob(run, {"seed": 3}, asked, 2, 4, 3, None, tmp_path / f"{len(prompt)}", 2)

    drawn = [
        one.media(one.requests * 2, [generator(3, "x", i) for i in range(2)])
        for one in (job("tea", LEVELS), job("tea, vivid", None), job("tea", None))
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    write_folder(job("tea", LEVELS))
    listing = (tmp_path / "3" / "metadata.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in listing] == ["tea", "tea"]


def test_words_of_other_rewards_are_refused_before_weights_are_read(tmp_path):
    with pytest.raises(ValueError, match="names blue, which no reward gives"):
        new_run(tmp_path / "run", conditioning=RewardLevels(thresholds={"blue": [0.1]}))
