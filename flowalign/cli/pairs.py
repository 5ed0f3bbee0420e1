"""Runs `flowalign pairs`: makes pairs to train on from a table of scores."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.cli.ranges import SEED, whole
from flowalign.utils.console import table as print_table

if TYPE_CHECKING:
    from flowalign.curation.pairing.job import Found, Job
    from flowalign.curation.pairing.rules import Choice, Rule

HELP = "Make pairs to train on of a table of scores."
EXIT_FAILED = 1
_LISTED = 3
"""Largest number of reasons that an error message lists."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `flowalign pairs`."""
    add = parser.add_argument
    add("table", help="folder of `flowalign score`, or its scores.parquet or scores.jsonl")
    add("--out", required=True, metavar="FOLDER", help="earlier pairs in it are replaced")
    add(
        "--rule",
        required=True,
        choices=("best_worst", "gap", "dominance", "per_dimension"),
        help="the two extremes of a prompt; any two; any two of which one is worse in no "
        "dimension; any two, in each dimension",
    )
    add("--dimensions", nargs="+", default=[], metavar="NAME", help="default: all")
    add(
        "--weights",
        nargs="+",
        default=[],
        metavar="NAME=WEIGHT",
        help="weights of the total, needed if several dimensions decide",
    )
    add("--min_gap", type=float, default=0.0, help="in the total, or the dimension; default 0")
    add("--tolerance", type=float, help="dominance: how much worse still counts as no worse")
    add("--max_per_prompt", type=whole(1), help="at most so many pairs; the widest gaps are kept")
    add("--by", choices=("prompt", "record"), default="prompt", help="group that is compared")
    add("--stages", type=whole(2), help="stages of a curriculum, wide gaps first: column `stage`")
    by = "equal ranges of gaps (default), or equally many pairs"
    add("--stages_by", choices=("score", "rank"), help=by)
    add("--held_out", type=float, default=0.1, help="share of the prompts, default 0.1")
    add("--seed", type=whole(*SEED), default=0, help="seed of the choice of held-out prompts")
    root = "where relative paths of the table begin; default: the current folder"
    add("--mask", metavar="REWARD", help="take the maps of this reward as masks (FocusDPO)")
    add("--root", default="", metavar="FOLDER", help=root)
    add(
        "--labels",
        action="store_true",
        help="write single media as `prompt`, `completion` and `label`, which is true for winners "
        "(KTO), and leave out those that win and lose",
    )
    add(
        "--mixed_shapes",
        action="store_true",
        help="pair media that differ in size or number of frames, too",
    )


def run(args: argparse.Namespace) -> int:
    """Make pairs; returns 0, or 1 if the table gives none.

    Raises:
        ConfigError: The options or the table need a correction by the user.
    """
    from flowalign.curation.pairing.job import check_folder, find
    from flowalign.utils.errors import ConfigError

    try:
        _check(args)
        check_folder(Path(args.out))
        job = _job(args)
        found = find(job)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not found.choices:
        lines = [*found.media.lines(), *found.pairs.lines()] or ["no gap is wide enough"]
        what = "\n".join(line[:300] for line in lines[:_LISTED])
        sys.stderr.write(f"error: {args.table} gives no pair:\n{what}\n")
        return EXIT_FAILED
    _print_summary(args, found, _write(args, job, found))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.stages_by and not args.stages:
        raise ValueError("--stages_by needs --stages")
    if args.labels and (args.stages or args.rule == "per_dimension"):
        other = "--stages" if args.stages else "--rule per_dimension"
        raise ValueError(f"--labels has no use with {other}: a label has no stage or dimension")
    if not 0 <= args.held_out < 1:
        raise ValueError(f"--held_out is {args.held_out:g}; it must be in [0, 1)")
    if args.tolerance is not None and args.rule != "dominance":
        raise ValueError("--tolerance is of --rule dominance")
    if args.weights and args.rule == "per_dimension":
        raise ValueError("--weights has no use with --rule per_dimension: there is no total")
    if args.root and not Path(args.root).is_dir():
        raise ValueError(f"--root {args.root!r} is no folder")


def _job(args: argparse.Namespace) -> "Job":
    from flowalign.curation.pairing.job import Job
    from flowalign.curation.pairing.table import find_table, read_table

    given = _parsed(args.weights)
    dims = list(dict.fromkeys(args.dimensions)) or list(given)
    scored = read_table(find_table(Path(args.table)), dims, args.root)
    return Job(
        scored,
        _rule(args, scored.dims, given),
        args.by == "record",
        args.stages or 0,
        args.stages_by or "score",
        args.mixed_shapes,
        args.mask,
    )


