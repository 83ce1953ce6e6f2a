"""Bad input: an error that names the value, the rule and the fix, and a layer that is as it was."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from streamnorm import (
    Affine,
    DecoupledUpdate,
    GeneralBatchNorm,
    Manhattan,
    NormRef,
    SampleNorm,
    StreamingNorm,
    convert,
)
from streamnorm import TimeSpecificNorm as TSN
from streamnorm.engine.compat import top_hooks

CONSTRUCTION = [
    (lambda: StreamingNorm(0), "num_features=0: must be a whole number of at least 1"),
    (lambda: StreamingNorm(2.5), "num_features=2.5"),
    (lambda: Affine(-1), "num_features=-1"),
    (lambda: StreamingNorm(3, p=0.5), "p=0.5: .*at least 1"),
    (lambda: StreamingNorm(3, p=float("inf")), "p=inf: .*finite"),
    (lambda: StreamingNorm(3, p="two"), "p='two'"),
    (lambda: StreamingNorm(3, eps=-1e-5), "eps=-1e-05"),
    (lambda: StreamingNorm(3, ref="BA7"), "ref='BA7': use one of BA1, .*or a NormRef"),
    (lambda: StreamingNorm(3, center="median"), "center='median': use .mean."),
    (lambda: StreamingNorm(3, alpha=(0.7,)), "alpha=.* has 1 numbers: it takes 2 .long short."),
    (lambda: StreamingNorm(3, alpha=0.7), "alpha=0.7: must be 2 finite numbers"),
    (lambda: StreamingNorm(3, beta=(0.7, 0.3)), "beta=.* has 2 numbers: it takes 3"),
    (lambda: StreamingNorm(3, kappa=(1, 0)), "kappa=.* has 2 numbers: it takes 4"),
    (lambda: StreamingNorm(3, beta=(0.7, 0.3, float("nan"))), "beta=.*finite"),
    (lambda: StreamingNorm(3, alpha="ab"), "alpha='ab'"),
    (lambda: StreamingNorm(3, warmup=-1), "warmup=-1"),
    (lambda: StreamingNorm(3, channel_dim=1.0), "channel_dim=1.0"),
    (lambda: StreamingNorm(3, p=10**400), "p=1000"),
    (lambda: StreamingNorm(3, ref=["BA1"]), "ref=.'BA1'.: use one of"),
    (lambda: StreamingNorm(3, dtype=torch.complex64), "dtype=torch.complex64"),
    (lambda: StreamingNorm(3, affine=False, dtype=torch.int64), "dtype=torch.int64"),
    (lambda: Affine(3, dtype=torch.int64), "dtype=torch.int64"),
    (lambda: StreamingNorm(3, channel_dim=2), "channel_dim=2: use 1 .*or -1"),
    (lambda: StreamingNorm(3, process_group=object()), "process_group=.*use .world. for all processes"),
    (lambda: SampleNorm(3, ref="BA1"), "pools samples: use SP1-SP5"),
    (lambda: SampleNorm(3, center="running"), "no running mean"),
    (lambda: GeneralBatchNorm(3, ref="SP1"), "GeneralBatchNorm ref='SP1' pools no samples: use BA1-BA6"),
    (lambda: TSN(3, 4, ref="SP2"), "TimeSpecificNorm ref='SP2' pools no samples"),
    (lambda: GeneralBatchNorm(3, momentum=1.5), "momentum=1.5: must be a number from 0 to 1"),
    (lambda: GeneralBatchNorm(3, momentum=None), "momentum=None"),
    (lambda: TSN(3, 0), "steps=0"),
    (lambda: SampleNorm(3, ref=NormRef(False, "each", 1)), "one element per statistic.*center=.zero."),
    (lambda: SampleNorm(1, ref="SP5"), "one element per statistic"),
    (lambda: StreamingNorm(1, ref="SP5", center="mean"), "one element per statistic"),
    (lambda: NormRef(space=4), "space=4: .*odd window"),
    (lambda: NormRef(space=0), "space=0"),
    (lambda: NormRef(space=True), "space=True"),
    (lambda: NormRef(channels="some"), "channels='some'"),
    (lambda: NormRef(samples=1), "samples=1"),
    (lambda: DecoupledUpdate(None, 0), "batches_per_update=0"),
    (lambda: Manhattan([torch.zeros(1)], lr=-1), "lr=-1"),
    (lambda: Manhattan([torch.zeros(1)], lr=0.1, momentum=float("nan")), "momentum=nan"),
]


CONSTRUCTION += [
    (lambda: SampleNorm((8, 4, 4)), r"num_features=\(8, 4, 4\): must be a whole number of at least 1, not a shape"),
    (lambda: StreamingNorm(torch.Size([8])), "num_features=.*not a shape"),
]


@pytest.mark.parametrize(("build", "message"), CONSTRUCTION, ids=[m for _, m in CONSTRUCTION])
def test_bad_construction(build, message):
    with pytest.raises(ValueError, match=message):
        build()


FOREIGN = [  # what the constructors of torch's norms take
    (lambda: StreamingNorm(3, momentum=0.1), r"StreamingNorm\(\) takes no momentum=: .*GeneralBatchNorm.*alpha="),
    (lambda: SampleNorm(3, momentum=0.1), r"SampleNorm\(\) takes no momentum=: .*GeneralBatchNorm"),
    (
        lambda: GeneralBatchNorm(3, track_running_stats=False),
        "GeneralBatchNorm.. takes no track_running_stats=: .*Sample",
    ),
    (lambda: SampleNorm(3, elementwise_affine=False), "takes no elementwise_affine=: .*affine="),
    (lambda: StreamingNorm(3, bias=False), "takes no bias=: .*affine=False"),
    (lambda: StreamingNorm(normalized_shape=3), "takes no normalized_shape=: .*num_features.*channel_dim=-1"),
    (
        lambda: SampleNorm(num_groups=2, num_channels=4),
        "takes no num_groups=: .*'SP1'.*'SP2'.*no num_channels=: .*num_f",
    ),
    (lambda: GeneralBatchNorm(num_channels=4), "takes no num_channels=: .*num_features"),
    (lambda: GeneralBatchNorm(3, process_group=None), "takes no process_group=: .*StreamingNorm"),
    (lambda: TSN(3, 4, momentun=0.1), r"TimeSpecificNorm\(\) takes no momentun=: did you mean momentum="),
    (lambda: StreamingNorm(3, gamma=1), "takes no gamma=: it takes num_features, ref, p, center, alpha, .*dtype"),
    (lambda: Affine(3, eps=1e-5), r"Affine\(\) takes no eps=: it takes num_features, channel_dim"),
    (lambda: StreamingNorm(64, 1e-5), r"StreamingNorm\(\) takes num_features by position, .*1e-05.*by name: eps="),
    (lambda: GeneralBatchNorm(64, 1e-5, 0.1), "GeneralBatchNorm.. takes num_features by position, .*64, 1e-05, 0.1"),
    (lambda: SampleNorm(8, 64), "SampleNorm.. takes num_features by position"),
    (lambda: TSN(8, 4, 1e-5), "TimeSpecificNorm.. takes num_features, steps by position"),
    (lambda: Affine(8, -1), "Affine.. takes num_features by position, .*by name: channel_dim="),
    (lambda: StreamingNorm(), "missing 1 required positional argument: 'num_features'"),
    (lambda: convert(torch.nn.BatchNorm1d(3), momentum=0.1, report=None), "takes no momentum="),
]


@pytest.mark.parametrize(("build", "message"), FOREIGN, ids=[m for _, m in FOREIGN])
def test_names_of_torchs_norms_get_a_hint(build, message):
    with pytest.raises(TypeError, match=message) as refused:
        build()
    assert refused.value.__cause__ is None


def test_a_mistake_of_another_kind_is_as_it_was():
    class Own(StreamingNorm):
        def __init__(self, size):
            super().__init__(size)
            raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        Own(3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentum'"):
        Own(3, momentum=0.1)  # the signature is not ours


good = torch.ones(4, 3, 5) * torch.arange(4)[:, None, None]
CALLS = [
    ({}, torch.tensor(1.0), None, ValueError, r"shape \(\) has 0 dimension"),
    ({}, torch.ones(3), None, ValueError, r"shape \(3,\) has 1 dimension.*expected \(N, C, \*space\)"),
    ({"channel_dim": -1}, torch.ones(3), None, ValueError, r"expected \(N, \*space, C\)"),
    ({}, torch.ones(3), None, ValueError, r"for one sample pass x.unsqueeze\(0\)$"),
    ({"channel_dim": -1}, torch.ones(3), None, ValueError, r"for one sample pass x.unsqueeze\(0\)$"),
    ({}, torch.ones(4), None, ValueError, r"expected \(N, C, \*space\)$"),
    ({}, torch.ones(3, 5), None, ValueError, r"for one sample \(C, \*space\) pass x.unsqueeze\(0\)$"),
    ({}, torch.ones(3, 5, 6), None, ValueError, r"for one sample \(C, \*space\) pass x.unsqueeze\(0\)$"),
    ({}, torch.ones(4, 5, 3), None, ValueError, r"\(see channel_dim\)$"),
    ({}, torch.ones(4, 5), None, ValueError, "has 5 channels in dimension 1.*num_features=3"),
    ({"channel_dim": -1}, torch.ones(4, 3, 5), None, ValueError, "has 5 channels in dimension -1"),
    ({}, torch.ones(4, 3, dtype=torch.int64), None, TypeError, r"dtype torch.int64.*x.float\(\)"),
    ({}, torch.ones(4, 3, dtype=torch.bool), None, TypeError, "dtype torch.bool"),
    ({}, torch.ones(4, 3, dtype=torch.complex64), None, TypeError, "dtype torch.complex64"),
    ({}, [[1.0, 2.0, 3.0]], None, TypeError, "input is list"),
    ({}, torch.ones(0, 3), None, ValueError, r"shape \(0, 3\) is empty"),
    ({}, torch.ones(4, 3, 0), None, ValueError, r"shape \(4, 3, 0\) is empty"),
    ({"center": "mean"}, torch.ones(1, 3), None, ValueError, "one element per statistic.*center=.running."),
    ({"center": "mean", "ref": "BA6"}, torch.ones(1, 3, 5), None, ValueError, "one element per statistic"),
    ({"center": "mean", "ref": "SP2"}, torch.ones(4, 3), None, ValueError, "one element per statistic"),
    ({"center": "mean", "ref": "SP4"}, torch.ones(4, 3, 1, 1), None, ValueError, "one element per statistic"),
    (
        {"ref": "BA6"},
        torch.ones(4, 3, 6),
        None,
        ValueError,
        r"spatial size \(6,\).*bound to \(5,\).*reset_running_stats",
    ),
    ({"ref": "BA4"}, torch.ones(4, 3, 5, 5), None, ValueError, r"spatial size \(5, 5\).*bound to \(5,\)"),
    ({"ref": "SP5"}, torch.ones(4, 3, 6), None, ValueError, "bound to"),
    ({}, good, torch.ones(4, 5), TypeError, "mask is torch.float32: pass a bool tensor"),
    ({}, good, [True], TypeError, "mask is list"),
    ({}, good, torch.ones(4, 3, 5, dtype=torch.bool), ValueError, r"mask of shape \(4, 3, 5\).*\(4, 5\)"),
    ({}, good, torch.ones(3, dtype=torch.bool), ValueError, r"mask of shape \(3,\) does not broadcast"),
]


@pytest.mark.parametrize(("settings", "x", "mask", "error", "message"), CALLS, ids=[c[-1] for c in CALLS])
def test_bad_calls_change_nothing(settings, x, mask, error, message):
    layer = StreamingNorm(3, **settings)
    first = good.movedim(1, -1) if settings.get("channel_dim") == -1 else good
    layer(first + torch.randn(first.shape)).sum().backward()
    layer.weights_updated()  # an update that a refused call must not fold in
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(error, match=message):
        layer(x, mask=mask)
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    layer(first)  # and it goes on


BATCH_CALLS = [
    (lambda: GeneralBatchNorm(3), torch.ones(1, 3), "one element per statistic"),
    (lambda: GeneralBatchNorm(3), torch.ones(0, 3), "is empty"),
    (lambda: TSN(3, 2), torch.ones(1, 3), "one element per statistic"),
    (lambda: SampleNorm(3), torch.ones(0, 3), "is empty"),
    (lambda: SampleNorm(3, ref="SP2"), torch.ones(2, 3), "one element per statistic"),
    (lambda: SampleNorm(3, channel_dim=-1), torch.ones(3), r"pass x.unsqueeze\(0\)$"),
    (lambda: GeneralBatchNorm(3), torch.ones(3, 5, 5), r"pass x.unsqueeze\(0\)$"),
    (lambda: TSN(3, 2), torch.ones(3), r"pass x.unsqueeze\(0\)$"),
    (lambda: Affine(3), torch.ones(3), r"pass x.unsqueeze\(0\)$"),
    (lambda: Affine(3), torch.ones(3, 5, 5), r"pass x.unsqueeze\(0\)$"),
]


@pytest.mark.parametrize(("make", "x", "message"), BATCH_CALLS)
def test_bad_calls_of_the_other_norms(make, x, message):
    layer = make()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        layer(x)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())


@pytest.mark.parametrize("step", [-1, 1.0, None, True])
def test_bad_steps(step):
    with pytest.raises(ValueError, match="step="):
        TSN(3, 2)(torch.randn(4, 3), step=step)


def test_a_changed_size_is_refused_in_evaluation_too():
    layer = StreamingNorm(3, ref="BA6")
    layer(torch.randn(4, 3, 5))
    with pytest.raises(ValueError, match="bound to"):
        layer.eval()(torch.randn(4, 3, 6))


def test_sample_norm_binds_nothing():
    layer = SampleNorm(3, ref="SP4")
    for space in [(5,), (6,), (4, 4)]:
        assert layer(torch.randn(2, 3, *space)).shape == (2, 3, *space)


def test_one_sample_without_space_is_what_streaming_is_for():
    assert torch.isfinite(StreamingNorm(3)(torch.randn(1, 3))).all()
    with pytest.raises(ValueError, match="more than 1 value"):
        torch.nn.BatchNorm1d(3)(torch.randn(1, 3))


@pytest.mark.skipif(top_hooks is not None, reason="this torch tells which segment it runs again")
@pytest.mark.filterwarnings("ignore:.*autocast")
def test_an_old_torch_cannot_repeat_a_segment_exactly():
    norm, x = StreamingNorm(3), torch.randn(5, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="needs a newer torch"):
        checkpoint(norm, x, use_reentrant=False).sum().backward()
