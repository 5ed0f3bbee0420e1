"""The benchmarks of the toy models run from end to end, without any download."""

import json

import pytest

from flowalign.cli.main import main

TOYS = {
    "shapes": "configs/shapes.yaml",
    "shapes_edit": "configs/shapes_edit.yaml",
    "shapes_video": "configs/models/shapes_video.yaml",
    "words": "configs/words_flow_grpo.yaml",
}

FEW = "--limit", "3", "--count", "1"


@pytest.mark.slow
@pytest.mark.parametrize("name", TOYS)
def test_a_toy_benchmark_gives_a_table_and_a_page(name, tmp_path, monkeypatch):
    monkeypatch.setattr("flowalign.studies.benchmark.statistics.REPEATS", 50)
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "eval",
                TOYS[name],
                "--benchmark",
                name,
                "--limit",
                "3",
                "--count",
                "1",
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert not ended.value.code
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["images"] == 3
    assert [one["setting"] for one in results["deviations"]] == ["images per row", "rows"]
    assert all(0 <= line["scores"][0]["value"] <= 100 for line in results["lines"])
    assert "data:image/webp" in (tmp_path / "out" / "results.html").read_text()
