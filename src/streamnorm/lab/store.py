"""Files of the lab: written whole or not at all, read back with a clear word when they are not what they should be."""

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from .errors import BusyError, StoreError

LARGEST_JSON = 1 << 26  # bytes; the largest results of the paper's own scale have 1 % of that
SEAL = b"streamnorm, sha256 of what follows: "


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that appears as `path` once the block has ended, and not at all if it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:  # an interrupt too
        part.unlink(missing_ok=True)
        raise


def sweep(folder: Path) -> None:
    """Remove what writers that were killed have left."""
    for part in folder.glob(".*.part"):
        part.unlink(missing_ok=True)


def write_bytes(path: Path, contents: bytes) -> None:
    """Whatever happens on the way, `path` holds either what it held or all of the new contents."""
    with complaining(path), written_whole(path) as file:
        file.write(contents)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, allow_nan=False) + "\n")


def write_rows(path: Path, head: dict[str, Any], rows: Iterable[Any]) -> None:
    """A line for each field of `head`, one for each run: small changes of results are small changes of the file."""
    lines = [f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in head.items()]
    runs = ",\n".join(json.dumps(row, allow_nan=False, separators=(",", ":")) for row in rows)
    lines.append(f'"runs": [\n{runs}\n]')
    write_text(path, "{" + ",\n".join(lines) + "}\n")


def read_json(path: Path) -> Any:
    """Strictly: neither NaN, which nothing here writes, nor a file that would fill the memory."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_JSON or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError(f"{size:,} bytes, must be a file of {LARGEST_JSON:,} or less")
            return json.loads(file.read(LARGEST_JSON), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise refused(path, "cannot be read", error, "remove it and run again") from error


def refused(path: Path, what: str, error: Exception, fix: str) -> StoreError:
    """To be raised: one line, however long the words of `error` are."""
    words = str(error).strip().splitlines() or [type(error).__name__]
    return StoreError(f"{path} {what} ({words[0][:200]}): {fix}")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"it has the number {text}")


def write_sealed(path: Path, contents: bytes) -> None:
    """With a digest in front, for contents in which a wrong bit would be a wrong number."""
    write_bytes(path, SEAL + hashlib.sha256(contents).hexdigest().encode() + b"\n" + contents)


def read_sealed(path: Path) -> bytes:
    """What `write_sealed` wrote, to the last bit; a ValueError otherwise. Nothing is loaded before it is known."""
    with path.open("rb") as file:
        head = file.read(len(SEAL) + 65)
        if not head.startswith(SEAL):
            raise ValueError("it has no digest")
        if head != SEAL + hashlib.file_digest(file, "sha256").hexdigest().encode() + b"\n":
            raise ValueError("its digest is not that of its contents")
        file.seek(len(head))
        return file.read()


def check_writable(folder: Path) -> None:
    """Refuse before the work, not after it."""
    with complaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextlib.contextmanager
def complaining(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror or error}; free some space, or choose another place"
        ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time trains a run. The system drops the lock when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:  # not on this platform: two processes on one run would only do the work twice
        yield
        return
    with complaining(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(f"{folder} is being trained by another process: wait for it, or stop it") from None
        yield
    finally:
        os.close(handle)
