"""`flowalign export` writes what other programs load, and publishes it; refusals are short."""

import json
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from diffusers import StableDiffusion3Pipeline
from huggingface_hub import HfApi
from PIL import Image
from safetensors import safe_open

from flowalign.runs.sampling_job import hash_weights
from flowalign.training.checkpoint import write_manifest
from flowalign.utils.hub import check_publishing
from tests.fixtures.commands import exit_code
from tests.fixtures.embedded import move, new_sd3

PUBLISH = ["--push-to-hub", "ann/red-circles", "--license", "apache-2.0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The directory of a finished run of the embedded model, with averaged weights."""
    folder = tmp_path_factory.mktemp("runs") / "shapes"
    checkpoint = folder / "checkpoints" / "step-000003"
    settings = yaml.safe_load(Path("configs/shapes.yaml").read_text())
    settings["policy"]["init_args"]["lora"] = {"rank": 3, "alpha": 6}
    settings["notify"] = ["curl", "https://hooks.example/SECRET"]
    (checkpoint / "state").mkdir(parents=True)
    policy = new_sd3(lora=_lora())
    policy.save_weights(str(checkpoint))
    move(policy)
    policy.save_weights(str(checkpoint / "ema"))
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(settings))
    write_manifest(checkpoint)
    (folder / "samples").mkdir()
    for step in (0, 2, 3):
        (folder / "samples" / f"step-00000{step}.png").write_bytes(b"grid %d" % step)
    summary = {"status": "finished", "steps": 3, "seed": 7, "seconds": 12.5}
    summary |= {"before": {"eval/exact_match": 0.25}, "after": {"eval/exact_match": 0.75}}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": 0, "evaluated_after": 0.0, "eval/exact_match": 0.25}]
    rows += [{"step": step, "reward_mean": 0.3 + 0.1 * step} for step in range(3)]
    rows += [{"step": 2, "evaluated_after": 3.0, "eval/exact_match": 0.75}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _lora():
    from pipelines.network.weights import Lora

    return Lora(rank=3, alpha=6)


def told(capsys, *words: object) -> tuple[object, str]:
    code = exit_code("export", *words)
    return code, " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["diffusers", "peft", "comfyui", "merged"])
def test_an_export_is_a_folder_with_weights_settings_grid_and_card(run, tmp_path, capsys, target):
    out = tmp_path / "out"
    code, said = told(capsys, run, "--to", target, "--dtype", "bf16", "--out", out)
    assert code == 0, said
    read_back = "not verified" if target == "comfyui" else "it reads back within 0.0e+00"
    assert f"step-000003/ema; {read_back}" in said
    files = {f.name for f in out.iterdir()}
    assert files >= {"README.md", "flowalign.yaml", "samples.png"}
    assert {
        "diffusers": "pytorch_lora_weights.safetensors",
        "peft": "adapter_model.safetensors",
        "comfyui": "comfyui_lora.safetensors",
        "merged": "model_index.json",
    }[target] in files
    settings = yaml.safe_load((out / "flowalign.yaml").read_text())
    assert settings["num_steps"] == 150
    assert not any(b"SECRET" in file.read_bytes() for file in out.rglob("*") if file.is_file())
    _, front, text = (out / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(front)
    assert about["base_model"] == "assets/shapes/sd3"
    assert about["library_name"] == "diffusers"
    assert ("lora" in about["tags"]) == (target != "merged")
    assert "| eval/exact_match | 0.2500 | 0.7500 |" in text
    assert "one run with seed 7" in text
    assert "flowalign.training.PolicyGradient" in text
    assert list(tmp_path.iterdir()) == [out]
    if target != "merged":
        (file,) = out.glob("*.safetensors")
        with safe_open(file, "pt") as weights:
            stamped = weights.metadata()
        assert stamped["flowalign.base_model"] == "assets/shapes/sd3"
        assert stamped["flowalign.rewards"] == "reward_models.ShapesVerifier"
        method = "flowalign.training.PolicyGradient, flowalign.losses.GRPO"
        assert stamped["flowalign.method"] == method
    if target == "peft":
        config = json.loads((out / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == "assets/shapes/sd3"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["peft", "merged"])
def test_no_file_of_an_export_names_a_local_folder(run, tmp_path, capsys, target):
    """The hub refuses a card whose base model is no id."""
    model, copied = tmp_path / "ann" / "sd3", tmp_path / "ann" / "run"
    shutil.copytree("assets/shapes/sd3", model)
    shutil.copytree(run, copied)
    checkpoint = copied / "checkpoints" / "step-000003"
    settings = yaml.safe_load((checkpoint / "config.yaml").read_text())
    settings["policy"]["init_args"]["path"] = str(model)
    (checkpoint / "config.yaml").write_text(yaml.safe_dump(settings))
    (checkpoint / "manifest.json").unlink()
    write_manifest(checkpoint)
    code, said = told(capsys, copied, "--to", target, "--out", tmp_path / "out")
    assert code == 0, said
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert [file for file in files if str(tmp_path).encode() in file.read_bytes()] == []
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in yaml.safe_load(card.split("---\n", 2)[1])
    assert "from_pretrained('sd3')" in card or target == "merged"


@pytest.mark.slow
def test_the_card_s_code_loads_the_weights_and_a_dry_run_publishes_nothing(
    run, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    benchmark = benchmark_of(run / "checkpoints" / "step-000003" / "ema", tmp_path / "benchmark")
    for name in ("check_publishing", "publish"):
        refuse = partial(pytest.fail, name)
        monkeypatch.setattr(f"flowalign.utils.hub.{name}", lambda *_, f=refuse: f())
    evidence = ["--benchmark", str(benchmark)]
    assert exit_code("export", str(run), "--out", str(out), *evidence, *PUBLISH, "--dry-run") == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "would be published as ann/red-circles (public)" in listed
    for file in out.iterdir():
        assert file.name in listed
    card = (out / "README.md").read_text()
    assert "## Shapes\n\n| metric | base | trained |\n" in card
    assert "(curves.png)" in card
    assert card.index("(samples_before.png)") < card.index("(samples.png)")
    shown = [(out / f"samples{name}.png").read_bytes() for name in ("_before", "")]
    assert shown == [b"grid 0", b"grid 3"]
    with Image.open(out / "curves.png") as picture:
        assert picture.width > 1000  # two panels: reward, and held-out values
    code = card.split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(code.replace("PATH", str(out)), names)
    assert isinstance(names["pipe"], StableDiffusion3Pipeline)
    assert names["pipe"].get_active_adapters() == ["default_0"]


def benchmark_of(weights: Path, folder: Path) -> Path:
    """Write the results that `flowalign eval --benchmark` leaves for some weights."""
    folder.mkdir()
    digests = {"base": "base", "trained": f"weights-{hash_weights(weights)}"}
    (folder / "results.json").write_text(json.dumps({"title": "Shapes", "weights": digests}))
    (folder / "results.md").write_text(
        "| metric | base | trained |\n|---|---|---|\n| a | 1 | 2 |\n"
    )
    return folder


def test_results_of_other_weights_are_not_put_into_the_card(run, tmp_path, capsys):
    checkpoint = run / "checkpoints" / "step-000003"
    other = benchmark_of(checkpoint, tmp_path / "other")
    code, said = told(capsys, run, "--out", tmp_path / "out", "--benchmark", other)
    assert code == 2
    assert "evaluated base, trained, not the exported weights" in said
    assert f"--weights {checkpoint / 'ema'}" in said
    code, said = told(capsys, run, "--out", tmp_path / "out", "--benchmark", tmp_path)
    assert code == 2
    assert "has no results.json" in said
    assert not (tmp_path / "out").exists()


@pytest.fixture
def _reads_nothing(monkeypatch):
    monkeypatch.setattr("pipelines.policy.load_pipeline", lambda *_, **__: pytest.fail("weights"))


@pytest.mark.usefixtures("_reads_nothing")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "assets/shapes_video/wan"],
            "belongs to another family than StableDiffusion3Pipeline",
        ),
        (["--model", "assets/golden/I_sd3_pipeline"], "size 32x32|does not fit the SD3Transformer"),
        (["--out", "assets"], "assets exists and is not overwritten"),
        (["--push-to-hub", "ann/x"], "--push-to-hub needs --license"),
        (["--dry-run"], "--dry-run needs --push-to-hub OWNER/NAME"),
        (["--push-to-hub", "x", "--license", "mit"], "is not a model name such as owner/name"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_weights_are_read(run, capsys, words, message):
    import re

    code, said = told(capsys, run, *words)
    assert code == 2
    assert re.search(message, said), said


@pytest.mark.usefixtures("_reads_nothing")
def test_a_folder_without_a_checkpoint_and_a_damaged_one_are_refused(run, tmp_path, capsys):
    assert "neither a run directory nor a checkpoint" in told(capsys, tmp_path)[1]
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "copy/checkpoints/step-000003/ema/adapter_model.safetensors").write_bytes(b"")
    assert "is damaged: ema/adapter_model" in told(capsys, tmp_path / "copy")[1]


@pytest.mark.usefixtures("_reads_nothing")
def test_without_a_token_or_a_hub_nothing_is_exported(run, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    code, said = told(capsys, run, *PUBLISH)
    assert (code, "no token for the Hugging Face Hub: hf auth login" in said) == (2, True)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr("huggingface_hub.HfApi", _unreachable)
    code, said = told(capsys, run, *PUBLISH)
    assert (code, "Hub could not be reached" in said) == (2, True)


def _unreachable():
    return HfApi(endpoint="http://127.0.0.1:9", token="a token")


class Hub:
    """A stand-in of the hub's API in a thread: who asks, which repositories, which commits."""

    def __init__(self, status: int = 200):
        self.asked: list[tuple[str, str]] = []
        self.commits: list[bytes] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(b"")

            def do_POST(self):
                self.answer(self.rfile.read(int(self.headers["Content-Length"])))

            def answer(self, body: bytes) -> None:
                hub.asked.append((self.command, self.path))
                if "/commit/" in self.path:
                    hub.commits.append(body)
                content = json.dumps(hub.reply(self.path, body)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reply(self, path: str, body: bytes) -> dict:
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            kept = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files
            ]
            return {"files": kept}
        if "/commit/" in path:
            return {
                "commitUrl": f"{self.url}/ann/red-circles/commit/{'0' * 40}",
                "commitOid": "0" * 40,
                "success": True,
            }
        return {"name": "ann", "url": f"{self.url}/ann/red-circles", "type": "user", "orgs": []}


@pytest.fixture
def hub(monkeypatch):
    stand_in = Hub()
    _connect(monkeypatch, stand_in)
    yield stand_in
    stand_in.server.shutdown()


def _connect(monkeypatch, stand_in: Hub) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    monkeypatch.setattr(
        "huggingface_hub.HfApi", lambda: HfApi(endpoint=stand_in.url, token="a token")
    )


@pytest.mark.slow
def test_publishing_creates_the_model_and_commits_every_file_of_the_folder(
    run, tmp_path, capsys, hub
):
    out = tmp_path / "out"
    code, said = told(capsys, run, "--out", out, *PUBLISH)
    assert code == 0, said
    assert f"published: {hub.url}/ann/red-circles" in said
    assert ("POST", "/api/repos/create") in hub.asked
    (commit,) = hub.commits
    paths = {json.loads(line)["value"].get("path") for line in commit.splitlines()}
    assert paths >= {f.name for f in out.iterdir()}
    assert "license: apache-2.0" in (out / "README.md").read_text()


@pytest.mark.slow
def test_a_token_that_the_hub_does_not_know_is_refused(monkeypatch):
    stand_in = Hub(status=401)
    _connect(monkeypatch, stand_in)
    with pytest.raises(ValueError, match="does not let this token publish ann/x: hf auth login"):
        check_publishing("ann/x")
    stand_in.server.shutdown()
