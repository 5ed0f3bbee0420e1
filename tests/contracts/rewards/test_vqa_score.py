"""VQAScore by any judge, and by CLIP-FlanT5 on a tiny checkpoint in the published layout."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from flowalign.types import MediaBatch
from reward_models.backbones.yes_no_judges import QwenYesNo
from reward_models.questions.vqa_score import QUESTION, ClipFlanT5, VQAScore, padded_square
from tests.fixtures.fake_judge import FakeJudge
from tests.fixtures.reward_contract import (
    check_contract,
    check_fingerprints,
    check_keys,
    example_batch,
)
from tests.fixtures.tiny_qwen import build_judge

pytestmark = pytest.mark.slow

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions."
)
T5 = {
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 260,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
}
SIZE = 56


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_clip_t5(tmp_path_factory.mktemp("clip_t5"))


def model(folder: Path, **changes) -> ClipFlanT5:
    given = {"source": str(folder), "tokenizer": str(folder / "t5"), "device": "cpu"}
    return ClipFlanT5(**given | changes)


def write_clip_t5(folder: Path) -> Path:
    """Names of the published file, a word embedding under a fourth name, a separate head."""
    torch.manual_seed(5)
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=20,
            intermediate_size=30,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=SIZE,
            patch_size=14,
        )
    )
    vision.save_pretrained(folder / "clip")
    t5 = T5ForConditionalGeneration(T5Config(**T5))
    tensors = {k: v.clone() for k, v in t5.state_dict().items()}
    for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "embed_tokens"):
        tensors[f"{name}.weight"] = tensors["shared.weight"]
    tensors["lm_head.weight"] = torch.randn(260, 24)
    for name, (rows, columns) in {"0": (24, 20), "2": (24, 24)}.items():
        tensors[f"mm_projector.{name}.weight"] = torch.randn(rows, columns) * 0.5
        tensors[f"mm_projector.{name}.bias"] = torch.randn(rows) * 0.5
    for name, value in vision.state_dict().items():
        noise = torch.randn(value.shape) * 0.3 if value.ndim > 1 else 0
        tensors[f"vision_tower.vision_tower.vision_model.{name}"] = value + noise
    torch.save(tensors, folder / "pytorch_model.bin")
    config = T5 | {
        "model_type": "t5",
        "architectures": ["CLIPT5ForConditionalGeneration"],
        "mm_vision_tower": str(folder / "clip"),
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_select_layer": -2,
        "mm_vision_select_feature": "patch",
        "mm_hidden_size": 20,
        "freeze_mm_mlp_adapter": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.31.0",
    }
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = ["<pad>", "</s>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Yes"]
    bytes_only = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.post_processor = processors.TemplateProcessing(
        "$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.add_tokens(["Yes"])
    tokenizer.save_pretrained(folder / "t5")
    return folder


def by_hand(folder: Path, image: Tensor, prompt: str) -> float:
    """exp of minus the mean cross entropy of "Yes" and the end, pixels by PIL."""
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    t5 = T5ForConditionalGeneration(T5Config(**T5)).eval()
    t5.load_state_dict({k: tensors[k] for k in t5.state_dict() if k != "lm_head.weight"}, False)
    vision = CLIPVisionModel.from_pretrained(folder / "clip").eval()
    start = "vision_tower.vision_tower.vision_model."
    vision.load_state_dict({k.removeprefix(start): v for k, v in tensors.items() if start in k})
    bits = (image * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture, side = Image.fromarray(bits), max(image.shape[1:])
    square = Image.new("RGB", (side, side), (122, 116, 104))
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )
    pixels = processor(square, return_tensors="pt")["pixel_values"]
    patches = vision(pixels, output_hidden_states=True).hidden_states[-2][0, 1:]
    weight = [
        tensors[f"mm_projector.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    ]
    image_part = F.linear(F.gelu(F.linear(patches, *weight[:2])), *weight[2:])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "t5")
    question = f'Does this figure show "{prompt}"? Please answer yes or no.'
    pieces = [
        tokenizer(text)["input_ids"] for text in (f"{SYSTEM} USER: ", f"\n{question} ASSISTANT: ")
    ]
    assert all(piece[-1] == 1 for piece in pieces)
    words = [tensors["shared.weight"][piece] for piece in pieces]
    encoded = t5.encoder(inputs_embeds=torch.cat([words[0], image_part, words[1]])[None])[0]
    answer = torch.tensor(tokenizer("Yes")["input_ids"])
    assert len(answer) == 2
    decoded = t5.decoder(torch.tensor([[0, int(answer[0])]]), encoder_hidden_states=encoded)[0]
    return float((-F.cross_entropy(decoded[0] @ tensors["lm_head.weight"].T, answer)).exp())


def batch(height: int = 40, width: int = 70) -> MediaBatch:
    """Four 8-bit images with prompts of different lengths."""
    found = example_batch(4, height=height, width=width)
    return replace(found, media=(found.media * 255).round() / 255)


@pytest.mark.parametrize(("size", "rtol"), [((40, 70), 5e-3), ((80, 50), 5e-3), ((56, 56), 1e-4)])
@torch.no_grad()
def test_clip_flan_t5_gives_what_its_parts_give_by_hand(folder, size, rtol):
    """Most exactly where nothing is resized."""
    given = batch(*size)
    expected = [by_hand(folder, m[0], p) for m, p in zip(given.media, given.prompts, strict=True)]
    scores = model(folder).score(given).values[:, 0]
    assert scores.std() / scores.mean() > 0.01
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=rtol, atol=0)


def test_clip_flan_t5_keeps_the_contract(folder):
    check_contract(model(folder, batch_size=3), example_batch(4, height=56, width=56))


def test_the_square_is_padded_around_the_middle_with_the_mean_colour():
    flat = padded_square(torch.ones(1, 3, 20, 40), 40)
    assert (flat[..., :10, :].abs() < 0.02).all()
    assert (flat[..., 10:30, :] > 1.5).all()
    assert (flat[..., 30:, :].abs() < 0.02).all()


def test_a_checkpoint_with_another_key_is_refused(tmp_path):
    folder = write_clip_t5(tmp_path)
    check_keys(folder / "pytorch_model.bin", "mm_projector.0.bias", model(folder).load)


def test_tied_and_deduplicated_embeddings_may_be_left_out(folder, tmp_path):
    other = write_clip_t5(tmp_path)
    tensors = torch.load(other / "pytorch_model.bin", weights_only=True)
    for name in ("encoder.embed_tokens", "decoder.embed_tokens", "embed_tokens"):
        del tensors[f"{name}.weight"]
    torch.save(tensors, other / "pytorch_model.bin")
    assert torch.equal(model(other).score(batch()).values, model(folder).score(batch()).values)


def test_half_precision_is_close_and_has_another_fingerprint(folder):
    full, half = model(folder), model(folder, dtype="bfloat16")
    check_fingerprints([full, half])
    scores = half.score(batch()).values
    torch.testing.assert_close(scores, full.score(batch()).values, rtol=0.1, atol=0)


def test_another_layout_is_refused(tmp_path):
    folder = write_clip_t5(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"mm_projector_type": "linear"}))
    with pytest.raises(ValueError, match="mlp2x_gelu"):
        model(folder).load()


def test_the_head_is_not_that_of_the_embedding(folder):
    network = model(folder).read()
    assert isinstance(network, nn.Module)
    assert not torch.equal(network.t5.lm_head.weight, network.t5.shared.weight)
    assert torch.equal(network.t5.encoder.embed_tokens.weight, network.t5.shared.weight)
    assert not network.t5.config.scale_decoder_outputs


def test_vqa_score_is_what_the_judge_answers_to_the_question():
    judge = FakeJudge({'Does this figure show "tea"? Please answer yes or no.': 0.375})
    output = VQAScore(judge).score(replace(example_batch(1), prompts=["tea"]))
    assert output.values.tolist() == [[0.375]]
    assert judge.asked[0] == [QUESTION.replace("[[prompt]]", "tea")]


def test_a_judge_without_an_answer_makes_the_sample_invalid():
    judge = FakeJudge({QUESTION.replace("[[prompt]]", "tea"): torch.nan})
    output = VQAScore(judge).score(replace(example_batch(2), prompts=["tea", "milk"]))
    assert output.valid.flatten().tolist() == [False, True]
    assert "no answer" in output.reasons[0]


def test_vqa_score_keeps_the_contract_with_a_judge():
    check_contract(VQAScore(FakeJudge()), example_batch())
    check_contract(VQAScore(FakeJudge()), example_batch(frames=3))


def test_vqa_score_keeps_the_contract_with_a_local_model(tmp_path):
    judge = QwenYesNo(str(build_judge(tmp_path / "judge")), "cpu", "float32", batch_size=3)
    check_contract(VQAScore(judge), example_batch())


def test_other_judges_and_questions_have_other_fingerprints():
    check_fingerprints(
        [
            VQAScore(FakeJudge()),
            VQAScore(FakeJudge({"a": 1.0})),
            VQAScore(FakeJudge(), "[[prompt]]?"),
        ]
    )
    with pytest.raises(ValueError, match="prompt"):
        VQAScore(FakeJudge(), "a cat?")
