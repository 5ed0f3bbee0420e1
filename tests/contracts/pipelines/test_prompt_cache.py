"""Conditioning that is encoded once, on disk: equal to the bit, and without encoders afterwards."""

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowalign import runs
from flowalign.data.tensor_store import StoredPrompts
from flowalign.runs import run_memory
from flowalign.runs.config import Run, load
from flowalign.sampling.inference import without_guidance
from flowalign.types import ModelPlan, Request, Setup, encode_requests, with_setup
from flowalign.utils.errors import ConfigError
from pipelines import LTX, SD3, DiffusersPolicy, Wan
from pipelines.text_encoder import TextEncoder
from pipelines.video import Video
from tests.fixtures.components import components
from tests.fixtures.embedded import FOLDER, new_sd3
from tests.fixtures.run_files import write_changed
from tests.fixtures.stopped_runs import SMALL, state

CPU = torch.device("cpu")
ASKED = [Request("a red circle"), Request("two blue squares"), Request("a red circle")]
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def stored(folder: Path, **changes) -> SD3:
    """The embedded policy with a prompt cache, loaded."""
    policy = new_sd3(**changes)  # also without one, to have the same settings
    policy = with_setup(policy, Setup(), cache=StoredPrompts(folder))
    policy.load(CPU)
    return policy


def settings(policy) -> str:
    return policy.text_encoder.describe_settings(policy)


def has_encoders(policy) -> set[bool]:
    return {policy.pipe.components[name] is not None for name in ENCODERS}


