"""A reward over HTTP is the reward, on a real server that is slow, refuses, dies, comes back."""

import base64
import io
import json
import math
import re
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from torch.testing import assert_close

from flowalign.cli.serve import format_snippet, run
from flowalign.rewards.batching import Batcher, Limits
from flowalign.rewards.checked import RewardError
from flowalign.rewards.protocol import CONTENT_TYPE, output_from_json, pack_batch, read_request
from flowalign.types import (
    MAY_PASS,
    Column,
    Loadable,
    MediaBatch,
    Reference,
    Request,
    RewardModel,
    RewardOutput,
    RewardSpec,
)
from flowalign.utils.hosts import is_loopback
from reward_models.wrappers.out_of_process import RemoteReward
from tests.fixtures.running import Running

pytestmark = pytest.mark.slow


class Mean(RewardModel, Loadable):
    """Mean and a prompt-dependent value, with further behaviour that tests select."""

    def __init__(self, name="mean", needs=(), before=lambda batch: None, load=lambda: None):
        self.spec = RewardSpec(
            name, ("level", "length"), "any", (0.0, math.inf), "MIT", needs=needs, version="7"
        )
        self.before, self.loading, self.calls = before, load, []

    def load(self):
        self.loading()

    def score(self, batch):
        failed = self.spec.screen(batch)
        self.calls.append(len(batch))
        self.before(batch)
        level = batch.media.mean((1, 2, 3, 4))
        values = torch.stack([level, torch.tensor([len(p) / 8 for p in batch.prompts])], 1)
        extras = [{"said": p} for p in batch.prompts]
        return RewardOutput.build(self.spec, values, failed, values / 2, extras)


def client(url, **options):
    return RemoteReward(url, ["level", "length"], **{"timeout": 20.0, "retries": 0} | options)


def batch_of(n=3, frames=1, size=5, **columns):
    media = torch.rand(n, frames, 3, size, size + 2, generator=torch.Generator().manual_seed(n))
    return MediaBatch(media, ["a" * (i + 1) for i in range(n)], **columns)


def wait_until(happened):
    while not happened():
        time.sleep(0.01)


def together(*calls):
    """Start all calls in threads; return a function that waits for their results."""
    pool = ThreadPoolExecutor(len(calls))
    futures = [pool.submit(call) for call in calls]
    return lambda: [future.result(60) for future in futures]


def encoded(picture, kind="PNG", **options):
    picture.save(buffer := io.BytesIO(), kind, **options)
    return base64.b64encode(buffer.getvalue()).decode()


def test_a_served_model_declares_its_needs_and_columns_to_its_client():
    served, columns = Mean(needs=("prompt", "references")), (Column("task", ("fill", "remove")),)
    served.spec = replace(served.spec, columns=columns)
    with Running(served) as there:
        here = client(there.url)
        here.load()
    assert here.spec.needs == ("prompt", "references")
    assert here.spec.columns == columns
    request = Request("a", (Reference("s", "1", lambda: torch.zeros(1, 3, 2, 2)),), None, {})
    assert here.spec.lacks(request) == served.spec.lacks(request)
    assert "no task; there are fill, remove" in here.spec.lacks(request)


def test_a_served_model_scores_as_it_does_here():
    references = [[torch.rand(3, 4, 6)], [], [torch.rand(3, 2, 2), torch.rand(3, 5, 1)]]
    columns = {"fps": [8.0, 2.5, 3.0], "metadata": [{"x": 1}, {}, {"y": [2]}]}
    masks = [torch.rand(1, 4, 6), None, torch.rand(1, 3, 1)]
    batch = batch_of(frames=2, references=references, groups=[4, 4, 5], masks=masks, **columns)
    seen = []
    local, served = Mean(), Mean(before=seen.append)
    with Running(served) as there:
        got = client(there.url, batch_size=2).score(batch)
    want = local.score(batch)
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.uncertainty, want.uncertainty)
    assert got.extras == want.extras
    whole = seen[0].media, seen[1].media
    assert torch.equal(torch.cat(whole), batch.media)
    assert [list(s.fps) for s in seen] == [[8.0, 2.5], [3.0]]
    assert [dict(m) for s in seen for m in s.metadata] == columns["metadata"]
    assert torch.equal(seen[1].references[0][1], references[2][1])
    assert seen[0].masks[1] is None
    assert torch.equal(seen[0].masks[0], masks[0])
    assert torch.equal(seen[1].masks[0], masks[2])
    assert [g for s in seen for g in s.groups] == [4, 4, 5]


