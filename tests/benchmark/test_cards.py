"""Every card is complete, and aggregates recorded item scores as the official script does."""

import math
from functools import cache

import pytest

from flowalign.rewards.config import build_reward_models
from flowalign.studies.benchmark.card import list_cards, load_card
from flowalign.utils.strict_yaml import read_mapping
from tests.fixtures.recorded_benchmarks import GENEVAL, GENEVAL_TAGS, IMGEDIT, UNIGENBENCH, numbers

CARDS = list_cards()
SCORED = [name for name, file in CARDS.items() if read_mapping(str(file)).get("rewards")]
card_of = cache(load_card)
TOYS = {"shapes", "shapes_edit", "shapes_video", "words"}


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    monkeypatch.setattr("flowalign.studies.benchmark.statistics.REPEATS", 20)


MEANS = {  # cards whose numbers are plain means of the scorers' outputs, and their factor
    "geneval2": 100,
    "ocr": 1,
    "pickscore": 1,
    "drawbench": 1,
    "drawbench_judges": 1,
    "partiprompts": 1,
    "dpg_bench": 100,
    "shapes": (100, 1),
    "shapes_edit": (100, 1),
    "shapes_video": (100, 1),
    "words": (100, 1),
}
OTHERS = {
    "geneval",
    "geneval_flow_grpo",
    "hpsv3",
    "t2i_compbench",
    "unigenbench",
    "divgenbench",
} | {
    *("vbench", "vbench2", "gedit", "imgedit"),
}


def test_every_card_has_a_test():
    assert CARDS.keys() == MEANS.keys() | OTHERS


@pytest.mark.parametrize("name", MEANS)
def test_plain_means(name):
    card = card_of(name)
    scores = {dim: [0.25 * (k + 1), 0.5, 0.9] for k, dim in enumerate(card.dims)}
    scale = MEANS[name] if isinstance(MEANS[name], tuple) else (MEANS[name],) * len(card.metrics)
    expected = {
        (metric.name, ""): factor * (0.25 * (k + 1) + 1.4) / 3
        for k, (metric, factor) in enumerate(zip(card.metrics, scale, strict=True))
    }
    assert numbers(name, scores) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["geneval", "geneval_flow_grpo"])
def test_geneval_is_the_mean_over_tags(name):
    found = numbers(name, {"correct": list(map(int, GENEVAL))}, {"tag": GENEVAL_TAGS})
    assert round(found["overall", ""], 5) == 0.28472


def test_imgedit_rounds_twice_per_type():
    rows = [list(map(int, each)) for each in IMGEDIT.split()]
    scores = {f"score_{k + 1}": [row[k] for row in rows] for k in range(3)}
    found = numbers(
        "imgedit", scores, {"edit_type": [("add", "remove", "style")[i % 3] for i in range(17)]}
    )
    assert found == pytest.approx(
        {("ImgEdit", "add"): 3.44, ("ImgEdit", "remove"): 2.39, ("ImgEdit", "style"): 3.53}
    )


def test_unigenbench_is_correct_over_total_per_dimension():
    names = [name for name, _ in UNIGENBENCH]
    groups = {"primary": [name.partition("-")[0] for name in names], "sub": names}
    found = numbers("unigenbench", {"score": [score for _, score in UNIGENBENCH]}, groups)
    assert found["primary", "Layout"] == pytest.approx(100 * 2 / 6)
    assert found["primary", "Grammar"] == pytest.approx(100 * 2 / 6)
    assert found["sub", "Grammar-Negation"] == pytest.approx(25)
    assert found["sub", "Style"] == pytest.approx(60)
    assert ("primary", "") not in found


def test_vbench2_is_the_mean_of_five_group_means():
    card = card_of("vbench2")
    names = [name for metric in card.metrics for name in metric.groups]
    assert len(names) == len(set(names)) == 18
    values = [k / 18 for k in range(18)]
    found = numbers("vbench2", {"score": values}, {"dimension": names})
    groups = [values[:2], values[2:4], values[4:11], values[11:14], values[14:]]
    assert found["total", ""] == pytest.approx(100 * sum(sum(g) / len(g) for g in groups) / 5)


def test_gedit_is_the_root_of_the_product_per_image_then_over_types():
    scores = {"semantics": [4, 9, 1], "quality": [9, 1, 1]}
    found = numbers("gedit", scores, {"task_type": ["a", "a", "b"]})
    expected = {"semantics": (6.5 + 1) / 2, "quality": (5 + 1) / 2, "overall": (4.5 + 1) / 2}
    assert found == pytest.approx({(name, ""): value for name, value in expected.items()})


def test_hpsv3_is_the_mean_of_category_means_and_t2i_compbench_has_no_overall_score():
    scores, names = [1.0, 2.0, 9.0], ["a", "a", "b"]
    assert numbers("hpsv3", {"hpsv3": scores}, {"category": names}) == {("HPSv3", ""): 5.25}
    found = numbers("t2i_compbench", {"score": scores}, {"category": names})
    assert {group: value for (_, group), value in found.items()} == {"a": 1.5, "b": 9.0}


def test_divgenbench_adds_three_standard_deviations():
    scores = {"saturation": [0.0, 1.0], "brightness": [0.5, 0.5], "contrast": [0.2, 0.6]}
    assert numbers("divgenbench", scores) == pytest.approx({("PVS", ""): 0.5 + 0 + 0.2})


@pytest.mark.parametrize("name", SCORED)
def test_the_scorers_of_a_card_give_its_dimensions(name):
    models, _ = build_reward_models({"rewards": card_of(name).rewards}, name)
    assert set(card_of(name).dims) <= {dim for model in models for dim in model.spec.dims}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_states_its_source_and_finite_numbers(name):
    card = card_of(name)
    assert card.source
    assert card.scorer
    assert all(math.isfinite(one.value) for one in card.published)
    assert card.rewards or name not in TOYS


def test_a_card_with_a_billion_images_is_refused(tmp_path):
    text = list_cards()["geneval"].read_text()
    assert "images_per_prompt: 4" in text
    (tmp_path / "card.yaml").write_text(
        text.replace("images_per_prompt: 4", "images_per_prompt: 1000000000")
    )
    with pytest.raises(ValueError, match=r"images_per_prompt is 1000000000; it must be .* 10000"):
        load_card(str(tmp_path / "card.yaml"))
