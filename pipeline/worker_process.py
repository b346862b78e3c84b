"""A worker of a local cluster: Dask's own ``dask spec``, which ends with the process that started it.

That one holds the other end of standard input. When it is gone, however it went, the pipe closes: no worker is left behind
that looks for its scheduler for ever, or goes on writing beside a run that continues.
"""

import os
import sys
import threading


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # the nanny's own child watches for that in turn


def main() -> None:
    """Run ``dask spec`` with the arguments given."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from distributed.cli.dask_spec import main as dask_spec

    dask_spec()


if __name__ == "__main__":
    main()
