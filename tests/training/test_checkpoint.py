"""A run stopped anywhere resumes exactly, and nothing damaged is ever resumed."""

import errno
import os
import re
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowalign import runs
from flowalign.credit import Critic, LambdaReturn
from flowalign.runs.config import Run
from flowalign.runs.run_directory import clear
from flowalign.sampling.sde_windows import Random
from flowalign.training import checkpoint
from flowalign.training.checkpoint import Checkpoints, check_start
from flowalign.training.learner import Learner, Optimizer
from flowalign.training.policy_gradient.step_gradients import MeasuredWeight
from flowalign.utils.errors import TrainingFailure
from tests.fixtures.pixel import PixelPolicy, Redness
from tests.fixtures.small_run import assert_resumes, go, new_run
from tests.fixtures.stopped_runs import metrics, state
from tests.fixtures.training import ALONE, flat, new_learner, new_recipe, train


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 4])
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path, after):
    assert_resumes(new_run, tmp_path, after)


def measured_run(folder: Path, models=(), **settings) -> Run:
    """Windows that move, two updates a step, and weights that have moved after two steps."""
    recipe = new_recipe(
        {"sde_window": Random(2, 0, 3)},
        prompts_per_step=4,
        updates_per_step=2,
        step_weight=MeasuredWeight(**{"half_life": 1.0} | settings),
    )
    return new_run(folder, recipe, models=models)


@pytest.mark.slow
@pytest.mark.parametrize("measured", ["gradient", "update"])
def test_averages_of_measured_weights_resume_bit_for_bit(tmp_path, measured):
    folders = assert_resumes(measured_run, tmp_path, 3, measured=measured)
    ends = [checkpoint.read_loop(folder / "checkpoints" / "step-000005") for folder in folders]
    assert ends[0]["loop"]["step_weight"] == ends[1]["loop"]["step_weight"]
    assert max(map(max, ends[0]["loop"]["step_weight"]["evidence"])) > 0.5


def test_averages_of_something_else_are_refused(tmp_path):
    folder = tmp_path / "run"
    go(measured_run(folder))
    with pytest.raises(
        ValueError, match=r"the update of 4 denoising steps, but .* the gradient of 4"
    ):
        go(measured_run(folder, measured="update"), checkpoint.latest(folder / "checkpoints"))


@pytest.mark.slow
def test_a_critic_resumes_bit_for_bit(tmp_path):
    """Its predictions from two steps before the stop determine the weights after it."""
    recipe = new_recipe(
        {"sde_window": Random(2, 0, 3)}, credit=LambdaReturn(decay=0.9), critic=Critic()
    )
    straight, _ = assert_resumes(new_run, tmp_path, 2, recipe=recipe)
    explained = [row[name] for row in metrics(straight) for name in row if "explained" in name]
    assert any(share != 0 for share in explained)


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_drops_what_came_later(tmp_path):
    folder = tmp_path / "run"
    go(new_run(folder, checkpoints=Checkpoints(every=1, keep=0)))
    before, rows = state(folder, 5), metrics(folder)
    go(new_run(folder), folder / "checkpoints" / "step-000002")
    assert all(torch.equal(before[n], value) for n, value in state(folder, 5).items())
    assert metrics(folder) == rows


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    folder = tmp_path / "run"
    go(new_run(folder))
    before = state(folder, 5)
    summary = go(new_run(folder), checkpoint.latest(folder / "checkpoints"))
    assert summary["steps"] == 5
    assert all(torch.equal(before[n], value) for n, value in state(folder, 5).items())


@pytest.mark.parametrize(("keep", "kept"), [(2, [4, 5]), (0, [2, 4, 5])])
def test_the_last_step_is_always_saved_and_only_the_newest_are_kept(tmp_path, keep, kept):
    go(new_run(tmp_path / "run", checkpoints=Checkpoints(every=2, keep=keep)))
    found = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert found == [f"step-{step:06d}" for step in kept]


def test_the_newest_checkpoint_is_the_one_of_the_highest_step_beyond_six_digits(tmp_path):
    for step in (999_999, 1_000_000, 90):
        (tmp_path / f"step-{step:06d}").mkdir()
    (tmp_path / "step-000090-my-copy").mkdir()
    assert checkpoint.latest(tmp_path).name == "step-1000000"
    checkpoint.prune(tmp_path, 1)
    assert {p.name for p in tmp_path.iterdir()} == {"step-1000000", "step-000090-my-copy"}


