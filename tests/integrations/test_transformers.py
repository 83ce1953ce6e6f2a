"""The Trainer of transformers folds once per optimizer step, and its checkpoints hold the streams."""

import pytest
import torch
from integrations.loops import (
    Calls,
    assert_equal,
    assert_heard,
    loader,
    new_model,
    norms,
    plain_loop,
)
from torch import nn
from torch.utils.data import Dataset

from streamnorm import StreamingNorm

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default", "error:.*backward passes and no weight update")


class Classifier(nn.Module):
    """What the Trainer asks of a model: a loss first."""

    def __init__(self):
        super().__init__()
        self.model = new_model()

    def forward(self, x, labels):
        logits = self.model(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Samples(Dataset):
    def __init__(self, batches):
        self.x, self.labels = loader(batches).dataset.tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i], "labels": self.labels[i]}


class InOrder(transformers.Trainer):
    """Without shuffling, so that a plain loop sees the same batches."""

    def _get_train_sampler(self, *rest):
        return None


def trainer(model, folder, batches, epochs=2, window=4, **settings):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=window,
        optim="sgd",
        optim_args="momentum=0.9",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", "max_grad_norm": 0.0, **settings},
    )
    return InOrder(model, arguments, train_dataset=Samples(batches))


@pytest.mark.parametrize(("batches", "windows"), [(8, [4, 4]), (10, [4, 4, 2])])
def test_accumulated_batches_are_one_window(tmp_path, batches, windows):
    """Ten batches in fours: the end of the epoch ends a window too."""
    model, alone = Classifier(), new_model()
    calls = Calls(model)
    run = trainer(model, tmp_path, batches)
    run.train()
    calls.assert_windows(*windows * 2)
    assert run.state.global_step == plain_loop(alone, loader(batches), 4, epochs=2, divide_by=lambda n: n)
    assert_heard(model, run.state.global_step)
    assert_equal(model.model, alone)


def test_bfloat16(tmp_path):
    model, alone = Classifier(), new_model()
    calls = Calls(model)
    trainer(model, tmp_path, 6, epochs=1, window=2, bf16=True).train()
    plain_loop(alone, loader(6), 2, precision=torch.bfloat16)
    calls.assert_windows(2, 2, 2)
    assert_equal(model.model, alone)


def test_a_resumed_run_is_one_that_never_stopped(tmp_path):
    """From a checkpoint in the middle of training, whose weights are a safetensors file."""
    whole, resumed = Classifier(), Classifier()
    trainer(whole, tmp_path, 8, epochs=4, save_strategy="steps", save_steps=4).train()
    assert (tmp_path / "checkpoint-4/model.safetensors").exists()
    with torch.no_grad():
        resumed.model[0].weight.zero_()  # everything comes from the checkpoint
    run = trainer(resumed, tmp_path, 8, epochs=4)
    calls = Calls(resumed)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert run.state.global_step == 8
    calls.assert_windows(4, 4, 4, 4)
    assert_equal(resumed, whole)


def test_reading_the_state_before_saving(tmp_path):
    """safetensors refuses tensors that share memory: those that were handed out do not, with one another."""
    model, loaded = Classifier(), Classifier()
    run = trainer(model, tmp_path, 4)
    run.train()
    read = [(norm.mean, norm.stats, norm.grads) for norm in norms(model)]
    run.save_model(str(tmp_path))
    from safetensors.torch import load_file

    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equal(loaded, model)
    assert read


def streaming_bert():
    """A tiny BERT whose layer norms are streaming norms; its dropout is off, since a resumed run would draw anew."""
    torch.manual_seed(0)
    size = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 6}
    depth = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**size, **depth, **dropout))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, StreamingNorm(child.normalized_shape[0], channel_dim=-1, eps=child.eps))
    return model


class Sentences(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        words = torch.arange(i, i + 6) * 7 % 20
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": i % 2}


def test_a_bert_with_streaming_norms(tmp_path):
    """Windows of 4, 2 in each epoch; the scale of the loss and the clipping are the Trainer's own."""
    models = [streaming_bert() for _ in range(2)]
    with torch.no_grad():
        models[1].classifier.weight.zero_()
    calls = [Calls(model) for model in models]
    assert len(calls[0].counts) == 5
    for model, resume in zip(models, (None, str(tmp_path / "checkpoint-2")), strict=True):
        run = trainer(model, tmp_path, 6, epochs=3, save_strategy="steps", save_steps=2, max_grad_norm=1.0)
        run.train_dataset = Sentences()
        run.train(resume_from_checkpoint=resume)
    calls[0].assert_windows(*[4, 2] * 3)
    calls[1].assert_windows(*[4, 2] * 2)
    assert_heard(models[0], 6)
    assert_equal(*models)


class Config(transformers.PretrainedConfig):
    model_type = "streamnorm-test"


class Pretrained(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.model = new_model()
        self.post_init()

    def forward(self, x, labels):
        logits = self.model(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def _init_weights(self, module):
        pass


def test_save_pretrained_and_back(tmp_path):
    model = Pretrained(Config())
    trainer(model, tmp_path, 6).train()
    model.save_pretrained(tmp_path)
    loaded, found = Pretrained.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found
    assert_equal(loaded, model)
    assert torch.equal(norms(loaded)[0].stats.short, norms(model)[0].stats.short)


def test_a_checkpoint_without_streams_is_refused_by_from_pretrained(tmp_path):
    """As docs/guide/trainers.md says; load_state_dict reads it where a person allows keys to be missing."""
    from safetensors.torch import load_file, save_file

    Pretrained(Config()).save_pretrained(tmp_path)
    weights = {name: t for name, t in load_file(tmp_path / "model.safetensors").items() if name.endswith(("ght", "as"))}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(AttributeError, match="neither a parameter, buffer"):
        Pretrained.from_pretrained(tmp_path)
