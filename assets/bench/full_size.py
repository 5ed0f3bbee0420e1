"""Plan and measure the memory and FLOPs of published models at full size, without GPU or weights.

    python assets/bench/full_size.py --plan                    # all run files of configs/models
    python assets/bench/full_size.py --plan sd35_medium        # some
    python assets/bench/full_size.py sd35_medium flux1_dev     # measure; about a minute of a core
    python assets/bench/full_size.py --draw                    # the chart of docs/models/index.md

A measured model makes one update by the stages of `full_size_stages` on the simulated GPU of the
tests. Results are added to `full_size.json`, next to the memory that `flowalign check` plans.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from flowalign.utils.files import atomic_write  # noqa: E402
from tests.fixtures.simulated_gpu import on_simulated_gpu  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
CHART = ROOT / "assets/figures/full_size.svg"
OTHERS = "shapes_video", "toy_shapes", "any_flow"
"""Run files that name no published model."""
SDXL = "{class_path: pipelines.SDXL, init_args: {path: stabilityai/stable-diffusion-xl-base-1.0, "
SDXL += "height: 1024, width: 1024, precision: bf16, gradient_checkpointing: true}}"
"""Policy of a model without a file in configs/models, instead of Stable Diffusion 1.5."""
PLAIN = "trackers=[]", "speed.kept_blocks=0"
"""Settings of all runs: each block recomputes its activations."""
COLORS = {
    "encoding": "#9aa5b1",
    "sampling": "#4c78a8",
    "updating": "#f58518",
    "verifying": "#54a24b",
}


def _files(model: str) -> tuple[list[str], list[str]]:
    """Return the run file of a model, and the settings that it needs here."""
    if model == "sdxl":
        return ["configs/models/sd15.yaml"], [*PLAIN, f"policy={SDXL}"]
    return [f"configs/models/{model}.yaml"], [*PLAIN]


def all_models() -> list[str]:
    """Return the published models: stems of configs/models, and sdxl."""
    files = sorted((ROOT / "configs/models").glob("*.yaml"))
    return [*(file.stem for file in files if file.stem not in OTHERS), "sdxl"]


def plan_model(model: str, *changes: str) -> dict[str, Any]:
    """Return the planned memory of the run file of a model."""
    from assets.bench.full_size_stages import plan

    files, settings = _files(model)
    return plan(files, [*settings, *changes])


def measure_model(model: str, *changes: str) -> dict[str, Any]:
    """Return the measured memory of the run file of a model."""
    files, settings = _files(model)
    measure: Any = SimpleNamespace(
        __module__="assets.bench.full_size_stages", __qualname__="measure"
    )
    given = model, files, [*settings, *changes]
    result, _ = on_simulated_gpu(measure, *given, payload="meta")
    return result


def draw(results: dict[str, Any]) -> None:
    """Draw the planned bytes of each stage, with the measured ones as marks."""
    import matplotlib.pyplot as plt

    names = sorted(results, key=lambda name: max(results[name]["planned"].values()))
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(names) + 1.2))
    for row, name in enumerate(names):
        for place, (stage, color) in enumerate(COLORS.items()):
            y, one = row + 0.3 - 0.2 * place, results[name]
            label = {"label": stage} if not row else {}
            axes.barh(y, one["planned"][stage] / 1e9, 0.18, color=color, **label)
            if "measured" in one:
                axes.plot(one["measured"][stage] / 1e9, y, "|", color="black", markersize=5)
    for size in (24, 48, 80):
        axes.axvline(size, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlabel(
        "GB of one process. Bars: flowalign check. Marks: simulated. Lines: 24, 48, 80 GB"
    )
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(CHART, metadata={"Date": None})


def main() -> None:
    """Plan and measure the named models, or draw the figure."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "models", nargs="*", help="models to measure: stems of configs/models, sdxl"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="results (default: %(default)s)")
    parser.add_argument(
        "--plan", action="store_true", help="plan instead of measuring; without models, all"
    )
    parser.add_argument("--draw", action="store_true", help="draw the chart")
    args = parser.parse_args()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    work = plan_model if args.plan else measure_model
    for model in args.models or (all_models() if args.plan else ()):
        results[model] = results.get(model, {}) | work(model)
        with atomic_write(args.out) as partial:
            partial.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    if args.draw:
        draw(results)


if __name__ == "__main__":
    main()
