"""Collect votes on samples in a browser, also as the reward of a training run."""

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flowalign.cli.commands.common import get_log, refuse_address
from flowalign.cli.commands.serve import format_entries
from flowalign.curation.votes.poll import Poll, PollSettings, measure_agreement
from flowalign.curation.votes.questions import Question, make_questions
from flowalign.curation.votes.run_samples import find_run_questions
from flowalign.curation.votes.vote_reward import NAME, VoteReward
from flowalign.curation.votes.vote_server import VoteServer
from flowalign.curation.votes.vote_table import VOTES, VoteTable
from flowalign.data.readers import open_dataset
from flowalign.utils.console import say
from flowalign.utils.errors import ConfigError, convert_value_errors
from flowalign.utils.folders import Claim
from flowalign.utils.hosts import is_loopback

_WEEK_S = 604800


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Serve until interrupted, and return 0; raise ConfigError for unusable samples or address."""
    source = Path(args.samples)
    local, token = is_loopback(args.host), os.environ.get(args.token_env)
    if not local and not token:
        raise ConfigError(
            f"--host {args.host} can be reached from other machines, so votes need a token:\n"
            f"set the environment variable {args.token_env}, or serve on 127.0.0.1"
        )
    if not args.online and not source.exists():
        raise ConfigError(f"{source} does not exist; --online waits for samples of a training run")
    settings = PollSettings(
        kind=args.ask,
        dimensions=args.dimensions,
        scale=args.scale,
        annotators=args.annotators,
        repeats=args.repeats,
    )
    folder = source if source.is_dir() or args.online else source.parent
    out = Path(args.out) if args.out else folder / "votes"
    claim = Claim(out, get_log())
    try:
        table = VoteTable(out / VOTES)
        if any(settings.column not in row for row in table.rows.values()):
            raise ValueError(f"{table.path} has other votes than {settings.column}: choose --out")
        poll = Poll(settings, table, [] if args.online else _find_questions(args, source, out))
        reward = VoteReward(poll, out / "samples", args.candidates)
        with refuse_address(args.host, args.port):
            server = VoteServer(
                poll, reward, args.host, args.port, source, None if local else token
            )
        _announce(args, server)
        with server, suppress(KeyboardInterrupt):
            server.serve_forever()
        _summarize(poll)
    finally:
        claim.release()
    return 0


def _find_questions(args: argparse.Namespace, source: Path, out: Path) -> Sequence[Question]:
    if (source / "config.yaml").is_file() and (source / "samples" / "index.json").is_file():
        return find_run_questions(source, out, args.candidates)
    dataset = open_dataset(str(source), args.schema, args.root)
    questions, problems = make_questions(dataset, args.candidates)
    kinds = Counter(problem.partition(":")[0] for problem in problems)
    told = "; ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    if not questions:
        raise ValueError(f"{source} gives no question: {told or 'it is empty'}")
    if problems:
        say(f"left out: {told}")
    return questions


def _announce(args: argparse.Namespace, server: VoteServer) -> None:
    url = f"http://{args.host}:{server.server_port}"
    table, key = server.poll.table, f"/?key={server.token}" if server.token else ""
    say(f"{len(server.poll.questions):,} questions, {len(table.rows):,} votes in {table.path}")
    say(f"vote on {url}{key}  (Ctrl-C ends it; the next start continues)")
    if args.online:
        say("reward in a run file:\nrewards:")
        more = {"timeout": _WEEK_S, "retries": 1000}
        say("\n".join(format_entries(NAME, args.dimensions, url, more)))


def _summarize(poll: Poll) -> None:
    say(f"{len(poll.table.rows):,} votes in {poll.table.path}")
    for dim, one in measure_agreement(poll).items():
        if one.alpha == one.alpha:
            say(f"{dim}: agreement of annotators (Krippendorff's alpha) {one.alpha:.2f}")
        if one.repeats == one.repeats:
            say(f"{dim}: consistency of repeated answers (alpha) {one.repeats:.2f}")
