"""SGLang-Diffusion servers sample what the trainer samples, or the run ends with one message."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import torch
from safetensors.torch import save

from flowalign.data.requests import Requests
from flowalign.distributed.processes import join
from flowalign.functional.transition import CPS, FlowSDE
from flowalign.rewards.composite import Rewards
from flowalign.runs import load, plan, start, train
from flowalign.sampling.rollout import sample
from flowalign.sampling.sampling_settings import Sampling
from flowalign.sampling.sde_windows import AllButLast, NoSteps
from flowalign.training.learner import Learner, Optimizer, TrainingFailure
from flowalign.training.policy_gradient.old_log_probs import OldLogProbs, replay
from flowalign.training.rollouts.collecting import RolloutSampler
from flowalign.training.rollouts.rollout_settings import RolloutSettings
from flowalign.training.sglang import SGLangPool
from flowalign.training.sglang.client import ServerError, ServerLost, SGLangServer, decode_answer
from flowalign.training.sglang.messages import (
    SampleReader,
    as_media,
    first_seed,
    rollout_request,
    to_trajectory,
)
from flowalign.training.sglang.weights import SyncedWeights
from flowalign.training.workers import RolloutWorkers, SGLang
from flowalign.types import plain_requests
from flowalign.utils.adapters import adapters_of, merged_weights
from flowalign.utils.errors import ConfigError
from pipelines import SD3
from reward_models import ShapesVerifier
from tests.fixtures.sglang_server import MODEL, MockModel, encode, serving
from tests.fixtures.stopped_runs import free_port

TENSOR = {"t": torch.arange(6.0).view(2, 3)}


@pytest.fixture(scope="module")
def policy():
    made = SD3(MODEL, 32, 32, 1.0, precision="fp32", max_sequence_length=1)
    made.load(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, p in made.denoiser.named_parameters():
        if "lora_B" in name:  # an adapter that was trained
            p.data.copy_(0.05 * torch.randn(p.shape, generator=generator))
    return made


@pytest.fixture(scope="module")
def learner(policy):
    return Learner(policy, Optimizer(), join("cpu"), 1)


def test_tensors_are_read_from_safetensors_in_msgpack():
    packed = msgpack.packb([{"a": encode(TENSOR["t"]), "b": None, "c": [1, "x", 0.5]}])
    (found,) = decode_answer(packed, "application/msgpack")
    assert found["a"].equal(TENSOR["t"])
    assert (found["b"], found["c"]) == (None, [1, "x", 0.5])
    assert decode_answer(b'{"success": true}', "application/json") == {"success": True}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": b"bytes"}, "holds a bytes"),
        (msgpack.ExtType(4, b"x"), "holds a ExtType"),
        ({"__tensor__": True, "data": "gASVBAAAAAA=", "shape": [], "dtype": ""}, "not safetensors"),
        ({**encode(TENSOR["t"]), "shape": [3, 2]}, r"declared as \[3, 2\]"),
        ({**encode(TENSOR["t"]), "dtype": "torch.bfloat16"}, "declared as .* torch.bfloat16"),
        ({**encode(TENSOR["t"]), "data": "?"}, "not safetensors"),
        (
            {**encode(TENSOR["t"]), "data": base64.b64encode(save({"u": TENSOR["t"]})).decode()},
            "not safetensors",
        ),
    ],
)
def test_unsafe_or_malformed_answers_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        decode_answer(msgpack.packb(value), "application/msgpack")


@pytest.mark.parametrize("kind", ["application/octet-stream", "text/html"])
def test_answers_of_other_types_are_not_read(kind):
    with pytest.raises(ValueError, match="not JSON or msgpack"):
        decode_answer(b"\x80\x04.", kind)


def test_seeds_of_a_run_do_not_repeat():
    seeds = {
        first_seed(seed, step, place, 3, 4) + k
        for seed in (0, 1)
        for step in range(5)
        for place in range(3)
        for k in range(4)
    }
    assert len(seeds) == 2 * 5 * 3 * 4
    assert max(seeds) < 2**63


@pytest.mark.slow
def test_merged_weights_are_those_of_a_network_without_adapter(policy):
    merged = merged_weights(policy.denoiser)
    assert len(merged) == len(adapters_of(policy.denoiser)) > 0
    plain = SD3(MODEL, 32, 32, 1.0, None, "fp32", 1)
    plain.load(torch.device("cpu"))
    own = dict(plain.denoiser.named_parameters())
    assert merged.keys() <= own.keys()
    requests, x = plain_requests(["a red circle"]), torch.randn(1, *policy.plan().latent_shape)
    before = plain.velocity(x, torch.tensor(0.5), plain.encode(requests))
    for name, value in merged.items():
        own[name].data.copy_(value)
    after = plain.velocity(x, torch.tensor(0.5), plain.encode(requests))
    trained = policy.velocity(x, torch.tensor(0.5), policy.encode(requests))
    assert (before - trained).abs().max() > 1e-3
    torch.testing.assert_close(after, trained, rtol=1e-4, atol=1e-5)


def of_server(model: MockModel, policy, cfg: RolloutSettings):
    """Trajectories of two prompts that the mock server samples."""
    window, requests = cfg.window(0), plain_requests(["a red circle", "two blue squares"])
    reader = SampleReader(policy, cfg.sampling.num_steps)
    samples = []
    for i, request in enumerate(requests):
        body = rollout_request(cfg.sampling, window, request, 100 * i, policy.guidance)
        entries = decode_answer(msgpack.packb(model.generate(body)), "application/msgpack")
        samples += reader.read(body, entries)
    return to_trajectory(cfg, window, policy, requests, samples), samples


@pytest.fixture(scope="module")
def shared():
    with serving() as server:
        yield server


@pytest.fixture
def synced(policy, shared, tmp_path):
    """A mock server with the policy's weights."""
    shared.model.faults = set()
    weights = SyncedWeights(SGLang(urls=[shared.url], model=MODEL, folder=str(tmp_path)))
    weights.write(policy.denoiser, "fp32")
    weights.send(SGLangServer(shared.url, 60.0))
    yield shared.model
    weights.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "window"),
    [(FlowSDE(), AllButLast()), (CPS(), AllButLast()), (CPS(density="gaussian"), AllButLast())],
    ids=["sde", "cps", "cps_gaussian"],
)
def test_log_probabilities_of_the_server_are_those_of_the_replay(policy, synced, kernel, window):
    sampling = Sampling(
        num_steps=4, samples_per_prompt=2, eta=0.6, kernel=kernel, sde_window=window
    )
    cfg = RolloutSettings(sampling=sampling, keeps="trained", needs_means=True)
    trajectory, _ = of_server(synced, policy, cfg)
    assert trajectory.trained.sum() == 2 * 2 * 3
    replayed = replay(policy, trajectory, 3)
    torch.testing.assert_close(replayed.logp, trajectory.logp, rtol=1e-4, atol=1e-4)
    assert (trajectory.logp[:, -1] == 0).all()
    gaussian = replayed.means[1] + 0  # x_2 - mu = std x noise, so its size is the kernel's std
    std = kernel.coefficients(trajectory.sigmas, 1, trajectory.eta[:, 1]).std
    moved = (trajectory.state(2) - gaussian).flatten(1).std(1)
    torch.testing.assert_close(moved, std, rtol=0.2, atol=0)


