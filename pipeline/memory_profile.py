"""A page about memory: resident bytes of the program and its workers over time, and what Python code of the program holds."""

import threading
import time
import tracemalloc
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from pipeline.markup import join, table, tag
from pipeline.summaries import nbytes_text
from pipeline.watch import Watch
from schemas.errors import HeadraceError

EVERY_S = 0.5
TOP_LINES = 15
"""Lines of code with the most traced memory that are shown."""

WIDTH_PX, HEIGHT_PX = 900, 240
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


class MemoryProfile(Watch):
    """Samples memory while a run lasts; a context manager, which writes the page at its end, however that came about."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.rows: list[tuple[float, str, int]] = []
        """``(seconds, process, resident bytes)``."""
        self.python: list[tuple[float, int]] = []
        """``(seconds, bytes that Python's allocator gave to this program)``."""
        self._client: Any = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="headrace-memory", daemon=True)
        self._began_s = time.monotonic()

    def __enter__(self) -> "MemoryProfile":
        tracemalloc.start()
        self._thread.start()
        return self

    def connected(self, client: Any) -> None:
        """Take the cluster whose workers are sampled; None where it ends."""
        self._client = client

    def _sample(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.sample()

    def sample(self) -> None:
        """Add one row for each process."""
        now_s = time.monotonic() - self._began_s
        self.rows.append((now_s, "headrace", psutil.Process().memory_info().rss))
        self.python.append((now_s, tracemalloc.get_traced_memory()[0]))
        client = self._client
        if client is None:
            return
        try:
            workers = client.scheduler_info()["workers"]
        except (OSError, TimeoutError, RuntimeError):  # the cluster ends; the run itself says where that is an error
            return
        for address, worker in workers.items():
            self.rows.append((now_s, str(address), int(worker["metrics"].get("memory", 0))))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.sample()
        page = self.page()
        tracemalloc.stop()
        try:
            self.output.write_text(page, "utf-8")
        except OSError as failed:
            if error is None:
                raise HeadraceError(
                    f"expected to write {self.output}, found: {failed.strerror}; choose another --memory-profile"
                ) from failed

    def page(self) -> str:
        """Return the page."""
        names = list(dict.fromkeys(name for _, name, _ in self.rows))
        series = {name: np.array([(at, size) for at, found, size in self.rows if found == name]) for name in names}
        series["headrace, traced"] = np.array(self.python, np.float64).reshape(-1, 2)
        peaks = [[name, _swatch(k), nbytes_text(rows[0, 1]), nbytes_text(rows[-1, 1]), nbytes_text(rows[:, 1].max())]
                 for k, (name, rows) in enumerate(series.items())]  # fmt: skip
        lines = tracemalloc.take_snapshot().statistics("lineno")[:TOP_LINES]
        code = [[str(line.traceback), f"{line.count:,}", nbytes_text(line.size)] for line in lines]
        body = join(
            [
                tag("h1", "Memory of a run"),
                _picture(list(series.values())),
                table("Resident memory", ["process", "", "first", "last", "most"], peaks, numeric=(2, 3, 4)),
                table(
                    "Code of this program that holds the most at the end",
                    ["line", "objects", "bytes"],
                    code,
                    numeric=(1, 2),
                ),
            ]
        )
        style = "body{font:15px system-ui;margin:2rem}td,th{padding:.1rem .8rem;text-align:left}"
        return f"<!doctype html><meta charset=utf-8><title>Memory of a run</title><style>{style}</style>{body}\n"


def _swatch(number: int) -> Any:
    return tag("span", "■", style=f"color:{COLOURS[number % len(COLOURS)]}")


def _picture(series: list[np.ndarray]) -> Any:
    """Return one line a process, over seconds and from 0 bytes."""
    end_s = max(float(rows[-1, 0]) for rows in series) or 1.0
    most = max(float(rows[:, 1].max()) for rows in series) or 1.0
    marks = []
    for number, rows in enumerate(series):
        x = rows[:, 0] / end_s * WIDTH_PX
        y = HEIGHT_PX * (1 - rows[:, 1] / most)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))
        colour = COLOURS[number % len(COLOURS)]
        marks.append(tag("polyline", points=points, fill="none", stroke=colour, stroke_width="2"))
    box = f"-2 -2 {WIDTH_PX + 4} {HEIGHT_PX + 4}"
    svg = tag("svg", marks, viewbox=box, width=WIDTH_PX, height=HEIGHT_PX, role="img", aria_label="memory over time")
    return join([tag("p", f"0 to {end_s:.0f} s, 0 to {nbytes_text(most)}"), svg])
