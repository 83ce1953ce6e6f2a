"""segmentation_models_pytorch: decoders on encoders of its own and of timm."""

import segmentation_models_pytorch as smp
import torch
from integrations.examine import Model


def model(kind, encoder, **settings):
    def build():
        return getattr(smp, kind)(encoder, encoder_weights=None, classes=2, **settings)

    return Model("segmentation_models_pytorch", f"{kind}, {encoder}", build, lambda n: torch.randn(n, 3, 64, 64))


MODELS = [
    model("Unet", "resnet18"),
    model("FPN", "mobilenet_v2"),
    model("DeepLabV3Plus", "resnet18"),
    model("MAnet", "timm-mobilenetv3_small_minimal_100"),
    model("Linknet", "resnet18"),
]
