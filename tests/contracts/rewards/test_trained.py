"""From a run file to a reward: backbones, cache, training, folder, and the reward read back."""

import json
import math
import shutil
import sys

import open_clip
import pytest
import torch
import world
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flowalign.cli.main import parse
from flowalign.cli.reward import run as run_reward
from flowalign.reward_training import embeddings
from flowalign.reward_training.embeddings import Embeddings, RewardSample, embed_samples
from flowalign.reward_training.reward_run import load_run, train
from flowalign.types import MediaBatch
from flowalign.utils.folders import Claim
from flowalign.utils.media.media import Media
from reward_models import ShapesVerifier, TrainedReward
from reward_models.backbones.backbones import Lora, PooledFrames
from reward_models.backbones.encoders import EfficientNet, Encoder, OpenClip

pytestmark = pytest.mark.slow

WORDS = "a above below blue circle circles green left of purple red right square squares three "
WORDS += "triangle triangles two white yellow"
LOSSES = "flowalign.reward_training.losses"


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """A tiny random open_clip model with a separate tokenizer, as a local folder."""
    folder = tmp_path_factory.mktemp("clip")
    vocab = {w: i for i, w in enumerate(["<pad>", "<bos>", "<unk>", *WORDS.split(), "<eos>"])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", len(vocab) - 1)]
    )
    special = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(folder)
    vision = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8}
    text = {"context_length": 12, "vocab_size": len(vocab), "width": 16, "heads": 2, "layers": 1}
    text["hf_tokenizer_name"] = "local"
    config = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = open_clip.CLIP(**config)
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != "attn_mask"}
    save_file(tensors, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return folder


def picture(path, pixels):
    pixels = (pixels * 255).round().to(torch.uint8)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    return path.name


def preferences(folder, prompts=24, noise=False):
    """Pairs of images, one of which shows the prompt; the verifier decides the preference."""
    generator, everything = torch.Generator().manual_seed(0), world.splits()["train"]
    chosen = everything[:: len(everything) // prompts][:prompts]
    rows = []
    for i, prompt in enumerate(chosen):
        shown = [prompt, chosen[(i + 1) % len(chosen)]]
        pixels = torch.stack([world.render(p, generator) for p in shown])
        if i % 2:
            pixels = pixels.flip(0)
        values = ShapesVerifier().score(MediaBatch(pixels[:, None], [prompt] * 2)).values
        ranks = {
            dim: (1 + (values[:, d] < values[:, d].max())).float().tolist()
            for d, dim in enumerate(ShapesVerifier().spec.dims[:2])
        }
        files = [picture(folder / f"{i}-{n}.png", pixels[n]) for n in range(2)]
        rows.append({"id": str(i), "prompt": prompt, "images": files, "ranks": ranks})
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def pooled(clip, **settings):
    """The settings of a backbone."""
    encoder = {"class_path": "reward_models.OpenClip", "init_args": {"path": str(clip)}}
    return {
        "class_path": "reward_models.PooledFrames",
        "init_args": {"encoder": encoder} | settings,
    }


def run_file(folder, clip, data, **changes):
    content = {
        "name": "shapes_preference",
        "licence": "Apache-2.0",
        "backbone": pooled(clip),
        "head": {"class_path": "reward_models.MLP", "init_args": {"hidden": [8]}},
        "dimensions": {
            dim: {"loss": {"class_path": f"{LOSSES}.BradleyTerryTies"}}
            for dim in ("colour", "shape")
        },
        "data": [{"path": str(data)}],
        "held_out": 0.25,
        "test": 0.15,
        "schedule": {"epochs": 3, "batch_size": 8},
        "embeddings": str(folder / "embeddings"),
        "device": "cpu",
        "output_dir": str(folder / "run"),
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(content | changes))
    return file


def quiet(_):
    pass


@pytest.fixture(scope="module")
def trained(tmp_path_factory, clip):
    folder = tmp_path_factory.mktemp("trained")
    run, config = load_run(str(run_file(folder, clip, preferences(folder))))
    return folder, run, train(run, config, quiet)


def batch(frames=1, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return MediaBatch(
        torch.rand(3, frames, 3, 32, 32, generator=generator),
        ["a red circle", "two blue squares", "a red circle"],
    )


# The folder and the reward read from it -----------------------------------------------------------


def test_the_reward_read_back_gives_exactly_the_trainers_scores(trained):
    folder, run, config = trained
    reward = TrainedReward(str(folder / "run" / "model"), units="calibrated", device="cpu")
    samples = [
        RewardSample(Media(path=str(folder / f"{i}-0.png")), "a red circle") for i in range(4)
    ]
    frames = torch.stack([read(s.media) for s in samples])
    scores = reward.score(MediaBatch(frames, ["a red circle"] * 4))
    assert scores.valid.all()
    assert reward.spec.dims == ("colour", "shape")
    features = run.backbone.embed(MediaBatch(frames, ["a red circle"] * 4))
    again = TrainedReward(str(folder / "run" / "model"), device="cpu")
    values = again.score(MediaBatch(frames, ["a red circle"] * 4)).values
    assert torch.equal(
        values * again.rater.std + again.rater.mean, values * reward.rater.std + reward.rater.mean
    )
    raw, _ = reward.rater.in_units(reward.rater(features), z_score=False)
    assert torch.equal(scores.values, raw)
    torch.testing.assert_close(scores.values, values * again.rater.std + again.rater.mean)
    assert config["dims"] == ["colour", "shape"]


def read(medium):
    from flowalign.utils.media.decode import decode

    return decode(medium).frames


def test_z_scores_of_the_training_media_have_mean_0_and_deviation_1(trained):
    folder, run, config = trained
    reward = TrainedReward(str(folder / "run" / "model"), device="cpu")
    assert config["data"]["records"] == {"train": 14, "held_out": 6, "test": 4}
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    from flowalign.reward_training.reward_run import read_preferences

    table, _ = read_preferences(run)
    keep = [rows[int(i)] for i in table.rows("train")]
    media = torch.stack([read(Media(path=str(folder / f))) for r in keep for f in r["images"]])
    values = reward.score(MediaBatch(media, [r["prompt"] for r in keep for _ in range(2)])).values
    torch.testing.assert_close(values.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(values.std(0, correction=0), torch.ones(2), atol=1e-3, rtol=0)


def test_scores_do_not_depend_on_the_batch_and_have_a_gradient_to_the_pixels(trained):
    folder, _, _ = trained
    reward = TrainedReward(str(folder / "run" / "model"), device="cpu", batch_size=2)
    some = batch(frames=2)
    whole = reward.score(some)
    for i in range(3):
        alone = reward.score(some.take([i]))
        torch.testing.assert_close(alone.values[0], whole.values[i], atol=1e-5, rtol=1e-5)
    pixels = some.media.clone().requires_grad_()
    reward.score(MediaBatch(pixels, some.prompts)).values.sum().backward()
    assert pixels.grad is not None
    assert (pixels.grad.flatten(1).abs().sum(1) > 0).all()
    missing = reward.score(MediaBatch(some.media, ["", "a red circle", "a red circle"]))
    assert missing.valid.tolist() == [[False] * 2, [True] * 2, [True] * 2]
    assert "prompt is missing" in missing.reasons[0]


def test_the_card_and_config_say_what_a_user_must_know(trained):
    folder, _, config = trained
    model = folder / "run" / "model"
    card = (model / "README.md").read_text()
    for part in (
        "Licence: Apache-2.0",
        "| colour | ranks | BradleyTerryTies | k = ",
        "| test | shape |",
        "reward_models.TrainedReward",
        config["data"]["fingerprint"],
    ):
        assert part in card, part
    figures = json.loads((model / "config.json").read_text())["figures"]
    assert figures.keys() == {"train", "held_out", "test"}
    files = {"README.md", "config.json", "model.safetensors"}
    assert {p.name for p in model.iterdir()} == files


def damaged(trained, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(trained[0] / "run" / "model", folder)
    return folder, load_file(folder / "model.safetensors")


def test_a_folder_that_does_not_account_for_every_key_is_refused(trained, tmp_path, clip):
    folder, tensors = damaged(trained, tmp_path)
    key = "rater.head.out.score.bias"
    cases = {
        "1 missing": {k: v for k, v in tensors.items() if k != key},
        "1 unexpected": tensors | {"rater.extra": torch.zeros(1)},
        "1 of another shape": tensors | {key: torch.zeros(5)},
        "1 not finite": tensors | {key: torch.full((2,), torch.nan)},
        "frozen weights": tensors | {"backbone.logit_scale": torch.zeros(())},
    }
    for why, content in cases.items():
        save_file(content, folder / "model.safetensors")
        with pytest.raises(ValueError, match=why):
            TrainedReward(str(folder), device="cpu").load()
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="cannot be read"):
        TrainedReward(str(folder), device="cpu").load()


def test_a_folder_may_name_classes_of_trusted_packages_only(trained, tmp_path):
    folder, _ = damaged(trained, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["head"] = {"class_path": "elsewhere.Head", "init_args": {}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"names elsewhere.Head, which is not in reward_models"):
        TrainedReward(str(folder))
    with pytest.raises(ValueError, match="cannot be built"):
        TrainedReward(str(folder), device="cpu", trusted=["reward_models", "elsewhere"]).load()
    config["head"] = {"class_path": "reward_models.backbones.heads.Linear", "init_args": {}}
    for part in ("head", "backbone"):
        given = config[part]["init_args"] | {"encoder": ["this.Thing"]}
        changed = config | {part: config[part] | {"init_args": given}}
        (folder / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"names this.Thing, which is not in reward_models"):
            TrainedReward(str(folder))
    assert "this" not in sys.modules
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="not in the format"):
        TrainedReward(str(folder))


def test_a_backbone_with_other_weights_is_refused(trained, tmp_path, clip):
    folder, _ = damaged(trained, tmp_path)
    other = tmp_path / "clip"
    shutil.copytree(clip, other)
    weights = load_file(other / "open_clip_model.safetensors")
    weights["logit_scale"] += 1
    save_file(weights, other / "open_clip_model.safetensors")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace(str(clip), str(other)))
    with pytest.raises(ValueError, match="was trained on a backbone with fingerprint"):
        TrainedReward(str(folder), device="cpu").load()


# Resuming, adapters, refusals ---------------------------------------------------------------------


class Stop(Exception):
    pass


def test_an_interrupted_training_resumes_to_the_same_bytes(trained, tmp_path, clip):
    folder, _, _ = trained

    def fresh():
        return load_run(str(run_file(tmp_path, clip, folder / "pairs.jsonl")))

    def interrupt(line):
        if line.startswith("epoch 1"):
            raise Stop

    with pytest.raises(Stop):
        train(*fresh(), interrupt)
    with pytest.raises(ValueError, match="already holds a run"):
        train(*fresh(), quiet)
    train(*fresh(), quiet, resume=True)
    one, two = (f / "run" / "model" / "model.safetensors" for f in (folder, tmp_path))
    assert one.read_bytes() == two.read_bytes()
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]


def test_a_training_that_is_refused_leaves_its_folder_as_it_was(tmp_path, clip):
    """Neither missing data nor another process may delete the existing files."""
    out, missing = tmp_path / "run", tmp_path / "missing.jsonl"
    run, config = load_run(str(run_file(tmp_path, clip, missing)))
    with pytest.raises(ValueError, match="missing"):
        train(run, config, quiet)
    assert not out.exists()
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="is no run and is not deleted"):
        train(run, config, quiet, overwrite=True)
    (out / "config.yaml").write_text("name: earlier\n")
    with pytest.raises(ValueError, match="missing"):
        train(run, config, quiet, overwrite=True)
    claim = Claim(out, quiet)
    with pytest.raises(ValueError, match="is in use by process"):
        train(run, config, quiet, overwrite=True)
    claim.release()
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "thesis.tex"]


