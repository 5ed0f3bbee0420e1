"""The benchmarks of the toy models run from end to end, without any download."""

import json

import pytest

from tests.fixtures.commands import exit_code

TOYS = {
    "shapes": "configs/shapes.yaml",
    "shapes_edit": "configs/shapes_edit.yaml",
    "shapes_video": "configs/models/shapes_video.yaml",
    "words": "configs/words_flow_grpo.yaml",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_toy_benchmark_gives_a_table_and_a_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr("flowalign.studies.benchmark.statistics.REPEATS", 50)
    words = f"--benchmark {name} --limit 3 --count 1 --out {tmp_path / 'out'}"
    assert exit_code("eval", TOYS[name], *words.split()) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["images"] == 3
    assert [one["setting"] for one in results["deviations"]] == ["images per row", "rows"]
    assert all(0 <= line["scores"][0]["value"] <= 100 for line in results["lines"])
    assert "data:image/webp" in (tmp_path / "out" / "results.html").read_text()
