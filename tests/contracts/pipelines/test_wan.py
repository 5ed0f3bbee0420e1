"""Wan satisfies the contract of policies, and is its official pipeline with whole times."""

import json
from itertools import pairwise

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from safetensors.torch import load_file

from pipelines.families.wan import Wan
from tests.fixtures.embedded import move
from tests.fixtures.families import (
    GOLDEN,
    PROMPTS,
    assert_official,
    assert_one_time_per_row,
    noise,
    requests_for,
)
from tests.fixtures.policy_contract import WanContract
from tests.fixtures.tiny_families import wan_fixture
from tests.fixtures.tiny_video import (
    RECORDED,
    assert_official_velocities,
    build_wan,
    build_wan22,
    build_wan22_5b,
    build_wan_i2v,
    new_video,
    tiny_video,
)

pytestmark = pytest.mark.slow


class TestWan(WanContract):
    """On the fixture `family`."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("wan")
    return {"2.1": build_wan(root / "wan"), "5b": build_wan22_5b(root / "5b")}


family = wan_fixture(
    "wan",
    Wan,
    guided={"guidance": 3.0},
    frames=[(6, 5, 9), (12, 9, 13), (2, 1, 5), (0, 1, 5)],
    cases=[{"width": 64}, {"width": 64, "guidance": 3.5}],
)


def new(folders, model, **changes):
    return new_video(Wan, folders[model], width=64, **changes)


@pytest.mark.parametrize("guidance", [1.0, 3.5], ids=["plain", "guided"])
def test_a_network_with_times_of_tokens_is_its_official_pipeline(family, folders, guidance):
    policy = new(folders, "5b", guidance=guidance)
    move(policy)
    assert_official_velocities(policy, PROMPTS)
    assert_official(family, policy)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_with_an_euler_scheduler_in_the_folder_schedule_and_times_are_its_own(
    family, folders, tmp_path
):
    path = build_wan(tmp_path, FlowMatchEulerDiscreteScheduler(shift=3.0))
    policy = new_video(Wan, path, guidance=2.0)
    assert_official_velocities(policy, PROMPTS)
    assert_official(family, policy)
    assert policy.schedule(4)[0] == 1
    whole = new(folders, "2.1")
    told = [p.times(noise(p, 1), torch.tensor(0.6347)).item() for p in (policy, whole)]
    assert told == [pytest.approx(634.7), 634]


@pytest.mark.parametrize(("shift", "apart"), [(1.0, 68), (3.0, 0), (5.0, 0), (12.0, 0)])
def test_times_of_any_number_of_steps_are_those_of_unipc(folders, shift, apart):
    """Flow shifts of the released models; with a shift of 1 a third of the steps have whole times,
    where float32 falls to the other side in 68 of 5050 cases, by 1."""
    policy = new(folders, "2.1")
    policy.pipe.scheduler = UniPCMultistepScheduler.from_config(
        policy.pipe.scheduler.config, flow_shift=shift
    )
    x, others = noise(policy, 1), 0
    for num_steps in range(1, 101):
        sigmas, times = policy.schedule(num_steps)[:-1], policy.pipe.scheduler.timesteps
        found = policy.times(x.expand(num_steps, *x.shape[1:]), sigmas)
        assert ((found - times).abs() <= 1).all()
        others += int((found != times).sum())
    assert others == apart


@pytest.mark.parametrize("model", ["2.1", "5b"])
def test_a_shift_of_the_schedule_is_that_of_a_pipeline_with_such_a_scheduler(folders, model):
    policy = new(folders, model, shift=7.0)
    scheduler = UniPCMultistepScheduler.from_pretrained(
        folders[model], subfolder="scheduler", flow_shift=7.0
    )
    scheduler.set_timesteps(6)
    assert torch.equal(policy.schedule(6), scheduler.sigmas)
    assert torch.equal(policy.plan().sigmas(6), scheduler.sigmas)
    assert (new(folders, model).schedule(6) - scheduler.sigmas).abs().max() > 0.1
    assert_official_velocities(policy, PROMPTS)


def test_rows_of_different_times_are_the_rows_alone_with_times_of_tokens(folders):
    assert_one_time_per_row(new(folders, "5b", guidance=3.0), PROMPTS)


@pytest.mark.parametrize("run", ["nocfg", "cfg", "cfg_euler"])
def test_what_was_recorded_from_the_reference_pipeline_comes_out_again(run):
    """States are as recorded, since UniPC looks back: `cfg_euler` alone can take our steps."""
    recorded = load_file(GOLDEN / "I_wan.safetensors")
    about = json.loads((GOLDEN / "I_wan.json").read_text())["values"]
    arguments, steps = about["runs"][run]["arguments"], about["steps"]
    policy = new_video(
        Wan,
        str(RECORDED),
        height=32,
        width=32,
        num_frames=5,
        max_sequence_length=32,
        lora=None,
        guidance=arguments["guidance_scale"],
    )
    if run == "cfg_euler":
        policy.pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        policy.whole_times = False
    x, sigmas = policy.noise(2, seeded(about["generator_seed"])), policy.schedule(steps)
    assert torch.equal(x, recorded[f"{run}.net_in0"])
    torch.testing.assert_close(sigmas, recorded[f"{run}.sigmas"], atol=1e-6, rtol=0)
    times = [policy.times(x, sigma)[0] for sigma in sigmas[:-1]]
    told = torch.stack(times).float().repeat_interleave(len(recorded[f"{run}.net_t"]) // steps)
    torch.testing.assert_close(told, recorded[f"{run}.net_t"], atol=1e-3, rtol=0)
    cond = dict(policy.encode(requests_for(policy, about["prompts"])))
    if run != "nocfg":
        cond["text_neg"] = policy.encode(requests_for(policy, [arguments["negative_prompt"]] * 2))[
            "text"
        ]
    states = [x, *recorded[f"{run}.step_latents"]]
    with torch.no_grad():
        first = policy.evaluate(x, policy.times(x, sigmas[0]), cond, "text")
        last = policy.evaluate(states[-2], policy.times(x, sigmas[-2]), cond, [*cond][-1])
        torch.testing.assert_close(first, recorded[f"{run}.net_out0"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last, recorded[f"{run}.net_out_last"], atol=1e-5, rtol=1e-5)
        for k, (state, after) in enumerate(pairwise(states) if run == "cfg_euler" else ()):
            step = (sigmas[k + 1] - sigmas[k]) * policy.velocity(state, sigmas[k], cond)
            torch.testing.assert_close(state + step, after, atol=1e-5, rtol=1e-5)


def test_the_plan_agrees_with_the_loaded_model_and_the_schedule(folders):
    for model, unit in (("2.1", 8), ("5b", 16)):
        policy = new(folders, model)
        plan, parameters = policy.plan(), list(policy.denoiser.named_parameters())
        trainable = sum(p.numel() for _, p in parameters if p.requires_grad)
        assert plan.trainable == trainable > 0
        assert plan.parameters == sum(p.numel() for n, p in parameters if "lora_" not in n)
        assert plan.latent_shape == (noise(policy).shape[1], 3, 32 // unit, 64 // unit)
        for num_steps in (1, 7, 40):
            sigmas = plan.sigmas(num_steps)
            assert torch.equal(sigmas, policy.schedule(num_steps))
            assert (len(sigmas), float(sigmas[-1])) == (num_steps + 1, 0.0)
            assert 0.999 < sigmas[0] < 1


def test_in_bf16_the_layers_that_wan_wants_in_float32_are_as_in_the_official_pipeline(folders):
    policy = new(folders, "2.1", precision="bf16", guidance=3.0)
    move(policy)
    official = WanPipeline.from_pretrained(folders["2.1"], dtype=torch.bfloat16).transformer
    theirs = {name: p.dtype for name, p in official.named_parameters()}
    mine = {n.replace(".base_layer", ""): p for n, p in policy.denoiser.named_parameters()}
    assert {n: p.dtype for n, p in mine.items() if "lora_" not in n} == theirs
    assert set(theirs.values()) == {torch.float32, torch.bfloat16}
    x, cond = noise(policy), policy.encode(requests_for(policy, PROMPTS))
    velocity = policy.velocity(x, torch.tensor(0.3), cond)
    assert velocity.dtype == torch.float32
    velocity.square().mean().backward()
    trained = {name for name, p in mine.items() if p.grad is not None}
    assert trained == {name for name, p in mine.items() if "lora_" in name}
    assert {mine[name].dtype for name in trained} == {torch.float32}


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("14b", r"has 2 network\(s\), Wan needs 1: .*Wan22"),
        ("i2v", "takes 36 channels, Wan provides"),
    ],
)
def test_folders_of_other_kinds_of_wan_are_refused_by_name(tmp_path, model, error):
    path = (build_wan22 if model == "14b" else build_wan_i2v)(tmp_path)
    policy = tiny_video(Wan, path)
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=error):
            work()


def test_in_fp16_encoders_keep_in_float32_what_they_do_in_the_official_pipeline(folders):
    """UMT5 overflows otherwise; of the tiny one three layers' last projections are named `wo`."""
    policy = new(folders, "2.1", precision="fp16")
    official = WanPipeline.from_pretrained(folders["2.1"], dtype=torch.float16)
    dtypes = {n: p.dtype for n, p in policy.pipe.text_encoder.named_parameters()}
    assert dtypes == {n: p.dtype for n, p in official.text_encoder.named_parameters()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert kept == {name for name in dtypes if name.endswith(".wo.weight")} != set()
    with torch.no_grad():
        text, _ = official.encode_prompt(list(PROMPTS), False, max_sequence_length=24)
    assert torch.equal(policy.encode(requests_for(policy, PROMPTS))["text"], text)
    half = new(folders, "2.1", precision="bf16").pipe.text_encoder
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_a_scheduler_that_is_not_one_of_flows_is_refused(tmp_path):
    path = build_wan(tmp_path, UniPCMultistepScheduler(use_flow_sigmas=False))
    with pytest.raises(ValueError, match=r"UniPCMultistepScheduler.*those of a flow are at most 1"):
        tiny_video(Wan, path).plan().sigmas(4)
