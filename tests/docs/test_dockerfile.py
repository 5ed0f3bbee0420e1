"""The Dockerfile follows the rules that a builder does not check."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line and line[0] not in "# "]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stages():
    """The instructions of each stage, with those of the stages that it begins with."""
    found: dict[str, list[list[str]]] = {}
    for name, rest in INSTRUCTIONS:
        if name == "FROM":
            image, _, stage = rest.split()
            found[stage] = [[name, image], *found.get(image, [])]
        else:
            found[stage].append([name, rest])
    return found


def test_instructions_are_known_and_images_have_a_version():
    names = {name for name, _ in INSTRUCTIONS}
    assert names == {"FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD"}
    images = {rest.split()[0] for name, rest in INSTRUCTIONS if name == "FROM"} - {*stages()}
    assert images
    for image in images:
        version = re.fullmatch(r"python:(3\.\d+)-slim", image)
        assert version, image
        low, high = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", PROJECT["requires-python"]).groups()
        assert int(low) <= int(version[1][2:]) < int(high)


def test_both_images_run_flowalign_without_root_rights():
    for stage in ("cpu", "cuda"):
        last = dict(stages()[stage])
        assert last["USER"] not in ("root", "0")
        assert last["ENTRYPOINT"] == '["flowalign"]'
        whole = " ".join(rest for _, rest in stages()[stage])
        assert "useradd" in whole
        assert last["WORKDIR"] == "/flowalign"
        for command in re.findall(r"pip (?:install|wheel)[^&]*", whole):
            assert "--no-cache-dir" in command
        extras = re.findall(r"\.whl\)\[([\w,-]+)\]", whole)
        assert {e for some in extras for e in some.split(",")} <= {
            *PROJECT["optional-dependencies"]
        }


def test_the_wheel_gets_what_it_contains():
    copied = [rest.split()[:-1] for name, rest in stages()["wheel"] if name == "COPY"]
    names = {name for some in copied for name in some}
    assert all((ROOT / name).exists() for name in names)
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contents = wheel["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {path.split("/")[0] for path in contents} | {"pyproject.toml"} <= names
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not names & {*ignored}
