"""The wheel works in a new environment outside of a checkout, with the base packages alone."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution

import pytest
from packaging.requirements import Requirement

from tests.fixtures.doc_pages import ROOT, blocks
from tests.fixtures.short_demo import SHORTENED, write_short_demo

pytestmark = pytest.mark.slow


def find_packages(requirements):
    """Return the installed distributions that requirements need, with those of their extras."""
    found, todo = {}, [(Requirement(text), "") for text in requirements]
    while todo:
        one, extra = todo.pop()
        if (one.name, extra) in found or (one.marker and not one.marker.evaluate({"extra": extra})):
            continue
        try:
            found[one.name, extra] = package = distribution(one.name)
        except PackageNotFoundError:
            continue  # for another system
        for inner in map(Requirement, package.requires or ()):
            todo += [(inner, extra) for extra in one.extras or [""] if applies(inner, extra)]
    return list(found.values())


def applies(requirement, extra):
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return a new environment with the wheel, and links to the packages that it requires."""
    folder = tmp_path_factory.mktemp("wheel")

    def run(*words):
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)

    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    (wheel,) = folder.glob("flowalign_diffusion-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--no-compile", str(wheel))
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (about,) = site.glob("flowalign_diffusion-*.dist-info")
    required = PathDistribution(about).requires
    for package in find_packages([text for text in required if "extra ==" not in text]):
        for top in {file.parts[0] for file in package.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    return folder / "venv/bin"


@pytest.fixture
def call(environment, tmp_path):
    def run(program, *words):
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return subprocess.run(
            [environment / program, *words],
            cwd=tmp_path,
            env=env | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    return run


def succeed(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_run_files_are_listed_and_checked_outside_of_a_checkout(call):
    assert "shapes_crd" in succeed(call("flowalign", "recipes"))
    checked = call("flowalign", "check", "configs/shapes.yaml")
    assert "reward calls: 192" in succeed(checked)


def test_the_demo_trains_the_bundled_model(call, tmp_path):
    short = write_short_demo(tmp_path)
    succeed(call("python", "-c", SHORTENED, "demo", "--steps", "1", "--processes", "1", short))
    assert (tmp_path / "runs/demo/report.html").is_file()


def test_the_python_lines_of_the_readme_run(call, tmp_path):
    (code,) = [b.code for b in blocks(ROOT / "README.md") if b.language == "python"]
    shown = "import reward_models; print(flowalign.__file__, reward_models.__file__)"
    code = code.replace("num_steps=15", "num_steps=1")
    assert str(ROOT) not in succeed(call("python", "-c", f"{code}\n{shown}"))
    assert (tmp_path / "warm-lora/pytorch_lora_weights.safetensors").is_file()


def test_what_needs_an_extra_names_it(call):
    done = call("flowalign", "check", "configs/words_nft.yaml")
    assert done.returncode == 2
    assert "pip install 'flowalign-diffusion[plots]'" in done.stderr
    code = "import flowalign; flowalign.rewards.CLIPScore('ViT-B-32', 'openai').load()"
    assert "flowalign-diffusion[clip]" in call("python", "-c", code).stderr
