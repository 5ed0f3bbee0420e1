"""The embedded editing model: trained as plain diffusers asks, which reads what training wrote."""

import argparse
from itertools import pairwise
from pathlib import Path

import edited_world
import pytest
import torch
import train
from diffusers import FluxKontextPipeline
from torchvision.transforms.functional import to_pil_image
from toy_training import save

from flowalign.data.requests import read_requests
from flowalign.types import MediaBatch, prompts_of
from pipelines.families.flux1 import Flux1Kontext
from pipelines.parts.evaluation import pack
from reward_models.verifiers.shapes_edit import ShapesEditVerifier

ASSETS = Path("assets/shapes_edit")
CALL = {
    "height": 32,
    "width": 32,
    "max_area": 32 * 32,
    "_auto_resize": False,
    "max_sequence_length": train.TOKENS,
    "num_inference_steps": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An untrained pipeline of the script, every parameter away from its start, as it is saved."""
    torch.manual_seed(0)
    sizes = argparse.Namespace(vae="assets/shapes/sd3", width=32, double_layers=1, single_layers=2)
    pipe = train.new_pipeline(sizes)
    with torch.no_grad():
        for p in pipe.transformer.parameters():
            p.add_(0.1 * torch.randn_like(p))
    saved = tmp_path_factory.mktemp("pipeline")
    save(pipe, saved)
    return saved


def plain(folder):
    pipe = FluxKontextPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@torch.no_grad()
def test_training_asks_the_network_what_the_plain_pipeline_asks(folder):
    pipe = plain(folder)
    edits = edited_world.edits(edited_world.combinations()[0], 4, seed=4)
    sources = torch.stack([edited_world.picture(e.change.source) for e in edits])
    editor, x = train.Editor(pipe), torch.randn(4, 16, 16)
    text = editor.embed(train.words_of(pipe, edits))
    source = train.encode(pipe.vae, [e.change.source for e in edits])
    found = pipe(
        image=sources,
        prompt=[e.instruction for e in edits],
        latents=x,
        output_type="latent",
        **CALL,
    ).images
    for sigma, following in pairwise(pipe.scheduler.sigmas):
        x = x + (following - sigma) * editor.velocity(x, sigma.expand(4), source, text)
    torch.testing.assert_close(found, x, atol=1e-4, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_every_word_is_known_and_words_and_source_matter(folder):
    pipe = plain(folder)
    editor = train.Editor(pipe)
    edits = [e for some in edited_world.splits().values() for e in some]
    ids = train.words_of(pipe, edits)
    assert ids.shape == (len(edits), train.TOKENS)
    assert pipe.tokenizer_2.unk_token_id not in ids
    text, pooled = editor.embed(ids[:1])
    source = train.encode(pipe.vae, [edits[0].change.source])
    x, sigma = torch.randn(1, 16, 16), torch.tensor([0.8])
    velocity = editor.velocity(x, sigma, source, (text, pooled))
    for other in (
        (source.flip(1), (text, pooled)),
        (source, (-text, pooled)),
        (source, (text, -pooled)),
    ):
        assert (editor.velocity(x, sigma, *other) - velocity).abs().max() > 1e-3


@pytest.mark.slow
def test_a_picture_and_an_instruction_give_a_picture_of_that_size(folder):
    source = to_pil_image(edited_world.picture(edited_world.splits()["seen"][0].change.source))
    result = plain(folder)(image=source, prompt="make the circle red", **CALL).images[0]
    assert result.size == (32, 32)


@pytest.mark.slow
def test_the_policy_makes_of_the_committed_pipeline_what_plain_diffusers_makes():
    settings = {"embedded_guidance": None, "precision": "fp32", "lora": None}
    length = {"max_sequence_length": train.TOKENS}
    policy = Flux1Kontext(str(ASSETS / "kontext"), height=32, width=32, **settings | length)
    policy.load(torch.device("cpu"))
    requests = read_requests(str(ASSETS / "requests/unseen.jsonl"))[:4]
    x, sigmas = policy.noise(4, torch.Generator().manual_seed(5)), policy.schedule(4)
    state, cond = x, policy.encode(requests)
    with torch.no_grad():
        for k, sigma in enumerate(sigmas[:-1]):
            state = state + (sigmas[k + 1] - sigma) * policy.velocity(state, sigma, cond)
        made = policy.decode(state)[:, 0]
    found = results(plain(ASSETS / "kontext"), requests, latents=pack(x), num_inference_steps=4)
    torch.testing.assert_close(made, found, atol=2e-3, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["seen", "unseen"])
def test_the_committed_pipeline_edits_about_a_fifth_of_the_held_out_requests_right(split):
    """Which leaves room for alignment."""
    requests = read_requests(str(ASSETS / f"requests/{split}.jsonl"))
    generator = torch.Generator().manual_seed(0)
    made = results(plain(ASSETS / "kontext"), requests, generator=generator)
    sources = [[reference.read()[0] for reference in request.references] for request in requests]
    scenes = [request.metadata for request in requests]
    batch = MediaBatch(made[:, None], prompts_of(requests), scenes, references=sources)
    verifier = ShapesEditVerifier()
    means = dict(zip(verifier.spec.dims, verifier.score(batch).values.mean(0), strict=True))
    assert 0.12 < means["exact_match"] < 0.3
    assert 0.8 < means["kept"] < 1


def results(pipe, requests, **changes):
    """The images that plain diffusers generates for requests."""
    sources = torch.cat([request.references[0].read() for request in requests])
    asked = CALL | {"num_inference_steps": 8, "output_type": "pt"} | changes
    return pipe(image=sources, prompt=list(prompts_of(requests)), **asked).images


def test_the_world_takes_less_than_8_megabytes():
    files = [file for file in ASSETS.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 8e6
