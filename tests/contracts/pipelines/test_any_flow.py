"""`AnyFlow` equals each family's policy, and rejects pipelines that it cannot replay."""

import copy
import importlib
import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from diffusers import FlowMapEulerDiscreteScheduler, QwenImageEditPlusPipeline

from flowalign.training.reference import conditional
from pipelines.any_pipeline.any_flow import AnyFlow, Call
from pipelines.any_pipeline.recorded import Layout
from pipelines.any_pipeline.wrapping import replay_difference
from pipelines.families.hunyuan import HunyuanVideo15
from pipelines.network.weights import JOINT_ATTENTION
from tests.fixtures.embedded import FOLDER
from tests.fixtures.families import noise
from tests.fixtures.tiny_flux import build_flux
from tests.fixtures.tiny_ltx2 import build_ltx2
from tests.fixtures.tiny_qwen_image import EDITED
from tests.fixtures.tiny_unet import build_sd15
from tests.fixtures.tiny_video import build_wan, build_wan22, build_wan_i2v
from tests.fixtures.twins import BUILD, asked, new_any, twins

PROMPTS = "a red circle left of a blue square", "three white triangles"
EMBEDDED = {"guidance_scale": 1.0, "max_sequence_length": 1}
CLOSE = {"atol": 1e-5, "rtol": 1e-5}
FAST = ("embedded sd3",)


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in BUILD],
)
def pair(request, tmp_path_factory):
    """The image size that Qwen-Image-Edit's network sees is a constant of its pipeline."""
    folder = tmp_path_factory.mktemp(request.param.replace(" ", "_"))
    module = importlib.import_module(QwenImageEditPlusPipeline.__module__)
    with patch.object(module, "VAE_IMAGE_SIZE", EDITED.area):
        yield twins(request.param, folder)


def encoded(policy, prompts=PROMPTS):
    return policy.encode(asked(policy, prompts))


@pytest.mark.slow
def test_velocities_and_gradients_are_those_of_the_family_s_own_policy(pair):
    x, time = noise(pair.adapter), torch.tensor(0.2)
    wanted = pair.packed(pair.adapter.velocity(x, time, encoded(pair.adapter)))
    found = pair.generic.velocity(pair.packed(x), time, encoded(pair.generic))
    assert (wanted[0] - wanted[1]).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, **CLOSE)
    for policy, velocity in ((pair.adapter, wanted), (pair.generic, found)):
        policy.denoiser.zero_grad()
        velocity.square().mean().backward()
    theirs = dict(pair.adapter.denoiser.named_parameters())
    for name, parameter in pair.generic.denoiser.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, **CLOSE)


@pytest.mark.slow
def test_rows_of_different_times_are_those_of_the_family_s_own_policy(pair):
    prompts, sigma = [*PROMPTS, "a white circle"], torch.tensor([0.9, 0.3, 0.9])
    x = noise(pair.adapter, 3)
    with torch.no_grad():
        wanted, found = (
            policy.velocity(state, sigma, encoded(policy, prompts))
            for policy, state in ((pair.adapter, x), (pair.generic, pair.packed(x)))
        )
    torch.testing.assert_close(found, pair.packed(wanted), **CLOSE)


@pytest.mark.slow
def test_schedules_media_and_latents_are_those_of_the_family_s_own_policy(pair):
    adapter, generic = pair.adapter, pair.generic
    for num_steps in (1, 4, 11):
        assert torch.equal(generic.schedule(num_steps), adapter.schedule(num_steps))
        assert torch.equal(generic.plan().sigmas(num_steps), adapter.schedule(num_steps))
    x = noise(adapter)
    media = generic.decode(pair.packed(x))
    torch.testing.assert_close(media, adapter.decode(x), **CLOSE)
    apart = replace(generic.call, decode_one=True)
    one = copy.copy(generic)
    one.call = apart
    torch.testing.assert_close(one.decode(pair.packed(x)), media, **CLOSE)
    shown = torch.rand(2, adapter.num_frames or 1, 3, 50, 70, generator=torch.manual_seed(3))
    found = generic.embed(shown)
    assert generic.plan().latent_shape == tuple(found.shape[1:])
    torch.testing.assert_close(found, pair.packed(adapter.embed(shown)), **CLOSE)
    mine, theirs = generic.plan(), adapter.plan()
    assert (mine.parameters, mine.trainable) == (theirs.parameters, theirs.trainable)
    # Text counts as if joint. The masks of HunyuanVideo 1.5 grow with the square of its text
    # tokens, of which `AnyFlow` plans `max_sequence_length`, 512.
    least = 0.2 if isinstance(adapter, HunyuanVideo15) else 0.5
    assert mine.activation_bytes > least * theirs.activation_bytes


