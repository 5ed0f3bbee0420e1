"""Write the model card of a trained reward."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def render_card(config: Mapping[str, Any]) -> str:
    """Return the card: dimensions, data, agreement with annotators, calibration, licence, use."""
    needs = "a prompt with every sample" if config["needs_prompt"] else "no prompt"
    needs += " and its source image" if config.get("needs_references") else ""
    lines = [
        f"# {config['name']}",
        "",
        f"A trained reward model of {'noisy latents of ' if 'noise' in config else ''}"
        f"{config['modality']} media that needs {needs}. "
        f"Licence: {config['licence']}.",
        "",
        *_section("Dimensions", *_dimensions(config)),
        *_section(
            "Data",
            *(f"- {key}: {_format_value(value)}" for key, value in config["data"].items()),
            "",
            "Records are divided by prompt (edits: by prompt and source), so no prompt is in two "
            "parts. The held-out part was used for early stopping, temperatures and tie "
            "thresholds. The test part was used for nothing else.",
        ),
        *_section(
            "Agreement with annotators",
            *_agreement(config),
            "",
            "Accuracy: share of the pairs with a human preference that the scores order correctly. "
            "With ties: three-way accuracy; leads up to the threshold of the held-out part are "
            "ties. ECE: expected calibration error of sigmoid(a - b) in calibrated units.",
        ),
        *_section(
            "Parts",
            f"- backbone: `{json.dumps(config['backbone'])}`, "
            f"fingerprint {config['backbone_fingerprint']}",
            f"- head: `{json.dumps(config['head'])}`",
            f"- best epoch: {config['best_epoch']}",
            *_noise(config.get("noise")),
        ),
        *_section("Use", *_usage(config["dims"], "noise" in config)),
    ]
    return "\n".join(lines)


def _section(title: str, *lines: str) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _noise(noise: Mapping[str, Any] | None) -> list[str]:
    if noise is None:
        return []
    return [
        f"- noise levels: `{json.dumps(noise['times'])}`; the results above use one level drawn "
        "for each record",
        f"- cost of a score: {noise['evaluation_share']:.3g} of an evaluation of the denoiser",
    ]


def _usage(dims: Sequence[str], noisy: bool) -> list[str]:
    if noisy:
        return [
            "```yaml",
            "class_path: reward_models.TrainedLatentReward",
            "init_args: {path: PATH_OF_THIS_FOLDER}",
            "```",
        ]
    return [
        "```yaml",
        "rewards:",
        "  - class_path: reward_models.TrainedReward",
        "    init_args: {path: PATH_OF_THIS_FOLDER}",
        "    weight: {" + ", ".join(f"{d}: 1.0" for d in dims) + "}",
        "```",
    ]


def _dimensions(config: Mapping[str, Any]) -> list[str]:
    rows = ["| dimension | labels | loss | learned | temperature |", "|---|---|---|---|---|"]
    for dim in config["dims"]:
        learned = ", ".join(f"{k} = {_format_value(v)}" for k, v in config["learned"][dim].items())
        rows.append(
            f"| {dim} | {config['labels'][dim]} | {config['losses'][dim]} | {learned or '-'} | "
            f"{_format_value(config['temperatures'][dim])} |"
        )
    return rows


def _agreement(config: Mapping[str, Any]) -> list[str]:
    rows = [
        "| part | dimension | pairs | ties | accuracy | with ties | ECE | Spearman |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part, dims in config["figures"].items():
        for dim, found in dims.items():
            shown = [
                _format_value(found.get(key))
                for key in (
                    "ties",
                    "accuracy",
                    "accuracy_with_ties",
                    "calibration_error",
                    "spearman",
                )
            ]
            rows.append(f"| {part} | {dim} | {int(found['pairs'])} | {' | '.join(shown)} |")
    return rows


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_format_value(v) for v in value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
