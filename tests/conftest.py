import pytest
import torch
from hypothesis import settings

settings.register_profile("laws", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("laws")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
