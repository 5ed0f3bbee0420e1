"""The page about sampling in plain diffusers generates flowalign's images."""

import json

import pytest
import torch

from flowalign.sampling.inference import generate
from flowalign.types import plain_requests
from flowalign.utils.seeds import generator
from pipelines.network.weights import Lora
from tests.fixtures.doc_pages import DOCS, ROOT, all_blocks, blocks
from tests.fixtures.embedded import move, new_sd3

PAGE = DOCS / "guides" / "sample_in_diffusers.md"
PROMPTS = ["a red circle above a blue square", "two green triangles"]


@pytest.mark.slow
def test_its_pictures_are_those_of_flowalign_to_four_digits(tmp_path, monkeypatch):
    policy = new_sd3(lora=Lora(rank=16, alpha=32))
    move(policy)
    policy.save_weights(str(tmp_path / "runs/docs/plain/checkpoints/step-000002/ema"))
    seeds = [generator(3, "sample", number, copy) for number in range(2) for copy in range(2)]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    ours = policy.decode(generate(policy, plain_requests(prompts), 8, seeds, micro_batch=4))[:, 0]

    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    code = next(block.code for block in blocks(PAGE) if block.language == "python")
    exec(code, names)
    index = [(number, copy) for number in range(2) for copy in range(2)]
    theirs = [names["picture"](p, 3, *i) for p, i in zip(prompts, index, strict=True)]
    torch.testing.assert_close(torch.stack(theirs), ours, atol=1e-4, rtol=0)
    assert (ours[0] - ours[1]).abs().max() > 0.1, "copies have noise of their own"


@pytest.mark.slow
def test_the_number_of_tokens_decides_the_picture():
    """The pipeline pads a prompt to its own default, the model was trained with one token."""
    policy = new_sd3()
    x = policy.noise(1, generator(3, "sample", 0))
    given = {"height": 32, "width": 32, "guidance_scale": 1.0, "num_inference_steps": 8}
    made = [
        policy.pipe(PROMPTS[0], latents=x, output_type="pt", **given, **tokens).images[0]
        for tokens in ({"max_sequence_length": 1}, {})
    ]
    assert (made[0] - made[1]).abs().max() > 0.05


def test_every_call_of_the_embedded_pipeline_gives_its_number_of_tokens():
    """On all pages, and in the notebook."""
    cells = json.loads((DOCS / "tutorials" / "cpu_demo.ipynb").read_text())["cells"]
    code = [(block.where, block.code) for block in all_blocks("python")]
    code += [("notebook", "".join(c["source"])) for c in cells if c["cell_type"] == "code"]
    own = [(where, text) for where, text in code if "flowalign.align" not in text]
    calls = [(where, text) for where, text in own if "num_inference_steps" in text]
    assert len({where.partition(":")[0] for where, _ in calls}) >= 6
    for where, text in calls:
        assert "max_sequence_length" in text, where
