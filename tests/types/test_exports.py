"""A package exports the public names of its modules without a list of them."""

import importlib
import sys

import pytest

from flowalign.types.exports import lazy_exports

PACKAGES = ("conditioning", "credit", "gradient_paths", "losses", "sampling")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two folders with modules that are not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "exported"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(
        "from flowalign.types.exports import lazy_exports\n"
        "__getattr__, __dir__ = lazy_exports(__name__, __path__)\n"
    )
    (folder / "one.py").write_text("class One: ...\nclass Both: ...\ndef two(): ...\n")
    (folder / "deep" / "two.py").write_text("class Two: ...\nclass Both: ...\nclass _Own: ...\n")
    yield importlib.import_module("exported")
    for name in [name for name in sys.modules if name.split(".")[0] == "exported"]:
        monkeypatch.delitem(sys.modules, name)


def test_a_class_in_a_new_file_is_exported_without_an_entry(package):
    assert "exported.deep.two" not in sys.modules
    assert package.Two.__module__ == "exported.deep.two"
    assert dir(package) == ["One", "Two"]


@pytest.mark.parametrize("name", ["Both", "_Own", "two", "Three"])
def test_names_that_are_ambiguous_private_or_unknown_are_not_exported(package, name):
    """`two` is a function of one.py, which the module two.py would hide once it is imported."""
    with pytest.raises(AttributeError, match=f"'exported' has no attribute '{name}'"):
        getattr(package, name)


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_of_components_keep_no_list(name):
    """A new credit method, loss, path, conditioning or sampler is one file of the package."""
    package = importlib.import_module(f"flowalign.{name}")
    get_export, _ = lazy_exports(package.__name__, package.__path__)
    assert not hasattr(package, "__all__")
    assert all(getattr(package, each) is get_export(each) for each in dir(package)[:3])