def test_the_pipeline_s_own_rollout_is_replayed_bit_for_bit(pair):
    one, other = asked(pair.generic, PROMPTS)
    steps, rows = pair.generic.stock.rollout(pair.generic.denoiser, [one], 4)
    assert len(steps) == 4
    assert rows == 4 * pair.generic.evaluations_per_velocity
    assert replay_difference(pair.generic, steps, one) == 0.0
    assert replay_difference(pair.generic, steps, other) > 1e-3


def test_an_adapter_that_is_saved_comes_back_and_acts_in_plain_diffusers(pair, tmp_path):
    pair.generic.save_weights(str(tmp_path))
    assert pair.generic.verify_weights(str(tmp_path)) == 0.0
    pair.adapter.load_weights(str(tmp_path))


def new_embedded(**changes) -> AnyFlow:
    return new_any(FOLDER, **{"call": Call(arguments=EMBEDDED)} | changes)


def test_texts_of_other_lengths_are_padded_for_keeping_and_not_for_the_network():
    """Texts of two and three tokens are stored at one length but evaluated at their own lengths."""

    def calls(length: int, rows: int = 1) -> list:
        text = torch.arange(1.0, length + 1).expand(rows, length)[..., None]
        places = torch.zeros(length if rows < 0 else 5, 3)
        return [
            ("encode_prompt", (text, None, places)),
            ("prepare_latents", (torch.ones(rows, 4), places)),
        ]

    layout = Layout.of(calls(2), calls(3), calls(3, 2), longest=4)
    assert layout.ragged
    cond = layout.kept([calls(2), calls(3)])
    assert {name: tuple(value.shape) for name, value in cond.items()} == {
        "0": (2, 4, 1),
        "0.length": (2,),
    }
    assert cond["0"][..., 0].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert layout.lengths(cond).tolist() == [[2], [3]]
    row, x = {name: value[1:] for name, value in cond.items()}, torch.full((1, 4), 7.0)
    (_, (text, mask, places)), (_, (state, ids)) = layout.returned(row, x)
    assert text[..., 0].tolist() == [[1, 2, 3]]
    assert mask is None
    assert state is x
    assert torch.equal(places, ids)
    with pytest.raises(ValueError, match=r"a prompt has 5 tokens; .*max_sequence_length is 4"):
        layout.kept([calls(5)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (Call(arguments={**EMBEDDED, "guidance": 2.0}), "call.arguments has guidance; Stable"),
        (Call(arguments={"latents": 1}), "call.arguments has latents;"),
    ],
)
def test_arguments_that_the_pipeline_does_not_take_are_refused_by_the_plan(call, message):
    with pytest.raises(ValueError, match=message):
        AnyFlow(FOLDER, 32, 32, call).plan()


def test_another_number_of_evaluations_is_refused_with_the_right_one():
    call = Call(arguments=EMBEDDED | {"guidance_scale": 3.0})
    with pytest.raises(ValueError, match=r"call.evaluations is 1, but .* makes 2 per step"):
        new_embedded(call=call)


def test_a_size_that_does_not_fit_is_refused_by_the_plan_in_the_pipeline_s_words():
    with pytest.raises(ValueError, match=r"divisible by 8 but are 36 and 32|divisible by"):
        AnyFlow(FOLDER, 37, 32, Call(arguments=EMBEDDED)).plan()


def test_a_velocity_without_its_guidance_is_refused_and_not_guided():
    """Losses of pairs see the conditional model, which a call with guidance does not make."""
    policy = new_embedded(call=Call(arguments=EMBEDDED | {"guidance_scale": 3.0}, evaluations=2))
    x, cond = noise(policy), encoded(policy)
    with pytest.raises(
        ValueError, match=r"AnyFlow only computes velocities with the guidance of call.arguments"
    ):
        conditional(policy).velocity(x, torch.tensor(0.5), cond)
    assert policy.velocity(x, torch.tensor(0.5), cond).shape == x.shape