def test_without_stochastic_steps_the_server_samples_the_ode(policy, synced):
    sampling = Sampling(num_steps=4, samples_per_prompt=2, sde_window=NoSteps())
    trajectory, samples = of_server(synced, policy, RolloutSettings(sampling=sampling, keeps="all"))
    assert (trajectory.logp == 0).all()
    velocity = policy.velocity(trajectory.state(0), trajectory.sigmas[0], take(trajectory))
    step = trajectory.sigmas[1] - trajectory.sigmas[0]
    expected = trajectory.state(0) + step * velocity
    torch.testing.assert_close(trajectory.state(1), expected, rtol=1e-4, atol=1e-4)
    media = as_media(samples)
    torch.testing.assert_close(media, policy.decode(trajectory.state(4)), rtol=0, atol=1e-4)


def take(trajectory):
    return {name: value.repeat_interleave(2, 0) for name, value in trajectory.cond.items()}


def test_a_replay_gives_the_log_probabilities_of_a_rollout(policy):
    sampling = Sampling(num_steps=4, samples_per_prompt=3, eta=0.6)
    requests, steps = plain_requests(["a red circle"]), (0, 1, 2)
    drawn = sample(policy, requests, sampling, steps, [torch.Generator().manual_seed(1)])
    forgotten = replace(drawn, logp=torch.zeros_like(drawn.logp))
    torch.testing.assert_close(replay(policy, forgotten, 2).logp, drawn.logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "the seed is 7, asked was 3"),
        ({"prompt": "b"}, "the prompt is 'b'"),
        ({"rollout_log_probs": None}, "lacks the tensors logp"),
        ({"dit_trajectory": None}, "lacks the tensors latents, sigmas"),
        ({"latents": torch.zeros(3, 16, 8, 8)}, "set height and width"),
        ({"sigmas": torch.tensor([1.0, 0.2, 0.0])}, "the server's noise levels are"),
        ({"rollout_log_probs": torch.zeros(3)}, "one value per step"),
    ],
)
def test_answers_that_do_not_fit_are_refused(policy, change, message):
    reader = SampleReader(policy, 2)
    path = {"latents": torch.zeros(3, *reader.shape), "sigmas": policy.schedule(2)}
    media = torch.zeros(3, 32, 32)
    entry = {"prompt": "a", "seed": 3, "dit_trajectory": path, "generated_output": media}
    entry |= {"rollout_log_probs": torch.zeros(2)}
    asked = {"prompt": "a", "seed": 3, "num_outputs_per_prompt": 1}
    assert len(reader.read(asked, [entry])) == 1
    inner = {name: value for name, value in change.items() if name in path}
    changed = entry | (change if not inner else {"dit_trajectory": path | inner})
    with pytest.raises(ValueError, match=message):
        reader.read(asked, [changed])
    with pytest.raises(ValueError, match="does not have 1 samples"):
        reader.read(asked, [])


