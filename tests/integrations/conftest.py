import pytest
from integrations.zoo import import_torchvision

collect_ignore_glob = ["zoo/*"]  # no tests: `integrations.models` runs them
import_torchvision()  # trainers import it as well, if it is there


@pytest.fixture(autouse=True)
def _without_settings_of_other_tests():
    """Accelerate, also inside transformers, keeps its settings for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
