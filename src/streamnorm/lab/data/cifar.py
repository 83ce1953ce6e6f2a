"""CIFAR-10 as its authors publish it, the binary or the python form, a folder or an archive, as one block of records.

A record is one label byte and the 3072 bytes of an image (the red, green and blue planes): the binary form is these.
"""

import hashlib
import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..errors import DataError
from . import batches, tar
from .download import cache_folder, keep

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ADDRESS_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FOLDERS = {"cifar-10-batches-bin": ".bin", "cifar-10-batches-py": ""}  # and how the files' names end in it
RECORDS = 10_000  # in each file
RECORD = 1 + 3 * 32 * 32  # bytes
CLASSES = 10
SPARE = 1 << 20  # bytes of an archive that are not batches
STEPS = 16  # of a pickle, for each image: its label, its name
LARGEST_ARCHIVE = 200_000_000  # bytes to download; it has 170,052,171
# Of the files of the binary form; the official python form has the same records.
OFFICIAL = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)


class Readable(Protocol):
    def read(self, count: int, /) -> bytes: ...


def find(place: Path) -> Path | None:
    """The folder or archive to read in `place`, which may be that folder or archive itself; None if there is none."""
    if place.is_file():
        return place
    for folder in (place, *(place / name for name in FOLDERS)):
        if _ending(folder) is not None:
            return folder
    return next((place / name for name in ARCHIVES if (place / name).is_file()), None)


def load(place: Path, *, keeping: bool = True) -> tuple[Tensor, str]:
    """The records of a folder or archive that `find` gave, uint8 (6, RECORDS, RECORD), and their fingerprint.

    `keeping`: those of an archive are kept in the cache folder for the next time.
    """
    if place.is_file():
        buffer, fingerprint = _of_archive(place, keeping)
    else:
        buffer = _of_folder(place)
        fingerprint = fingerprint_of(buffer)
    return _records(buffer), fingerprint


def combined(digests: tuple[str, ...]) -> str:
    """One fingerprint of those of the files."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def fingerprint_of(buffer: bytearray | mmap.mmap) -> str:
    """The sha256 of the sha256 of each file in its binary form."""
    size = RECORDS * RECORD
    with memoryview(buffer) as view, ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        parts = [view[i * size : (i + 1) * size] for i in range(len(FILES))]
        digests = tuple(pool.map(lambda part: hashlib.sha256(part).hexdigest(), parts))
        for part in parts:
            part.release()
    return combined(digests)


def _records(buffer: bytearray | mmap.mmap) -> Tensor:
    count = len(FILES) * RECORDS * RECORD
    return torch.frombuffer(buffer, dtype=torch.uint8, count=count).view(len(FILES), RECORDS, RECORD)


def _ending(folder: Path) -> str | None:
    """How the names of the batch files in `folder` end, None if there are none."""
    for ending in FOLDERS.values():
        if any((folder / f"{name}{ending}").exists() for name in FILES):
            return ending
    return None


def _of_folder(folder: Path) -> bytearray:
    ending = _ending(folder)
    buffer = bytearray(len(FILES) * RECORDS * RECORD)
    for i, name in enumerate(FILES):
        path = folder / f"{name}{ending}"
        if not path.exists():
            raise DataError(f"{folder} has no {path.name}: all six of CIFAR-10's batch files must be there")
        if not (path.is_file() or path.is_dir()):  # opening a folder says what it is
            raise DataError(f"{path} is no regular file: put a batch file of CIFAR-10 there")
        with path.open("rb") as file:
            _read(file, path.stat().st_size, buffer, i, str(path), pickled=not ending)
    return buffer


def _of_archive(archive: Path, keeping: bool) -> tuple[bytearray | mmap.mmap, str]:
    """The records of an archive, by the cache folder if they were kept there."""
    state = archive.stat()
    key = f"{archive.resolve()}\n{state.st_size}\n{state.st_mtime_ns}"
    cached = cache_folder() / f"cifar10-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"
    if (known := _of_cache(cached)) is not None:
        return known
    buffer = _decoded(archive)
    fingerprint = fingerprint_of(buffer)
    if keeping:
        keep(cached, buffer, fingerprint.encode())
    return buffer, fingerprint


def _of_cache(cached: Path) -> tuple[mmap.mmap, str] | None:
    """What `_of_archive` wrote, None if it is not there or not whole."""
    size = len(FILES) * RECORDS * RECORD
    try:
        with cached.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # absent, or empty
        return None
    if len(buffer) != size + 64:
        return None
    fingerprint = buffer[size:].decode("ascii", "replace")
    return (buffer, fingerprint) if fingerprint_of(buffer) == fingerprint else None


def _decoded(archive: Path) -> bytearray:
    """The records in an archive. Only members of the expected names are read, and nothing is extracted."""
    known = {f"{f}/{name}{end}": (i, not end) for f, end in FOLDERS.items() for i, name in enumerate(FILES)}
    buffer, seen = bytearray(len(FILES) * RECORDS * RECORD), set()
    with tar.refusals(archive):
        for member in tar.members(archive, 2 * len(buffer) + SPARE):
            if member.name not in known:
                continue
            where = f"{archive}: {member.name}"
            if not member.is_file:
                raise DataError(f"{where} is no regular file: not an archive of CIFAR-10's authors")
            i, pickled = known[member.name]
            _read(member, member.size, buffer, i, where, pickled)
            seen.add(i)
    if len(seen) < len(FILES):
        raise DataError(f"{archive} holds {len(seen)} of CIFAR-10's six batch files: replace it by a new download")
    return buffer


def _read(file: Readable, size: int, buffer: bytearray, i: int, where: str, pickled: bool) -> None:
    """Put the records of one batch file of `size` bytes in their place, the i-th."""
    want = RECORDS * RECORD
    records = _records(buffer)[i]
    if pickled:
        if size > 2 * want:
            raise DataError(f"{where} has {size:,} bytes, must have about {want:,}: download it again")
        _unpickle(file.read(2 * want), records, where)
    else:
        if size != want:
            raise DataError(f"{where} has {size:,} bytes, must have {want:,} ({RECORDS:,} images): download it again")
        with memoryview(buffer) as view, view[i * want : (i + 1) * want] as part:
            part[:] = file.read(want)
    label = int(records[:, 0].max())
    if label >= CLASSES:
        raise DataError(f"{where} has the label {label}, labels are 0 to {CLASSES - 1}: not a file of CIFAR-10")


def _unpickle(raw: bytes, records: Tensor, where: str) -> None:
    shape = RECORDS, RECORD - 1
    try:
        batch = batches.unpickled(raw, STEPS * (RECORDS + 100))
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        labels = batches.labels_of(batch["labels"], RECORDS, CLASSES)
        pixels, by_columns = batches.pixels_of(batch["data"], shape)
    except Exception as error:  # a damaged pickle can raise anything
        words = f"{type(error).__name__}: {str(error)[:200]}"  # not its repr, which may be as long as the file
        raise DataError(f"{where} is damaged, or no batch of CIFAR-10 ({words}): download it again") from error
    flat = torch.frombuffer(pixels, dtype=torch.uint8)
    records[:, 0] = torch.frombuffer(bytearray(labels), dtype=torch.uint8)
    records[:, 1:] = flat.view(shape[::-1]).T if by_columns else flat.view(shape)
