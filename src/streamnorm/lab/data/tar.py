"""The files in a .tar.gz, one after the other, with nothing held that was not asked for.

Python's tarfile reads headers of any length, and remembers every member: a small archive can fill the memory.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DataError
from .download import BLOCK

HEADER = 512  # bytes; contents are padded to a multiple of it
MEMBERS = 1_000


class Member:
    """A file in an archive. Its contents can be read until the next one is asked for."""

    def __init__(self, header: bytes, stream: gzip.GzipFile) -> None:
        name, prefix = (part.split(b"\0", 1)[0].decode("utf-8", "replace") for part in (header[:100], header[345:500]))
        self.name = f"{prefix}/{name}" if prefix and header[257:262] == b"ustar" else name
        self.is_file = header[156:157] in (b"0", b"\0")
        self.size = int(header[124:136].strip(b" \0") or b"0", 8)
        self.stream, self.left = stream, self.size
        if self.size < 0:
            raise ValueError("a negative size")

    def read(self, count: int) -> bytes:
        parts = []
        while count and self.left:
            parts.append(self.stream.read(min(count, self.left, BLOCK)))
            if not parts[-1]:
                raise EOFError("it ends within a file")
            self.left -= len(parts[-1])
            count -= len(parts[-1])
        return b"".join(parts)


def members(archive: Path, largest: int) -> Iterator[Member]:
    """All files, folders and links of an archive that unpacks to `largest` bytes at most.

    Longer names and other things that headers of their own tell are passed over: no archive of CIFAR-10 needs them.
    """
    with gzip.open(archive) as stream:
        unpacked = 0
        for _ in range(MEMBERS):
            header = stream.read(HEADER)
            if header == bytes(HEADER):
                break
            if len(header) < HEADER or int(header[148:156].strip(b" \0") or b"0", 8) != _checksum(header):
                raise ValueError("no header where there must be one")
            member = Member(header, stream)
            unpacked += HEADER + member.size
            if unpacked > largest:
                raise ValueError(f"it unpacks to more than {largest:,} bytes")
            yield member
            while member.read(BLOCK):
                pass
            stream.read(-member.size % HEADER)
        else:
            raise ValueError(f"it has more than {MEMBERS:,} members")
        while block := stream.read(BLOCK):  # gzip's checksum stands at the end
            unpacked += len(block)
            if unpacked > largest:
                raise ValueError(f"it unpacks to more than {largest:,} bytes")


def _checksum(header: bytes) -> int:
    return sum(header[:148]) + 8 * ord(" ") + sum(header[156:])


@contextmanager
def refusals(archive: Path) -> Iterator[None]:
    """Around all that reads an archive."""
    try:
        yield
    except (ValueError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or no .tar.gz ({error}): replace it by a new download") from error
