"""What each verb does. The only place with side effects in order."""

import argparse
import importlib.metadata
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from flowalign import checkpoint, sample_command, serve_command
from flowalign.clip_pairs import command as clip_pairs_command
from flowalign.config import AnyRun, Run, load
from flowalign.console import table
from flowalign.errors import ConfigError
from flowalign.exploration import is_calibrating
from flowalign.launch import relaunch
from flowalign.learner import TrainingFailure
from flowalign.pairing import command as pairs_command
from flowalign.plan import plan
from flowalign.reward_training import command as reward_command
from flowalign.reward_training import eval as reward_eval
from flowalign.rewards import RewardFailure, Rewards
from flowalign.scoring import command as score_command

MAX_LINES = 5


def run(args: argparse.Namespace) -> int:
    """Run a verb and turn what the user can correct into a short message."""
    quiet_libraries()
    verbs: dict[str, Callable[[argparse.Namespace], int]] = {
        "train": train, "demo": demo, "eval": evaluate, "check": check,
        "sample": sample_command.run,
        "bench": bench, "compare": compare, "doctor": doctor, "reward": reward,
        "score": score_command.run, "pairs": pairs_command.run,
        "clip-pairs": clip_pairs_command.run,
        "serve-reward": serve_command.run,
    }  # fmt: skip
    try:
        return verbs[args.verb](args)
    except (ConfigError, UsageError) as error:
        return _complain(error, 2)
    except (
        TrainingFailure,
        RewardFailure,
        OSError,
    ) as error:  # OSError: a full disk, a read-only folder
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _complain(
            RuntimeError("stopped; what was saved is intact, go on with --resume"), 130
        )


class UsageError(ValueError):
    """A wrong use of a verb, found after its run file was read."""


def quiet_libraries() -> None:
    """Keep libraries' chatter about kernels, retries and symlinks out of the way."""
    for name in ("xformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks.*")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def train(args: argparse.Namespace) -> int:
    """`flowalign train CONFIG`."""
    run_file, config = load(args.config, args.overrides)
    return _train(run_file, config, args.resume, args.overwrite)


def demo(args: argparse.Namespace) -> int:
    """`flowalign demo`."""
    if "RANK" not in os.environ:
        wanted = args.processes or min(2, os.cpu_count() or 1)
        folder = args.output_dir or _free("runs/demo")
        argv = ["demo", "--seed", str(args.seed), "--output_dir", folder]
        argv += ["--steps", str(args.steps)] if args.steps else []
        if wanted > 1:
            relaunch(wanted, argv)
        args.output_dir = folder
    overrides = ["--seed", str(args.seed), "--output_dir", args.output_dir]
    overrides += ["--num_steps", str(args.steps)] if args.steps else []
    run_file, config = load("configs/shapes.yaml", overrides)
    return _train(run_file, config, None, False)


def _train(run_file: AnyRun, config: str, resume: str | None, overwrite: bool) -> int:
    from flowalign import run as runs

    say = _say()
    folder = Path(run_file.output_dir)
    world = int(os.environ.get("WORLD_SIZE", 1))
    from_checkpoint = _checkpoint_to_resume(folder, resume) if resume else None
    main = os.environ.get("RANK", "0") == "0"
    rows = _plan(run_file, world)
    if main:
        table(f"plan of {folder}", rows)
    try:
        if main and overwrite and not resume:
            runs.remove(folder)
        session = runs.start(run_file, config, say, from_checkpoint)
        summary = runs.train(session, from_checkpoint)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if main:
        table(f"{summary['status']} after {summary['steps']} steps", _outcome(summary))
        say(f"report: {folder / 'report.html'}")
        if saved := checkpoint.latest(folder / "checkpoints"):
            averaged = f"; averaged, which the table is of: {saved / 'ema'}" if run_file.ema else ""
            say(f"weights: {saved}{averaged}")
    if summary["status"] == "interrupted":
        say(f"interrupted; go on with: flowalign train {folder / 'config.yaml'} --resume")
        return 130
    return 0


def check(args: argparse.Namespace) -> int:
    """`flowalign check CONFIG`."""
    run_file, _ = load(args.config, args.overrides)
    table(f"plan of {args.config}", _plan(run_file, args.processes))
    return 0


def evaluate(args: argparse.Namespace) -> int:
    """`flowalign eval CONFIG [--weights CHECKPOINT]`."""
    from flowalign.distributed import join
    from flowalign.evaluate import evaluate as measure

    run_file, _ = load(args.config, args.overrides)
    if run_file.evaluation is None:
        raise ConfigError(f"{args.config}: evaluation is null, so there is nothing to evaluate")
    processes = join(run_file.device)
    rewards = run_file.judges()
    _load(run_file, args.weights, rewards)
    metrics = measure(run_file.policy, rewards, run_file.evaluation, processes).metrics
    if processes.is_main:
        table(f"{args.weights or 'before training'}", {k: f"{v:.4f}" for k, v in metrics.items()})
        print(json.dumps(metrics))  # noqa: T201
    return 0