def test_a_training_that_ended_in_its_first_epoch_is_repeated(tmp_path, clip, trained, monkeypatch):
    file = run_file(tmp_path, clip, trained[0] / "pairs.jsonl")
    run, config = load_run(str(file), ["--schedule.epochs", "1"])

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("flowalign.reward_training.reward_run.save_state", fail)
        for resume in (False, True):
            with pytest.raises(OSError, match="No space"):
                train(run, config, quiet, resume)
    train(run, config, quiet)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1]


def test_adapters_are_trained_saved_and_read_back(tmp_path, clip, trained):
    backbone = pooled(clip, lora={"rank": 2, "targets": ["c_fc", "c_proj"]})
    file = run_file(tmp_path, clip, trained[0] / "pairs.jsonl", backbone=backbone)
    run, config = load_run(str(file), ["--schedule.epochs", "2", "--optimizer.learning_rate=0.01"])
    train(run, config, quiet)
    model = tmp_path / "run" / "model"
    adapters = {k: v for k, v in load_file(model / "model.safetensors").items() if "lora_" in k}
    assert len(adapters) == 2 * 2 * 3  # two matrices in two layers of three blocks
    assert all(float(v.abs().max()) > 0 for k, v in adapters.items() if "lora_B" in k)
    reward = TrainedReward(str(model), units="calibrated", device="cpu")
    values = reward.score(batch()).values
    run.backbone.network.eval()
    with torch.no_grad():
        features = run.backbone.embed(batch())
        expected, _ = reward.rater.in_units(reward.rater(features), z_score=False)
    assert torch.equal(values, expected)
    plain = PooledFrames(OpenClip(str(clip)))
    plain.load()
    assert not torch.allclose(plain.embed(batch()).joint, features.joint, atol=1e-4)


