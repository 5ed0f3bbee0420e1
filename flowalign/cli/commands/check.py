"""Validate a run file, and print its plan or its complete settings."""

import argparse
import sys

from flowalign.cli.commands.common import read_settings
from flowalign.runs.config import load_with_origins
from flowalign.runs.planning.capacity_plan import (
    Cluster,
    capacity_rows,
    plan_capacity,
    read_costs,
)
from flowalign.runs.planning.gpus import GPUS, find_gpu
from flowalign.runs.planning.plan import plan
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Print the plan or the settings, and return 0; raise ConfigError for an unusable run file."""
    loaded = load_with_origins(*read_settings(args))
    if args.shows_settings:
        sys.stdout.write(loaded.annotate())
    else:
        settings = loaded.run
        settings.recipe.check_data(settings.context(settings.build_rewards()))
        cluster = _read_cluster(args)
        world = cluster.count if cluster else args.processes
        table(f"plan of {' '.join(args.config)}", plan(settings, world))
        if cluster:
            found = plan_capacity(settings, cluster)
            table(f"step on {cluster.count} x {cluster.name}", capacity_rows(settings, found))
    return 0


def _read_cluster(args: argparse.Namespace) -> Cluster | None:
    """Return the GPUs of the capacity plan, if it is asked for.

    Raises:
        ValueError: The options do not belong together.
    """
    if args.gpus is None:
        if args.gpu or args.costs or args.reward_seconds is not None:
            raise ValueError("--gpu, --costs and --reward-seconds need --gpus N")
        return None
    if args.processes != 1:
        raise ValueError("--gpus starts one process per GPU: leave out --processes")
    if args.gpu is None and args.costs is None:
        raise ValueError(f"--gpus needs --gpu or --costs; types of GPUs: {', '.join(GPUS)}")
    return Cluster(
        count=args.gpus,
        name=args.gpu or "GPUs",
        gpu=find_gpu(args.gpu) if args.gpu else None,
        utilization=args.utilization,
        measured=read_costs(args.costs) if args.costs else None,
        reward=args.reward_seconds,
    )
