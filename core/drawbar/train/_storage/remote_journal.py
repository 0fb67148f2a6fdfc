"""The journal of a run in remote storage.

    journal.jsonl                   the journal at the last start or end of the run
    journal.parts/000000000000812   the lines after the first 812 bytes

Object stores cannot append to a file. After each commit, only the last part is uploaded, so that an
upload does not grow with the age of the run.
"""

from __future__ import annotations

from drawbar.train._storage.journal_file import JOURNAL_FILE
from drawbar.train._storage.remote_path import RemotePath

PARTS_DIRECTORY = "journal.parts"
PART_BYTES = 64 * 1024
"""Size from which on a part is no longer changed."""

_MAX_READS = 3


class RemoteJournal:
    """Copy of a journal in remote storage.

    Args:
        run_path: Directory of the run in the storage.
    """

    def __init__(self, run_path: RemotePath) -> None:
        self._run_path = run_path
        self._parts_path = run_path / PARTS_DIRECTORY

    def read(self) -> bytes | None:
        """Return the journal; None if there is none."""
        for _ in range(_MAX_READS):
            # List the parts first: the end of the run uploads the whole journal and deletes them.
            parts = self._list_parts()
            data = self._run_path.read_or_none(JOURNAL_FILE)
            is_complete = True
            for offset in sorted(parts):
                if data is not None and offset == len(data):
                    part = self._parts_path.read_or_none(_name_part(offset))
                    is_complete = is_complete and part is not None
                    data += part or b""
            if is_complete:
                break
        return data

    def upload(self, data: bytes) -> None:
        """Upload the lines that the copy does not have.

        Args:
            data: The whole journal. The copy, which `upload_all` has written, is the start of it.
        """
        start = self._run_path.get_size(JOURNAL_FILE)
        if start is None or start > len(data):
            self.upload_all(data)
            return
        parts = self._list_parts()
        while parts.get(start, 0) >= PART_BYTES:
            start += parts[start]
        if start < len(data):
            self._parts_path.write(_name_part(start), data[start:])

    def upload_all(self, data: bytes) -> None:
        """Upload the whole journal, and delete the parts."""
        self._run_path.write(JOURNAL_FILE, data)
        for offset in self._list_parts():
            self._parts_path.delete_file(_name_part(offset))

    def _list_parts(self) -> dict[int, int]:
        """Return the size of each part by its offset."""
        files = self._parts_path.list_files()
        return {int(file.path): file.size for file in files if file.path.isdecimal()}


def _name_part(offset: int) -> str:
    return f"{offset:015d}"
