"""Accelerate's optimizer skips the steps inside a window, and layers fold once per real one, with no extra line."""

import pytest
import torch
from integrations.loops import Calls, assert_equal, assert_heard, loader, new_model, new_optimizer, plain_loop
from torch import nn

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("default", "error:.*backward passes and no weight update")


class Training:
    """The loop of Accelerate's documentation."""

    def __init__(self, model, batches, window=4, **settings):
        self.accelerator = accelerate.Accelerator(gradient_accumulation_steps=window, cpu=True, **settings)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, new_optimizer(model), loader(batches))
        self.updates = 0

    def epoch(self):
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.updates += self.accelerator.sync_gradients


@pytest.mark.parametrize(("batches", "windows"), [(8, [4, 4]), (10, [4, 4, 2])])
def test_accumulated_batches_are_one_window(batches, windows):
    """Ten batches in fours: the end of the data ends a window too."""
    model, alone = new_model(), new_model()
    calls = Calls(model)
    training = Training(model, batches)
    for _ in range(2):
        training.epoch()
    calls.assert_windows(*windows * 2)
    assert training.updates == plain_loop(alone, loader(batches), 4, epochs=2)
    assert_heard(model, training.updates)
    assert_equal(model, alone)


def test_a_window_that_goes_on_in_the_next_epoch():
    plugin = accelerate.utils.GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    model = new_model()
    calls = Calls(model)
    accelerator = accelerate.Accelerator(gradient_accumulation_plugin=plugin, cpu=True)
    wrapped, optimizer, batches = accelerator.prepare(model, new_optimizer(model), loader(6))
    for _ in range(2):
        for x, y in batches:
            with accelerator.accumulate(wrapped):
                accelerator.backward(nn.functional.cross_entropy(wrapped(x), y))
                optimizer.step()
                optimizer.zero_grad()
    calls.assert_windows(4, 4, 4)


def test_bfloat16():
    model, alone = new_model(), new_model()
    calls = Calls(model)
    Training(model, 6, window=2, mixed_precision="bf16").epoch()
    calls.assert_windows(2, 2, 2)
    plain_loop(alone, loader(6), 2, precision=torch.bfloat16)
    assert_equal(model, alone)


def test_a_resumed_run_is_one_that_never_stopped(tmp_path):
    whole = new_model()
    training = Training(whole, 8)
    for epoch in range(4):
        training.epoch()
        if epoch == 1:
            training.accelerator.save_state(str(tmp_path / "half"))
    resumed = new_model()
    with torch.no_grad():
        resumed[0].weight.zero_()  # everything comes from the checkpoint
    again = Training(resumed, 8)
    again.accelerator.load_state(str(tmp_path / "half"))
    calls = Calls(resumed)
    for _ in range(2):
        again.epoch()
    calls.assert_windows(4, 4, 4, 4)
    assert_equal(resumed, whole)


@pytest.mark.parametrize("safe", [True, False])
def test_weights_saved_after_the_state_was_read(tmp_path, safe):
    """Reading hands tensors of the state out; the file has them all the same, each once."""
    model, loaded = new_model(), new_model()
    training = Training(model, 4)
    training.epoch()
    read = [(model[1].mean, model[1].stats, model.state_dict()) for _ in range(2)]
    training.accelerator.save_model(training.model, str(tmp_path), safe_serialization=safe)
    accelerate.load_checkpoint_in_model(loaded, str(tmp_path))
    assert_equal(loaded, model)
    assert read
