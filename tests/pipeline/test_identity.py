"""A foreign module that hides one of ours is named before anything else fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from pipeline.identity import require_own_siblings


def import_pipeline_in(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in ``folder`` that imports our package: the script's folder comes first on the module path."""
    script = folder / "train.py"
    script.write_text("import pipeline.loaders")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)


def test_our_own_packages_are_accepted():
    require_own_siblings(pipeline.__file__)


@pytest.mark.parametrize("name", ["tasks", "schemas"])
@pytest.mark.parametrize("layout", ["module", "package"])
def test_a_foreign_module_that_hides_ours_is_named(tmp_path, name, layout):
    foreign = tmp_path / f"{name}.py" if layout == "module" else tmp_path / name / "__init__.py"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("VALUE = 1\n")
    done = import_pipeline_in(tmp_path)
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert message.startswith(f"ImportError: expected the package {name!r} of Headrace in ")
    assert str(foreign) in message
    assert "which hides it; rename that one" in message


def test_a_folder_without_init_hides_nothing(tmp_path):
    (tmp_path / "tasks").mkdir()
    assert import_pipeline_in(tmp_path).returncode == 0


def test_a_foreign_module_that_was_imported_before_is_named(tmp_path, monkeypatch):
    foreign = type(sys)("tasks")
    foreign.__file__ = str(tmp_path / "tasks.py")
    monkeypatch.setitem(sys.modules, "tasks", foreign)
    with pytest.raises(ImportError, match=r"found .*tasks\.py, which hides it"):
        require_own_siblings(pipeline.__file__)


def test_an_installation_without_a_package_is_named(tmp_path):
    elsewhere = tmp_path / "pipeline" / "__init__.py"
    with pytest.raises(ImportError, match=f"expected the package 'tasks' of Headrace in {tmp_path}, found"):
        require_own_siblings(str(elsewhere))
