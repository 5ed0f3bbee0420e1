"""Show the progress of a scoring job."""

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from flowalign.curation.scoring.stats import Progress

_SECONDS_BETWEEN_LINES = 5.0


class ShownProgress(Progress):
    """Progress as a bar on a terminal; in a log, a line at most every 5 seconds."""

    def __init__(self, bar: Bar, total: int | None):
        super().__init__()
        self._bar, self._task = bar, bar.add_task("", total=total, status="")
        self._printed_at = self.start

    def show(self) -> None:
        """Show the progress after a block."""
        speed = self.speed()
        status = (
            f"{self.stats.failed} failed  {speed['rows_per_second']:.1f} rows/s  "
            f"{speed['share_in_model']:.0%} in the model"
        )
        self._bar.update(self._task, completed=self.stats.records, status=status)
        if self._bar.disable and time.perf_counter() - self._printed_at >= _SECONDS_BETWEEN_LINES:
            self._bar.console.print(
                f"{self.stats.rows} rows  {status}", markup=False, highlight=False
            )
            self._printed_at = time.perf_counter()


@contextlib.contextmanager
def show_progress(total: int | None) -> Iterator[Progress]:
    """Yield the progress of a job with `total` records, shown until the end of the block."""
    columns = (
        TextColumn("records"),
        MofNCompleteColumn(),
        BarColumn(None),
        TextColumn("{task.fields[status]}"),
    )
    console = Console()
    with Bar(*columns, console=console, expand=True, disable=not console.is_terminal) as bar:
        yield ShownProgress(bar, total)
