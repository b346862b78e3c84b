"""The rules of the house that no linter knows: what importing costs, what a wheel holds, how long a function may be."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "tasks", "schemas")
SOURCES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]


def run_python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    """Run ``code`` in a new interpreter; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(code: str, cwd: Path) -> set[str]:
    """Return the top-level modules that ``code`` imports."""
    tail = "\nimport json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    return set(json.loads(run_python(code + tail, cwd=cwd).splitlines()[-1]))


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return every function and method of a module."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


# -- what importing costs ----------------------------------------------------------------------------------------------


def test_loaders_import_no_dask_and_no_reader(tmp_path):
    found = imported_by("import pipeline.loaders", tmp_path)
    assert not found & {"dask", "distributed", "zarr", "typer", "xarray", "pandas", "h5py", "fsspec", "torch", "av"}


def test_loaders_import_no_reader_of_raw_formats(tmp_path):
    code = "import sys, pipeline.loaders; print([n for n in sys.modules if n.startswith('pipeline.readers')])"
    assert run_python(code, cwd=tmp_path).strip() == "[]"


def test_help_is_quick_since_it_imports_nothing_heavy(tmp_path):
    code = """
import sys
from pipeline.cli import main
sys.argv = ["headrace", "--help"]
try:
    main()
except SystemExit as stop:
    if stop.code:
        raise
"""
    found = imported_by(code, tmp_path)
    assert not found & {
        "numba",
        "dask",
        "distributed",
        "zarr",
        "xarray",
        "pandas",
        "pyarrow",
        "h5py",
        "torch",
        "av",
        "PIL",
    }


def test_every_public_name_of_the_package_is_there():
    package = import_module("pipeline")
    assert {"convert", "open_dataset", "open_raw", "verify"} <= set(package.__all__)
    assert all(callable(getattr(package, name)) for name in package.__all__ if not name.startswith("__"))


# -- names and sizes ---------------------------------------------------------------------------------------------------


def test_no_module_has_a_name_of_the_standard_library_or_one_that_says_nothing():
    nameless = {"utils", "util", "common", "helpers", "helper", "base", "manager", "core", "misc"}
    taken = (sys.stdlib_module_names - {"__main__"}) | nameless
    assert [path for path in SOURCES if path.stem in taken or path.parent.name in taken] == []


def test_modules_and_functions_stay_short():
    long = [f"{path}: {lines} lines" for path in SOURCES if (lines := len(path.read_text("utf-8").splitlines())) > 500]
    for path in SOURCES:
        for function in functions_of(path):
            body = function.body[ast.get_docstring(function) is not None :]
            if body and function.end_lineno - body[0].lineno >= 50:
                long.append(f"{path}:{function.lineno}: {function.name} has more than 50 lines")
    assert long == []


def test_every_folder_of_modules_is_a_package():
    """Else import-linter and mypy look past it, and a wheel may lack it."""
    assert [path for path in SOURCES if not (path.parent / "__init__.py").is_file()] == []


# -- what code must not do ---------------------------------------------------------------------------------------------


def forbidden_in(tree: ast.AST) -> Iterator[str]:
    """Return what a module does that no module may."""
    for node in ast.walk(tree):
        match node:
            case ast.Assert():
                yield f"line {node.lineno}: assert, which -O removes"
            case ast.ExceptHandler(type=kind) if _catches_all(kind) and not _raises(node):
                yield f"line {node.lineno}: swallows every exception"
            case ast.Import(names=names) if any(_unpickles(alias.name) for alias in names):
                yield f"line {node.lineno}: a pickle"
            case ast.ImportFrom(module=str(module)) if _unpickles(module):
                yield f"line {node.lineno}: a pickle"
            case ast.Call(func=ast.Name(id="eval" | "exec")):
                yield f"line {node.lineno}: eval or exec"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="load")) if not _no_pickle(node):
                yield f"line {node.lineno}: np.load without allow_pickle=False"


def _catches_all(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds
    )


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _unpickles(module: str) -> bool:
    return module.partition(".")[0] in {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


def _no_pickle(call: ast.Call) -> bool:
    return any(
        keyword.arg == "allow_pickle" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in call.keywords
    )


def test_no_module_asserts_swallows_unpickles_or_evaluates():
    assert [f"{path}: {fault}" for path in SOURCES for fault in forbidden_in(ast.parse(path.read_text("utf-8")))] == []


@pytest.mark.parametrize(
    "code",
    [
        "assert x",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept (OSError, BaseException) as error:\n    log(error)",
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_search_for_forbidden_code_finds_it(code):
    assert len(list(forbidden_in(ast.parse(code)))) == 1


# -- what users install ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel as `pip install .` does."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=REPOSITORY, check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_three_packages_whole_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for package in PACKAGES for path in (REPOSITORY / package).rglob("*") if path.is_file())
    assert names == {str(path.relative_to(REPOSITORY)) for path in files if "__pycache__" not in path.parts}
    assert {"pipeline/recipes/pi0.toml", "pipeline/recipes/three-view.toml"} <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_installed_wheel_works_from_any_folder(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    code = "import pipeline, tasks, schemas; from pipeline.recipes import load_recipe; load_recipe('pi0'); print(pipeline.__file__)"
    assert run_python(code, cwd=elsewhere, path=site).strip() == str(site / "pipeline" / "__init__.py")


def test_the_version_is_the_same_wherever_it_stands():
    assert import_module("pipeline").__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in (REPOSITORY / "CHANGELOG.md").read_text("utf-8")


def test_the_lowest_requirements_are_the_lower_bounds():
    """So that `make test-lowest` proves what pyproject.toml promises."""
    lines = (REPOSITORY / "tests" / "lowest-requirements.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("#")[0].strip().split("==") for line in lines if "==" in line)
    promised = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["robot"]]
    for requirement in promised:
        name, bound = re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement).groups()
        assert re.fullmatch(rf"{re.escape(bound)}(\.0)*", pins[name]), name
