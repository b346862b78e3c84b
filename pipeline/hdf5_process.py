"""Reads texts of free length out of HDF5 files, in a process of its own that may be given up.

Such texts lie in a file's global heap. Of a damaged one HDF5 2.0.0 may never return (an object whose size wraps around to the same
place), in C and with the interpreter's lock held, so that no thread or signal of the same process can end it. This process ends itself
after :data:`LIMIT_S` of its own processor time for one text, even where the one that asked is gone.

Run as a script, with lines of JSON on standard input and output: ``[file, object, attribute or null, limit in bytes]`` in,
``[true, texts]`` or ``[false, message]`` out.
"""

import json
import sys

LIMIT_S = 10
MEMORY_NBYTES = 8 * 2**30


def main() -> None:
    """Answer until there are no more questions."""
    import h5py

    _limit_memory()
    for line in sys.stdin:
        _limit_time()
        try:
            answer = [True, _read(h5py, *json.loads(line))]
        except (OSError, RuntimeError, LookupError, ValueError, TypeError, AttributeError, MemoryError) as error:
            answer = [False, " ".join(f"{error}".split())[:200]]
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _read(h5py, path, name, attribute, limit_nbytes):  # type: ignore[no-untyped-def]
    with h5py.File(path, "r", locking=False) as file:
        found = file[name]
        value = found.attrs[attribute] if attribute is not None else found.asstr(errors="replace")[:]
    values = [value] if isinstance(value, str | bytes) else list(value.reshape(-1))
    texts = [text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text) for text in values]
    if sum(map(len, texts)) > limit_nbytes:
        raise ValueError(f"more than {limit_nbytes} bytes of text")
    return texts


def _limit_time() -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits; the one that asked has its own clock
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + LIMIT_S, hard))


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_NBYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (ImportError, ValueError, OSError):  # a lower limit of the whole session holds already
        return


if __name__ == "__main__":
    main()
