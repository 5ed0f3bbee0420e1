"""GenEval and counting: rules compared with the reference, and detectors on images."""

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import (
    BertConfig,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    PreTrainedTokenizerFast,
    SwinConfig,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
)

from flowalign.types import MediaBatch
from reward_models.backbones.detection import Detection, TransformersDetector
from reward_models.backbones.reward_bases import Unscorable
from reward_models.detection.counting import Counting, SoftCounting, shortfall
from reward_models.detection.geneval import (
    Clause,
    GenEval,
    find_relations,
    grade,
    parse_clauses,
    select_detections,
)
from reward_models.verifiers.shapes import parse_prompt
from reward_models.verifiers.truth import ShapesDetector
from tests.fixtures.fake_judge import FakeDetector
from tests.fixtures.golden import GOLDEN, load
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_scores,
    check_small_steps,
    example_batch,
)

CASES = json.loads((GOLDEN / "H_geneval.json").read_text())["values"]["cases"]
WRONG_PLACE = 22
"""The one recorded case of a wrong relation, where the reference adds a 1 after the 0."""


def detections(case) -> list[Detection]:
    colours = case["colors_in_box_order"]
    return [
        Detection(label, score, tuple(box), colours[label][k])
        for label, rows in case["detections"].items()
        for k, (*box, score) in enumerate(rows)
    ]


def judged(case) -> tuple[float, float, float]:
    metadata = case["metadata"]
    include, exclude = parse_clauses(metadata, "include"), parse_clauses(metadata, "exclude")
    threshold = 0.9 if metadata["tag"] == "counting" else 0.3
    found = select_detections(detections(case), threshold, 16)
    assert {label: len(objects) for label, objects in found.items()} == case["kept"]
    strict, dense = grade(include, exclude, found)
    return strict, grade(include, exclude, found, surplus=True)[0], dense


def test_the_rules_are_those_of_the_reference_but_for_its_bonus_for_a_wrong_place():
    golden = load("H_geneval")
    expected = torch.stack([golden["strict_rewards"], golden["rewards"], golden["scores"]], 1)
    measured = torch.tensor([judged(case) for case in CASES], dtype=torch.float64)
    same = [i for i in range(len(CASES)) if i != WRONG_PLACE]
    assert torch.equal(measured[same], expected.double()[same])


def test_a_wrong_place_gives_nothing_where_the_reference_gives_a_part():
    case = CASES[WRONG_PLACE]
    assert case["metadata"]["tag"] == "position"
    assert case["dense_score"] == 3 / 4  # two right numbers, 0 for the place, and the bonus
    assert judged(case) == (0, 0, 2 / 3)


def at(x: float, y: float, label: str = "cat", score: float = 0.5, colour: str | None = None):
    return Detection(label, score, (x - 5.0, y - 10.0, x + 5.0, y + 10.0), colour)


def test_positions_by_hand():
    centre = at(100, 100)
    assert find_relations(at(60, 100), centre) == {"left of"}
    assert find_relations(at(140, 100), centre) == {"right of"}
    assert find_relations(at(100, 50), centre) == {"above"}
    assert find_relations(at(100, 150), centre) == {"below"}
    assert find_relations(at(150, 150), centre) == {"right of", "below"}
    assert (
        find_relations(at(101, 103), centre) == set()
    )  # within a tenth of both sizes: 2 and 4 pixels
    assert find_relations(at(140, 122), centre) == {
        "right of"
    }  # (22 - 4) / 45.7 is less than a half


def test_only_the_surest_objects_above_the_threshold_are_kept():
    found = select_detections(
        [at(0, 0, score=s) for s in (0.4, 0.9, 0.3, 0.6)] + [at(0, 0, "dog", 0.2)], 0.3, 2
    )
    assert {label: [d.score for d in objects] for label, objects in found.items()} == {
        "cat": [0.9, 0.6]
    }


def test_the_original_rule_looks_at_the_surest_and_the_strict_one_at_all():
    red = [Clause("cat", 1, "red")]
    found = select_detections(
        [at(0, 0, score=0.9, colour="red"), at(50, 0, score=0.8, colour="blue")], 0.3, 16
    )
    assert grade(red, [], found, surplus=True)[0] == 1
    assert grade(red, [], found) == (0, 0)
    swapped = select_detections(
        [at(0, 0, score=0.8, colour="red"), at(9, 0, score=0.9, colour="blue")], 0.3, 16
    )
    assert grade(red, [], swapped, surplus=True)[0] == 0


