"""The models that `make test-integrations` tries, one file for each library: small settings, random weights."""

import importlib
import importlib.util
import sys

import torch

# Of `torch` there are two, for the tests of the checks themselves.
LIBRARIES = (
    *("transformers", "timm", "torchvision", "monai", "segmentation_models_pytorch", "diffusers", "torch_geometric"),
)


def models_of(library):
    """The models of a library; ImportError if it is not installed."""
    if library != "torch":
        import_torchvision()
    return importlib.import_module(f"integrations.zoo.of_{library}").MODELS


def import_torchvision():
    """Also where its compiled operators are for another build of torch, as those on PyPI are for CUDA.

    Its Python part, which is all that is tried here, then only wants two of them to be known by name.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")