def _rule(args: argparse.Namespace, dims: Sequence[str], given: Mapping[str, float]) -> "Rule":
    from flowalign.curation.pairing.rules import Rule

    if not given and (len(dims) == 1 or args.rule == "per_dimension"):
        given = dict.fromkeys(dims, 1.0)
    if set(given) != set(dims):
        names = " ".join(f"{dim}=1" for dim in dims)
        raise ValueError(
            f"the total of {', '.join(dims)} needs the weight of each, and of no other dimension,\n"
            f"such as --weights {names}; or choose with --dimensions"
        )
    weights = {dim: given[dim] for dim in dims}
    return Rule(args.rule, weights, args.min_gap, args.tolerance or 0.0, args.max_per_prompt)


def _parsed(pairs: Sequence[str]) -> dict[str, float]:
    weights = {}
    for pair in pairs:
        name, _, text = pair.rpartition("=")
        try:
            weights[name] = float(text)
        except ValueError:
            name = ""
        if not name:
            raise ValueError(f"--weights {pair!r} is not NAME=NUMBER, such as {pair}=1")
    return weights


def _write(args: argparse.Namespace, job: "Job", found: "Found") -> dict[str, Any]:
    """Write the files, the summary last; returns the summary."""
    from flowalign.curation.pairing import page
    from flowalign.curation.pairing.job import (
        HELD_OUT,
        PAGE,
        SUMMARY,
        TRAIN,
        split,
    )
    from flowalign.utils.files import write_text

    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split(job.table, found.choices, args.held_out, args.seed)
    labels = _write_rows(args, job, {TRAIN: train, HELD_OUT: held_out})
    stages = Counter(choice.stage for choice in found.choices) if job.stages else {}
    summary = {
        "table": str(Path(args.table).resolve()),
        "fingerprint": job.table.fingerprint,
        "rule": job.rule.name,
        "weights": dict(job.rule.weights),
        "min_gap": job.rule.min_gap,
        "tolerance": job.rule.tolerance,
        "max_per_prompt": job.rule.max_per_prompt,
        "by": args.by,
        "seed": args.seed,
        "held_out_share": args.held_out,
        "mixed_shapes": job.mixed_shapes,
        "media": len(job.table.media),
        "prompts": found.prompts,
        "pairs": len(found.choices),
        "train": len(train),
        "held_out": len(held_out),
        "labels": {"true": labels[True], "false": labels[False]} if args.labels else None,
        "stages_by": job.stages_by if job.stages else None,
        "stages": {str(stage): stages[stage] for stage in sorted(stages)},
        "dropped_media": found.media.summary(),
        "dropped_pairs": found.pairs.summary(),
    }
    write_text(folder / PAGE, page.render(folder.name, job, found, train or held_out, summary))
    write_text(folder / SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def _write_rows(
    args: argparse.Namespace, job: "Job", files: Mapping[str, Sequence["Choice"]]
) -> Counter[bool]:
    """Write the pairs, or the labels of their media, of every file; count the labels."""
    from flowalign.curation.pairing.job import labelled, line, write

    labels: Counter[bool] = Counter()
    for name, choices in files.items():
        (Path(args.out) / name).unlink(missing_ok=True)
        rows = [line(job, choice) for choice in choices]
        if args.labels:
            rows = labelled(job, choices)
            labels.update(row["label"] for row in rows)
        if rows:
            write(Path(args.out), name, rows)
    return labels


def _print_summary(args: argparse.Namespace, found: "Found", summary: Mapping[str, Any]) -> None:
    from flowalign.curation.pairing.job import HELD_OUT, PAGE, TRAIN

    folder = Path(args.out)
    files = {"train": TRAIN, "held_out": HELD_OUT}
    rows = {
        name: f"{summary[name]:,}: {folder / file}" for name, file in files.items() if summary[name]
    }
    if labels := summary["labels"]:
        rows["labels"] = f"{labels['true']:,} true, {labels['false']:,} false"
    rows |= {
        "media dropped": "\n".join([f"{found.media.total:,}", *found.media.lines()]),
        "pairs dropped": "\n".join([f"{found.pairs.total:,}", *found.pairs.lines()]),
        "page": str(folder / PAGE),
    }
    print_table(f"{summary['pairs']:,} pairs from {summary['prompts']:,} prompts", rows)
