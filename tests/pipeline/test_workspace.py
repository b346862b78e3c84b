"""Lock and journal under torn writes, dead owners and strangers."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.workspace import Journal, Lock, Workspace
from schemas.errors import LockedError, UsageError

records = st.lists(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["shard", "source"]), "number": st.integers(0, 2**40), "note": st.text()}
    ),
    max_size=6,
)


@given(written=records, cut=st.integers(0, 2000), data=st.data())
def test_a_journal_cut_anywhere_keeps_the_whole_records_before_the_cut(tmp_path_factory, written, cut, data):
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path)
    assert journal.open() == []
    ends = []
    for record in written:
        journal.append(record)
        ends.append(path.stat().st_size)
    journal.close()
    os.truncate(path, min(cut, path.stat().st_size))
    kept = [record for record, end in zip(written, ends, strict=True) if end <= cut]
    again = Journal(path)
    assert again.open() == kept
    again.append({"kind": "after"})
    again.close()
    last = Journal(path)
    assert last.open() == [*kept, {"kind": "after"}]
    last.close()


@given(written=records.filter(bool), data=st.data())
def test_a_flipped_byte_ends_the_journal_there(tmp_path_factory, written, data):
    path = tmp_path_factory.mktemp("journal") / "journal"
    journal = Journal(path)
    journal.open()
    ends = [0]
    for record in written:
        journal.append(record)
        ends.append(path.stat().st_size)
    journal.close()
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    whole = sum(end <= at for end in ends[1:])
    again = Journal(path)
    assert again.open() == written[:whole]
    again.close()


def test_a_dead_owner_holds_no_lock(tmp_path):
    script = (
        "import os, sys; from pathlib import Path; from pipeline.workspace import Lock, Workspace;"
        "Lock(Workspace(Path(sys.argv[1]))).__enter__(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert (tmp_path / "out.work" / "lock").exists()
    with Lock(Workspace(tmp_path / "out")):
        pass


def test_the_holder_is_named_and_the_lock_goes_with_it(tmp_path):
    workspace = Workspace(tmp_path / "out")
    with Lock(workspace):
        with (
            pytest.raises(LockedError, match=f"process {os.getpid()} of .* on .* since .*, last seen "),
            Lock(workspace),
        ):
            pass
        assert workspace.folder.exists()
    assert not workspace.folder.exists()
    with Lock(workspace):
        pass


def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="expected to create"), Lock(Workspace(tmp_path / "file" / "out")):
        pass
