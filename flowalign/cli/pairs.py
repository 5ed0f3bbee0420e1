"""Make training pairs from a table of scores: `flowalign pairs`."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowalign.cli.options import SEED, Parser, number, whole
from flowalign.utils.console import table as print_table
from flowalign.utils.files import write_rows, write_text

if TYPE_CHECKING:
    from flowalign.curation.pairing_job import PairingJob, PairSelection
    from flowalign.curation.score_table import PairChoice, PairingRule

HELP = "Make training pairs from a table of scores."
EXIT_FAILED = 1
_LISTED = 3
"""Largest number of reasons that an error message lists."""
_RULES = (
    "--stages_by needs --stages",
    "--labels excludes --stages: a label has no stage",
    "--labels excludes --rule per_dimension: a label has no dimension",
    "--tolerance needs --rule dominance",
    "--weights excludes --rule per_dimension: it has no total",
)
"""Options that need or exclude others."""


def add_arguments(parser: Parser) -> None:
    """Add the options of `flowalign pairs`."""
    add = parser.add_argument
    add("table", help="folder of `flowalign score`, or its scores.parquet or scores.jsonl")
    add("--out", required=True, metavar="FOLDER", help="output folder; earlier pairs are replaced")
    add(
        "--rule",
        required=True,
        choices=("best_worst", "gap", "dominance", "per_dimension"),
        help="best_worst: best against worst sample per prompt; gap: all pairs; dominance: all "
        "Pareto-dominating pairs; per_dimension: all pairs, separately in each dimension",
    )
    names = "dimensions, or columns of annotators such as votes/overall (default: all dimensions)"
    add("--dimensions", nargs="+", default=[], metavar="NAME", help=names)
    add(
        "--weights",
        nargs="+",
        default=[],
        metavar="NAME=WEIGHT",
        help="weights of the total; required with several dimensions",
    )
    add("--min_gap", type=float, default=0.0, help="smallest gap of a pair (default: 0)")
    add("--tolerance", type=float, help="dominance: deficit per dimension that is still ignored")
    add("--max_per_prompt", type=whole(1), help="pairs per prompt, those with the widest gaps")
    add("--by", choices=("prompt", "record"), default="prompt", help="group (default: prompt)")
    _add_division(parser)
    root = "folder where relative paths of the table begin (default: the current folder)"
    add("--mask", metavar="REWARD", help="use the maps of this reward as masks (FocusDPO)")
    add("--root", default="", metavar="FOLDER", help=root)
    add(
        "--labels",
        action="store_true",
        help="write single samples for KTO, with columns prompt, completion and label (true for "
        "winners); samples that both win and lose are left out",
    )
    add(
        "--mixed_shapes",
        action="store_true",
        help="also pair samples that differ in size or number of frames",
    )
    parser.rules += _RULES


def _add_division(parser: Parser) -> None:
    """Add the options that divide pairs into stages, and prompts into parts."""
    add = parser.add_argument
    add("--stages", type=whole(2), help="number of curriculum stages, wide gaps first")
    by = "stages with equal ranges of gaps (score, default), or equally many pairs (rank)"
    add("--stages_by", choices=("score", "rank"), help=by)
    add(
        "--held_out",
        type=number(0.0, below=1.0),
        default=0.1,
        help="held-out share of the prompts (default: 0.1)",
    )
    add("--seed", type=whole(*SEED), default=0, help="seed of the held-out prompts (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Make pairs; return 0, or 1 if the table gives none."""
    from flowalign.curation.pairing_job import check_folder, find_pairs

    if args.root and not Path(args.root).is_dir():
        raise ValueError(f"--root {args.root!r} is no folder")
    check_folder(Path(args.out))
    job = _build_job(args)
    found = find_pairs(job)
    if not found.choices:
        lines = [*found.media.lines(), *found.pairs.lines()] or ["no gap is large enough"]
        reasons = "\n".join(format_pair[:300] for format_pair in lines[:_LISTED])
        sys.stderr.write(f"error: {args.table} gives no pair:\n{reasons}\n")
        return EXIT_FAILED
    _print_summary(args, found, _write_files(args, job, found))
    return 0


def _build_job(args: argparse.Namespace) -> "PairingJob":
    from flowalign.curation.pairing_job import PairingJob
    from flowalign.curation.score_table import find_table, read_table

    weights = _parse_weights(args.weights)
    dims = list(dict.fromkeys(args.dimensions)) or list(weights)
    scored = read_table(find_table(Path(args.table)), dims, args.root)
    rule = _build_rule(args, scored.dims, weights)
    return PairingJob(
        scored,
        rule,
        args.by == "record" or rule.compares_labels,
        args.stages or 0,
        args.stages_by or "score",
        args.mixed_shapes,
        args.mask,
    )


def _build_rule(
    args: argparse.Namespace, dims: Sequence[str], weights: dict[str, float]
) -> "PairingRule":
    from flowalign.curation.score_table import PairingRule

    if not weights and (len(dims) == 1 or args.rule == "per_dimension"):
        weights = dict.fromkeys(dims, 1.0)
    if set(weights) != set(dims):
        names = " ".join(f"{dim}=1" for dim in dims)
        raise ValueError(
            f"the total of {', '.join(dims)} needs exactly one weight for each,\n"
            f"such as --weights {names}; or select dimensions with --dimensions"
        )
    weights = {dim: weights[dim] for dim in dims}
    return PairingRule(args.rule, weights, args.min_gap, args.tolerance or 0.0, args.max_per_prompt)


def _parse_weights(pairs: Sequence[str]) -> dict[str, float]:
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


def _write_files(
    args: argparse.Namespace, job: "PairingJob", found: "PairSelection"
) -> dict[str, Any]:
    """Write all files, the summary last; return the summary."""
    from flowalign.curation import pairing_job as pairing

    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = pairing.split(job.table, found.choices, args.held_out, args.seed)
    labels = _write_rows(args, job, {pairing.TRAIN: train, pairing.HELD_OUT: held_out})
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
    page = pairing.render_pairs(folder.name, job, found, train or held_out, summary)
    write_text(folder / pairing.PAGE, page)
    write_text(folder / pairing.SUMMARY, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    return summary


def _write_rows(
    args: argparse.Namespace, job: "PairingJob", files: "Mapping[str, Sequence[PairChoice]]"
) -> Counter[bool]:
    """Write the pairs of every file, or the labels of their samples; count the labels."""
    from flowalign.curation.pairing_job import format_pair, format_samples

    labels = Counter[bool]()
    for name, choices in files.items():
        (Path(args.out) / name).unlink(missing_ok=True)
        rows = [format_pair(job, choice) for choice in choices]
        if args.labels:
            rows = format_samples(job, choices)
            labels.update(row["label"] for row in rows)
        if rows:
            write_rows(Path(args.out) / name, rows)
    return labels


def _print_summary(
    args: argparse.Namespace, found: "PairSelection", summary: Mapping[str, Any]
) -> None:
    from flowalign.curation.pairing_job import HELD_OUT, PAGE, TRAIN

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