def test_media_outside_their_range_are_refused():
    for media, message in ((torch.full((3, 4, 4), 2.0), "range"), (torch.zeros(4, 4), "shape")):
        with pytest.raises(ValueError, match=message):
            as_media([{"media": media}])


def test_a_server_that_cannot_be_reached_or_reports_an_error(shared):
    with pytest.raises(ServerLost, match="ConnectionRefusedError"):
        SGLangServer(f"http://127.0.0.1:{free_port()}", 5.0).get("/v1/models")
    body = {"rollout_sde_type": "ode", "rollout_log_prob_no_const": False}
    asked = {"num_outputs_per_prompt": 1, "num_inference_steps": 1, **body}
    server = SGLangServer(shared.url, 60.0)
    with pytest.raises(ServerError, match=r"answers 500.*p_ode is always 0"):
        server.post("/rollout/generate", asked)


def run_file(url: str, **sglang: object) -> dict:
    return {"sglang": {"urls": [url], "model": MODEL, "generator_device": "cpu"} | sglang}


def load_toy(tmp_path: Path, rollouts: dict, *options: str):
    words = ["--num_steps", "2", "--evaluation", "null", "--checkpoints.verify", "never"]
    words += ["--recipe.prompts_per_step", "2", "--recipe.sampling.samples_per_prompt", "3"]
    words += ["--recipe.sampling.num_steps", "4", "--output_dir", str(tmp_path / "run")]
    words += ["--rollouts", json.dumps(rollouts), *options]
    return load("configs/models/toy_shapes.yaml", words)


@pytest.mark.parametrize(
    ("sglang", "options", "message"),
    [
        ({"urls": ["localhost:1"]}, [], "rollouts.sglang.urls"),
        ({"urls": []}, [], "rollouts.sglang.urls"),
        ({}, ["--rollouts.workers", "2"], "rollouts.workers and devices"),
        ({}, ["--recipe.sampling.kernel", "flowalign.functional.DanceSDE"], "the kernel DanceSDE"),
        ({}, ["--recipe.sampling.seeds_per_prompt", "1"], "recipe.sampling.seeds_per_prompt"),
        ({}, ["--recipe.sampling.eta", "[1,1,1,1]"], "a noise level for each step"),
    ],
)
def test_settings_that_servers_cannot_follow_are_refused(tmp_path, sglang, options, message):
    with pytest.raises(ConfigError, match=message):
        load_toy(tmp_path, run_file("http://localhost:1", **sglang), *options)


def test_processes_share_no_server():
    settings = RolloutWorkers(sglang=SGLang(urls=["http://a:1", "http://b:2"], model=MODEL))
    settings.check_prompts(8, 2)
    with pytest.raises(ValueError, match="2 servers for 4 processes"):
        settings.check_prompts(8, 4)
    with pytest.raises(ValueError, match=r"the number of rollouts.sglang.urls is 2"):
        settings.check_prompts(1, 1)
    assert "2 SGLang-Diffusion servers" in settings.rows["rollout workers"]


