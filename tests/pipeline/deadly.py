"""A reader whose frames kill the process that reads them, as a crash in a C decoder would."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from pipeline.readers.lbc import LbcReader
from schemas.source import EpisodeRef, Frame


@dataclass(frozen=True, slots=True)
class DeadlyReader(LbcReader):
    """LBC routes; a route with a file ``deadly`` kills at the step written in it, one with ``once`` kills once, one with ``hungry`` takes 2 GiB."""

    name: ClassVar[str] = "deadly"

    def read_frames(self, ref: EpisodeRef, view: str, steps: np.ndarray) -> Iterator[Frame]:
        folder = Path(self.root) / ref.key
        if (folder / "deadly").exists() and int((folder / "deadly").read_text()) in steps:
            os.kill(os.getpid(), signal.SIGKILL)
        if (folder / "once").exists() and int((folder / "once").read_text()) in steps:
            (folder / "once").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (folder / "hungry").exists() and int((folder / "hungry").read_text()) in steps:
            held = [np.ones(2**25, np.uint8) for _ in range(64)]  # 2 GiB, touched
            time.sleep(10 * len(held))
        yield from LbcReader.read_frames(self, ref, view, steps)