def test_what_is_excluded_must_be_absent_from_both_rules():
    found = select_detections([at(0, 0), at(30, 0, "dog")], 0.3, 16)
    for surplus in (True, False):
        for exclude, expected in (([], 1), ([Clause("dog", 1)], 0), ([Clause("dog", 2)], 1)):
            assert grade([Clause("cat", 1)], exclude, found, surplus)[0] == expected


@pytest.mark.parametrize(
    "include",
    [
        "cat",
        ["cat"],
        [{"count": 1}],
        [{"class": "cat", "count": 0}],
        [{"class": "cat", "count": 1, "position": ["left of", 0]}],
        [{"class": "cat"}, {"class": "dog", "position": ["near", 0]}],
    ],
)
def test_metadata_that_breaks_the_schema_cannot_be_scored(include):
    with pytest.raises(Unscorable, match="metadata"):
        parse_clauses({"include": include}, "include")


def marked(*levels: int) -> torch.Tensor:
    return (torch.tensor(levels) / 255)[:, None, None, None, None].expand(-1, 1, 3, 6, 9).clone()


TWO_CATS = {"tag": "counting", "include": [{"class": "cat", "count": 2}]}


def test_counting_asks_for_more_certainty():
    sure, unsure = [at(0, 0, score=0.95), at(50, 0, score=0.95)], [at(0, 0), at(50, 0)]
    model = GenEval(FakeDetector(sure, unsure))
    other = TWO_CATS | {"tag": "single_object"}
    output = model.score(MediaBatch(marked(0, 1, 1), [""] * 3, [TWO_CATS, TWO_CATS, other]))
    assert output.values.tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert [extra["found"] for extra in output.extras] == [{"cat": 2}, {}, {"cat": 2}]


def test_the_rewards_keep_the_contract():
    told = FakeDetector(*([at(30 * k, 0, score=0.95) for k in range(n)] for n in range(5)))
    batch = MediaBatch(marked(1, 2, 3, 4), [""] * 4, [TWO_CATS] * 4)
    check_contract(GenEval(told), batch)
    check_contract(Counting(told), batch)
    assert Counting(told).score(batch).values.tolist() == [[0.5, 0], [1, 1], [0.5, 0], [0, 0]]
    assert GenEval(told).score(batch).values[:, 2].tolist() == [0.5, 1, 0.5, 0]
    check_fingerprints(
        [
            GenEval(told),
            GenEval(told, threshold=0.4),
            GenEval(told, counting_threshold=0.8),
            GenEval(told, max_objects=8),
            Counting(told),
            Counting(told, threshold=0.8),
        ]
    )


def test_a_dense_score_far_below_zero_is_within_the_scale():
    many = [at(30 * k, 0, score=0.95) for k in range(40)]
    model = GenEval(FakeDetector(many))
    one = {"tag": "counting", "include": [{"class": "cat", "count": 1}]}
    value = model.score(MediaBatch(marked(0), [""], [one])).values[0, 2]
    assert value == model.spec.scale[0] == -14
    counted = Counting(FakeDetector(many)).score(MediaBatch(marked(0), [""], [one]))
    assert counted.values.tolist() == [[0, 0]]


def test_what_the_detector_cannot_see_makes_a_row_invalid_and_no_other():
    told = FakeDetector([at(0, 0)])
    metadata = [{"include": [{"class": "car"}]}, {"include": [{"class": "cat"}]}, {}]
    for model in (GenEval(told), Counting(told, threshold=0.1)):
        output = model.score(MediaBatch(marked(0, 0, 0), [""] * 3, metadata))
        assert output.valid.all(1).tolist() == [False, True, False]
        assert "does not know car" in output.reasons[0]
        assert "include" in output.reasons[2]
    told.names_colours = False
    red = {"include": [{"class": "cat", "color": "red"}]}
    assert "colour" in GenEval(told).score(MediaBatch(marked(0), [""], [red])).reasons[0]


def asked(prompt: str) -> dict:
    """GenEval's metadata of a prompt of the shapes world."""
    scene = parse_prompt(prompt)
    if scene.relation is None:
        (colour, shape), count = scene.objects[0], len(scene.objects)
        return {"tag": "colors", "include": [{"class": shape, "count": count, "color": colour}]}
    (first, second), include = scene.objects, []
    include.append({"class": second[1], "count": 1, "color": second[0]})
    place = [scene.relation, 0]
    include.append({"class": first[1], "count": 1, "color": first[0], "position": place})
    return {"tag": "position", "include": include}