def _build_flow_map(folder):
    """Write a Wan with the scheduler of diffusers' AnyFlowPipeline, without its network."""
    return build_wan(folder, FlowMapEulerDiscreteScheduler(shift=5.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (build_wan22, "it has a second network, transformer_2"),
        (build_wan_i2v, r"it needs image in addition to a prompt \(call.pictures\)"),
        (build_ltx2, "it makes two states, video and audio"),
        (lambda folder: build_sd15(folder), "it has no transformer"),
        (_build_flow_map, "its network predicts the mean velocity between two times"),
    ],
)
def test_a_pipeline_that_cannot_be_replayed_is_refused_in_one_line(tmp_path, build, reason):
    path = build(tmp_path)
    for work in (lambda p: p.plan(), lambda p: p.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=reason) as caught:
            work(AnyFlow(path, 32, 32))
        assert "103_your_pipeline.md" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_a_pipeline_whose_steps_depend_on_their_number_is_refused(tmp_path, monkeypatch):
    """Here replayed velocities are larger than the pipeline's at low noise."""
    path = build_flux(tmp_path)
    policy = new_any(path, call=Call(arguments={"max_sequence_length": 24}))
    original = type(policy)._velocity
    monkeypatch.setattr(
        AnyFlow, "_velocity", lambda *given: original(*given) * (1 + 0.1 * (given[2] < 0.9))
    )
    with pytest.raises(ValueError, match=r"cannot be replayed: .*differs by"):
        new_any(path, call=Call(arguments={"max_sequence_length": 24}))


@pytest.mark.slow
def test_the_encoders_are_named_by_weights_and_arguments():
    policy, other = new_embedded(), new_embedded(lora=None)
    assert policy.encoders() == other.encoders()
    changed = new_embedded(call=Call(arguments=EMBEDDED | {"clip_skip": 1}))
    assert changed.encoders()[1] != policy.encoders()[1]
    media, text = new_embedded(height=16).encoders()
    assert (media == policy.encoders()[0], text == policy.encoders()[1]) == (False, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "path", "arguments", "fps"),
    [
        ("configs/models/toy_shapes.yaml", FOLDER, EMBEDDED, None),
        (
            "configs/models/shapes_video.yaml",
            "assets/shapes_video/wan",
            {"guidance_scale": 1.0, "max_sequence_length": 16, "num_frames": 9},
            8.0,
        ),
    ],
    ids=["sd3", "wan"],
)
def test_two_steps_of_training_are_those_of_the_family_s_own_policy(
    tmp_path, file, path, arguments, fps
):
    content = yaml.safe_load(Path(file).read_text())
    call = {"arguments": arguments, "fps": fps}
    lora = {"target_modules": list(JOINT_ATTENTION), **content["policy"]["init_args"]["lora"]}
    generic = {
        "class_path": "pipelines.AnyFlow",
        "init_args": {
            "path": path,
            "height": 32,
            "width": 32,
            "precision": "fp32",
            "call": call,
            "lora": lora,
        },
    }
    rows = [
        trained(tmp_path / name, content | {"policy": policy})
        for name, policy in (("own", content["policy"]), ("any", generic))
    ]
    assert len(rows[0]) == 2
    # the two evaluate batches of other shapes, and Wan's pipeline divides latents by 1 / std where
    # our policy multiplies: sums round apart, and two updates carry that on
    for own, generic_row in zip(*rows, strict=True):
        assert generic_row == pytest.approx(own, rel=1e-5, abs=1e-6)
    assert len({row["optim/grad_norm"] for row in rows[0]}) == 2


def trained(folder: Path, content: dict) -> list[dict]:
    """The metrics of two steps of a small copy of a run, but for times and costs."""
    from flowalign.cli.main import main

    folder.mkdir()
    recipe = content["recipe"]["init_args"] | {"prompts_per_step": 2, "micro_batch": 8}
    recipe["sampling"] = recipe["sampling"] | {"samples_per_prompt": 4, "num_steps": 4}
    recipe["sampling"]["micro_batch"] = 8
    content = content | {
        "recipe": content["recipe"] | {"init_args": recipe},
        "num_steps": 2,
        "output_dir": str(folder / "run"),
        "evaluation": None,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(SystemExit) as stop:
        main(["train", str(folder / "run.yaml")])
    assert stop.value.code == 0
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    measured = re.compile("seconds|timing/|throughput")
    return [{k: v for k, v in row.items() if not measured.search(k)} for row in rows]
