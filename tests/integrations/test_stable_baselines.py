"""Target networks of stable-baselines3, which captures tensors by their names, once, and copies into them."""

import pytest
import torch
from torch import nn

from streamnorm import GeneralBatchNorm, StreamingNorm

sb3 = pytest.importorskip("stable_baselines3")
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor  # noqa: E402
from stable_baselines3.common.utils import polyak_update  # noqa: E402


def extractor(kind):
    class Normed(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 16)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(space.shape[0], 16), kind(16), nn.ReLU())

        def forward(self, x):
            return self.net(x)

    return Normed


@pytest.mark.filterwarnings("ignore")  # critics are called in training mode without a gradient
@pytest.mark.parametrize("kind", [StreamingNorm, GeneralBatchNorm])
@pytest.mark.parametrize("name", ["DQN", "SAC", "TD3"])
def test_the_statistics_of_target_networks_follow(kind, name):
    environment = "CartPole-v1" if name == "DQN" else "Pendulum-v1"
    settings = {"target_update_interval": 20, "tau": 1.0} if name == "DQN" else {"tau": 0.05}
    policy = {"features_extractor_class": extractor(kind), "net_arch": [16]}
    agent = getattr(sb3, name)(
        "MlpPolicy", environment, learning_starts=50, seed=0, policy_kwargs=policy, device="cpu", **settings
    )
    agent.learn(200)
    nets = (agent.q_net, agent.q_net_target) if name == "DQN" else (agent.critic, agent.critic_target)
    prefix = "critic_" if name == "TD3" else ""
    stats = [getattr(agent, f"{prefix}batch_norm_stats{of}") for of in ("", "_target")]
    norms = [[norm for norm in net.modules() if isinstance(norm, kind)] for net in nets]
    assert len(stats[0]) == 2 * len(norms[0]) > 0
    for norm, copied in zip(*norms, strict=True):
        assert copied.running_mean.abs().max() > 0
        assert (norm.running_mean - copied.running_mean).abs().max() < norm.running_mean.abs().max()
    # A whole copy makes the evaluation of both the same.
    polyak_update(nets[0].parameters(), nets[1].parameters(), 1.0)
    polyak_update(*stats, 1.0)
    x = torch.as_tensor(agent.replay_buffer.observations[:64, 0])
    action = [] if name == "DQN" else [torch.as_tensor(agent.replay_buffer.actions[:64, 0])]
    with torch.no_grad():
        ours, theirs = (net.eval()(x, *action) for net in nets)
    for one, two in zip(*((each if isinstance(each, tuple) else (each,)) for each in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, two)