def test_the_reward_says_how_unsure_it_is_where_a_loss_taught_it(tmp_path, clip, trained):
    losses = {"colour": "Thurstone", "shape": "BradleyTerry"}
    head = {"class_path": "reward_models.Linear", "init_args": {"uncertainty": True}}
    dimensions = {d: {"loss": {"class_path": f"{LOSSES}.{n}"}} for d, n in losses.items()}
    file = run_file(tmp_path, clip, trained[0] / "pairs.jsonl", head=head, dimensions=dimensions)
    train(*load_run(str(file)), quiet)
    z, calibrated = (
        TrainedReward(str(tmp_path / "run" / "model"), units=units, device="cpu")
        for units in ("z-score", "calibrated")
    )
    a, b = z.score(batch()), calibrated.score(batch())
    assert a.uncertainty is not None
    assert b.uncertainty is not None
    assert a.uncertainty[:, 1].isnan().all()
    torch.testing.assert_close(a.uncertainty[:, 0] * z.rater.std[0], b.uncertainty[:, 0])
    with torch.no_grad():
        spread = z.rater(z.backbone.embed(batch())).log_variance[:, 0]
    torch.testing.assert_close(b.uncertainty[:, 0], (spread / 2).exp() * z.rater.factor[0])


def test_too_many_unreadable_media_stop_the_training_and_few_do_not(tmp_path, clip, trained):
    for file in trained[0].glob("*.png"):
        shutil.copy(file, tmp_path)
    shutil.copy(trained[0] / "pairs.jsonl", tmp_path)
    (tmp_path / "3-1.png").write_bytes((tmp_path / "3-1.png").read_bytes()[:40])
    (tmp_path / "4-0.png").unlink()
    run, config = load_run(str(run_file(tmp_path, clip, tmp_path / "pairs.jsonl")))
    with pytest.raises(ValueError, match=r"2 of 48 samples failed \(max_failed_fraction 0.01\)"):
        train(run, config, quiet)
    run, config = load_run(
        str(run_file(tmp_path, clip, tmp_path / "pairs.jsonl", max_failed_fraction=0.1))
    )
    found = train(run, config, quiet, overwrite=True)
    pairs = [found["figures"][part]["colour"]["pairs"] for part in ("train", "held_out", "test")]
    assert sum(pairs) == 22


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dimensions": {}}, "at least one"),
        ({"held_out": 0.0}, "held_out is 0.0; it must be above 0"),
        ({"schedule": {"epochs": 0}}, "schedule.epochs is 0; it must be at least 1"),
        ({"nonsense": 1}, "nonsense"),
        (
            {"optimizer": {"kind": "adamw_offloaded"}},
            "optimizer.kind is adamw_offloaded, but .* adamw",
        ),
        ({"head": {"class_path": "reward_models.backbones.heads.MLQ"}}, "MLQ"),
        (
            {"dimensions": {"colour": {"loss": {"class_path": f"{LOSSES}.Regression"}}}},
            "reads ratings, not ranks",
        ),
    ],
)
def test_a_run_file_that_makes_no_sense_is_refused_before_anything_is_read(tmp_path, changes, why):
    with pytest.raises(ValueError, match=why) as error:
        load_run(
            str(run_file(tmp_path, tmp_path / "nowhere", tmp_path / "nothing.jsonl", **changes))
        )
    assert len(str(error.value).splitlines()) <= 5


