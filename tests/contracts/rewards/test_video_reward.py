"""VideoReward against its original code, and what every reward promises."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowalign.types import MediaBatch
from reward_models.backbones.pixels import resize
from reward_models.preference import video_reward
from reward_models.preference.video_reward import PUBLISHED, VideoReward, merge_lora
from tests.fixtures.golden import GOLDEN, check_chats, load
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_small_steps,
    example_batch,
)

# A FutureWarning would be an argument that transformers has renamed.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::FutureWarning")]

torch.set_num_threads(1)
FOLDER = GOLDEN / "H_videoreward"
RECORDED = load("H_videoreward_io")
VALUES = json.loads((GOLDEN / "H_videoreward_io.json").read_text())["values"]
PROMPTS = VALUES["prompts"]
FULL, ADAPTER = FOLDER / "full", FOLDER / "adapter"
SHORT = "\nOf quality <|VQ_reward|> and motion <|MQ_reward|>, for {prompt}: <|TA_reward|>\n"


def tiny(checkpoint=FULL, **kwargs):
    kwargs = {"normalisation": "none", "dtype": "float32", "device": "cpu"} | kwargs
    return VideoReward(str(checkpoint), str(FOLDER / "base"), **kwargs)


@pytest.fixture(scope="module")
def model():
    model = tiny()
    model.load()
    return model


@pytest.fixture
def short(monkeypatch):
    """A shorter question about smaller frames, for tests that do not depend on it."""
    monkeypatch.setattr(video_reward, "INSTRUCTION", SHORT)
    monkeypatch.setattr(video_reward, "FEWEST_PIXELS", 4 * 28 * 28)
    model = tiny()
    model.load()
    return model


def recorded(i, prompt=None):
    frames = RECORDED[f"frames{i}"].permute(0, 3, 1, 2)[None].float() / 255
    return MediaBatch(frames, [prompt or PROMPTS[i]], fps=[RECORDED["fps"][i].item()])


def raw(model, i, prompt=None):
    return model.score(recorded(i, prompt)).values[0, :3]


@pytest.mark.parametrize("i", range(3))
def test_scores_are_those_of_the_original(model, i):
    torch.testing.assert_close(raw(model, i), RECORDED["logits"][i], atol=5e-5, rtol=0)


def test_the_adapter_form_holds_the_same_model(model):
    adapter = tiny(ADAPTER)
    adapter.load()
    weights, expected = adapter.network.state_dict(), model.network.state_dict()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-6, msg=name)
    torch.testing.assert_close(raw(adapter, 1), RECORDED["logits"][1], atol=5e-5, rtol=0)


def test_tokens_and_pixels_are_those_of_the_original(model):
    chats = [model._chat(recorded(i), 0) for i in range(3)]
    check_chats(chats, RECORDED, "video_grid_thw")


def test_positions_of_three_axes_give_other_scores():
    wrong = tiny(position_mode="mrope")
    got = raw(wrong, 0)
    torch.testing.assert_close(got, RECORDED["logits_mrope"][0], atol=5e-5, rtol=0)
    assert (got - RECORDED["logits"][0]).abs().max() > 1


@pytest.mark.parametrize("normalisation", ["checkpoint", "published"])
def test_scores_are_normalised_and_summed_as_in_the_original(normalisation):
    output = tiny(normalisation=normalisation).score(recorded(1))
    expected = VALUES["scores"]["norm"][1]
    got = dict(zip(("VQ", "MQ", "TA", "Overall"), output.values[0].tolist(), strict=True))
    assert got == pytest.approx(expected, abs=5e-5)


def test_constants_of_the_checkpoint_are_its_own_and_missing_ones_are_no_default(tmp_path):
    configured(tmp_path, lambda c: c["inference_config"].update(VQ_mean=1.0, MQ_std=2.0))
    model = tiny(tmp_path, normalisation="checkpoint")
    model.load()
    assert model.constants[0].tolist() == pytest.approx([1.0, 1.1646, 2.8105])
    assert model.constants[1].tolist() == pytest.approx([2.2476, 2.0, 2.5121])
    configured(tmp_path, lambda c: c.pop("inference_config"))
    with pytest.raises(ValueError, match="no inference_config to normalise with"):
        tiny(tmp_path, normalisation="checkpoint").load()
    published = tiny(tmp_path, normalisation="published")
    published.load()
    assert published.constants[0].tolist() == pytest.approx(
        [PUBLISHED[f"{dim}_mean"] for dim in ("VQ", "MQ", "TA")]
    )


def in_one_pass(model, batch, i=0):
    """The raw scores by a single pass over clip and prompt, as in the original."""
    marks = model.tokenizer.convert_tokens_to_ids(list(video_reward.TOKENS))
    return model.network([model._chat(batch, i)], marks, "video")[0].diagonal()


def test_quality_and_motion_cannot_depend_on_the_prompt(model):
    here = in_one_pass(model, recorded(0))
    there = in_one_pass(model, recorded(0, "a" * len(PROMPTS[0])))
    assert torch.equal(here[:2], there[:2])
    assert (here[2] - there[2]).abs() > 1e-3
    other = raw(model, 0, "A totally different prompt")
    torch.testing.assert_close(other, RECORDED["logits_other_prompt"][0], atol=5e-5, rtol=0)


@pytest.mark.parametrize("position_mode", ["sequential", "mrope"])
def test_reading_the_clip_before_the_prompt_changes_no_score(short, position_mode):
    short.network.position_mode = position_mode
    batch = replace(example_batch(3, frames=12), fps=(8.0, 2.0, 8.0))
    for i in range(3):
        alone = in_one_pass(short, batch, i)
        torch.testing.assert_close(short.score(batch).values[i, :3], alone, atol=1e-5, rtol=1e-5)


def counted(model):
    """Clips that the vision tower sees, and tokens that the language model reads, per pass."""
    seen = {"clips": [], "tokens": []}
    model.network.backbone.visual.register_forward_pre_hook(
        lambda _, args, kwargs: seen["clips"].append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    model.network.backbone.language_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen["tokens"].append(tuple(kwargs["inputs_embeds"].shape[:2])),
        with_kwargs=True,
    )
    return seen


def test_another_prompt_for_a_clip_costs_only_its_alignment(short):
    clips, prompts = example_batch(2, frames=6).media, ["a cat", "tea", "a dog", "a red car"]
    batch = MediaBatch(clips[[0, 0, 1, 0]], prompts, fps=[8.0] * 4)
    fresh = [tiny() for _ in range(4)]
    expected = torch.cat([fresh[i].score(batch.take([i])).values for i in range(4)])
    seen = counted(short)
    first = short.score(batch).values
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    assert seen["clips"] == [2]
    (rows, before), (texts, after) = seen["tokens"]
    assert (rows, texts) == (2, 4)
    assert before > 40 > after
    again = short.score(replace(batch, prompts=["rain", *prompts[1:]])).values
    assert seen["clips"] == [2], "the clips of the last batch are not seen again"
    assert len(seen["tokens"]) == 3
    assert torch.equal(again[0, :2], first[0, :2])
    assert (again[0, 2] - first[0, 2]).abs() > 1e-4
    torch.testing.assert_close(again[1:], expected[1:], atol=1e-5, rtol=1e-5)


def test_a_clip_that_differs_in_one_pixel_is_seen_anew(short):
    media = example_batch(1, frames=4).media
    other = media.clone()
    other[0, 2, 1, 5, 7] = 1 - other[0, 2, 1, 5, 7]
    seen = counted(short)
    first, second = (short.score(MediaBatch(m, ["a"], fps=[8.0])).values for m in (media, other))
    assert seen["clips"] == [1, 1]
    assert not torch.equal(first, second)


def test_equal_clips_that_require_a_gradient_each_get_their_own(short):
    media = example_batch(1, frames=4).media.repeat(2, 1, 1, 1, 1).requires_grad_()
    values = short.score(MediaBatch(media, ["a cat", "tea"], fps=[8.0] * 2)).values
    (quality,) = torch.autograd.grad(values[1, 0], media, retain_graph=True)
    (alignment,) = torch.autograd.grad(values[1, 2], media)
    for gradient in (quality, alignment):
        assert (gradient[0] == 0).all()
        assert gradient[1].abs().sum() > 0
    assert short._kept == {}


def test_the_rate_of_frames_is_that_of_the_checkpoint(tmp_path):
    configured(tmp_path, lambda c: c["data_config"].update(fps=4.0))
    expected = [VALUES["scores"]["fps4"][0][dim] for dim in ("VQ", "MQ", "TA")]
    assert raw(tiny(tmp_path), 0).tolist() == pytest.approx(expected, abs=5e-5)


def test_what_every_reward_promises(short, monkeypatch):
    batch = replace(example_batch(3, frames=7), fps=(8.0, 8.0, 3.0))  # 4, 4 and 4 of 7 frames
    check_contract(short, batch, rtol_gradient=1)  # the sign; the size is checked without rounding
    monkeypatch.setattr(video_reward, "resize_rounding_once", resize)
    check_small_steps(short, batch)


def test_videos_of_other_lengths_in_a_batch_do_not_change_a_score(short):
    media = example_batch(3, frames=24).media
    prompts = ["a cat", "a much longer prompt about a cat, a dog and a mouse", "tea"]
    batch = MediaBatch(media, prompts, fps=[8.0, 2.0, 24.0])
    assert [short._chat(batch, i).grids[0][0] for i in range(3)] == [3, 12, 2]
    together = short.score(batch).values
    alone = torch.cat([short.score(batch.take([i])).values for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_the_gradient_reaches_the_frames_that_are_looked_at_and_no_others(short):
    media = example_batch(1, frames=16).media.requires_grad_()
    output = short.score(MediaBatch(media, ["a cat"], fps=[8.0]))
    (gradient,) = torch.autograd.grad(output.values.sum(), media)
    reached = (gradient[0].abs().sum((1, 2, 3)) > 0).nonzero().flatten().tolist()
    assert reached == [0, 5, 10, 15]


def test_a_video_that_cannot_be_asked_about_is_a_failure_with_a_reason(short):
    media = example_batch(4, frames=6).media
    prompts = ["a cat", "a <|MQ_reward|> cat", "tea", "a dog"]
    batch = MediaBatch(media, prompts, fps=[8.0, 8.0, 0.0, 8.0])
    output = short.score(batch)
    assert output.valid.all(1).tolist() == [True, False, False, True]
    assert output.reasons == {
        1: "its prompt contains the special token <|MQ_reward|>",
        2: "0.0 frames per second is not a frame rate",
    }
    expected = short.score(batch.take([3])).values[0]
    torch.testing.assert_close(output.values[3], expected, atol=1e-5, rtol=1e-5)
    ribbon = MediaBatch(torch.rand(1, 4, 3, 201, 1), ["a"], fps=[8.0])
    assert "over 200 times" in short.score(ribbon).reasons[0]


# The checkpoint.


def configured(tmp_path, change):
    """A copy of the full form with another configuration."""
    shutil.copytree(FULL, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "model_config.json").read_text())
    change(config)
    (tmp_path / "model_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("data_config", "num_frames", 8),
        ("data_config", "eval_dim", ["VQ", "TA", "MQ"]),
        ("model_config", "reward_token", "last"),
    ],
)
def test_a_configuration_for_what_is_not_implemented_is_refused(tmp_path, part, key, value):
    configured(tmp_path, lambda c: c[part].update({key: value}))
    with pytest.raises(ValueError, match=f"{part}.{key} of "):
        tiny(tmp_path).load()


def saved(tmp_path, change):
    """A copy of the full form with other weights."""
    shutil.copytree(FULL, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoint-11352" / "model.pth"
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)
    return tiny(tmp_path)


PEFT = "base_model.model."
Q = f"{PEFT}model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{PEFT}rm_head.weight"), r"1 missing: head\.weight"),
        (lambda t: t.update(value_head=torch.ones(3)), "1 unexpected: value_head"),
        (lambda t: t.pop(f"{Q}.lora_A.default.weight"), "LoRA of .*q_proj is not complete"),
        (lambda t: t.pop(f"{Q}.base_layer.weight"), "q_proj has no weight of its shape"),
        (
            lambda t: t.update({f"{Q}.weight": torch.ones(48, 48)}),
            r"two tensors .* named model\.layers\.0\.self_attn\.q_proj\.weight",
        ),
        (
            lambda t: t.update(
                {
                    f"{Q}.lora_A.default.weight": torch.ones(3, 48),
                    f"{Q}.lora_B.default.weight": torch.ones(48, 3),
                }
            ),
            "q_proj is not of rank 4",
        ),
        (lambda t: t[f"{Q}.lora_B.default.weight"].fill_(torch.inf), "not finite: .*q_proj"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_key(tmp_path, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        saved(tmp_path, change).load()
    assert len(str(caught.value).splitlines()) <= 5


def test_a_whole_model_with_a_rank_stabilised_adapter_is_refused(tmp_path):
    saved(tmp_path, lambda tensors: None)
    config = json.loads((tmp_path / "model_config.json").read_text())
    config["peft_lora_config"]["use_rslora"] = True
    (tmp_path / "model_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"model_config\.json: use_rslora is not supported"):
        tiny(tmp_path).load()


def test_an_adapter_is_refused_without_its_parts_or_of_another_kind(tmp_path):
    shutil.copytree(ADAPTER, tmp_path, dirs_exist_ok=True)
    step = tmp_path / "checkpoint-300"
    config = json.loads((step / "adapter_config.json").read_text())
    (step / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(ValueError, match="use_dora is not supported"):
        tiny(tmp_path).load()
    (step / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(step / "adapter_model.safetensors")
    tensors.pop(f"{Q}.lora_B.weight")
    save_file(tensors, step / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="q_proj is not complete"):
        tiny(tmp_path).load()
    (step / "non_lora_state_dict.pth").unlink()
    with pytest.raises(ValueError, match=r"neither model\.pth nor non_lora_state_dict\.pth"):
        tiny(tmp_path).load()
    shutil.rmtree(step)
    with pytest.raises(ValueError, match="no folder checkpoint-<step>"):
        tiny(tmp_path).load()


def test_the_last_step_is_read(tmp_path):
    shutil.copytree(FULL, tmp_path, dirs_exist_ok=True)
    older = tmp_path / "checkpoint-9999"
    older.mkdir()
    torch.save({"rm_head.weight": torch.zeros(3, 48)}, older / "model.pth")
    tiny(tmp_path).load()  # as a string, 9999 would come after 11352


def test_a_lora_is_merged_by_its_formula():
    weight, bias = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.ones(3)
    tensors = {
        "a.weight": weight,
        "a.bias": bias,
        "a.lora_A.weight": torch.tensor([[1.0, -1.0]]),
        "a.lora_B.weight": torch.tensor([[1.0], [0.0], [2.0]]),
        "b.weight": bias,
    }
    result = merge_lora(tensors, 1, 3.0, "x")
    assert result["a.weight"].tolist() == [[4, -1], [3, 4], [11, 0]]
    assert set(result) == {"a.weight", "a.bias", "b.weight"}
    half = merge_lora(tensors | {"a.weight": weight.bfloat16()}, 1, 3.0, "x")
    assert half["a.weight"].dtype == torch.bfloat16


def test_a_hub_name_without_a_hub_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="KwaiVGI/VideoReward is not a local folder"):
        VideoReward().load()
    with pytest.raises(ValueError, match="Qwen/Qwen2-VL-2B-Instruct is not a local folder"):
        VideoReward(str(FULL), "Qwen/Qwen2-VL-2B-Instruct").load()


def test_fingerprints_tell_weights_and_settings_apart():
    check_fingerprints(
        [
            tiny(),
            tiny(ADAPTER),
            tiny(position_mode="mrope"),
            tiny(normalisation="checkpoint"),
            tiny(dtype="bfloat16"),
        ]
    )
    assert tiny().spec.fingerprint() == tiny(batch_size=1).spec.fingerprint()
