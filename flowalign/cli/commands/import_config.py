"""Convert a configuration of another toolkit to a run file, and check it."""

import argparse
from dataclasses import asdict
from pathlib import Path

from flowalign.runs.config import load
from flowalign.runs.importing.import_job import ImportOptions, import_config, write
from flowalign.utils.console import table
from flowalign.utils.errors import convert_value_errors
from flowalign.utils.folders import check_file_path


@convert_value_errors()
def run(args: argparse.Namespace) -> int:
    """Write the run file, print its differences, check it, and return 0."""
    out = Path(args.out)
    check_file_path(out, overwrite=False)
    options = ImportOptions(args.function, args.source_gpus, args.gpus, args.family, args.prompts)
    draft, text = import_config(Path(args.file), options)
    write(out, text)
    data = draft.settings["recipe"].get("data", {}).get("path")
    if data is None or Path(data).exists():
        try:
            load([str(out)], [])
        except ValueError:
            out.unlink()
            raise
    facts = {k.replace("_", " "): str(v) for k, v in asdict(draft.facts).items() if v is not None}
    gpus = args.gpus or draft.gpus
    table(
        f"{args.file}: {out}",
        facts
        | {"differs": "\n".join(draft.differences) or "-"}
        | {"unsupported": "\n".join(draft.unsupported) or "-"}
        | {"train": f"flowalign train {out} --processes {gpus}"},
    )
    return 0
