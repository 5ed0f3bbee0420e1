"""Collect votes on samples in a browser: `flowalign vote`."""

import argparse
import hashlib
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from flowalign.cli.options import add_columns, number, whole
from flowalign.cli.serve import add_address, format_entries, format_url, read_token
from flowalign.utils.console import get_log, say
from flowalign.utils.folders import Claim
from flowalign.utils.hosts import is_loopback
from flowalign.utils.imports import import_optional

if TYPE_CHECKING:
    from flowalign.curation.votes.poll import Poll
    from flowalign.curation.votes.questions import Question
    from flowalign.curation.votes.vote_reward import VoteReward

HELP = "Collect votes on samples in a browser, also as the reward of a training run."
_WEEK_S = 604800
_OWN_FOLDERS = ("sample.json", "config.yaml")
"""Files of folders that flowalign wrote, and where votes are stored by default."""


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
    add(
        "--out",
        metavar="FOLDER",
        help="folder of votes.jsonl (default: SAMPLES/votes; for your own data runs/votes/NAME-ID)",
    )
    add("--schema", default="auto", help="format of a dataset (default: detected)")
    add("--root", metavar="FOLDER", help="folder where relative paths of a dataset begin")
    add_columns(parser)
    add_address(parser, 8413)


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, and return 0; raise ValueError for unusable samples or address."""
    from flowalign.curation.votes.poll import Poll, PollSettings
    from flowalign.curation.votes.questions import VOTES, VoteTable
    from flowalign.curation.votes.vote_reward import VoteReward

    source, token = Path(args.samples), read_token(args)
    import_optional("fastapi", "serve")
    if not args.online and not source.exists():
        raise ValueError(f"{source} does not exist; --online waits for samples of a training run")
    settings = PollSettings(
        kind=args.ask,
        dimensions=args.dimensions,
        scale=args.scale,
        annotators=args.annotators,
        repeats=args.repeats,
    )
    own = args.online or any((source / name).is_file() for name in _OWN_FOLDERS)
    out = Path(args.out or (source / "votes" if own else _place(source)))
    claim = Claim(out, get_log())
    try:
        table = VoteTable(out / VOTES)
        if any(settings.column not in row for row in table.rows.values()):
            raise ValueError(f"{table.path} has other votes than {settings.column}: choose --out")
        poll = Poll(settings, table, [] if args.online else _find_questions(args, source, out))
        reward = VoteReward(poll, out / "samples", args.candidates)
        _serve(args, poll, reward, None if is_loopback(args.host) else token)
        _summarize(poll)
    finally:
        claim.release()
    return 0


def _place(source: Path) -> Path:
    """Return the default folder of votes on a user's data; folders of one name have different."""
    digest = hashlib.sha256(str(source.resolve()).encode()).hexdigest()
    return Path("runs/votes") / f"{source.stem}-{digest[:8]}"


def _serve(args: argparse.Namespace, poll: "Poll", reward: "VoteReward", token: str | None) -> None:
    """Serve the poll until interrupted."""
    from flowalign.curation.votes.vote_server import HEADERS, vote_application
    from flowalign.rewards.batching import Limits
    from flowalign.rewards.reward_server import Service, build_server, listen

    service = Service([reward], Limits(deadline=float(_WEEK_S)), token)
    app = vote_application(poll, service, args.host, Path(args.samples))
    with listen(args.host, args.port) as listening:
        _announce(args, poll, format_url(listening), token)
        server = build_server(app, service.limits.read_timeout, HEADERS)
        # Not the main thread, so that an interrupt does not wait for requests that wait for votes.
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        with suppress(KeyboardInterrupt):
            thread.join()


def _find_questions(args: argparse.Namespace, source: Path, out: Path) -> "Sequence[Question]":
    from flowalign.curation.votes.questions import find_run_questions, make_questions
    from flowalign.data.readers import open_dataset, parse_columns

    if (source / "config.yaml").is_file() and (source / "samples" / "index.json").is_file():
        return find_run_questions(source, out, args.candidates)
    columns = parse_columns(args.columns)
    dataset = open_dataset(str(source), args.schema, args.root, columns)
    questions, problems = make_questions(dataset, args.candidates)
    kinds = Counter(problem.partition(":")[0] for problem in problems)
    told = "; ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    if not questions:
        raise ValueError(f"{source} gives no question: {told or 'it is empty'}")
    if problems:
        say(f"left out: {told}")
    return questions


def _announce(args: argparse.Namespace, poll: "Poll", url: str, token: str | None) -> None:
    from flowalign.curation.votes.vote_reward import NAME

    table, key = poll.table, f"/?key={token}" if token else ""
    say(f"{len(poll.questions):,} questions, {len(table.rows):,} votes in {table.path}")
    say(f"vote on {url}{key}  (Ctrl-C ends it; the next start continues)")
    if args.online:
        say("reward in a run file:\nrewards:")
        more = {"timeout": _WEEK_S, "retries": 1000}
        say("\n".join(format_entries(NAME, args.dimensions, url, more)))


def _summarize(poll: "Poll") -> None:
    from flowalign.curation.votes.poll import measure_agreement

    say(f"{len(poll.table.rows):,} votes in {poll.table.path}")
    for dim, one in measure_agreement(poll).items():
        if one.alpha == one.alpha:
            say(f"{dim}: agreement of annotators (Krippendorff's alpha) {one.alpha:.2f}")
        if one.repeats == one.repeats:
            say(f"{dim}: consistency of repeated answers (alpha) {one.repeats:.2f}")
