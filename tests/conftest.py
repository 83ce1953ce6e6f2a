import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

collect_ignore = ["other_device.py", "device_cases.py", "device_processes.py"]  # of processes with another device

settings.register_profile("laws", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("laws")

# The files that take longest, first: what begins last should be short, as the others wait for it.
LONGEST = ("test_cli", "test_devices", "test_triton", "test_memory", "test_commands", "test_compile")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.stem not in LONGEST)


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background is begun without

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _compiles_afresh():
    """The compiler gives a function up after some compilations, those of other files included."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text long enough to learn from."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text((Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8") * 4, encoding="utf-8")
    return path
