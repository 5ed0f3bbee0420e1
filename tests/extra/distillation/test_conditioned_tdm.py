"""Distillation samples the prompts that the run's conditioning makes, as evaluation does."""

from pathlib import Path

import pytest

from flowalign.extra import TDM, RewardWords
from tests.fixtures.training import context, new_learner


def words(name: str) -> RewardWords:
    return RewardWords(words={name: "<warm>"}, form="{words} {prompt}", guidance=None)


def test_the_generator_is_asked_with_the_words_of_the_run(tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\nbb\n")
    cfg = TDM(prompts=str(prompts), prompts_per_step=2, num_steps=2, real_guidance=1.0)
    run = context(conditioning=words("redness"))
    cfg.check(run)
    opened = cfg.open(run, new_learner(run.policy), Path(tmp_path), lambda _: None)
    drawn = next(opened.data([0])).data.trajectory
    assert sorted(r.policy_request.prompt for r in drawn.requests) == ["<warm> a", "<warm> bb"]


def test_words_of_an_unknown_reward_are_refused(tmp_path):
    (tmp_path / "prompts.txt").write_text("a\n")
    cfg = TDM(prompts=str(tmp_path / "prompts.txt"), prompts_per_step=1, real_guidance=1.0)
    with pytest.raises(ValueError, match="warmth"):
        cfg.check(context(conditioning=words("warmth")))