def bench(args: argparse.Namespace) -> int:
    """`flowalign bench CONFIG`."""
    from flowalign.bench import measure
    from flowalign.bench_values import measure_values

    run_file, _ = load(args.config, args.overrides)
    if not isinstance(run_file, Run):
        raise ConfigError(f"{args.config} trains on data; bench times the steps of online runs")
    work = measure_values if args.values else measure
    result = work(run_file, args.repeats)
    table(f"one step of {args.config}", {k: f"{v:.4g}" for k, v in result.items()})
    print(json.dumps(result))  # noqa: T201
    return 0


def compare(args: argparse.Namespace) -> int:
    """`flowalign compare CONFIG CONFIG ... --seeds 0 1 2`."""
    from flowalign import compare as comparing
    from flowalign.comparison_page import with_std

    settings = [c for c in args.configs if "=" in c]  # a.b=c, as elsewhere
    files = [c for c in args.configs if "=" not in c]
    overrides, out = [*settings, *args.overrides], Path(args.out)
    request = comparing.Request(files, overrides, args.seeds, out, args.jobs, args.metric)
    try:
        result = comparing.compare(request, _say())
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        return _complain(RuntimeError("stopped; the same command goes on from here"), 130)
    finals = {row.method.name: with_std(row.final) for row in result.rows}
    table(f"held-out {result.metric} after training", finals)
    _say()(f"comparison: {out / 'compare.html'}")
    return 0


def reward(args: argparse.Namespace) -> int:
    """`flowalign reward train CONFIG` and `flowalign reward eval TABLE`."""
    actions = {"train": reward_command.run_train, "eval": reward_eval.run_eval}
    return actions[args.action](args)


def doctor(_args: argparse.Namespace) -> int:
    """`flowalign doctor`."""
    import torch

    names = ["flowalign", "torch", "torchvision", "diffusers", "transformers", "accelerate", "peft",
             "open-clip-torch", "safetensors", "xformers", "av", "pyarrow", "scipy", "fastapi",
             "uvicorn", "httpx", "rapidocr-onnxruntime", "nudenet", "opencv-python-headless",
             "tensorboard", "wandb"]  # fmt: skip
    rows = {"python": sys.version.split()[0]}
    for name in names:
        try:
            rows[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            rows[name] = "not installed"
    rows["cpu"] = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    rows["gpu"] = (
        ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        if torch.cuda.is_available() else "none"
    )  # fmt: skip
    table("doctor", rows)
    return 0


def _load(run_file: AnyRun, weights: str | None, rewards: Rewards | None = None) -> None:
    import torch

    from flowalign.distributed import join

    if run_file.threads:
        torch.set_num_threads(run_file.threads)
    try:
        if rewards:
            rewards.load()
        run_file.policy.load(join(run_file.device).device)
        if weights:
            run_file.policy.load_weights(weights)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _plan(run_file: AnyRun, world: int) -> dict[str, str]:
    try:
        return plan(run_file, world)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _checkpoint_to_resume(folder: Path, resume: str) -> Path | None:
    if resume != "latest":
        path = Path(resume)
    else:
        newest = checkpoint.latest(folder / "checkpoints")
        if newest is None and is_calibrating(folder):
            return None
        if newest is None:
            raise UsageError(f"nothing to resume: {folder / 'checkpoints'} holds no checkpoint")
        path = newest
    try:
        checkpoint.check_complete(path)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return path


def _outcome(summary: dict) -> dict[str, str]:
    rows = {}
    for name, value in (summary["after"] or {}).items():
        before = summary["before"].get(name)
        if value is not None and before is not None:
            rows[name] = f"{before:.3f} -> {value:.3f} ({value - before:+.3f})"
    for name in ("seconds", "network_evaluations", "reward_calls", "seed"):
        rows[name] = str(summary[name])
    return rows


def _free(name: str) -> str:
    candidates = [name, *(f"{name}-{i}" for i in range(2, 1000))]
    return next(c for c in candidates if not Path(c).exists())


def _say() -> Callable[[str], None]:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    return console.print if os.environ.get("RANK", "0") == "0" else lambda _: None


def _complain(error: BaseException, code: int) -> int:
    lines = str(error).splitlines()[:MAX_LINES]
    if os.environ.get("RANK", "0") == "0":
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            "[bold red]flowalign:[/] " + "\n".join(lines).replace("[", r"\[")
        )
    return code
