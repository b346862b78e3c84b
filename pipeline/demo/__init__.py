"""Small synthetic recordings in the exact layout of the formats, painted from their own numbers."""

from pipeline.demo.bench2drive import write_bench2drive_clip
from pipeline.demo.lerobot import write_lerobot_set

__all__ = ["write_bench2drive_clip", "write_lerobot_set"]
