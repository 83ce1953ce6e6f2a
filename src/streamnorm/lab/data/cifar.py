"""CIFAR-10 as its authors publish it, the binary or the python form, a folder or an archive, as one block of records.

A record is one label byte and the 3072 bytes of an image (the red, green and blue planes): the binary form is these.
"""

import gzip
import hashlib
import io
import mmap
import pickle
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import DataError
from .download import BLOCK, cache_folder, keep

ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ADDRESS_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
ARCHIVES = ("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz")
FILES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FOLDERS = {"cifar-10-batches-bin": ".bin", "cifar-10-batches-py": ""}  # and how the files' names end in it
RECORDS = 10_000  # in each file
RECORD = 1 + 3 * 32 * 32  # bytes
CLASSES = 10
# Of the files of the binary form; the official python form has the same records.
OFFICIAL = (
    "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
)


def find(place: Path) -> Path | None:
    """The folder or archive to read in `place`, which may be that folder or archive itself; None if there is none."""
    if place.is_file():
        return place
    for folder in (place, *(place / name for name in FOLDERS)):
        if _ending(folder) is not None:
            return folder
    return next((place / name for name in ARCHIVES if (place / name).is_file()), None)


def load(place: Path) -> tuple[Tensor, str]:
    """The records of a folder or archive that `find` gave, uint8 (6, RECORDS, RECORD), and their fingerprint."""
    if place.is_file():
        buffer, fingerprint = _of_archive(place)
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
        with path.open("rb") as file:
            _read(file, path.stat().st_size, buffer, i, str(path), pickled=not ending)
    return buffer


def _of_archive(archive: Path) -> tuple[bytearray | mmap.mmap, str]:
    """The records of an archive, decoded at the first use and kept in the cache folder for the next."""
    state = archive.stat()
    key = f"{archive.resolve()}\n{state.st_size}\n{state.st_mtime_ns}"
    cached = cache_folder() / f"cifar10-{hashlib.sha256(key.encode()).hexdigest()[:16]}.bin"
    if (known := _of_cache(cached)) is not None:
        return known
    buffer = _decoded(archive)
    fingerprint = fingerprint_of(buffer)
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
    fingerprint = buffer[size:].decode("ascii", "replace")
    if len(buffer) != size + 64 or fingerprint_of(buffer) != fingerprint:
        return None
    return buffer, fingerprint


def _decoded(archive: Path) -> bytearray:
    """The records in an archive. Only members of the expected names are read, and nothing is extracted."""
    members = {f"{f}/{name}{end}": (i, not end) for f, end in FOLDERS.items() for i, name in enumerate(FILES)}
    buffer, seen = bytearray(len(FILES) * RECORDS * RECORD), set()
    try:
        with gzip.open(archive) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                if member.name not in members:
                    continue
                where = f"{archive}: {member.name}"
                file = tar.extractfile(member) if member.isreg() else None
                if file is None:
                    raise DataError(f"{where} is no regular file: not an archive of CIFAR-10's authors")
                i, pickled = members[member.name]
                _read(file, member.size, buffer, i, where, pickled)
                seen.add(i)
            while stream.read(BLOCK):  # gzip's checksum stands at the end
                pass
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or no .tar.gz ({error}): replace it by a new download") from error
    if len(seen) < len(FILES):
        raise DataError(f"{archive} holds {len(seen)} of CIFAR-10's six batch files: replace it by a new download")
    return buffer


def _read(file: IO[bytes], size: int, buffer: bytearray, i: int, where: str, pickled: bool) -> None:
    """Put the records of one batch file of `size` bytes in their place, the i-th."""
    want = RECORDS * RECORD
    records = _records(buffer)[i]
    if pickled:
        if size > 2 * want:
            raise DataError(f"{where} has {size:,} bytes, must have about {want:,}: download it again")
        _unpickle(file.read(), records, where)
    else:
        if size != want:
            raise DataError(f"{where} has {size:,} bytes, must have {want:,} ({RECORDS:,} images): download it again")
        with memoryview(buffer) as view, view[i * want : (i + 1) * want] as part:
            part[:] = file.read(want)
    label = int(records[:, 0].max())
    if label >= CLASSES:
        raise DataError(f"{where} has the label {label}, labels are 0 to {CLASSES - 1}: not a file of CIFAR-10")


def _unpickle(raw: bytes, records: Tensor, where: str) -> None:
    try:
        batch = _Unpickler(io.BytesIO(raw), encoding="bytes").load()  # written by Python 2
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        pixels, labels = batch["data"].tensor(), torch.tensor(batch["labels"])
    except pickle.UnpicklingError as error:
        raise DataError(f"{where} was not loaded ({error}): download it again") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{where} is damaged, or no batch of CIFAR-10 ({error!r}): download it again") from error
    if pixels.shape != (RECORDS, RECORD - 1) or labels.shape != (RECORDS,):
        raise DataError(
            f"{where} has images of shape {tuple(pixels.shape)} and labels of shape {tuple(labels.shape)}, "
            f"must be ({RECORDS}, {RECORD - 1}) and ({RECORDS},): download it again"
        )
    if labels.is_floating_point() or int(labels.min()) < 0 or int(labels.max()) >= CLASSES:
        raise DataError(f"{where} has labels other than 0 to {CLASSES - 1}: not a file of CIFAR-10")
    records[:, 0] = labels
    records[:, 1:] = pixels


class _Dtype:
    """Stands for numpy.dtype in a pickle."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = name.decode() if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        pass  # the byte order, of which bytes have none


class _Array:
    """Stands for numpy.ndarray in a pickle."""

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, self.shape, self.dtype, self.by_columns, self.raw = state

    @staticmethod
    def of_buffer(raw: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> "_Array":
        made = _Array()
        made.__setstate__((1, shape, dtype, order == "F", raw))
        return made

    def tensor(self) -> Tensor:
        if self.dtype.name != "u1":
            raise TypeError(f"pixels of dtype {self.dtype.name}")
        flat = torch.frombuffer(bytearray(self.raw), dtype=torch.uint8)
        return flat.view(self.shape[::-1]).T if self.by_columns else flat.view(self.shape)


class _Unpickler(pickle.Unpickler):
    """Builds plain containers and the stand-ins above; whatever else a pickle asks for is not even imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: _Array()
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":  # protocol 5
            return _Array.of_buffer
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _Array if name == "ndarray" else _Dtype
        if (module, name) == ("_codecs", "encode"):  # bytes, in the older protocols
            return lambda text, encoding: str(text).encode("latin1")
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch of CIFAR-10 needs")
