"""Lightning's Trainer folds once per optimizer step, as a loop in plain torch does, with no extra line."""

import copy

import pytest
import torch
from integrations.loops import (
    Calls,
    assert_equal,
    assert_heard,
    loader,
    new_model,
    new_optimizer,
    norms,
    plain_loop,
)
from torch import nn

import streamnorm

lightning = pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("default", "error:.*backward passes and no weight update")


class Classifier(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return new_optimizer(self.model)


def trainer(folder, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(default_root_dir=folder, accelerator="cpu", devices=1, **quiet, **settings)


@pytest.mark.parametrize(("batches", "windows"), [(8, [4, 4]), (10, [4, 4, 2])])
def test_accumulated_batches_are_one_window(tmp_path, batches, windows):
    """Ten batches in fours: the end of the epoch ends a window too."""
    model, alone = new_model(), new_model()
    calls = Calls(model)
    run = trainer(tmp_path, accumulate_grad_batches=4, max_epochs=2, enable_checkpointing=False)
    run.fit(Classifier(model), loader(batches))
    calls.assert_windows(*windows * 2)
    assert run.global_step == plain_loop(alone, loader(batches), 4, epochs=2)
    assert_heard(model, run.global_step)
    assert_equal(model, alone)


def test_bfloat16(tmp_path):
    model, alone = new_model(), new_model()
    calls = Calls(model)
    run = trainer(tmp_path, accumulate_grad_batches=2, max_epochs=1, precision="bf16-mixed", enable_checkpointing=False)
    run.fit(Classifier(model), loader(6))
    plain_loop(alone, loader(6), 2, precision=torch.bfloat16)
    calls.assert_windows(2, 2, 2)
    assert norms(model)[0].mean.dtype == torch.float32
    assert_equal(model, alone)


def test_sanity_checks_and_validation_leave_no_trace(tmp_path):
    class Validated(Classifier):
        def validation_step(self, batch, index):
            self.log("loss", self.training_step(batch, index))

    model, alone = new_model(), new_model()
    run = trainer(tmp_path, accumulate_grad_batches=4, max_epochs=1, val_check_interval=3, enable_checkpointing=False)
    run.fit(Validated(model), loader(8), loader(2))
    plain_loop(alone, loader(8), 4)
    assert_equal(model, alone)


def test_a_resumed_run_is_one_that_never_stopped(tmp_path):
    whole, begun, resumed = new_model(), new_model(), new_model()
    settings = {"accumulate_grad_batches": 4, "enable_checkpointing": False}
    trainer(tmp_path, max_epochs=4, **settings).fit(Classifier(whole), loader(8))
    first = trainer(tmp_path, max_epochs=2, **settings)
    first.fit(Classifier(begun), loader(8))
    first.save_checkpoint(tmp_path / "half.ckpt")
    with torch.no_grad():
        resumed[0].weight.zero_()  # everything comes from the checkpoint
    calls = Calls(resumed)
    second = trainer(tmp_path, max_epochs=4, **settings)
    second.fit(Classifier(resumed), loader(8), ckpt_path=tmp_path / "half.ckpt")
    calls.assert_windows(4, 4, 4, 4)
    assert_equal(resumed, whole)


class Gan(lightning.LightningModule):
    """Two optimizers, stepped by hand; the generator's step goes through the critic and leaves no trace there."""

    def __init__(self, generator, critic):
        super().__init__()
        self.generator, self.critic = generator, critic
        self.automatic_optimization = False

    def training_step(self, batch, index):
        update(batch[0], self.generator, self.critic, *self.optimizers(), self.manual_backward)

    def configure_optimizers(self):
        return new_optimizer(self.generator), new_optimizer(self.critic)


def update(real, generator, critic, for_generator, for_critic, backward):
    fake = generator(real.flip(0))
    with streamnorm.paused(critic):
        backward(critic(fake).mean())
    for_generator.step()
    for_generator.zero_grad()
    for_critic.zero_grad()
    backward(critic(real).mean() - critic(fake.detach()).mean())
    for_critic.step()
    for_critic.zero_grad()


def test_two_optimizers_by_hand(tmp_path):
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), streamnorm.StreamingNorm(8), nn.Linear(8, 6))
    critic = new_model()
    pair = copy.deepcopy((generator, critic))
    of_generator, of_critic = Calls(generator), Calls(critic)
    trainer(tmp_path, max_epochs=1, enable_checkpointing=False).fit(Gan(generator, critic), loader(5))
    assert of_generator.counts == [[1] * 5]  # once per step of its own optimizer
    # The critic sees the fakes of the generator's step too, which are not counted, then real and fake ones.
    for counts in of_critic.counts:
        assert counts == [0, 1, 2] + [2, 1, 2] * 4
    optimizers = [new_optimizer(each) for each in pair]
    for real, _ in loader(5):
        update(real, *pair, *optimizers, torch.Tensor.backward)
    assert_equal(generator, pair[0])
    assert_equal(critic, pair[1])
