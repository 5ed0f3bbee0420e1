"""What starting, resuming and stopping a run leave in its directory."""

import contextlib
import os
import shutil
import signal
from importlib import util
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from flowalign import runs
from flowalign.runs.config import load_with_origins
from flowalign.runs.run_directory import begin_directory
from flowalign.studies.compare import todo
from flowalign.training import PolicyGradient, checkpoint
from flowalign.training.checkpoint import Checkpoints
from flowalign.training.held_out_evaluation import Evaluation
from flowalign.utils.interrupts import Terminated, sigterm_stops
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.small_run import go, new_run
from tests.fixtures.stopped_runs import PIXELS, SMALL, assert_same_run, metrics, train_here


def quiet(_: str) -> None: ...


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Unloadable(PixelPolicy):
    """A policy with weights that do not fit."""

    def load(self, device: torch.device) -> None:
        raise ValueError("these weights are of another model")


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_is_refused_leaves_no_folder_or_the_folder_as_it_was(tmp_path, there):
    folder = tmp_path / "runs" / "mine"
    run = new_run(tmp_path / "any", policy=Unloadable(), output_dir=str(folder))
    if there:
        folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="another model"):
        runs.start(run, "num_steps: 5\n", quiet)
    assert folder.exists() == there
    assert files(tmp_path / "runs") == {}


def test_a_tracker_that_is_missing_is_reported_by_check_and_before_weights_are_loaded(
    tmp_path, monkeypatch
):
    """Unloadable would raise another error, and so would a package that is found."""
    here = util.find_spec
    missing = lambda name, *rest: None if name == "wandb" else here(name, *rest)  # noqa: E731
    monkeypatch.setattr(util, "find_spec", missing)
    run = new_run(tmp_path / "run", policy=Unloadable(), trackers=["wandb"])
    for use in (lambda: runs.plan(run), lambda: runs.start(run, "num_steps: 5\n", quiet)):
        with pytest.raises(ValueError, match=r"wandb.*pip install flowalign-diffusion\[wandb\]"):
            use()
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_refuses_to_open_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(self, run, learner, folder, log):
        assert (folder / "config.yaml").exists()  # for whoever is killed while it opens
        raise ValueError("these data cannot be trained on")

    monkeypatch.setattr(PolicyGradient, "open", refuse)
    with pytest.raises(ValueError, match="these data"):
        runs.start(new_run(tmp_path / "run"), "num_steps: 5\n", quiet)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("earlier", [None, "threads: 1\n"])
def test_settings_of_a_run_that_is_refused_while_it_opens_are_taken_back(tmp_path, earlier):
    if earlier:
        (tmp_path / "config.yaml").write_text(earlier)
    before = files(tmp_path)

    def opens():
        with begin_directory(tmp_path, "threads: 2\n"):
            assert (tmp_path / "config.yaml").read_text() == "threads: 2\n"
            raise ValueError("its data are gone")

    with pytest.raises(ValueError, match="its data are gone"):
        opens()
    assert files(tmp_path) == before


def test_a_folder_in_which_a_start_was_killed_is_begun_like_a_new_one(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").write_text("process 1 on a machine that is gone\n")
    assert todo(tmp_path / "run", {}) == "start"
    assert go(new_run(tmp_path / "run", num_steps=1))["status"] == "finished"
    assert not (tmp_path / "run" / "run.lock").exists()


@pytest.mark.slow
def test_overwriting_deletes_an_earlier_run_only_once_the_new_one_is_accepted(tmp_path):
    folder = tmp_path / "run"
    go(new_run(folder))
    before = files(folder)
    with pytest.raises(ValueError, match="another model"):
        runs.start(new_run(folder, policy=Unloadable()), "seed: 1\n", quiet, overwrite=True)
    assert files(folder) == before
    (folder / "of the earlier run").write_text("")
    runs.train(runs.start(new_run(folder, num_steps=2), "seed: 1\n", quiet, overwrite=True))
    assert not (folder / "of the earlier run").exists()
    assert (folder / "config.yaml").read_text() == "seed: 1\n"
    assert checkpoint.latest(folder / "checkpoints").name == "step-000002"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_directory_below_a_file_is_refused_before_weights_are_read(tmp_path, resumed):
    (tmp_path / "file").write_text("")
    run = new_run(tmp_path / "any", policy=Unloadable(), output_dir=str(tmp_path / "file" / "run"))
    resume = None
    if resumed:
        go(new_run(tmp_path / "other"))
        resume = checkpoint.latest(tmp_path / "other" / "checkpoints")
    with pytest.raises(ValueError, match="cannot be made: Not a directory") as caught:
        runs.start(run, "config: 1\n", quiet, resume)
    assert "\n" not in str(caught.value)


def test_a_run_is_not_resumed_and_overwritten(tmp_path):
    with pytest.raises(ValueError, match="exclude each other"):
        runs.start(new_run(tmp_path / "run"), "seed: 1\n", quiet, tmp_path, overwrite=True)


def resumed(folder: Path, config: str, **changes) -> list[str]:
    """Resume a run to its end with these settings; return the output."""
    said = []
    newest = checkpoint.latest(folder / "checkpoints")
    runs.train(runs.start(new_run(folder, **changes), config, said.append, newest))
    return said


def test_a_resumption_says_what_it_changes_and_writes_it_down(tmp_path):
    folder = tmp_path / "run"
    runs.train(runs.start(new_run(folder, num_steps=2), "num_steps: 2\nthreads: 1\n", quiet))
    said = resumed(folder, "num_steps: 3\nthreads: 2\n", num_steps=3)
    assert said[:2] == ["changed num_steps: 2 -> 3", "changed threads: 1 -> 2"]
    assert (folder / "config.yaml").read_text() == "num_steps: 3\nthreads: 2\n"


def test_a_resumption_names_prompts_and_code_that_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts, code, said = tmp_path / "prompts.txt", tmp_path / "my_sign.py", []
    reward = {"class_path": "my_sign.py:ok", "weight": {"ok": 1.0}}
    recipe = {
        "class_path": "flowalign.training.PolicyGradient",
        "init_args": {**PIXELS["recipe"]["init_args"], "prompts": str(prompts)},
    }
    content = {**PIXELS, "rewards": [reward], "output_dir": "run", "recipe": recipe}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))

    def train(sign: str, words: str, steps: int, resume: Path | None = None) -> None:
        prompts.write_text(words)
        code.write_text(f"def ok(images): return [{sign}float(one.mean()) for one in images]\n")
        loaded = load_with_origins("run.yaml", [f"--num_steps={steps}"])
        runs.train(runs.start(loaded.run, loaded.text, said.append, resume))

    train("", "red\nblue\n", 1)
    train("-", "red\ngreen\nblue\n", 2, Path("run/checkpoints/step-000001"))
    assert f"changed content of {code} since step 1" in said
    assert f"changed content of {prompts} since step 1" in said
    first, second = (row["reward_mean"] for row in metrics(Path("run")))
    assert first > 0 > second