def test_pictures_of_the_shapes_world_satisfy_their_prompts_and_no_other():
    from world import render

    prompts = [
        "a red circle",
        "two blue squares",
        "three green triangles",
        "a yellow triangle left of a white square",
        "a purple circle above a green triangle",
    ]
    generator = torch.Generator().manual_seed(3)
    media = torch.stack([render(p, generator) for p in prompts])[:, None]
    model = GenEval(ShapesDetector())
    own = model.score(MediaBatch(media, prompts, [asked(p) for p in prompts]))
    assert (own.values == 1).all()
    others = prompts[1:] + prompts[:1]
    crossed = model.score(MediaBatch(media, others, [asked(p) for p in others]))
    assert crossed.valid.all()
    assert (crossed.values[:, :2] == 0).all()
    mirrored = model.score(MediaBatch(media.flip(-1)[3:4], prompts[3:4], [asked(prompts[3])]))
    assert mirrored.values[0].tolist() == pytest.approx([0, 0, 0.8])


def test_boxes_of_the_shapes_world_are_in_pixels():
    picture = torch.tensor([20.0, 20, 28])[:, None, None].repeat(1, 32, 32) / 255
    picture[:, 8:20, 3:13] = torch.tensor([235.0, 235, 235])[:, None, None] / 255
    (found,) = ShapesDetector().detect(picture)
    assert (found.label, found.colour, found.box) == ("square", "white", (3, 8, 13, 20))


@pytest.fixture(scope="module")
def yolos(tmp_path_factory):
    """A tiny random detector in a folder, and its network."""
    folder = tmp_path_factory.mktemp("yolos")
    torch.manual_seed(5)
    names = {0: "cat", 1: "dog", 2: "cup"}
    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=[48, 64],
        patch_size=16,
        num_detection_tokens=6,
        id2label=names,
        label2id={name: i for i, name in names.items()},
    )
    network = YolosForObjectDetection(config).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    network.save_pretrained(folder)
    YolosImageProcessor(size={"height": 48, "width": 64}, do_pad=False).save_pretrained(folder)
    return folder, network


def test_a_detector_of_transformers_gives_the_boxes_of_its_network(yolos):
    folder, network = yolos
    detector = TransformersDetector(str(folder), least=0.0)
    detector.load()
    assert detector.classes() == {"cat", "dog", "cup"}
    picture = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(1))
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    with torch.no_grad():
        output = network(((picture - mean[:, None, None]) / std[:, None, None])[None])
    scores, labels = output.logits[0].softmax(-1)[:, :-1].max(-1)
    cx, cy, w, h = output.pred_boxes[0].unbind(-1)
    boxes = torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], 1)
    found = detector.detect(picture)
    assert [d.label for d in found] == [["cat", "dog", "cup"][i] for i in labels]
    assert [d.score for d in found] == pytest.approx(scores.tolist(), abs=1e-5)
    expected = boxes * torch.tensor([64.0, 48, 64, 48])
    torch.testing.assert_close(torch.tensor([d.box for d in found]), expected, atol=1e-3, rtol=0)
    strict = TransformersDetector(str(folder), least=float(scores.median()))
    assert 0 < len(strict.detect(picture)) < len(found)


def test_a_detector_with_a_wrong_checkpoint_is_refused(yolos, tmp_path):
    folder, network = yolos
    broken = YolosForObjectDetection(network.config)
    state = {k: v for k, v in network.state_dict().items() if "bbox_predictor" not in k}
    broken.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="bbox_predictor"):
        TransformersDetector(str(tmp_path)).load()
    with pytest.raises(ValueError, match="no such folder"):
        TransformersDetector(str(tmp_path / "none")).load()
    with pytest.raises(ValueError, match="least"):
        TransformersDetector(str(folder), least=1.0)


# Counting with a gradient: the loss by hand, and a tiny Grounding DINO in the published -----------


WORDS = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, ".": 1012}
"""Numbers that Grounding DINO knows by heart."""
NOUNS = {"cat": 1050, "red": 1051, "dog": 1052, "##s": 1053}


def test_the_shortfall_by_hand():
    """Two cats at .7 and .04, one dog at .3 of candidates; below .5 and .1 something is missing."""
    cats, dogs = torch.tensor([0.01, 0.7, 0.04]), torch.tensor([0.3, 0.2, 0.25])
    assert shortfall([cats, dogs], [2, 1], 0.1).item() == pytest.approx(0.06 / 3)
    assert shortfall([cats, dogs], [2, 1], 0.5).item() == pytest.approx((0.46 + 0.2) / 3)
    assert shortfall([cats], [1], 0.5) == 0
    assert shortfall([cats], [3], 0.05).item() == pytest.approx((0.01 + 0.04) / 3)