def test_a_checkpoint_holds_live_and_averaged_weights_apart(tmp_path):
    learner = new_learner(ema=(0.9, 1))
    train(new_recipe(), learner, steps=2)
    folder = checkpoint.save(tmp_path, 2, learner, "c: 1", {})
    live = load_file(folder / "pixel.safetensors")
    averaged = load_file(folder / "ema" / "pixel.safetensors")
    for (name, p), average in zip(learner.named.items(), learner.ema.average, strict=True):
        assert torch.equal(live[name], p)
        assert torch.equal(averaged[name], average)
    assert not torch.equal(live["proj_in.weight"], averaged["proj_in.weight"])


def _saved(tmp_path) -> tuple[Path, Learner]:
    learner = new_learner(ema=(0.9, 1))
    train(new_recipe(), learner, steps=1)
    return checkpoint.save(tmp_path, 1, learner, "c: 1", {}), learner


def _short(error: BaseException) -> str:
    assert len(str(error).splitlines()) <= 5
    return str(error)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def overwrite_end(file: Path) -> None:
    """4 kB of 0xff, which safetensors reads as numbers."""
    content = file.read_bytes()
    file.write_bytes(content[:-4096] + b"\xff" * 4096)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (truncate, "state/training.safetensors", r"damaged: \S+ has \d+ of \d+ bytes"),
        (zero, "state/training.safetensors", "damaged"),
        (overwrite_end, "state/training.safetensors", "damaged"),
        (zero, "state/loop.json", "damaged"),
        (zero, "pixel.safetensors", "damaged"),
        (zero, "ema/pixel.safetensors", "damaged"),
        (Path.unlink, "ema/pixel.safetensors", "has None of"),
        (zero, "manifest.json", "damaged"),
        (Path.unlink, "manifest.json", "is no complete checkpoint: manifest.json is missing"),
    ],
)
def test_files_that_changed_are_refused_by_name(tmp_path, damage, name, said):
    folder, learner = _saved(tmp_path)
    damage(folder / name)
    before = flat(learner.policy.denoiser)
    with pytest.raises(ValueError, match=re.escape(name)) as caught:
        checkpoint.restore(folder, learner)
    assert re.search(said, _short(caught.value))
    assert torch.equal(flat(learner.policy.denoiser), before)


class Untouched(PixelPolicy):
    """A policy that must not be built."""

    def load(self, device: torch.device) -> None:
        raise AssertionError("weights are read although the checkpoint is damaged")


def test_a_damaged_checkpoint_is_refused_before_any_weight_is_read(tmp_path):
    """The newest two of three are damaged: the oldest one is offered."""
    folder = tmp_path / "run"
    go(new_run(folder, checkpoints=Checkpoints(every=1, keep=3)))
    three, four, five = (folder / "checkpoints" / f"step-{k:06d}" for k in (3, 4, 5))
    zero(five / "state" / "loop.json")
    overwrite_end(four / "state" / "training.safetensors")
    with pytest.raises(ValueError, match="damaged") as caught:
        runs.start(new_run(folder, policy=Untouched()), "num_steps: 5\n", lambda _: None, five)
    assert f"--resume {three}" in _short(caught.value)
    with pytest.raises(ValueError, match=re.escape(f"--resume {three}")):
        checkpoint.check_complete(folder)  # the run directory, which is no checkpoint
    summary = go(new_run(folder), three)
    assert summary["steps"] == 5


def test_weights_of_a_damaged_checkpoint_are_refused_and_those_of_no_checkpoint_are_not(tmp_path):
    folder, _ = _saved(tmp_path / "checkpoints")
    checkpoint.check_weights(folder / "ema")
    zero(folder / "state" / "training.safetensors")  # no part of the weights
    check_start(str(folder), "recipe.start")
    zero(folder / "ema" / "pixel.safetensors")
    with pytest.raises(ValueError, match=r"recipe\.start: .*ema/pixel\.safetensors"):
        check_start(str(folder), "recipe.start")
    with pytest.raises(ValueError, match=re.escape("ema/pixel.safetensors")):
        checkpoint.check_weights(folder / "ema")
    (tmp_path / "weights").mkdir()
    checkpoint.check_weights(tmp_path / "weights")


def test_all_files_reach_the_disk_before_the_folder_has_its_name(tmp_path, monkeypatch):
    events, sync, rename = [], os.fsync, os.replace

    def record_sync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def record_rename(source, target):
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    folder, _ = _saved(tmp_path)
    partial = folder.with_name(f".{folder.name}.tmp")
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    wanted = {partial / path.relative_to(folder) for path in folder.rglob("*")} | {partial}
    assert set(before) == wanted
    assert after == [folder.parent]


