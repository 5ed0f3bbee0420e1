"""Collect votes on samples in a browser: `flowalign vote`."""

import argparse

from flowalign.cli.options import number, whole

HELP = "Collect votes on samples in a browser, also as the reward of a training run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the samples, the task of the annotators, and the address of the page."""
    add = parser.add_argument
    add("samples", help="folder of `flowalign sample`, dataset, or run directory")
    add("--online", action="store_true", help="wait for samples of training runs (RemoteReward)")
    add("--ask", choices=("best", "rank", "rate"), default="best", help="task (default: best)")
    add(
        "--dimensions",
        nargs="+",
        default=["overall"],
        metavar="NAME",
        help="dimensions that are rated (default: overall)",
    )
    add("--scale", type=whole(2, 9), default=5, help="highest rating (default: 5)")
    add("--candidates", type=whole(2, 9), default=4, help="samples per question (default: 4)")
    add("--annotators", type=whole(1), default=1, help="annotators per question (default: 1)")
    add(
        "--repeats",
        type=number(0.0, 1.0),
        default=0.0,
        help="share of questions asked twice, which measures consistency (default: 0)",
    )
    add("--out", metavar="FOLDER", help="folder of votes.jsonl (default: SAMPLES/votes)")
    add("--schema", default="auto", help="format of a dataset (default: detected)")
    add("--root", metavar="FOLDER", help="folder where relative paths of a dataset begin")
    add("--host", default="127.0.0.1", help="address to serve on (default: this machine only)")
    add("--port", type=whole(0, 65535), default=8413, help="port; 0: any free port (default: 8413)")
    add(
        "--token_env",
        default="FLOWALIGN_REWARD_TOKEN",
        metavar="NAME",
        help="environment variable with the token of a public address",
    )