def equal(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def one_by_one(policy, requests):
    """Encodings of each request alone; in a batch rounding depends on the batch size."""
    rows = [policy.encode([request]) for request in requests]
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.slow
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_conditioning_equals_that_of_encoders_to_the_bit(tmp_path, guidance):
    plain, policy = new_sd3(guidance=guidance), stored(tmp_path, guidance=guidance)
    assert has_encoders(policy) == {False}
    found = encode_requests(policy, ASKED)
    assert policy.text_encoder.cache.num_encoded == 2
    assert equal(found, one_by_one(plain, ASKED))
    assert equal(encode_requests(policy, ASKED[1:]), one_by_one(plain, ASKED[1:]))
    assert policy.text_encoder.cache.num_encoded == 2


@pytest.mark.slow
@pytest.mark.parametrize(("together", "calls"), [(1, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_as_many_prompts_are_encoded_together_as_the_run_sets(tmp_path, together, calls):
    run = run_of(tmp_path, f"text_micro_batch={together}", f"output_dir={tmp_path / 'out'}")
    runs.start(run, "config: 1\n", lambda _: None)
    alone = one_by_one(run.policy, ASKED)
    rows, encode = [], run.policy.encode
    run.policy.encode = lambda some: rows.append(len(some)) or encode(some)
    found = encode_requests(run.policy, ASKED)
    assert rows == calls
    assert found.keys() == alone.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, alone[name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_what_is_found_needs_no_encoders(tmp_path, monkeypatch):
    first = stored(tmp_path)
    first.text_encoder.cache.prepare(first, ASKED)
    assert has_encoders(first) == {False}
    again = stored(tmp_path)
    monkeypatch.setattr(TextEncoder, "read", lambda *_: pytest.fail("encoders were read"))
    assert equal(encode_requests(again, ASKED), one_by_one(new_sd3(), ASKED))
    assert again.text_encoder.cache.num_encoded == 0


def test_other_settings_are_other_texts(tmp_path):
    """A policy without guidance has no conditioning on the empty prompt."""
    policy = stored(tmp_path, guidance=3.0)
    guided, plain = encode_requests(policy, ASKED), encode_requests(without_guidance(policy), ASKED)
    assert guided.keys() > plain.keys()
    names = {settings(policy), settings(without_guidance(policy))}
    names |= {settings(SD3(FOLDER, 32, 32, 3.0, max_sequence_length=n)) for n in (2, 3)}
    names.add(settings(SD3(FOLDER, 32, 32, 3.0, precision="fp16")))
    assert len(names) == 5
    assert settings(SD3(FOLDER)) == settings(SD3(FOLDER, lora=None))


def test_other_files_are_another_model(tmp_path):
    copy = tmp_path / "sd3"
    shutil.copytree(FOLDER, copy)
    (policy, same) = SD3(FOLDER), SD3(str(copy))
    assert policy.text_encoder.digest_files() == same.text_encoder.digest_files()
    file = copy / "text_encoder_2" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert SD3(str(copy)).text_encoder.digest_files() != policy.text_encoder.digest_files()


@pytest.mark.slow
def test_every_setting_that_an_encoding_may_depend_on_is_an_attribute():
    """`describe_settings` reads it there; a new setting under another name would not be seen."""
    skipped = {"self", "path", "lora", "gradient_checkpointing", "memory"}
    found = [cls for cls in components() if issubclass(cls, DiffusersPolicy)]
    classes = [cls for cls in found if not inspect.isabstract(cls)]
    assert len(classes) > 15
    for cls in classes:
        parameters = inspect.signature(cls.__init__).parameters
        needed = {
            n: "any/path" if n == "path" else Video(height=64, width=64, num_frames=9, fps=8.0)
            for n, p in parameters.items()
            if n in ("path", "video") and n != "self"
        }
        told = vars(cls(**needed))
        assert parameters.keys() - skipped <= told.keys(), cls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "folder"), [(Wan, "I_wan_pipeline"), (LTX, "I_ltx_pipeline")], ids=["Wan", "LTX"]
)
def test_video_policies_do_without_encoders_too(cls, folder, tmp_path):
    def new():
        video = Video(height=64, width=96, num_frames=17, fps=8.0)
        return cls(f"assets/golden/{folder}", video=video, precision="fp32")

    plain, policy = new(), new()
    plain.load(CPU)
    policy = with_setup(policy, Setup(), cache=StoredPrompts(tmp_path))
    policy.load(CPU)
    assert policy.pipe.components["text_encoder"] is None
    assert equal(encode_requests(policy, ASKED), one_by_one(plain, ASKED))


def test_policies_that_need_their_encoders_are_refused(tmp_path):
    policy = {"class_path": "pipelines.AnyFlow", "init_args": {"path": FOLDER}}
    file = write_changed("configs/shapes.yaml", tmp_path, {"policy": policy})
    with pytest.raises(ConfigError, match=r"prompt_cache: AnyFlow needs the encoders while it"):
        load(file, ["prompt_cache=x"])


def run_of(folder: Path, *settings: str) -> Run:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return load(str(file), ["num_steps=2", "recipe.prompts_per_step=1", *settings])[0]


@pytest.mark.slow
def test_a_run_trains_the_same_with_and_without_encoders(tmp_path, monkeypatch):
    cache = f"prompt_cache={tmp_path / 'cache'}"
    for name, settings in (("plain", ()), ("first", (cache,)), ("second", (cache,))):
        run = run_of(tmp_path, f"output_dir={tmp_path / name}", *settings)
        if name == "second":
            monkeypatch.setattr(TextEncoder, "read", lambda *_: pytest.fail("encoders were read"))
        session = runs.start(run, "config: 1\n", lambda _: None)
        if settings:
            assert has_encoders(run.policy) == {False}
        runs.train(session)
    results = [state(tmp_path / name, 2) for name in ("plain", "first", "second")]
    for other in results[1:]:
        assert equal(results[0], other)
    files = list((tmp_path / "cache").rglob("*"))
    assert {f.suffix for f in files if f.is_file()} == {".safetensors"}
    rows = sum(len(load_file(f)["key"]) for f in files if f.is_file())
    prompts = set(Path("assets/shapes/prompts/train.txt").read_text().split("\n")) - {""}
    assert rows == len(prompts) + 2
    told = [json.loads(line) for line in (tmp_path / "second/metrics.jsonl").open()]
    assert told


def test_check_counts_encoders_only_while_they_encode(tmp_path):
    model = ModelPlan(
        latent_shape=(4, 8, 8),
        parameters=100,
        trainable=10,
        bytes_per_parameter=2.0,
        activation_bytes=1,
        sigmas=lambda n: torch.linspace(1, 0, n + 1),
        text_bytes=70,
        encoder_bytes=60,
    )
    run = run_of(tmp_path)
    before = {p.name: p for p in run_memory.network(run, model, 0)}["text encoders and VAE"]
    assert before.savings == {"prompt_cache: FOLDER": 60}
    after = run_memory.network(replace(run, prompt_cache="x"), model, 0)
    found = {(p.name, p.stage): p.num_bytes for p in after}
    assert found["text encoders and VAE", "always"] == 10
    assert found["text encoders", "encoding"] == 60