def test_pixels_of_8_bits_travel_unchanged_in_a_quarter_of_the_bytes():
    batch = batch_of()
    eight = MediaBatch((batch.media * 255).round() / 255, batch.prompts)
    small, full = (b"".join(pack_batch(eight, kind, {})) for kind in ("8bit", "float32"))
    assert torch.equal(read_request(small, CONTENT_TYPE, lambda _: None)[1].media, eight.media)
    assert 0 <= len(full) - len(small) - 3 * eight.media.numel() < 16
    assert load(small)["media"].dtype == torch.uint8


def test_a_row_that_fails_there_is_invalid_here_with_its_reason():
    class Picky(Mean):
        def score(self, batch):
            output = super().score(batch)
            bad = {i: "too short" for i, p in enumerate(batch.prompts) if len(p) == 2}
            partly = output.values.clone()
            partly[[len(p) == 3 for p in batch.prompts], 1] = torch.nan
            output = RewardOutput.build(self.spec, partly, bad)
            return replace(output, reasons=dict.fromkeys(output.reasons, "not all") | bad)

    with Running(Picky()) as there:
        output = client(there.url, batch_size=1).score(batch_of())
    assert output.valid.tolist() == [[True] * 2, [False] * 2, [True, False]]
    assert output.reasons == {1: "too short", 2: "not all"}


def test_requests_of_many_clients_share_batches_and_shapes_are_kept_apart():
    gate, model = threading.Event(), Mean(before=lambda batch: gate.wait(20))
    with Running(model, max_batch=64, max_wait_ms=1.0) as there:
        batches = [batch_of(n, size=size) for n, size in ((1, 5), (2, 5), (3, 5), (2, 9), (4, 5))]
        first, *others = [partial(client(there.url).score, batch) for batch in batches]
        begun = together(first)
        wait_until(lambda: model.calls)
        rest = together(*others)
        wait_until(lambda: len(there.service.queues["mean"].waiting) == 4)
        gate.set()
        outputs = [*begun(), *rest()]
    assert sorted(model.calls) == [1, 2, 9]
    for batch, output in zip(batches, outputs, strict=True):
        assert_close(output.values, Mean().score(batch).values)


def test_a_request_that_is_refused_does_not_take_others_of_its_batch_with_it():
    gate = threading.Event()

    def refuse_dogs(batch):
        gate.wait(20)
        if "dog" in batch.prompts:
            raise ValueError("no dogs")

    model = Mean(before=refuse_dogs)
    batcher, later = Batcher(model, Limits(max_wait_ms=1.0)), time.monotonic() + 60
    bad = MediaBatch(batch_of().media, ["cat", "dog", "cow"])
    first = batcher.submit(batch_of(1), later)
    wait_until(lambda: model.calls)
    good, refused, last = (batcher.submit(b, later) for b in (batch_of(), bad, batch_of(2)))
    gate.set()
    assert all(future.result(20).valid.all() for future in (first, good, last))
    with pytest.raises(RewardError, match="no dogs"):
        refused.result(20)
    assert model.calls == [1, 8, 3, 5, 3, 2]


def test_the_earliest_deadline_is_served_first_and_one_that_was_given_up_not_at_all():
    gate = threading.Event()
    model = Mean(before=lambda batch: gate.wait(60))
    batcher, now = Batcher(model, Limits(max_wait_ms=0.0)), time.monotonic()
    first = batcher.submit(batch_of(1), now + 60)
    wait_until(lambda: model.calls)
    sizes, seconds = (2, 3, 4, 5), (400, 200, 100, 300)  # of different shapes: no shared batches
    futures = [
        batcher.submit(batch_of(n, size=n), now + s) for n, s in zip(sizes, seconds, strict=True)
    ]
    futures[1].cancel()
    assert len(batcher.waiting) == 3
    gate.set()
    for future in (first, *futures[:1], *futures[2:]):
        assert future.result(60).valid.all()
    assert model.calls == [1, 4, 5, 2]


def test_a_job_whose_deadline_has_passed_is_not_scored():
    model = Mean()
    batcher = Batcher(model, Limits())
    with pytest.raises(TimeoutError, match="its deadline passed"):
        batcher.submit(batch_of(1), time.monotonic() - 1).result(60)
    assert batcher.submit(batch_of(2), time.monotonic() + 60).result(60).valid.all()
    assert model.calls == [2]