def test_the_command_trains_and_turns_refusals_into_short_messages(tmp_path, clip, trained, capsys):
    file = run_file(tmp_path, clip, trained[0] / "pairs.jsonl")
    args = parse(["reward", "train", str(file), "--schedule.epochs", "1"])
    assert run_reward(args) == 0
    said = capsys.readouterr().out
    assert "test records, best epoch 1" in said
    assert "accuracy" in said
    with pytest.raises(ValueError, match="already holds a run"):
        run_reward(args)


# The cache ----------------------------------------------------------------------------------------


def samples(folder):
    return [
        RewardSample(Media(path=str(folder / f"{i}-{n}.png")), "a red circle")
        for i in range(4)
        for n in (0, 1)
    ]


def test_features_are_computed_once_and_by_content(trained, clip, tmp_path):
    backbone = PooledFrames(OpenClip(str(clip)))
    backbone.load()
    some = samples(trained[0])
    first = Embeddings(backbone, tmp_path)
    features, failed = first(some)
    assert (first.num_computed, failed) == (8, {})
    shutil.copy(trained[0] / "0-0.png", tmp_path / "copy.png")
    second = Embeddings(backbone, tmp_path)
    again, _ = second(
        [RewardSample(Media(path=str(tmp_path / "copy.png")), "a red circle"), *some[1:]]
    )
    assert second.num_computed == 0
    assert torch.equal(again.joint, features.joint)
    second([RewardSample(some[0].media, "a blue circle")])
    assert second.num_computed == 1
    (tmp_path / "broken.png").write_bytes(b"x")
    broken = [
        RewardSample(Media(path=str(tmp_path / "broken.png")), "a"),
        some[0],
        RewardSample(Media(path="no"), "a"),
    ]
    partly, failed = second(broken)
    assert failed.keys() == {0, 2}
    assert torch.equal(partly.joint[1], features.joint[0])
    assert partly.joint[0].isnan().all()
    other = PooledFrames(OpenClip(str(clip)), joint=["image"])
    other.load()
    assert other.fingerprint != backbone.fingerprint
    assert Embeddings(other, tmp_path)(some)[0].joint.shape == (8, 12)


