"""Wan image-to-video satisfies the contract, is its official pipeline, and knows its pictures."""

import json

import pytest
import torch
from PIL import Image

from pipelines.wan_i2v import WanI2V, cropped, pictures
from tests.fixtures.embedded import move
from tests.fixtures.families import Family, assert_one_time_per_row, noise
from tests.fixtures.policy_contract import WanContract
from tests.fixtures.tiny_video import (
    PICTURES,
    assert_official_film,
    assert_official_velocities,
    build_wan,
    build_wan_i2v,
    new_i2v,
    tiny_video,
    video_family,
    write_pictures,
)

pytestmark = pytest.mark.slow

PROMPTS = tuple(PICTURES)[:2]


class TestWanI2V(WanContract):
    """On the fixture `family`."""

    # conditions hold latents: what identifies the VAE identifies them, see below
    test_encoders_are_named_alike_in_every_load_and_apart_after_a_change = None
    test_the_name_of_encoders_depends_on_the_size_of_pictures = None


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("i2v")
    return {"i2v": build_wan_i2v(root / "i2v"), "other": build_wan_i2v(root / "o", num_layers=3)}


@pytest.fixture
def family(folders) -> Family:
    family = video_family(WanI2V, new_i2v, folders["i2v"], folders["other"])
    sized = lambda path, **given: tiny_video(WanI2V, path, images=f"{path}/images.jsonl", **given)  # noqa: E731
    return Family(**{**vars(family), "cls": sized})


@pytest.mark.parametrize("guidance", [1.0, 3.5], ids=["plain", "guided"])
def test_velocities_and_films_are_those_of_the_official_pipeline(folders, guidance):
    policy = new_i2v(folders["i2v"], guidance=guidance)
    move(policy)
    assert_official_velocities_of_each(policy)
    assert_official_film(policy, PROMPTS)


def assert_official_velocities_of_each(policy) -> None:
    """The pipeline takes one picture a call."""
    for prompt in PROMPTS:
        assert_official_velocities(policy, [prompt], num_steps=3)


def test_a_network_without_features_of_the_picture_is_its_official_pipeline(tmp_path):
    """As those of Wan 2.2."""
    path = build_wan_i2v(tmp_path, image_dim=None, added_kv_proj_dim=None)
    policy = new_i2v(path, guidance=2.0)
    assert set(policy.encode(PROMPTS)) == {"text", "text_neg", "image"}
    assert_official_velocities_of_each(policy)


def test_features_of_the_picture_change_the_velocity(folders):
    """17 tokens, a class and 4 x 4 patches; the condition on the first frame stays."""
    policy = new_i2v(folders["i2v"])
    x, sigma, cond = noise(policy), torch.tensor(0.6), policy.encode(PROMPTS)
    assert cond["clip"].shape == (2, 17, 8)
    with torch.no_grad():
        velocity = policy.velocity(x, sigma, cond)
        other = policy.velocity(x, sigma, {**cond, "clip": cond["clip"].flip(0)})
    assert (other - velocity).flatten(1).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("length", [24, 513])
def test_prompts_of_another_length_than_512_are_refused_where_pictures_have_tokens(
    folders, tmp_path, length
):
    policy = tiny_video(
        WanI2V, folders["i2v"], images=f"{folders['i2v']}/images.jsonl", max_sequence_length=length
    )
    for work in (policy.plan, lambda: policy.load(torch.device("cpu"))):
        with pytest.raises(ValueError, match=f"max_sequence_length is {length}; .*give 512"):
            work()
    plain = build_wan_i2v(tmp_path, image_dim=None, added_kv_proj_dim=None)
    assert new_i2v(plain, max_sequence_length=length).encode(PROMPTS)["text"].shape[1] == length


def test_rows_of_different_times_are_the_rows_alone_with_guidance(folders):
    assert_one_time_per_row(new_i2v(folders["i2v"], guidance=3.0), PROMPTS)


def test_conditions_have_a_row_for_every_prompt_and_are_made_once_for_each(folders):
    policy, asked = new_i2v(folders["i2v"], guidance=2.0), []
    encode = policy.pipe.vae.encode
    policy.pipe.vae.encode = lambda *a, **k: asked.append(len(a[0])) or encode(*a, **k)
    cond = policy.encode([PROMPTS[1], PROMPTS[0], PROMPTS[1]])
    assert asked == [1, 1]
    assert {name: len(value) for name, value in cond.items()} == dict.fromkeys(cond, 3)
    alone = policy.encode([PROMPTS[0]])
    for name in ("image", "clip"):
        assert torch.equal(cond[name][0], cond[name][2])
        assert (cond[name][0] - cond[name][1]).abs().max() > 1e-3
        assert torch.equal(cond[name][1:2], alone[name])


