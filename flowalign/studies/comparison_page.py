"""Write a comparison as a page, an image and data: `compare.html`, `.png` and `.json`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from flowalign.reports.credit_view import CreditView, read_credit
from flowalign.reports.pages import render, score
from flowalign.reports.records import read_json
from flowalign.reports.run_report import COMPARISON_LINK, write_report
from flowalign.studies.comparison import (
    AXES,
    Axis,
    BenchmarkLine,
    Comparison,
    Difference,
    MethodRow,
    SeedStatistics,
    leads,
)
from flowalign.studies.comparison_chart import (
    DRAWN,
    is_cut,
    list_charts,
    picture,
    spent_by_all,
    words,
)
from flowalign.utils.files import atomic_write, write_json, write_text

Benchmarks = Mapping[str, Sequence[BenchmarkLine]]
"""Results by the name of the benchmark."""


def write_comparison(
    out: Path,
    comparison: Comparison,
    missing: Sequence[str] = (),
    benchmark: Benchmarks | None = None,
) -> None:
    """Write the three files, each atomically.

    `missing` names runs that failed; `benchmark` holds the results of benchmarks.
    """
    out.mkdir(parents=True, exist_ok=True)
    measured = {name: [asdict(line) for line in lines] for name, lines in (benchmark or {}).items()}
    write_json(
        out / "compare.json",
        {"missing": list(missing), "benchmark": measured} | asdict(comparison),
    )
    drawn = picture(comparison)
    with atomic_write(out / "compare.png") as partial:
        partial.write_bytes(drawn)
    write_text(out / "compare.html", page(out, comparison, missing, benchmark))
    for folder in _list_runs(out, comparison).values():
        report = folder / "report.html"
        # Reports older than the comparison lack its link.
        if report.is_file() and COMPARISON_LINK not in report.read_text(encoding="utf-8"):
            write_report(folder)


def _list_runs(out: Path, comparison: Comparison) -> dict[tuple[str, int], Path]:
    """Return the run directories by method and seed."""
    methods = [row.method for row in comparison.rows]
    return {
        (method.name, run.seed): out / method.name / f"seed{run.seed}"
        for method in methods
        for run in method.runs
    }


def page(
    out: Path,
    comparison: Comparison,
    missing: Sequence[str] = (),
    benchmark: Benchmarks | None = None,
) -> str:
    """Render the self-contained page, with links to the reports of the runs in `out`."""
    compared, drawn = spent_by_all(comparison, AXES), spent_by_all(comparison, DRAWN)
    runs = _list_runs(out, comparison)
    warnings = {run: read_json(at / "summary.json").get("warnings") for run, at in runs.items()}
    formats = {"score": score, "spread": with_std, "interval": with_interval}
    return render(
        "comparison.html.j2",
        formats | {"count": count, "words": words},
        name=out.resolve().name,
        comparison=comparison,
        rows=comparison.rows,
        axes=[axis for axis in AXES if axis != "gpu_hours" or axis in compared],
        compared=compared,
        won={axis: leads(comparison, axis) for axis in compared},
        verdict=verdict(comparison),
        caution=caution(comparison),
        missing=missing,
        warnings=[
            f"{name} seed {seed}: {text}"
            for (name, seed), told in warnings.items()
            for text in (told or {}).values()
        ],
        benchmarks=benchmark or {},
        cut=[words(axis) for axis in drawn if is_cut(comparison, axis)],
        charts=list_charts(comparison),
        diverse=any(math.isfinite(row.diversity.mean) for row in comparison.rows),
        reached=reached,
        credit_views=credit_views(out, comparison),
        links={
            run: f"{at.parent.name}/{at.name}/report.html"
            for run, at in runs.items()
            if (at / "report.html").is_file()
        },
        seeds=sorted({seed for _, seed in runs}),
    )


def credit_views(out: Path, comparison: Comparison) -> list[tuple[str, CreditView]]:
    """Return the last credit record of each method's first run, for methods that credit steps."""
    views = []
    for row in comparison.rows:
        seed = min(run.seed for run in row.method.runs)
        if known := read_credit(out / row.method.name / f"seed{seed}" / "credit"):
            views.append((row.method.name, known[-1]))
    return views