def test_a_damaged_file_of_the_cache_is_computed_again(trained, clip, tmp_path):
    backbone = PooledFrames(OpenClip(str(clip)))
    backbone.load()
    Embeddings(backbone, tmp_path)(samples(trained[0]))
    (file,) = tmp_path.rglob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    second = Embeddings(backbone, tmp_path)
    second(samples(trained[0]))
    assert (second.store.num_damaged, second.num_computed) == (1, 8)
    assert file.read_bytes() == whole


# Backbones ----------------------------------------------------------------------------------------


class Corners(Encoder):
    """Six numbers per image, three per prompt."""

    reads_prompts = True

    def read(self):
        self.module = torch.nn.Linear(1, 1)

    def embed_images(self, frames):
        return torch.cat([frames[:, :, 0, 0], frames[:, :, -1, -1]], 1)

    def embed_prompts(self, prompts):
        return torch.tensor([[float(len(p)), 1.0, 2.0] for p in prompts])


def test_frames_are_pooled_and_joined_as_by_hand():
    pixels = torch.rand(2, 5, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    some = MediaBatch(pixels, ["abc", "d"])
    backbone = PooledFrames(Corners(), over_frames=["max", "std", "mean"], num_frames=3)
    backbone.load()
    seen = torch.cat([pixels[:, [0, 2, 4], :, 0, 0], pixels[:, [0, 2, 4], :, -1, -1]], 2)
    image = torch.cat([seen.amax(1), seen.std(1, correction=0), seen.mean(1)], 1)
    text = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 2.0]])
    features = backbone.embed(some)
    torch.testing.assert_close(features.prompt, text)
    torch.testing.assert_close(
        features.joint, torch.cat([image, text, image * text.repeat(1, 6)], 1)
    )
    still = MediaBatch(pixels[:, :1].clone().requires_grad_(), some.prompts)
    backbone.embed(still).joint.sum().backward()
    assert still.media.grad.isfinite().all()  # the deviation over one frame has a gradient of 0


