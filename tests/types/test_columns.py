"""Columns of real batches have the axes that `COLUMNS` documents, and no column is unknown."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from jaxtyping import Shaped, jaxtyped
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from flowalign.credit import Branch, Gain, ProcessOutcome
from flowalign.data.encode_once import LatentCache, PromptEmbeddingCache
from flowalign.data.preference.collate import Collator
from flowalign.data.preference.preference_data import Media, Pair, Sample, Segment
from flowalign.extra import OmniNFT, SpanGRPO
from flowalign.losses import (
    AWM,
    CRD,
    DPO,
    FDFO,
    GRPO,
    KTO,
    NFT,
    OPD,
    OPSD,
    PPOClip,
    RatioNorm,
    StepDPO,
)
from flowalign.rewards.composite import Rewards
from flowalign.sampling import AllButLast, Comb, Sampling
from flowalign.training.learner import Learner
from flowalign.training.matching import (
    GuidedStep,
    OnPolicyStates,
    RewardAscent,
    SamplerGrid,
    StoredDataset,
    VisitedStates,
)
from flowalign.training.matching.noising import noise_for
from flowalign.training.matching.residuals import matching_residuals, select_fields
from flowalign.training.matching.source import BatchStream, StreamContext
from flowalign.training.policy_gradient.batches import minibatches
from flowalign.training.policy_gradient.gardo import UncertaintyGate
from flowalign.training.rollouts.advantages import RewardMap
from flowalign.types import COLUMNS, Batch, RewardOutput, plain_requests
from tests.fixtures.credited import judged
from tests.fixtures.latent import LatentRedness
from tests.fixtures.matching_losses import LOSSES
from tests.fixtures.pixel import PixelPolicy, Redness, SmoothRedness
from tests.fixtures.preference import jsonl, painted, recipe, stored
from tests.fixtures.scored import batch_of, groups, opened
from tests.fixtures.training import new_learner, new_recipe, new_rewards
from tests.fixtures.video_pixel import GRID, VideoPixel

NEVER_IN_A_MINIBATCH = {"mask", "rival", "log_ratio", "chunk", "span", "row", "part"}
OF_KEPT_GRAPHS = {"velocity"}  # tests/training/policy_gradient/test_shared_states.py


def assert_documented(batch: Batch) -> None:
    """Axes with one name, such as the rows and the latent, have one size in the whole batch."""
    for name, column in batch.items():
        axes = COLUMNS[name][0]
        if axes == "names":
            assert all(isinstance(one, str) for one in column), name
            continue
        for each in column.values() if axes == "group" else [column]:
            own = axes if axes != "group" else "..."
            assert isinstance(each, Shaped[Tensor, f"n {own}"]), (name, each.shape)


class Mapped(Redness):
    """Redness with the brightness of each place as its map."""

    def __init__(self):
        super().__init__()
        self.spec = replace(self.spec, name="mapped", modality="any", maps=True)

    def score(self, batch):
        values = super().score(batch).values
        return RewardOutput.build(self.spec, values, places=batch.media.mean(2))


class Ready(LatentCache):
    """Latents of videos that are there."""

    def __init__(self):
        pass

    def read(self, media, flipped):
        return torch.randn(len(media), 3, *GRID)


# Matching -----------------------------------------------------------------------------------------


def matched(loss, stream: BatchStream, learner: Learner | None = None, **changes) -> Batch:
    """The batch that a loss reads, at the first step of a stream."""
    learner, found = learner or new_learner(), batch_of(stream)
    cfg = recipe(loss=loss, **changes)
    for name in ("old", "anchor"):
        learner.fields[name] = learner.reference
    part = noise_for(
        cfg, learner.policy, found.examples, 0, (0, 0, 0), found.steps, found.visited
    ).all()
    states = cfg.states.build(part, learner.policy, learner.policy)
    return matching_residuals(cfg, learner.policy, states, select_fields(cfg, learner))


def of_stored(folder: Path) -> Iterator[Batch]:
    yield matched(DPO(), stored(painted(folder), new_learner()))
    segment = [{"start": 0, "stop": 1, "label": -1}]
    known = {"user_id": ["u"] * 6, "segments": [segment] * 6}
    yield matched(KTO(), stored(painted(folder, 6, "more", **known), new_learner()))
    Image.new("RGB", (4, 4), (40, 90, 90)).save(folder / "0.png")
    row = {"prompt": "a", "image": "0.png", "positive": "sharp", "negative": "blurred"}
    path = jsonl(folder / "attributes.jsonl", [row])
    source = StoredDataset(path=path, kind="attributes", batch_size=1)
    yield matched(DPO(), source.open(new_learner(), StreamContext(new_rewards(), 0)))


def of_maps(folder: Path) -> Iterator[Batch]:
    save_file({"map": torch.ones(8, 4, 6)}, folder / "map.safetensors")
    file, texts = str(folder / "map.safetensors"), PromptEmbeddingCache(PixelPolicy(), None)
    texts.prepare(plain_requests(["p"]))
    sides = Sample("p", Media("a"), weight_map=file), Sample("p", Media("b"))
    pairs = [Pair(*sides, segments=[Segment(0, 2, -1)], mask=file), Pair(*sides)]
    yield Collator(Ready(), texts, pairs).build(pairs)


def of_scored_groups(folder: Path) -> Iterator[Batch]:
    stochastic = {"sde_window": AllButLast()}
    policy = PixelPolicy()
    policy.modality_sizes = {"video": 2, "audio": 1}
    rewards, learner = new_rewards(), new_learner(policy)
    parts = {"video": ["redness"], "audio": ["redness"]}
    yield matched(NFT(), opened(groups(folder, stochastic, credit=Gain())))
    yield matched(OmniNFT(), opened(groups(folder, modalities=parts), learner, rewards))
    yield matched(AWM(), opened(groups(folder)), states=GuidedStep(count=2))
    yield matched(CRD(), opened(groups(folder)))
    two = {"samples_per_prompt": 2, "seeds_per_prompt": 1, **stochastic}
    visited = {"states": VisitedStates(), "times": SamplerGrid(num_steps=4)}
    yield matched(FDFO(), opened(groups(folder, two, contrast=True)), **visited)
    smooth = Rewards([SmoothRedness()], {"redness": 1.0})
    at_query = visited | {"times": SamplerGrid(num_steps=4, start=2, stop=3)}
    yield matched(
        OPSD(), opened(groups(folder, ascent=RewardAscent(query=2)), None, smooth), **at_query
    )
    videos, mapped = new_learner(VideoPixel()), Rewards([Mapped()], {"redness": 1.0})
    spatial = groups(folder, spatial=RewardMap(reward="mapped"), weight_map="mapped")
    yield matched(NFT(), opened(spatial, videos, mapped), videos)


def of_visited_states(folder: Path) -> Iterator[Batch]:
    prompts = jsonl(folder / "routed.jsonl", [{"prompt": p, "teacher": "one"} for p in "abc"])
    source = OnPolicyStates(
        prompts=prompts,
        prompts_per_step=3,
        teacher_field="teacher",
        sampling=Sampling(num_steps=4, samples_per_prompt=2, sde_window=AllButLast()),
    )
    times = SamplerGrid(num_steps=4, stop=3)
    stream = source.open(new_learner(), StreamContext(new_rewards(), 0))
    yield matched(OPD(), stream, states=VisitedStates(), times=times)


# Policy gradient ----------------------------------------------------------------------------------


def transitions(policy=None, rewards=None, sampling=None, **changes) -> Batch:
    """The first minibatch of a step."""
    cfg, learner = new_recipe(sampling, **changes), new_learner(policy)
    batch, _ = judged(cfg, learner, rewards)
    return next(minibatches(batch, torch.arange(len(batch.mask)), 100))


def of_policy_gradients(folder: Path) -> Iterator[Batch]:
    clipped = PPOClip(0.2)
    yield transitions(algorithm=GRPO(RatioNorm(0.2)))
    yield transitions(algorithm=GRPO(clipped, chunk_sizes=[2, 2]))
    yield transitions(algorithm=SpanGRPO(span_steps=2, clip_range=0.2))
    yield transitions(algorithm=StepDPO(reference="old"))
    comb = {"branching": Comb(children=2), "samples_per_prompt": 6}
    yield transitions(sampling=comb, credit=Branch())
    yield transitions(credit=ProcessOutcome(reward=LatentRedness()))
    gate = UncertaintyGate(auxiliary=["green"], share=0.25)
    yield transitions(kl_gate=gate, algorithm=GRPO(clipped, kl_coef=0.1))
    mapped = Rewards([Mapped()], {"redness": 1.0})
    yield transitions(VideoPixel(), mapped, spatial=RewardMap(reward="mapped"))


SOURCES = (of_stored, of_maps, of_scored_groups, of_visited_states, of_policy_gradients)


def test_columns_have_the_axes_that_are_documented_and_every_column_is_used(tmp_path):
    seen = set()
    for source in SOURCES:
        for batch in source(tmp_path):
            with jaxtyped("context"):
                assert_documented(batch)
            seen |= {*batch}
    assert seen == COLUMNS.keys() - NEVER_IN_A_MINIBATCH - OF_KEPT_GRAPHS


def test_every_loss_needs_columns_that_are_documented():
    for loss in (*LOSSES.values(), AWM(), CRD(), FDFO(), NFT(), OPD(), OPSD(), OmniNFT()):
        assert loss.needs <= COLUMNS.keys()


def test_an_unknown_column_and_columns_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"unknown columns \['latent'\]: describe them"):
        Batch({"latent": torch.zeros(2)})
    with pytest.raises(ValueError, match="differ in their number of rows"):
        Batch({"weight": torch.zeros(2), "cond": {"text": torch.zeros(3)}})
    with pytest.raises(KeyError, match="the batch has no column 'old', only weight"):
        Batch({"weight": torch.zeros(2), "scores": {}})["old"]


def test_the_page_on_the_loop_names_columns_that_exist():
    page = Path("docs/concepts/the_loop.md").read_text()
    section = page.split("## Batch and engine")[1].split("\n## ")[0]
    rows = [line.split("|")[3] for line in section.splitlines() if line.startswith("| ")][1:]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {"x_next", "policy", "advantage"} <= named <= COLUMNS.keys()