def test_a_model_whose_loading_breaks_is_not_loading_for_ever():
    def broken():
        raise OSError("the disk is gone")

    with Running(Mean(load=broken)) as there, pytest.raises(ValueError, match="the disk is gone"):
        client(there.url).load()


def test_batches_of_groupwise_models_are_not_mixed():
    gate, model = threading.Event(), Mean(needs=("groups",), before=lambda batch: gate.wait(20))
    with Running(model, max_wait_ms=1.0) as there:
        score = partial(client(there.url).score, batch_of(groups=[0, 0, 1]))
        results = together(score, score, score)
        wait_until(lambda: model.calls and len(there.service.queues["mean"].waiting) >= 2)
        gate.set()
        results()
    assert model.calls == [3, 3, 3]


def test_a_request_past_its_deadline_is_invalid_and_the_next_one_is_served():
    gate = threading.Event()
    with Running(Mean(before=lambda batch: gate.wait(20))) as there:
        late = client(there.url, timeout=0.3).score(batch_of())
        gate.set()
        good = client(there.url).score(batch_of())
    assert not late.valid.any()
    assert "not scored within 0.3 seconds" in late.reasons[2]
    assert good.valid.all()


def test_a_server_that_dies_gives_invalid_rows_and_one_that_comes_back_is_used_again():
    batch = batch_of()
    with Running(Mean()) as there:
        reward = client(there.url)
        assert reward.score(batch).valid.all()
    dead = reward.score(batch)
    assert not dead.valid.any()
    assert dead.reasons[0].startswith("the reward server failed 1 times, last with ConnectError")
    assert MAY_PASS in dead.reasons[0]
    with Running(Mean(), port=there.port):
        assert reward.score(batch).valid.all()


def test_a_transient_failure_is_tried_again():
    failures = iter([RuntimeError("out of memory"), OSError("disk")])

    def sometimes(_):
        if error := next(failures, None):
            raise error

    with Running(Mean(before=sometimes)) as there:
        output = client(there.url, retries=2).score(batch_of())
        assert output.valid.all()


def test_what_the_model_calls_wrong_is_raised_and_not_tried_again():
    calls = []

    def refuse(batch):
        calls.append(1)
        raise ValueError("no such prompt")

    with (
        Running(Mean(before=refuse)) as there,
        pytest.raises(ValueError, match=r"status 422.*no such prompt"),
    ):
        client(there.url, retries=3).score(batch_of())
    assert calls == [1]


def test_the_same_request_id_is_scored_once():
    model = Mean()
    message = b"".join(pack_batch(batch_of(), "float32", {"request_id": "one", "model": "mean"}))
    with Running(model) as there, httpx2.Client(base_url=there.url) as http:
        headers = {"content-type": CONTENT_TYPE}
        first, second = (
            http.post("/score", content=message, headers=headers).json() for _ in range(2)
        )
    assert first == second
    assert model.calls == [3]


def test_png_over_json_is_understood_and_jpeg_is_not():
    picture = Image.new("RGB", (4, 2), (255, 0, 51))
    images = encoded(picture), encoded(picture, "JPEG"), "iVBORw0KGgo="
    with Running(Mean()) as there, httpx2.Client(base_url=there.url) as http:
        answer, refused, broken = (
            http.post("/score", json={"prompts": ["ab"], "images": [image]}) for image in images
        )
    assert answer.json()["values"][0] == pytest.approx([(1 + 0.2) / 3, 0.25])
    assert (refused.status_code, broken.status_code) == (400, 400)
    assert "lossless" in refused.json()["error"]


def test_pictures_over_json_are_decoded_as_files_are():
    """Transparency is shown on white, grey of 16 bits is scaled, and the EXIF rotation applies."""
    exif = Image.Exif()
    exif[0x0112] = 6
    clear, deep = Image.new("RGBA", (4, 2), (0, 0, 0, 0)), np.full((2, 4), 32896, np.uint16)
    files = [encoded(picture, exif=exif) for picture in (clear, Image.fromarray(deep))]
    body = json.dumps({"images": files}).encode()
    _, batch = read_request(body, "application/json", lambda shapes: None)
    assert batch.media.shape == (2, 1, 3, 4, 2)
    assert [image.unique().tolist() for image in batch.media] == [[1], [pytest.approx(128 / 255)]]


def test_a_request_that_is_too_large_is_refused():
    large = batch_of(size=64)
    with Running(Mean(), max_request_mb=0.01) as there, pytest.raises(ValueError, match="413"):
        client(there.url).score(large)