@pytest.mark.slow
def test_a_run_trains_on_a_server_that_is_killed_once(tmp_path, capsys):
    with serving(lives=12) as server:  # it loses the last request of step 2
        rollouts = run_file(server.url, folder=str(tmp_path))
        run, text = load_toy(tmp_path, rollouts)
        counts = "24 sampling + 18 training + 18 log-probabilities"
        assert plan(run)["network evaluations per step"] == counts
        result = train(start(run, text, print))
        (path,) = server.model.loaded
    assert path.endswith("version-2"), "the new server got the newest weights"
    assert result["status"] == "finished"
    rows = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for step, row in enumerate(rows):
        assert row["rollout/weight_version"] == step
        assert row["rollout/synced_tensors"] == 39
        assert row["check/seed_gap"] < 1e-4
        assert row["rollout/ratio_clipped"] == 0
        assert row["cost/network_evaluations"] == 60 * (step + 1)
    assert rows[0]["check/reward_gap_colour"] == 0
    said = capsys.readouterr().out
    assert said.count("SGLang server lost, waiting for it") == 1
    assert "below 0.1: 100%" in said
    assert "rewards of equal samples" in said
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("stale", "checksum mismatch for 39 tensor"),
        ("renamed", "missing 3 tensor"),
        ("prompt", "another result for the fixed seed"),
        ("schedule", "the server's noise levels are"),
        ("media", "another .* for equal samples"),
        ("pickle", "not JSON or msgpack"),
        ("seeds", "other initial noise for the same seed"),
    ],
)
def test_a_server_that_samples_otherwise_ends_the_run(
    tmp_path, policy, learner, shared, fault, message
):
    shared.model.faults = {fault}
    for name in merged_weights(policy.denoiser):
        shared.model.weights[name].data.zero_()
    pool = new_pool(shared.url, policy, tmp_path)
    steps = iter(range(2))
    try:
        with pytest.raises(TrainingFailure, match=message):
            any(pool.begin(step, [[0, 1]], learner) for step in steps)
    finally:
        pool.close()


def new_pool(url: str, policy, folder: Path, **changes: object) -> SGLangPool:
    rewards = Rewards([ShapesVerifier()], {"colour": 1.0})
    rewards.load()
    requests = Requests(plain_requests(["a red circle", "two blue squares"]), 0)
    sampling = Sampling(num_steps=4, samples_per_prompt=2)
    cfg = RolloutSettings(sampling=sampling, prompts_per_step=2, keeps="trained")
    settings = {"urls": [url], "model": MODEL, "generator_device": "cpu", "folder": str(folder)}
    workers = RolloutWorkers(sglang=SGLang(**settings | changes), restarts=0)
    sampler = RolloutSampler(cfg, policy, requests)
    return SGLangPool(workers, sampler, rewards, join("cpu"), 2)


def test_a_server_with_another_model_or_none_is_refused(tmp_path, policy, shared):
    with pytest.raises(TrainingFailure, match=f"serves {MODEL}, but rollouts.sglang.model is b"):
        new_pool(shared.url, policy, tmp_path, model="b")
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TrainingFailure, match=r"SGLang server lost.*sglang serve --model-path"):
        new_pool(url, policy, tmp_path)


def test_ratios_outside_the_clip_range_end_a_run(policy, learner):
    sampling = Sampling(num_steps=4, samples_per_prompt=3, eta=0.6)
    requests, steps = plain_requests(["a red circle"]), (0, 1, 2)
    drawn = sample(policy, requests, sampling, steps, [torch.Generator().manual_seed(1)])
    moved = replace(drawn, logp=drawn.logp + torch.tensor([0.0, 0.005, 0.2, 0.0]))
    said: list[str] = []
    old = OldLogProbs(learner, 0.01, 4, said.append)
    replayed, metrics = old.recompute(moved, 0.4)
    torch.testing.assert_close(replayed.logp, drawn.logp, rtol=0, atol=1e-5)
    assert metrics["rollout/ratio_clipped"] == pytest.approx(1 / 3)
    assert "below 0.1: 33%, 0.1 to 1: 33%, 1 to 10: 0%, above 10: 33%" in said[0]
    with pytest.raises(TrainingFailure, match="33% of the transitions have a ratio"):
        old.recompute(moved, 0.3)
    assert len(said) == 1