def test_the_condition_says_which_frame_is_known_and_ends_with_its_latents(folders):
    policy = new_i2v(folders["i2v"])
    image = policy.encode(PROMPTS[:1])["image"]
    assert image.shape == (1, 4 + 16, 3, 4, 6)
    assert image[:, :4, 0].unique().tolist() == [1]
    assert image[:, :4, 1:].unique().tolist() == [0]
    frame = cropped(policy.pictures[PROMPTS[0]], 48 / 32)
    clip = torch.full((1, 9, 3, 32, 48), 0.5)
    clip[:, 0] = policy.pipe.video_processor.preprocess(frame, 32, 48) / 2 + 0.5
    torch.testing.assert_close(image[:, 4:], policy.embed(clip), atol=1e-5, rtol=1e-5)


def test_a_prompt_without_a_picture_is_refused_by_name(folders):
    with pytest.raises(ValueError, match=r"1 prompt\(s\) without a picture in .*'a blue dog'"):
        new_i2v(folders["i2v"]).encode([PROMPTS[0], "a blue dog"])


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (
            ['{"prompt": "a", "image": "ball.png"}', '{"prompt": "a", "image": "cats.png"}'],
            "line 2: prompt 'a' has two pictures, .*ball.png and .*cats.png",
        ),
        (['{"prompt": "a", "image": "none.png"}'], "line 1: there is no picture .*none.png"),
        (['{"prompt": "a", "image": "ball.png"}', '{"prompt": "b"'], "line 2 is no JSON"),
        (['{"prompt": "a", "picture": "ball.png"}'], "line 1 must be .*but is"),
        (["[1]"], "line 1 must be"),
        ([], "names no pictures"),
    ],
)
def test_a_file_of_pictures_with_a_fault_is_refused_before_loading(folders, tmp_path, lines, error):
    write_pictures(tmp_path)
    file = tmp_path / "faulty.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=error) as caught:
        tiny_video(WanI2V, folders["i2v"], images=str(file)).plan()
    assert len(str(caught.value).splitlines()) <= 5


def test_a_missing_file_of_pictures_is_refused_and_a_picture_named_twice_is_not(folders, tmp_path):
    with pytest.raises(ValueError, match=r"none.jsonl does not exist"):
        tiny_video(WanI2V, folders["i2v"], images=str(tmp_path / "none.jsonl")).plan()
    write_pictures(tmp_path)
    file = tmp_path / "images.jsonl"
    file.write_text(file.read_text() + json.dumps({"prompt": PROMPTS[0], "image": "ball.png"}))
    assert pictures(str(file)) == {p: tmp_path / name for p, name in PICTURES.items()}


def test_a_picture_is_cut_to_the_proportions_of_the_video_and_not_squeezed(tmp_path):
    """12 x 4 at 1 : 1: columns 4 to 7; 4 x 12 at 2 : 1: rows 5 and 6."""
    wide = Image.new("RGB", (12, 4))
    for column in range(12):
        wide.paste((20 * column, 0, 0), (column, 0, column + 1, 4))
    wide.save(tmp_path / "wide.png")
    got = cropped(tmp_path / "wide.png", 1.0)
    assert got.size == (4, 4)
    assert [got.getpixel((x, 0))[0] for x in range(4)] == [80, 100, 120, 140]
    tall = wide.rotate(90, expand=True)
    tall.save(tmp_path / "tall.png")
    assert cropped(tmp_path / "tall.png", 2.0).size == (4, 2)
    assert cropped(tmp_path / "tall.png", 2.0).getpixel((1, 0))[0] == 20 * 6


def test_the_name_of_the_text_encoder_depends_on_the_vae_and_on_the_encoder_of_pictures(folders):
    policy = new_i2v(folders["i2v"])
    media, text = policy.encoders()
    assert new_i2v(folders["i2v"]).encoders() == (media, text)
    with torch.no_grad():
        next(policy.pipe.image_encoder.parameters()).flatten()[3] += 1e-3
    assert (policy.encoders()[0] == media, policy.encoders()[1] == text) == (True, False)
    text = policy.encoders()[1]
    with torch.no_grad():
        next(policy.pipe.vae.parameters()).flatten()[3] += 1e-3
    assert (policy.encoders()[0] == media, policy.encoders()[1] == text) == (False, False)


def test_the_name_of_the_text_encoder_depends_on_the_pictures(folders, tmp_path):
    write_pictures(tmp_path)
    given = new_i2v(folders["i2v"]).encoders()
    same = new_i2v(folders["i2v"], images=str(tmp_path / "images.jsonl"))
    assert same.encoders() == given
    Image.new("RGB", (9, 9), "red").save(tmp_path / PICTURES[PROMPTS[1]])
    assert same.encoders()[1] != given[1]


def test_a_text_to_video_folder_is_refused_by_name(folders, tmp_path):
    path = build_wan(tmp_path)
    policy = tiny_video(WanI2V, path, images=f"{folders['i2v']}/images.jsonl")
    with pytest.raises(ValueError, match="takes 16 channels, WanI2V gives it 36"):
        policy.plan()
