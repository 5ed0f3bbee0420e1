"""`flowalign reward train`: its options, and what it says."""

import argparse


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `flowalign reward train`; others override the run file, as `args.overrides`."""
    parser.add_argument("config", help="run file (YAML); further --a.b VALUE override it")
    parser.add_argument("--resume", action="store_true", help="go on after the last epoch")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier training there")


def run_train(args: argparse.Namespace) -> int:
    """Train, print the agreement with people, and return 0.

    Raises:
        ConfigError: what the user can correct.
    """
    from pathlib import Path

    from rich.console import Console

    from flowalign.console import table
    from flowalign.errors import ConfigError
    from flowalign.reward_training.run import MODEL, load_run, train

    run, config = load_run(args.config, args.overrides)
    say = Console(soft_wrap=True, highlight=False).print
    try:
        trained = train(run, config, say, args.resume, args.overwrite)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    part = "test" if "test" in trained["figures"] else "held_out"
    rows = {
        dim: f"accuracy {found['accuracy']:.3f}, with ties {found['accuracy_with_ties']:.3f} "
        f"({int(found['pairs'])} pairs)"
        for dim, found in trained["figures"][part].items()
    }
    table(f"{part} records, best epoch {trained['best_epoch']}", rows)
    say(f"reward model: {Path(run.output_dir) / MODEL}")
    return 0
