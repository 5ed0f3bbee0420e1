"""Requests that policy or rewards cannot use are named with file and row, before weights load."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from flowalign.data.compatibility import check_requests
from flowalign.data.requests import read_located_requests
from flowalign.runs.config import load
from flowalign.types import InputSpec, Loadable, Request
from flowalign.utils.errors import ConfigError
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.sources import OwnSource, SourcePolicy, write_sources


class Painter(PixelPolicy):
    input_spec = InputSpec(references=(1, 2), mask=True, kind="source", crop=(3, 3))


class Exact(PixelPolicy):
    input_spec = InputSpec(references=(1, 1), kind="source", size=(6, 8))


class ClipEditor(PixelPolicy):
    input_spec = InputSpec(references=(1, 1), kind="source", frames=(2, 5))


@pytest.fixture
def folder(tmp_path):
    """An image, a truncated image, masks of two sizes, an empty mask, an animation."""
    noise = Image.effect_noise((8, 6), 90)
    noise.convert("RGB").save(tmp_path / "a.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:60])
    Image.new("L", (8, 6), 255).save(tmp_path / "hole.png")
    Image.new("L", (8, 6), 0).save(tmp_path / "none.png")
    Image.new("L", (4, 6), 255).save(tmp_path / "narrow.png")
    corner = Image.new("L", (8, 6), 0)
    corner.putpixel((0, 3), 255)  # where a square crop of 8 x 6 does not reach
    corner.save(tmp_path / "corner.png")
    noise.resize((8, 4)).convert("RGB").save(tmp_path / "low.png")
    frames = [Image.new("RGB", (8, 6), (k, 0, 0)) for k in (0, 200)]
    frames[0].save(tmp_path / "moving.webp", save_all=True, append_images=frames[1:], duration=50)
    return tmp_path


def check(folder, policy, rewards, **row):
    file = folder / "edits.jsonl"
    image = "a.png" if policy.input_spec.frames[0] == 1 else "moving.webp"
    good = {"prompt": "a", "image": image} | (
        {"mask": "hole.png"} if policy.input_spec.mask else {}
    )
    rows = good, {"prompt": "b", **row}
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    check_requests(policy, rewards, read_located_requests(str(file)))


WRONG = {
    "no source": (SourcePolicy, {}, "SourcePolicy takes 1 source references, .* has 0"),
    "two sources": (SourcePolicy, {"images": ["a.png"] * 2}, "takes 1 source .* has 2"),
    "missing": (SourcePolicy, {"image": "gone.png"}, "missing file: .*gone.png"),
    "truncated": (SourcePolicy, {"image": "cut.png"}, "damaged image: .*cut.png"),
    "a clip": (SourcePolicy, {"image": "moving.webp"}, "moving.webp has 2 frames"),
    "unwanted mask": (SourcePolicy, {"image": "a.png", "mask": "hole.png"}, "takes no mask"),
    "no mask": (Painter, {"image": "a.png"}, "takes a mask, and the request has none"),
    "three": (Painter, {"images": ["a.png"] * 3}, "takes 1 to 2 source references, .* has 3"),
    "a mask without a hole": (Painter, {"image": "a.png", "mask": "none.png"}, "no white pixel"),
    "a hole outside the crop": (
        Painter,
        {"image": "a.png", "mask": "corner.png"},
        "corner.png has no white pixel within the 3 x 3 that are kept",
    ),
    "another size": (
        Exact,
        {"image": "low.png"},
        "low.png: Exact takes references of 8 x 6 pixels, and this has 8 x 4",
    ),
    "too few frames": (
        ClipEditor,
        {"image": "a.png"},
        "a.png: ClipEditor takes references of 2 to 5 frames, and this has 1",
    ),
    "another shape": (
        Painter,
        {"image": "a.png", "mask": "narrow.png"},
        "narrow.png has 4 x 6 pixels, the source 8 x 6",
    ),
    "no source to score": (PixelPolicy, {}, "reward 'own' needs a source"),
    "both fields": (SourcePolicy, {"image": "a.png", "images": ["a.png"]}, "image and images"),
    "no path": (SourcePolicy, {"image": 3}, "image must be a path, bytes or a PIL image, got 3"),
}


@pytest.mark.parametrize(("policy", "row", "said"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_named_with_its_row(folder, policy, row, said):
    with pytest.raises(ValueError, match=rf"edits.jsonl:2: .*{said}"):
        check(folder, policy(), [OwnSource()] if policy is PixelPolicy else [], **row)


def test_a_missing_source_names_the_setting_and_a_bundled_file():
    with pytest.raises(ValueError, match="has 0") as caught:
        check_requests(SourcePolicy(), [], [("a.txt:1", Request("a"))], "evaluation.prompts.b")
    remedy = caught.value.args[0].splitlines()[1]
    assert remedy == (
        "Set evaluation.prompts.b to a file whose rows have an `image`, such as "
        "assets/prompts/edits.jsonl"
    )


def test_a_source_that_only_a_reward_reads_is_no_mistake(folder):
    check(folder, PixelPolicy(), [OwnSource()], image="a.png")
    check(folder, PixelPolicy(), [Redness()], image="a.png")
    check(folder, Painter(), [OwnSource()], images=["a.png", "cut.png"][:1], mask="hole.png")


def test_a_clip_is_taken_where_the_policy_says_so_and_no_reward_reads_it(folder):
    check(folder, ClipEditor(), [Redness()], image="moving.webp")
    with pytest.raises(ValueError, match=r"references must be images; .*moving.webp has 2"):
        check(folder, ClipEditor(), [OwnSource()], image="moving.webp")


class Late(OwnSource, Loadable):
    """Reward that declares its needs only when it is loaded, as a served reward does."""

    def __init__(self) -> None:
        super().__init__()
        self.declared, self.spec = self.spec, replace(self.spec, needs=())

    def load(self) -> None:
        self.spec = self.declared


def test_what_a_reward_says_it_needs_when_it_is_loaded_is_checked_then(tmp_path):
    (tmp_path / "p.txt").write_text("a red circle\n")
    changes = [f"recipe.prompts={tmp_path / 'p.txt'}"]
    changes += [
        "rewards=[{class_path: tests.training.test_fit.Late, weight: {red: 1.0}}]",
        "evaluation=null",
    ]
    run, _ = load("configs/shapes.yaml", changes)
    with pytest.raises(ValueError, match=r"p.txt:1: reward 'own' needs a source"):
        run.load_rewards(run.build_rewards())
    changes[0] = f"recipe.prompts={write_sources(tmp_path)}"
    run, _ = load("configs/shapes.yaml", changes)
    run.load_rewards(run.build_rewards())


def test_a_run_is_refused_before_weights_load(tmp_path):
    (tmp_path / "p.txt").write_text("a red circle\n")
    changes = [f"recipe.prompts={tmp_path / 'p.txt'}"]
    changes += ["rewards=[{class_path: tests.fixtures.sources.OwnSource, weight: {red: 1.0}}]"]
    with pytest.raises(ConfigError, match=r"p.txt:1: reward 'own' needs a source"):
        load("configs/shapes.yaml", changes)
    changes[0] = f"recipe.prompts={write_sources(tmp_path)}"
    changes += ["evaluation=null"]
    load("configs/shapes.yaml", changes)