def test_the_source_of_an_edit_is_encoded_like_the_edit():
    pixels = torch.rand(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    sources = [torch.rand(3, 5, 6), torch.rand(3, 2, 7)]
    some = MediaBatch(pixels, ["abc", "d"], references=[[sources[0]], [sources[1], sources[0]]])
    backbone = PooledFrames(Corners(), joint=["source", "image"])
    backbone.load()
    assert backbone.reads_references
    expected = torch.stack([torch.cat([s[:, 0, 0], s[:, -1, -1]]) for s in sources])
    features = backbone.embed(some).joint
    torch.testing.assert_close(features[:, :6], expected)
    torch.testing.assert_close(features[:, 6:9], pixels[:, 0, :, 0, 0])
    assert not PooledFrames(Corners()).reads_references


def test_features_of_an_edit_are_those_of_its_own_source_also_from_the_cache(tmp_path, monkeypatch):
    levels = {"s": 0.1, "t": 0.7, "edit": 0.4}
    backbone = PooledFrames(Corners(), joint=["source", "image"])
    backbone.load()
    for name in levels:
        (tmp_path / name).write_bytes(name.encode())

    def medium(name):
        return Media(path=str(tmp_path / name))

    def read(_, found):
        return torch.full((1, 3, 4, 4), levels[found.path.rpartition("/")[2]])

    monkeypatch.setattr(embeddings, "read_frames", read)
    some = [RewardSample(medium("edit"), "a", [medium(name)]) for name in ("s", "t", "s")]
    for num in (2, 0):  # the first and the third sample are the same
        cached = Embeddings(backbone, tmp_path / "cache")
        features, failed = cached([*some, RewardSample(medium("edit"), "a")])
        torch.testing.assert_close(features.joint[:3, 0], torch.tensor([0.1, 0.7, 0.1]))
        torch.testing.assert_close(features.joint[:3, 6], torch.full((3,), 0.4))
        assert failed == {3: "its source image is missing"}
        assert cached.num_computed == num


def test_media_of_different_shapes_keep_their_order(monkeypatch):
    backbone = PooledFrames(Corners())
    backbone.load()
    shapes = [(1, 4, 4), (2, 3, 3), (1, 4, 4), (2, 4, 4)]
    media = {str(i): torch.full((f, 3, h, w), i / 10) for i, (f, h, w) in enumerate(shapes)}
    some = [RewardSample(Media(path=name), "abc") for name in media]
    monkeypatch.setattr(embeddings, "read_frames", lambda _, medium: media[medium.path])
    features, failed = embed_samples(backbone, some)
    assert not failed
    torch.testing.assert_close(features.joint[:, 0], torch.tensor([0.0, 0.1, 0.2, 0.3]))


def test_backbones_refuse_what_they_cannot_do(clip):
    with pytest.raises(
        ValueError, match=r"EfficientNet reads no prompts; its joint must be \[image\]"
    ):
        PooledFrames(EfficientNet())
    with pytest.raises(ValueError, match="num_frames of PooledFrames is 0"):
        PooledFrames(Corners(), num_frames=0)
    with pytest.raises(ValueError, match=r"lora\.rank is 0"):
        Lora(rank=0)
    with pytest.raises(ValueError, match="match no linear layer"):
        PooledFrames(OpenClip(str(clip)), lora=Lora(targets=["nowhere"])).load()
    with pytest.raises(ValueError, match="no such"):
        PooledFrames(OpenClip("/nowhere/at/all")).load()


def test_every_adapter_gets_a_gradient(clip):
    backbone = PooledFrames(OpenClip(str(clip)), lora=Lora(rank=2))
    backbone.load()
    adapters = {n: p for n, p in backbone.network.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in adapters.items():
            parameter.fill_(0.01 if "lora_B" in name else 0.02)
    some = batch()
    backbone.embed(some).joint.square().sum().backward()
    backbone.embed(some).joint[:, 0].sum().backward()
    assert adapters
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in adapters.values())


def test_a_head_on_imagenet_features_learns_what_shapes_look_like(tmp_path):
    """Real features tell flat objects from blurred ones on prompts never seen, beyond chance."""
    generator, verifier = torch.Generator().manual_seed(0), ShapesVerifier()
    prompts = world.splits()["train"][::12][:44]
    rows = []
    for i, prompt in enumerate(prompts):
        pixels = torch.stack([world.render(prompt, generator) for _ in range(2)])
        blurred = torch.nn.functional.avg_pool2d(pixels[:1], 5, 1, 2)
        pixels = torch.cat([blurred, pixels[1:]])
        if i % 2:
            pixels = pixels.flip(0)
        clean = verifier.score(MediaBatch(pixels[:, None], [prompt] * 2)).values[:, 4]
        files = [picture(tmp_path / f"{i}-{n}.png", pixels[n]) for n in range(2)]
        ranks = {"clean": (1 + (clean < clean.max())).float().tolist()}
        rows.append({"id": str(i), "prompt": prompt, "images": files, "ranks": ranks})
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    backbone = {
        "class_path": "reward_models.PooledFrames",
        "init_args": {
            "encoder": {"class_path": "reward_models.EfficientNet"},
            "joint": ["image"],
        },
    }
    bradley_terry = {"class_path": "flowalign.reward_training.losses.BradleyTerry"}
    file = run_file(
        tmp_path,
        "",
        tmp_path / "pairs.jsonl",
        backbone=backbone,
        head={"class_path": "reward_models.Linear"},
        dimensions={"clean": {"loss": bradley_terry}},
        test=0.35,
    )
    run, config = load_run(str(file))
    found = train(run, config, quiet)["figures"]["test"]["clean"]
    assert found["pairs"] >= 12
    assert found["accuracy"] > 0.5 + 3 * math.sqrt(0.25 / found["pairs"])