@pytest.mark.parametrize(
    ("policy", "ema"),
    [(PixelPolicy(width=16), (0.9, 1)), (PixelPolicy(), None)],
    ids=["another model", "without its EMA"],
)
def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(tmp_path, policy, ema):
    folder, _ = _saved(tmp_path)
    other = new_learner(policy, ema=ema)
    before = flat(policy.denoiser)
    with pytest.raises(ValueError, match="another model or adapter") as caught:
        checkpoint.restore(folder, other)
    assert "for example" in _short(caught.value)
    assert torch.equal(flat(policy.denoiser), before)


def test_left_over_half_written_folders_are_neither_resumed_nor_counted(tmp_path):
    folder, learner = _saved(tmp_path)
    leftover = tmp_path / ".step-000002.tmp"
    (leftover / "state").mkdir(parents=True)
    (leftover / "state" / "training.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == folder
    checkpoint.prune(tmp_path, 1)
    assert folder.is_dir()
    second = checkpoint.save(tmp_path, 2, learner, "c: 2", {})
    assert not leftover.exists()
    checkpoint.check_complete(second)


@contextmanager
def disk_that_fills():
    """A call, from any thread, makes the disk full; afterwards it is as before.

    Files cannot grow beyond ten kilobytes; safetensors then fails the way it does on a full disk.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


class FullDisk(Redness):
    """Redness; its third call fills the disk."""

    def __init__(self, fill):
        super().__init__()
        self.fill, self.calls = fill, 0

    def score(self, batch):
        self.calls += 1
        if self.calls == 3:
            self.fill()
        return super().score(batch)


def test_a_full_disk_leaves_earlier_checkpoints_and_says_so_in_a_few_lines(tmp_path):
    folder = tmp_path / "run"
    # Wide enough that the optimizer's moments do not fit where the weights and metrics still do.
    policy, failure = PixelPolicy(width=128), "could not write checkpoint 3"
    with disk_that_fills() as fill, pytest.raises(TrainingFailure, match=failure) as caught:
        go(new_run(folder, policy=policy, models=[FullDisk(fill)]))
    assert "File too large" in _short(caught.value)
    assert "--resume" in _short(caught.value)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000002",
    ]
    checkpoint.check_complete(folder / "checkpoints" / "step-000002")


def test_an_os_error_while_saving_keeps_the_reason(tmp_path, monkeypatch):
    def fail(tensors, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(TrainingFailure, match="No space left on device") as caught:
        go(new_run(tmp_path / "run"))
    assert str(tmp_path / "run" / "checkpoints") in _short(caught.value)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_run_directory_is_never_overwritten_unasked(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(ValueError, match="already holds a run") as caught:
        runs.start(new_run(folder), "", lambda _: None)
    assert "--overwrite" in _short(caught.value)
    assert [p.name for p in folder.iterdir()] == ["precious.txt"]


def test_overwriting_refuses_to_delete_what_is_no_run_directory(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=re.escape("holds no config.yaml")):
        clear(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    (tmp_path / "config.yaml").write_text("")
    clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_loads_back_differently_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(PixelPolicy, "verify_weights", lambda self, folder: 1e-3)
    with pytest.raises(TrainingFailure, match=re.escape("difference of 1.0e-03 instead of 0")):
        go(new_run(tmp_path / "run"))


def test_a_restored_loss_scale_and_counters_are_those_saved(tmp_path):
    policy = PixelPolicy()
    policy.precision = "fp16"
    learner = Learner(policy, Optimizer(), ALONE, 10)
    learner.scaler._scale, learner.num_updates, learner.num_skipped = torch.tensor(512.0), 7, 2
    folder = checkpoint.save(tmp_path, 3, learner, "", {"seconds": 1.5})
    other = Learner(policy, Optimizer(), ALONE, 10)
    loop = checkpoint.restore(folder, other)
    assert other.scaler.state_dict()["scale"] == 512.0
    assert (other.num_updates, other.num_skipped) == (7, 2)
    assert (loop["step"], loop["seconds"]) == (3, 1.5)


def test_a_rename_that_fails_leaves_the_earlier_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    partial, final = tmp_path / ".step-000004.tmp", tmp_path / "step-000004"
    for folder, text in ((partial, "new"), (final, "old")):
        folder.mkdir()
        (folder / "what").write_text(text)
    rename = os.replace

    def refuse(source, target):
        if source == partial:
            raise OSError(errno.EIO, "input/output error")
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", refuse)
    with pytest.raises(OSError, match="input/output"):
        checkpoint.put_in_place(partial, final)
    assert (final / "what").read_text() == "old"
    monkeypatch.undo()
    checkpoint.put_in_place(partial, final)
    assert (final / "what").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]
