"""`flowalign compare --benchmark`: its commands, numbers over seeds, and refusals."""

import json

import pytest

from flowalign.cli.main import main
from flowalign.studies import compare_benchmark, comparison_page
from flowalign.studies.compare import ComparisonRequest
from flowalign.studies.compare_benchmark import evaluate_benchmark
from flowalign.studies.comparison import Curve, Method, Point
from flowalign.studies.comparison import compare as compared


def result():
    point = Point(1, 0.5, 1.0, {"seconds": 1.0})
    methods = [Method(name, (Curve(0, (point,)), Curve(1, (point,)))) for name in ("a", "b")]
    return compared("x", methods)


def test_all_seeds_of_a_method_are_evaluated_together_and_compared(tmp_path, monkeypatch):
    for name in ("a", "b"):
        for seed in (0, 1):
            (tmp_path / name / f"seed{seed}" / "checkpoints" / "step-000002").mkdir(parents=True)
    (tmp_path / "b" / "seed1" / "checkpoints" / "step-000002" / "ema").mkdir()
    commands = []

    def run_all(jobs, _at_once, _log):
        for job in jobs:
            commands.append(" ".join(job.command[3:]))
            out = tmp_path / ("a" if "/a/" in job.command[4] else "b") / "benchmark-toy"
            out.mkdir()
            values = (1.0, 2.0, 4.0) if out.parent.name == "a" else (1.0, 6.0, 8.0)
            scores = [{"value": value} for value in values]
            lines = [{"metric": "m", "group": "", "scores": scores}]
            (out / "results.json").write_text(json.dumps({"lines": lines}))
        return []

    monkeypatch.setattr(compare_benchmark, "run_all", run_all)
    monkeypatch.setattr(comparison_page, "picture", lambda *_: b"png")
    asked = ComparisonRequest(
        [["a.yaml"], ["b.yaml"]],
        ["--num_steps", "1"],  # of training; `eval` would take them for denoising steps
        [0, 1],
        tmp_path,
    )
    (line,) = evaluate_benchmark(asked, "toy", "p", result(), lambda _: None)
    step = "checkpoints/step-000002"
    assert commands[1] == (
        f"eval {tmp_path}/b/seed0/config.yaml --benchmark toy "
        f"--data p --out {tmp_path}/b/benchmark-toy "
        f"--weights {tmp_path}/b/seed0/{step} --weights {tmp_path}/b/seed1/{step}/ema"
    )
    assert (line.metric, line.base) == ("m", 1.0)
    assert [line.methods[name].mean for name in ("a", "b")] == [3.0, 7.0]
    change = line.differences["b"]
    # Welch with variances 2 and 2, so a squared error of 1 each: 2 degrees of freedom, t = 4.303
    assert (change.mean, change.high) == pytest.approx((4.0, 4.0 + 4.303 * 2**0.5), abs=1e-3)
    stored = json.loads((tmp_path / "compare.json").read_text())["benchmark"]["toy"]
    assert stored[0]["methods"]["b"]["values"] == [6.0, 8.0]
    page = (tmp_path / "compare.html").read_text()
    assert "Benchmark toy" in page
    assert "7.000 ± 1.414 (+4.000 [-2.085, +10.085])" in page


def test_a_benchmark_that_compare_cannot_score_is_refused_before_training(capsys):
    for words, expected in (
        (["--benchmark", "vbench"], "VBench is scored by an official tool"),
        (["--benchmark", "hpsv3"], "--data"),
        (["--data", "x"], "--data needs --benchmark"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["compare", "configs/shapes.yaml", "configs/shapes_nft.yaml", *words])
        assert ended.value.code == 2
        assert expected in capsys.readouterr().err
