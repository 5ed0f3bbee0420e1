"""Build the steering of `flowalign sample` from its options: RewardSDS, or a search."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from flowalign.runs.config import Run
from flowalign.runs.sample.steering import Steering
from flowalign.sampling.reward_sds import RewardSDS
from flowalign.sampling.search import Search
from flowalign.utils.typed_settings import load_typed

_SETTING_NAMES = {"latent_rate": "learning_rate"}
"""Setting of RewardSDS for each option with another name."""


def build_steering(
    run_file: Run,
    sds_steps: int | None,
    sds_options: Mapping[str, Any],
    best_of: int | None,
    search_file: str | None,
) -> Steering | None:
    """Return the optimisation or search that replaces plain sampling, or None.

    Args:
        run_file: Run that provides the rewards.
        sds_steps: Optimisation steps of RewardSDS; None: no RewardSDS.
        sds_options: Given options of RewardSDS (noises, weighting, latent_rate).
        best_of: Number of candidates per image; the best one is kept. None: no search.
        search_file: YAML file with settings of a tree search, or None.

    Raises:
        ValueError: Options exclude each other or the run's guidance, or no reward has a weight.
    """
    sds = _read_reward_sds(sds_steps, sds_options)
    tree, settings = _read_search(best_of, search_file)
    if sds and tree:
        raise ValueError("--reward_sds and a search exclude each other: give one of them")
    cfg = sds or tree
    if cfg is None:
        return None
    _check_guidance(run_file, "--reward_sds" if sds else "a search")
    rewards = run_file.build_rewards()
    if isinstance(cfg, Search) or cfg.weighting != "none":
        rewards.check_weights()
    rewards.check_policy(run_file.policy, with_sound=False)
    steering = Steering(cfg, rewards.weighted(), settings or json.loads(json.dumps(asdict(cfg))))
    steering.check()
    return steering


def _check_guidance(run_file: Run, option: str) -> None:
    """Raise ValueError if the run file has guidance that the steered sampler would ignore."""
    if run_file.evaluation and run_file.evaluation.reward_guidance:
        raise ValueError(
            f"evaluation.reward_guidance does not reach {option}: drop the option, "
            "or the guidance with --evaluation.reward_guidance null"
        )
    if run_file.conditioning and run_file.conditioning.guidance is not None:
        raise ValueError(
            f"the guidance of conditioning {type(run_file.conditioning).__name__} does not reach "
            f"{option}: drop the option, or the conditioning with --conditioning null"
        )


def _read_reward_sds(steps: int | None, options: Mapping[str, Any]) -> RewardSDS | None:
    """Return the settings of RewardSDS; raise ValueError for its options without it."""
    if steps is None:
        if options:
            raise ValueError(f"--{next(iter(options))} is an option of --reward_sds: add it")
        return None
    named = {_SETTING_NAMES.get(name, name): value for name, value in options.items()}
    return RewardSDS(steps=steps, **named)


def _read_search(best_of: int | None, file: str | None) -> tuple[Search | None, dict[str, Any]]:
    """Return the search for each image, if there is one, and its settings as JSON values."""
    if best_of:
        return Search(width=best_of), {"width": best_of}
    if file is None:
        return None, {}
    tree, text = load_typed(Search, file)
    return tree, yaml.safe_load(text)
