"""MONAI: networks for medical images, of two and three dimensions."""

import torch
from integrations.examine import Model
from monai.networks import nets


def volumes(size=16, channels=1):
    return lambda n: torch.randn(n, channels, size, size, size)


def images(size=32, channels=1):
    return lambda n: torch.randn(n, channels, size, size)


def model(name, inputs, *args, title=None, **settings):
    return Model("monai", title or name, lambda: getattr(nets, name)(*args, **settings), inputs)


SIZE = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
FLAT = SIZE | {"spatial_dims": 2}

MODELS = [
    model("UNet", volumes(), channels=(4, 8, 16), strides=(2, 2), num_res_units=1, **SIZE),
    model("UNet", images(), channels=(4, 8, 16), strides=(2, 2), norm="batch", title="UNet, batch norm", **FLAT),
    model("BasicUNet", images(), features=(4, 4, 8, 8, 8, 4), **FLAT),
    model("AttentionUnet", images(), channels=(4, 8, 16), strides=(2, 2), **FLAT),
    model(
        "DynUNet",
        volumes(),
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 8],
        **SIZE,
    ),
    model("SegResNet", volumes(), init_filters=8, **SIZE),
    model("VNet", volumes(16), **SIZE),
    model(
        "UNETR",
        volumes(32),
        img_size=32,
        feature_size=4,
        hidden_size=24,
        mlp_dim=16,
        num_heads=2,
        **{k: v for k, v in SIZE.items() if k != "spatial_dims"},
    ),
    model("DenseNet", volumes(32), init_features=8, growth_rate=4, block_config=(2, 2), **SIZE),
    model("ResNet", volumes(), "basic", [1, 1, 1, 1], [4, 8, 8, 16], n_input_channels=1, num_classes=3),
    model("SEResNet50", images(32, 3), spatial_dims=2, in_channels=3, num_classes=3),
    model(
        "EfficientNetBN",
        images(64, 3),
        "efficientnet-b0",
        pretrained=False,
        spatial_dims=2,
        in_channels=3,
        num_classes=3,
    ),
    model(
        "HighResNet",
        volumes(8),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        layer_params=[
            {"name": "conv_0", "n_features": 4, "kernel_size": 3},
            {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
            {"name": "conv_1", "n_features": 4, "kernel_size": 1},
            {"name": "conv_2", "kernel_size": 1},
        ],
    ),
    model("AutoEncoder", images(), channels=(4, 8), strides=(2, 2), **FLAT),
    model(
        "ViT",
        volumes(16),
        in_channels=1,
        img_size=16,
        patch_size=8,
        hidden_size=12,
        mlp_dim=16,
        num_layers=2,
        num_heads=2,
        classification=True,
        num_classes=3,
    ),
    model(
        "MedNeXt",
        volumes(16),
        init_filters=4,
        encoder_expansion_ratio=2,
        decoder_expansion_ratio=2,
        bottleneck_expansion_ratio=2,
        **SIZE,
    ),
]
