"""The notebooks run from top to bottom, as plain Python, and are kept without outputs."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def cells(path, kind):
    content = json.loads(path.read_text("utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def test_there_are_the_five_that_the_documentation_speaks_of():
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_is_kept_without_outputs(path):
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(path, "code"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_a_notebook_runs_and_its_last_expressions_have_a_representation(path, tmp_path):
    """Each cell's last expression is shown by Jupyter, so its representation is made here."""
    pytest.importorskip("matplotlib")
    code = ["import ast, matplotlib", "matplotlib.use('Agg')", "names = {'__name__': '__main__'}"]
    for cell in cells(path, "code"):
        code += [
            f"tree = ast.parse({''.join(cell['source'])!r})",
            "last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None",
            "exec(compile(tree, 'cell', 'exec'), names)",
            "shown = eval(compile(ast.Expression(last.value), 'cell', 'eval'), names) if last else None",
            "assert isinstance(getattr(shown, '_repr_html_', shown.__repr__)(), str)",
        ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
