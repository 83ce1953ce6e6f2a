"""timm: its small classifiers."""

import timm
import torch
from integrations.examine import Model


def model(name, size=64, **settings):
    def build():
        return timm.create_model(name, num_classes=5, **settings)

    return Model("timm", name, build, lambda n: torch.randn(n, 3, size, size))


MODELS = [
    model("resnet10t"),
    model("resnetv2_18"),
    model("resnetv2_50d_gn", 32),
    model("efficientnet_lite0"),
    model("mobilenetv3_small_050"),
    model("mobilenetv4_conv_small_035"),
    model("regnety_002"),
    model("ghostnet_050"),
    model("repvgg_a0", 32),
    model("fastvit_t8"),
    model("dla46_c"),
    model("convnext_atto"),
    model("convnextv2_atto"),
    model("edgenext_xx_small"),
    model("poolformerv2_s12"),
    model("levit_128s", 224),
    model("vit_tiny_patch16_224", img_size=64, depth=2),
    model("swin_s3_tiny_224", 64, img_size=64, window_size=(2, 2, 2, 2)),
    model("mixer_s32_224", img_size=64),
    model("efficientvit_b0"),
    model("rexnet_100"),
    model("tinynet_e"),
    model("inception_next_atto"),
    model("resnetv2_50d_evos", 32),
]
