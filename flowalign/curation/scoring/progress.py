"""Show the progress of a scoring job."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from flowalign.curation.scoring.part_files import RunningStats, Throughput
from flowalign.curation.scoring.scoring_job import ScoringJob, Watch

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def show_progress(job: ScoringJob) -> Iterator[Watch]:
    """Show progress: a bar on a terminal; in a log, a line at most every 5 seconds."""
    columns = (
        TextColumn("records"),
        MofNCompleteColumn(),
        BarColumn(None),
        TextColumn("{task.fields[status]}"),
    )
    bar = Progress(*columns, console=Console(), expand=True, disable=not Console().is_terminal)
    task = bar.add_task("", total=job.share(), status="")
    printed_at = time.monotonic()

    def watch(stats: RunningStats, speed: Throughput) -> None:
        nonlocal printed_at
        now = speed.summary()
        status = (
            f"{stats.failed} failed  {now['rows_per_second']:.1f} rows/s  "
            f"{now['share_in_model']:.0%} in the model"
        )
        bar.update(task, completed=stats.records, status=status)
        if bar.disable and time.monotonic() - printed_at >= _SECONDS_BETWEEN_LINES:
            bar.console.print(f"{stats.rows} rows  {status}", markup=False, highlight=False)
            printed_at = time.monotonic()

    with bar:
        yield watch