def test_health_says_loading_then_ready_and_failed_with_the_reason():
    gate = threading.Event()
    with Running(Mean(load=lambda: gate.wait(20))) as there, httpx2.Client(base_url=there.url) as h:
        assert (h.get("/health").status_code, h.get("/health").json()["status"]) == (503, "loading")
        gate.set()
        client(there.url).load()
        assert h.get("/health").json()["models"] == {"mean": "ready"}

    def fail():
        raise ValueError("weights are missing")

    with Running(Mean(load=fail)) as there, pytest.raises(ValueError, match="weights are missing"):
        client(there.url).load()


def test_the_clients_spec_is_the_servers_with_its_fingerprint():
    with Running(Mean()) as there:
        reward = client(there.url)
        reward.load()
    assert reward.spec.scale == (0.0, math.inf)
    assert Mean().spec.fingerprint() in reward.spec.version


def test_loading_refuses_other_dimensions_unknown_models_and_absent_servers():
    with Running(Mean(), Mean("other")) as there:
        with pytest.raises(ValueError, match="gives level, length, not level"):
            RemoteReward(there.url, ["level"], "other", timeout=2.0).load()
        with pytest.raises(ValueError, match="no model None; it has mean, other"):
            client(there.url).load()
        assert client(there.url, model="other").score(batch_of()).valid.all()
    with pytest.raises(ValueError, match="cannot be reached"):
        client(there.url, timeout=1.0).load()
    with pytest.raises(ValueError, match="must start with http"):
        RemoteReward("localhost:8411", ["level"])


def test_a_token_is_asked_for(monkeypatch):
    with Running(Mean(), token="secret") as there:
        with pytest.raises(ValueError, match=r"401.*environment variable FLOWALIGN_REWARD_TOKEN"):
            client(there.url).load()
        monkeypatch.setenv("FLOWALIGN_REWARD_TOKEN", "secret")
        assert client(there.url).score(batch_of()).valid.all()


def test_other_machines_are_served_with_a_token_only(monkeypatch):
    import argparse

    monkeypatch.delenv("FLOWALIGN_REWARD_TOKEN", raising=False)
    args = argparse.Namespace(host="0.0.0.0", token_env="FLOWALIGN_REWARD_TOKEN", rewards="x")
    with pytest.raises(ValueError, match="clients need a token"):
        run(args)
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "host")))


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {"values": [[1.0, 2.0]], "uncertainty": None, "reasons": {}, "extras": []},
        {"values": [[1.0]] * 3, "uncertainty": None, "reasons": {}, "extras": []},
    ],
)
def test_an_answer_of_another_length_is_an_error(content):
    with pytest.raises(ValueError, match=r"answer|dimensions"):
        output_from_json(content, Mean().spec, 3)


def test_the_snippet_is_a_run_files_reward_list(tmp_path):
    from flowalign.rewards.config import load_rewards

    with Running(Mean(), Mean("other")) as there:
        file = tmp_path / "rewards.yaml"
        file.write_text(format_snippet(there.service.queues, there.url))
        models, _ = load_rewards(str(file))
    assert [m.model for m in models] == ["mean", "other"]
    assert models[1].spec.dims == ("level", "length")


def test_serving_imports_no_library_that_needs_another_version_of_transformers():
    """So the environment of IXC-2.5-Reward can have transformers 4, next to flowalign alone."""
    code = """
import sys
from flowalign.cli import main, serve
from flowalign.rewards import reward_server
from flowalign.rewards.config import load_rewards
load_rewards("configs/rewards/ixc_reward.yaml")
print([name for name in ("transformers", "diffusers", "peft") if name in sys.modules])
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_environment_of_a_server_lists_every_package_that_serving_needs():
    lines = Path("configs/rewards/ixc_requirements.txt").read_text().splitlines()
    named = {re.match(r"[\w-]+", line)[0] for line in lines if line and not line.startswith("#")}
    own = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    needed = {"torch", "safetensors", "numpy", "pillow", "jaxtyping", "jsonargparse", "pyyaml"}
    needed |= {"rich", "typing-extensions", "fastapi", "uvicorn", "httptools"}
    assert needed <= named
    pinned = {line for line in lines if re.match(r"(torch|torchvision|jsonargparse)[^\w]", line)}
    assert pinned <= set(own["dependencies"])
    assert "transformers>=4.46,<5" in lines
