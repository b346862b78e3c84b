"""Tell a foreign module that hides one of ours, before it fails somewhere else with a message nobody understands."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("tasks", "schemas")
"""Top-level packages that are installed beside ``pipeline``."""


def require_own_siblings(init_file: str) -> None:
    """Raise ImportError if ``import tasks`` or ``import schemas`` would give a module that is not Headrace's.

    The names are common: a ``tasks.py`` in the folder of a script comes before any installed package. Nothing is
    imported here, only looked up.

    Parameters
    ----------
    init_file
        ``pipeline.__file__``: the siblings lie in the folder that holds its package.
    """
    home = Path(init_file).resolve().parents[1]
    for name in SIBLINGS:
        found = _location(name)
        if found is None:
            raise ImportError(
                f"expected the package {name!r} of Headrace in {home}, found none; install Headrace again", name=name
            )
        if found.resolve() != home / name / "__init__.py":
            raise ImportError(
                f"expected the package {name!r} of Headrace in {home}, found {found}, which hides it; "
                f"rename that one, or keep its folder off the module path (PYTHONPATH, the script's own folder)",
                name=name,
                path=str(found),
            )


def _location(name: str) -> Path | None:
    """Return the file or folder that ``import name`` gives, None where there is none."""
    loaded = sys.modules.get(name)
    spec: ModuleSpec | None = find_spec(name) if loaded is None else getattr(loaded, "__spec__", None)
    if spec is None:  # not there, or put into sys.modules by hand
        file = getattr(loaded, "__file__", None)
        return Path(file or f"a module {name!r} without a file") if loaded is not None else None
    if spec.origin is not None:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or ()), name))  # a folder without __init__.py
