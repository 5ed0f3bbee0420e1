"""Z-Image satisfies the contract of policies; its time runs from noise, its texts are ragged."""

import json

import pytest
import torch
from safetensors.torch import load_file

from flowalign.sampling.stepping import last_layers
from flowalign.types import plain_requests
from pipelines.families.z_image import ZImage
from tests.fixtures.families import GOLDEN, assert_unseen
from tests.fixtures.golden import Recorded, recorded_velocities
from tests.fixtures.image_families import official_z_image
from tests.fixtures.policy_contract import PictureContract
from tests.fixtures.tiny_families import family_fixture, sizes

pytestmark = pytest.mark.slow


family = family_fixture(
    "z_image",
    ZImage,
    official_z_image,
    {"dim": 48, "n_heads": 3, "n_kv_heads": 3},
    query="attention.to_q",
    guided={"guidance": 3.0},
    cases=sizes("guidance", (48, 64, 1.0), (48, 64, 5.0), (64, 32, 2.5)),
)


class TestZImage(PictureContract):
    """On the tiny pipeline."""

    # its last layer reads text and padding, too: a critic refuses it by the layer's name
    test_credit_observes_features_that_know_state_and_prompt = None


@pytest.mark.parametrize(("run", "guidance", "rows"), [("cfg", 6.0, 4), ("nocfg", 1.0, 2)])
def test_the_network_is_asked_and_obeyed_as_in_the_reference_pipeline(family, run, guidance, rows):
    """The pipeline's scale of 5 is 6 here. Recorded answers stand in for the recorded weights."""
    recorded = load_file(GOLDEN / "I_zimage.safetensors")
    about = json.loads((GOLDEN / "I_zimage.json").read_text())["values"]
    scale = about["runs"][run]["arguments"]["guidance_scale"]
    assert guidance == scale + 1
    policy = family.new(**about["call_arguments"], guidance=guidance)
    x = policy.noise(2, torch.Generator().manual_seed(about["generator_seed"]))
    cond = policy.encode(plain_requests(family.prompts))
    sigmas = policy.schedule(about["steps"])
    torch.testing.assert_close(sigmas, recorded[f"{run}.sigmas"], atol=1e-6, rtol=0)
    first = recorded[f"{run}.net_in0"][:2, :, 0]
    velocities = recorded_velocities(recorded, run, first)  # equal with guidance
    answers = [-v.repeat(rows // 2, 1, 1, 1)[:, :, None] for v in velocities]
    answers[0], answers[-1] = (recorded[f"{run}.net_out{n}"] for n in ("0", "_last"))
    network = policy.denoiser = Recorded([list(answer) for answer in answers])
    for k in range(about["steps"]):
        x = x + (sigmas[k + 1] - sigmas[k]) * policy.velocity(x, sigmas[k], cond)
    assert len(network.asked) == about["runs"][run]["calls"]
    assert torch.equal(torch.stack(network.asked[0]["x"]), recorded[f"{run}.net_in0"])
    for k, asked in enumerate(network.asked):
        times = recorded[f"{run}.net_t"][k].expand(rows)
        torch.testing.assert_close(asked["t"], times, atol=1e-6, rtol=0)
        assert len(asked["cap_feats"]) == rows
    torch.testing.assert_close(x, recorded[f"{run}.final"], atol=2e-5, rtol=2e-5)


def test_the_network_sees_as_many_tokens_as_a_text_has(family, plain):
    """Every byte of these prompts is a token, and padding changes nothing."""
    cond = plain.encode(plain_requests(family.prompts))
    lengths = cond["length"].tolist()
    assert lengths[1] - lengths[0] == len(family.prompts[1]) - len(family.prompts[0])
    assert cond["text"].shape == (2, 96, 16)
    places = torch.arange(cond["text"].shape[1])
    assert_unseen(plain, cond, places >= cond["length"][:, None])


def test_encoding_leaves_the_prompts_as_they_were(family, plain):
    requests = plain_requests(family.prompts)
    plain.encode(requests)
    assert [one.prompt for one in requests] == list(family.prompts)


def test_the_adapter_is_on_the_attention_of_layers_and_refiners(plain):
    """4 layers of each of 2 blocks, 1 noise refiner and 1 refiner of texts."""
    adapted = [n for n, m in plain.denoiser.named_modules() if n.endswith(".lora_A.default")]
    assert len(adapted) == 4 * (2 + 1 + 1)


def test_the_memory_estimate_counts_layers_and_refiners(family):
    """34 values per token and channel of 2 layers and a refiner, with 12 + 40 tokens."""
    plan = family.cls(family.path, height=48, width=64, max_sequence_length=40).plan()
    assert plan.activation_bytes == 2 * 34 * (3 * 4 + 40) * 32 * 3


def test_a_critic_refuses_the_network(plain):
    with pytest.raises(ValueError, match="ZImageTransformer2DModel has none that is called"):
        last_layers(plain.denoiser)
