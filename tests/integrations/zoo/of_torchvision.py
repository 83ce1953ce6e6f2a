"""torchvision: image classifiers, segmentation and video, without its compiled operators."""

import torch
from integrations.examine import Model
from torchvision import models
from torchvision.models import segmentation, video


# Deep networks get 64 pixels: with one location left, variances of single values magnify rounding to 1e-3.
def images(size=32):
    return lambda n: torch.randn(n, 3, size, size)


def model(name, build, inputs):
    return Model("torchvision", name, build, inputs)


def densenet():
    return models.DenseNet(growth_rate=4, block_config=(2, 2, 2), num_init_features=8, bn_size=2, num_classes=5)


def swin():
    return models.SwinTransformer([4, 4], 8, [1, 1], [2, 2], [4, 4], num_classes=5)


def convnext():
    blocks = [models.convnext.CNBlockConfig(8, 16, 1), models.convnext.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, num_classes=5)


def vit():
    return models.VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=5)


def clip(n):
    return torch.randn(n, 3, 4, 32, 32)


MODELS = [
    model("resnet18", lambda: models.resnet18(num_classes=5), images()),
    model("mobilenet_v2", lambda: models.mobilenet_v2(num_classes=5, width_mult=0.25), images()),
    model("mobilenet_v3_small", lambda: models.mobilenet_v3_small(num_classes=5, width_mult=0.5), images()),
    model("efficientnet_b0", lambda: models.efficientnet_b0(num_classes=5), images(64)),
    model("regnet_y_400mf", lambda: models.regnet_y_400mf(num_classes=5), images(64)),
    model("DenseNet", densenet, images()),
    model("shufflenet_v2_x0_5", lambda: models.shufflenet_v2_x0_5(num_classes=5), images()),
    model("googlenet", lambda: models.googlenet(num_classes=5, aux_logits=True, init_weights=True), images(64)),
    model("ConvNeXt", convnext, images()),
    model("SwinTransformer", swin, images()),
    model("VisionTransformer", vit, images()),
    model("r3d_18", lambda: video.r3d_18(num_classes=5), clip),
    model("mc3_18", lambda: video.mc3_18(num_classes=5), clip),
    model(
        "deeplabv3_mobilenet",
        lambda: segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=3, aux_loss=True
        ),
        images(64),
    ),
]