def test_only_the_best_candidates_that_are_unsure_have_a_gradient():
    scores = torch.tensor([0.01, 0.7, 0.04, 0.2], requires_grad=True)
    shortfall([scores], [3], 0.1).backward()
    assert_close(scores.grad, torch.tensor([0.0, 0.0, -1 / 3, 0.0]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A detector of eight candidates with a text encoder that distinguishes all words."""
    folder = tmp_path_factory.mktemp("grounding")
    vocabulary = {f"[unused{i}]": i for i in range(1060)}
    vocabulary = {
        w: i for w, i in vocabulary.items() if i not in {*WORDS.values(), *NOUNS.values()}
    }
    bare = Tokenizer(models.WordPiece(vocabulary | WORDS | NOUNS, unk_token="[UNK]"))
    bare.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=bare,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    swin = SwinConfig(
        image_size=64,
        patch_size=4,
        window_size=2,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        out_features=["stage2", "stage3", "stage4"],
    )
    bert = BertConfig(
        vocab_size=1060,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    config = GroundingDinoConfig(
        backbone_config=swin,
        text_config=bert,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_n_points=2,
        decoder_n_points=2,
        num_queries=8,
        max_text_len=20,
        disable_custom_kernels=True,
        auxiliary_loss=False,
    )
    torch.manual_seed(4)
    network = GroundingDinoForObjectDetection(config)
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.6 * parameter[0].numel() ** -0.5)
    boxes = (network.model.decoder.bbox_embed, network.model.encoder_output_bbox_embed)
    for parameter in (p for module in boxes for p in module.parameters()):
        torch.nn.init.zeros_(parameter)  # the network stops the gradient at its boxes
    network.model.decoder.layer_norm.weight.data *= 0.1  # scores far from 0 and 1
    network.save_pretrained(folder)
    return folder


def counted(num=3):
    asked = [
        [{"class": "cat", "count": 2}],
        [{"class": "red dogs", "count": 3}, {"class": "cat", "count": 1}],
        [{"class": "dog", "count": 1}],
        [{"class": "cats", "count": 5}],
    ]
    return replace(example_batch(num), metadata=[{"include": rows} for rows in asked[:num]])


def reward(folder, threshold=0.999):
    return SoftCounting(str(folder), threshold, side=64, device="cpu", batch_size=2)


@pytest.mark.slow
def test_what_every_reward_promises(folder):
    model, batch = reward(folder), counted()
    check_scores(model, batch)
    check_small_steps(model, batch, 2e-5)
    media = batch.media.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model.score(replace(batch, media=media)).values.sum(), media)
    assert (slope.flatten(1).abs().sum(1) > 0.01).all()
    check_fingerprints([model, reward(folder, 0.2)])


def test_a_class_of_several_tokens_counts_by_its_best_one(folder):
    """[CLS] red dog ##s . cat . [SEP], through the official class."""
    model, batch = reward(folder), counted().take([1])
    found = model.score(batch).values.item()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    picture = torch.nn.functional.interpolate(
        batch.media[:, 0], (64, 64), mode="bicubic", antialias=True
    )
    pixels = (picture - mean[:, None, None]) / std[:, None, None]
    ids = torch.tensor([[101, 1051, 1052, 1053, 1012, 1050, 1012, 102]])
    with torch.no_grad():
        scores = model.network(pixels, ids).logits[0].sigmoid()
    dogs, cats = scores[:, 1:4].amax(1), scores[:, 5]
    missing = (0.999 - dogs.topk(3).values).relu().sum() + (0.999 - cats.max()).relu()
    assert found == pytest.approx(-missing.item() / 4, rel=1e-4)


def test_what_cannot_be_counted_is_said(folder):
    rows = [
        {"include": [{"class": "cat", "count": 2}]},
        {},
        {"include": [{"class": "cat", "count": 9}]},
        {"include": [{"class": "cat. dog", "count": 1}]},
    ]
    output = reward(folder).score(replace(example_batch(4), metadata=rows))
    assert output.valid[:, 0].tolist() == [True, False, False, False]
    assert "no `include`" in output.reasons[1]
    assert "asks for 9 objects; 8 can be detected" in output.reasons[2]
    assert "'cat. dog'" in output.reasons[3]
