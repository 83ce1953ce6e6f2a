"""transformers: vision, text, sound and series; everything is built from its configuration."""

import torch
import transformers as hf
from integrations.examine import Model

from streamnorm import convert

TEXT = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IMAGE = {"image_size": 32, "patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def images(size=32, channels=3):
    return lambda n: {"pixel_values": torch.randn(n, channels, size, size)}


def words(n):
    return {"input_ids": torch.randint(5, 40, (n, 7)), "attention_mask": torch.ones(n, 7, dtype=torch.long)}


def both(n):
    return words(n) | {"decoder_input_ids": torch.randint(5, 40, (n, 5))}


def sound(n):
    return {"input_values": torch.randn(n, 800)}


def model(kind, inputs, **settings):
    """A model by its name, such as ResNetForImageClassification, with a configuration made of the settings."""

    def build():
        cls = getattr(hf, kind)
        return cls(cls.config_class(**settings))

    return Model("transformers", kind, build, inputs)


def on_request(model):
    """The same with its RMS norms converted as well."""

    def rules(built):
        kinds = {type(module) for module in built.modules() if type(module).__name__ in ("LlamaRMSNorm", "T5LayerNorm")}
        return dict.fromkeys(kinds, convert.rms)

    return model._replace(name=f"{model.name}, convert.rms", rules=rules)


def on_a_resnet(kind, inputs, **settings):
    def build():
        cls = getattr(hf, kind)
        backbone = hf.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 12, 16],
            depths=[1, 1, 1, 1],
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
        return cls(cls.config_class(backbone_config=backbone, **settings))

    return Model("transformers", kind, build, inputs)


STAGES = {"embedding_size": 8, "hidden_sizes": [8, 8, 12, 16], "depths": [1, 2, 1, 1]}
WAVES = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.0,
    "mask_time_prob": 0.0,
    "apply_spec_augment": False,
}

MODELS = [
    model("ResNetForImageClassification", images(), **STAGES),
    model("RegNetForImageClassification", images(), groups_width=4, **STAGES),
    model("ConvNextForImageClassification", images(), hidden_sizes=[8, 8, 12, 16], depths=[1, 1, 1, 1]),
    model("ConvNextV2ForImageClassification", images(), hidden_sizes=[8, 8, 12, 16], depths=[1, 1, 1, 1]),
    model(
        "EfficientNetForImageClassification",
        images(),
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    model("MobileNetV1ForImageClassification", images(), image_size=32, depth_multiplier=0.25),
    model("MobileNetV2ForImageClassification", images(), image_size=32, depth_multiplier=0.25),
    model(
        "MobileViTForImageClassification",
        images(64),
        image_size=64,
        hidden_sizes=[16, 20, 24],
        neck_hidden_sizes=[4, 4, 8, 12, 16, 16, 32],
        num_attention_heads=2,
    ),
    model("MobileViTV2ForImageClassification", images(64), image_size=64, width_multiplier=0.25),
    model(
        "LevitForImageClassification",
        images(64),
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    model(
        "BitForImageClassification",
        images(),
        num_groups=4,
        embedding_size=32,
        hidden_sizes=[32, 32, 64, 64],
        depths=[1, 1, 1, 1],
    ),
    model(
        "SwinForImageClassification",
        images(),
        image_size=32,
        patch_size=2,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    model("ViTForImageClassification", images(), intermediate_size=24, **IMAGE),
    model("BeitForImageClassification", images(), intermediate_size=24, **IMAGE),
    model(
        "PvtForImageClassification",
        images(64),
        image_size=64,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
    ),
    model(
        "SegformerForSemanticSegmentation",
        images(64),
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    ),
    model("PoolFormerForImageClassification", images(64), hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    model(
        "SwiftFormerForImageClassification", images(64), image_size=64, embed_dims=[8, 16, 16, 24], depths=[1, 1, 1, 1]
    ),
    model("CvtForImageClassification", images(64), embed_dim=[8, 16, 16], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    model(
        "FocalNetForImageClassification",
        images(64),
        image_size=64,
        embed_dim=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
    on_a_resnet(
        "DetrForObjectDetection",
        images(64),
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_queries=5,
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
    ),
    model("BertForSequenceClassification", words, **TEXT),
    model("DistilBertForSequenceClassification", words, vocab_size=40, dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    model("GPT2LMHeadModel", words, vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=16, use_cache=False),
    model(
        "T5ForConditionalGeneration",
        both,
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        use_cache=False,
    ),
    model("LlamaForCausalLM", words, use_cache=False, **TEXT),
    model("CohereForCausalLM", words, use_cache=False, **TEXT),
    model("DebertaForSequenceClassification", words, **TEXT),
    model(
        "SqueezeBertForSequenceClassification",
        words,
        embedding_size=16,
        q_groups=1,
        k_groups=1,
        v_groups=1,
        post_attention_groups=1,
        intermediate_groups=1,
        output_groups=1,
        **TEXT,
    ),
    model("AlbertForSequenceClassification", words, embedding_size=8, **TEXT),
    model(
        "FNetForSequenceClassification",
        lambda n: {"input_ids": torch.randint(5, 40, (n, 7))},
        **{k: v for k, v in TEXT.items() if k != "num_attention_heads"},
    ),
    model("Wav2Vec2ForCTC", sound, vocab_size=12, **WAVES, **SPEECH),
    model("HubertForCTC", sound, vocab_size=12, **WAVES, **SPEECH),
    model("Wav2Vec2ConformerForCTC", sound, vocab_size=12, conv_depthwise_kernel_size=3, **WAVES, **SPEECH),
    model(
        "WhisperModel",
        lambda n: {"input_features": torch.randn(n, 8, 40), "decoder_input_ids": torch.randint(5, 40, (n, 4))},
        vocab_size=40,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=20,
        max_target_positions=10,
        pad_token_id=1,
        use_cache=False,
    ),
    model(
        "PatchTSTForPrediction",
        lambda n: {"past_values": torch.randn(n, 32, 2)},
        num_input_channels=2,
        context_length=32,
        prediction_length=4,
        patch_length=8,
        patch_stride=8,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        ffn_dim=16,
        norm_type="batchnorm",
    ),
    model("CLIPVisionModel", images(), intermediate_size=24, **IMAGE),
    model("VitDetModel", images(), pretrain_image_size=32, residual_block_indices=[1], **IMAGE),
]
MODELS += [on_request(each) for each in MODELS if each.name.startswith(("Llama", "T5"))]
