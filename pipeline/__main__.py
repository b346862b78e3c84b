"""``python -m pipeline`` is ``headrace``."""

from pipeline.cli import main

main()