@pytest.mark.slow
def test_a_resumption_with_other_base_weights_is_refused(tmp_path, capsys):
    model, folder = tmp_path / "sd3", tmp_path / "run"
    shutil.copytree(SMALL["policy"]["init_args"]["path"], model)
    path = "--policy.init_args.path", model
    train_here(folder, *path, "--num_steps", 1)
    file = model / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: 1.3 * tensor for name, tensor in load_file(file).items()}, file)
    train_here(folder, *path, "--num_steps", 2, "--resume", code=2)
    assert "the model has other weights than in the first 1 steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "changes", "why"),
    [
        ("num_steps: 2\nseed: 5\n", {}, "seed: 4 -> 5"),
        ("num_steps: 1\nseed: 4\n", {"num_steps": 1}, "num_steps of at least 2"),
        ("num_steps: 2\nseed: 4\n", {"policy": PixelPolicy(width=8)}, "another model or adapter"),
        ("num_steps: 2\nseed: 4\n", {"policy": Unloadable()}, "weights are of another model"),
    ],
)
def test_a_resumption_that_is_refused_changes_no_file(tmp_path, config, changes, why):
    folder = tmp_path / "run"
    runs.train(runs.start(new_run(folder, num_steps=2), "num_steps: 2\nseed: 4\n", quiet))
    before = files(folder)
    with pytest.raises(ValueError, match=why) as caught:
        resumed(folder, config, **{"num_steps": 2} | changes)
    assert len(str(caught.value).splitlines()) <= 5
    assert files(folder) == before
    resumed(folder, "num_steps: 2\nseed: 4\n", num_steps=2)  # it still goes on as it was


@pytest.mark.slow
def test_a_run_that_is_going_on_is_not_started_again(tmp_path):
    folder = tmp_path / "run"
    session = runs.start(new_run(folder), "config: 1\n", quiet)
    for options in ({}, {"overwrite": True}, {"resume": folder}):
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
            runs.start(new_run(folder), "config: 1\n", quiet, **options)
    assert runs.train(session)["status"] == "finished"
    assert not (folder / "run.lock").exists()
    resumed(folder, "config: 1\n")


class Killed(BaseException):
    """What no code may catch and survive."""


class EndsAt(Redness):
    """Redness that is ended while it scores for the n-th time."""

    def __init__(self, call: int, sigterm: bool):
        super().__init__()
        self.left, self.sigterm = call, sigterm

    def score(self, batch):
        self.left -= 1
        if self.left == 0 and self.sigterm:
            signal.raise_signal(signal.SIGTERM)
        elif self.left == 0:
            raise Killed
        return super().score(batch)


def evaluated(folder: Path, reward: Redness) -> runs.Run:
    """Five steps with evaluations before the first, after the last and after every second one."""
    prompts = {"held": str(folder.parent / "prompts.txt")}
    (folder.parent / "prompts.txt").write_text("a\nbb\n")
    return new_run(
        folder,
        models=[reward],
        evaluation=Evaluation(prompts=prompts, num_prompts=2, num_steps=2, every=2),
        checkpoints=Checkpoints(every=100, verify="never"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("sigterm", [True, False], ids=["SIGTERM", "killed"])
def test_a_run_ended_within_any_call_of_a_reward_goes_on_to_the_same_bits(tmp_path, sigterm):
    """The first calls belong to the evaluation before training, the last to the one after it."""
    straight, ended = tmp_path / "straight", 0
    go(evaluated(straight, Redness()))
    while True:
        ended += 1
        folder = tmp_path / str(ended)
        try:
            with sigterm_stops():
                summary = go(evaluated(folder, EndsAt(ended, sigterm)))
        except (Terminated, Killed):
            summary = {"status": "ended"}
        if summary["status"] == "finished":
            break
        newest = checkpoint.latest(folder / "checkpoints")
        if summary["status"] == "interrupted":
            assert summary["stopped_by"] == "SIGTERM"
            assert newest.name == f"step-{summary['steps']:06d}"
            with contextlib.suppress(Killed):  # before the next checkpoint, after an evaluation
                go(evaluated(folder, EndsAt(2, sigterm=False)), newest)
            newest = checkpoint.latest(folder / "checkpoints")
        go(evaluated(folder, Redness()), newest or folder)
        assert_same_run(straight, folder, 5)
    assert ended > 9  # four evaluations, five steps
