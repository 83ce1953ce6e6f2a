"""Files of the lab: written whole or not at all, read back with a clear word when they are not what they should be."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .errors import StoreError


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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}): remove it and run again") from error


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
            raise StoreError(f"{folder} is being trained by another process: wait for it, or stop it") from None
        yield
    finally:
        os.close(handle)
