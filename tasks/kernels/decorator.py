"""The one decorator of all Numba kernels, and what it settles for them."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.extending import intrinsic

from tasks.kernels.stored import keep_compiled

P = ParamSpec("P")
R = TypeVar("R")


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` at its first call with each combination of dtypes, without the GIL and without fast maths.

    Lazy, because a signature compiled at import would cost every ``import tasks`` its compile time (measured on a Xeon, 2026-12: 1.3 s
    of CPU for resizing, 0.4 s for normalising, 13 s for the planner); whoever must not pay it inside the first request calls ``warm``
    of the task. What was compiled is kept on disk: see :mod:`tasks.kernels.stored`. Not
    ``parallel``: under several threads its work-queue layer aborts the interpreter.
    ``error_model="numpy"`` turns a division by zero into inf instead of a branch in the loop.

    A kernel checks nothing: shapes, dtypes and index ranges are its caller's.
    """
    options: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "fastmath": False}
    dispatcher = numba.njit(**options)(function)
    keep_compiled(dispatcher)
    return cast(Callable[P, R], dispatcher)


def emitted(function: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """Make an instruction of a function that returns its Numba signature and what emits its LLVM code.

    The first parameter is the typing context; kernels call it with the others.
    """
    return cast(Callable[..., Any], intrinsic(function))
