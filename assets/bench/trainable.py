"""Write the planned memory of the published models for `flowalign doctor`.

python assets/bench/trainable.py     # seconds; reads the plans in assets/bench/full_size.json
"""

import json
from pathlib import Path

from flowalign.runs.config.compose import compose
from flowalign.utils.files import write_text

HERE = Path(__file__).parent
OUT = HERE.parents[1] / "flowalign" / "runs" / "library" / "trainable.json"


def main() -> None:
    """Write a line per model: precision and micro-batch of its run file, and planned bytes."""
    lines = []
    for name, plan in json.loads((HERE / "full_size.json").read_text()).items():
        file = Path(f"configs/models/{name}.yaml")
        if not file.is_file():
            continue  # a plan of other settings than a bundled file
        run = compose([str(file)]).values
        row = {
            "precision": run["policy"]["init_args"]["precision"],
            "micro_batch": run["recipe"]["init_args"]["micro_batch"],
            "bytes": max(plan["planned"].values()),
        }
        lines.append(f'"{name}": {json.dumps(row)}')
    write_text(OUT, "{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    main()
