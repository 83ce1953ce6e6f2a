"""diffusers: a U-Net, one with conditions, and autoencoders."""

import diffusers
import torch
from integrations.examine import Model

BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}


def noisy(n):
    return {"sample": torch.randn(n, 3, 16, 16), "timestep": torch.full((n,), 7)}


def conditioned(n):
    return {
        "sample": torch.randn(n, 4, 16, 16),
        "timestep": torch.full((n,), 7),
        "encoder_hidden_states": torch.randn(n, 5, 8),
    }


MODELS = [
    Model(
        "diffusers",
        "UNet2DModel",
        lambda: diffusers.UNet2DModel(
            sample_size=16,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=4,
            **BLOCKS,
        ),
        noisy,
    ),
    Model(
        "diffusers",
        "UNet2DConditionModel",
        lambda: diffusers.UNet2DConditionModel(
            sample_size=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            **BLOCKS,
        ),
        conditioned,
    ),
    Model(
        "diffusers",
        "AutoencoderKL",
        lambda: diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS
        ),
        lambda n: torch.randn(n, 3, 16, 16),
    ),
]
