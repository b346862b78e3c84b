"""Texts of free length of HDF5 files, read by another process (:mod:`pipeline.hdf5_process`) that is given up where it does not answer."""

import atexit
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.errors import Reason, SourceError

_SCRIPT = Path(__file__).parents[1] / "hdf5_process.py"
WAIT_S = 60.0
"""For a disk that is slow; a file that never lets go is found out by processor time, sooner."""


class _Process:
    """One process for all files, begun when it is first needed and again after it had to be given up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None
        self.owner = 0
        self.refused: set[tuple[str, int, int]] = set()
        """Files that were given up, as they were: each costs seconds but once."""

    def ask(self, question: Sequence[Any]) -> list[Any] | None:
        """Return the answer, or None where the process ended or did not answer in time."""
        with self.lock:
            if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
                self._start()
            process = self.process
            if process is None or process.stdin is None or process.stdout is None:
                return None
            answers: queue.SimpleQueue[str] = queue.SimpleQueue()
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            except OSError:
                self._stop()
                return None
            out = process.stdout
            threading.Thread(target=lambda: answers.put(out.readline()), daemon=True).start()
            try:
                line = answers.get(timeout=WAIT_S)
            except queue.Empty:
                line = ""
            if not line:
                self._stop()
                return None
            answer: list[Any] = json.loads(line)
            return answer

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        self.owner = os.getpid()

    def _stop(self) -> None:
        process, self.process = self.process, None
        if process is not None and self.owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    try:
                        pipe.close()
                    except OSError:  # the question that nobody read
                        continue

    def close(self) -> None:
        """End the process with this one."""
        self._stop()


_PROCESS = _Process()
atexit.register(_PROCESS.close)


def read_texts(real_path: str, path: str, name: str, attribute: str | None, limit_nbytes: int) -> list[str]:
    """Return the texts of an attribute, or of a dataset, of a file of the source.

    Parameters
    ----------
    real_path
        Where the file lies; checked to lie inside the source.
    path
        Relative to the source, for the message.
    name
        Object in the file, no link on the way to it.
    attribute
        Name of the attribute; None for a dataset's own values.
    limit_nbytes
        Greatest length of all texts together.

    Raises
    ------
    SourceError
        The file is damaged, or reading it does not come back.
    """
    status = os.stat(real_path)
    version = real_path, status.st_size, status.st_mtime_ns
    answer = None
    if version not in _PROCESS.refused:
        answer = _PROCESS.ask([real_path, name, attribute, limit_nbytes])
    if answer is None:
        _PROCESS.refused.add(version)
        message = f"expected the text {attribute or name!r}, found that HDF5 crashes or never returns; the file is damaged: copy, download or record it again"
        raise SourceError(message, Reason.DECODE, file=path)
    if not answer[0]:
        message = f"expected a sound HDF5 file, found: {answer[1]}; copy, download or record it again"
        raise SourceError(message, Reason.DECODE, file=path)
    return [str(text) for text in answer[1]]