def verdict(comparison: Comparison) -> str:
    """Return sentences on the highest method after training, and the leader at equal cost."""
    rows, axis = comparison.rows, spent_by_all(comparison, AXES)[0]
    highest = max(row.final.mean for row in rows)
    best = [row for row in rows if row.final.mean == highest]
    led = [row for row, leader in zip(rows, leads(comparison, axis), strict=True) if leader]
    end = f"{_names(best, 'end')} highest in held-out {comparison.metric}: "
    end += with_std(best[0].final)
    if rows[0] not in best:
        end += f" (baseline {rows[0].method.name}: {with_std(rows[0].final)})"
    return (
        f"{end}. At {count(comparison.budgets[axis])} {words(axis)}, which all runs made, "
        f"{_names(led, 'lead')} with {with_std(led[0].at_budget[axis])}."
    )


def _names(rows: Sequence[MethodRow], verb: str) -> str:
    """Join the names of methods and a verb, for a sentence."""
    return " and ".join(row.method.name for row in rows) + f" {verb}{'s' * (len(rows) == 1)}"


def caution(comparison: Comparison) -> str:
    """Return a warning about methods with one seed; empty if all have several."""
    single = [row.method.name for row in comparison.rows if len(row.method.runs) == 1]
    if not single:
        return ""
    if len(single) == len(comparison.rows):
        return "Every method has one seed only: this supports no claim about which one is better."
    return f"One seed only, which supports no claim: {', '.join(single)}."


def reached(row: MethodRow, axis: Axis) -> str:
    """Format the cost at which a method met the baseline's final mean, with its relative cost."""
    met = row.reach[axis]
    if not math.isfinite(met.cost):
        return "not reached"
    return count(met.cost) + (f" ({met.share:.0%})" if math.isfinite(met.share) else "")


def with_std(values: SeedStatistics) -> str:
    """Format mean and standard deviation, or only the mean for one seed."""
    return score(values.mean) + (f" ± {score(values.std)}" if math.isfinite(values.std) else "")


def with_interval(difference: Difference) -> str:
    """Format a difference with its 95 % interval; a dash for what one seed cannot tell."""
    if not math.isfinite(difference.mean):
        return "-"
    ends = f"{difference.low:+.3f}, {difference.high:+.3f}"
    return f"{difference.mean:+.3f} [{ends if math.isfinite(difference.low) else '-'}]"


def count(value: float) -> str:
    """Format a cost as a whole number, or with one decimal for a few seconds."""
    if 0 < value < 1:
        return f"{value:.2g}"
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:,.1f}"


def describe_results(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Return tables by title: values after training, and at each cost that all runs reached.

    After training, the difference to the baseline follows, with its 95 % interval.
    """
    rows, least = comparison.rows, "smallest detectable difference"
    finals = {
        row.method.name: with_std(row.final)
        + (f", {with_interval(row.difference)}" if row is not rows[0] else "")
        for row in rows
    }
    finals[least] = score(comparison.smallest_final)
    tables = {f"held-out {comparison.metric} after training": finals}
    for axis in spent_by_all(comparison, DRAWN):
        values = {row.method.name: with_std(row.at_budget[axis]) for row in rows}
        values[least] = score(comparison.smallest[axis])
        tables[f"at {count(comparison.budgets[axis])} {words(axis)}"] = values
    return tables


def describe_benchmark(name: str, lines: Sequence[BenchmarkLine]) -> dict[str, dict[str, str]]:
    """Return tables of a benchmark by title: each number with its std, and the differences."""
    tables = {}
    for line in lines:
        rows = {"before training": score(line.base)}
        for method, values in line.methods.items():
            change = line.differences.get(method)
            rows[method] = with_std(values) + (f", {with_interval(change)}" if change else "")
        tables[f"{name}: {line.metric}, difference to the first [95 %]"] = rows
    return tables
