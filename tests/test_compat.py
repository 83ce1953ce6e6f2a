"""Every private symbol of torch that we lean on is in one file, and means in this torch what we take it to mean."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import streamnorm
from streamnorm.engine import compat

SOURCE = Path(streamnorm.__file__).parent
COMPAT = SOURCE / "engine/compat.py"
SYMBOLS = sorted(
    name
    for node in ast.parse(COMPAT.read_text(encoding="utf-8")).body
    for name in (
        [node.name]
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        else [target.id for target in getattr(node, "targets", [getattr(node, "target", None)]) if target is not None]
    )
    if not name.startswith("_")
)

CANARIES = {}


def canary(test):
    """One for each symbol of the file, by its name."""
    CANARIES[test.__name__.removeprefix("test_")] = test
    return test


def test_every_symbol_has_a_canary():
    assert set(SYMBOLS) <= set(CANARIES)
    assert SYMBOLS


# Tensors


@canary
def test_is_zero_tensor():
    assert not compat.is_zero_tensor(torch.zeros(2))
    assert compat.is_zero_tensor(torch._efficientzerotensor(2))


@canary
def test_version_of():
    """It is counted by every write, also by those of optimizers, and by no read."""
    weight = nn.Parameter(torch.ones(2))
    before = compat.version_of(weight)
    weight.sum().backward()
    assert compat.version_of(weight) == before
    torch.optim.SGD([weight], 0.1).step()
    assert compat.version_of(weight) > before


def lists():
    return [torch.tensor([1.0, -2.0]), torch.tensor([3.0])]


@canary
def test_is_aliased():
    """By a view, by what shares memory and versions, by what shares memory alone, by an array."""
    ours = torch.zeros(2)
    for alias in (lambda: ours[0], ours.detach, lambda: ours.data, ours.numpy):
        assert not compat.is_aliased(ours)
        other = alias()
        assert compat.is_aliased(ours)
        del other
    assert not compat.is_aliased(ours)


@canary
def test_foreach_add_():
    ours = lists()
    compat.foreach_add_(ours, lists(), alpha=-0.5)
    assert [each.tolist() for each in ours] == [[0.5, -1.0], [1.5]]
    compat.foreach_add_(ours, 1)
    assert [each.tolist() for each in ours] == [[1.5, 0.0], [2.5]]


@canary
def test_foreach_copy_():
    ours = [torch.zeros(2), torch.zeros(3, 1)]
    compat.foreach_copy_(ours, [torch.ones(2), torch.ones(3, 1)])
    assert all(bool((each == 1).all()) for each in ours)


@canary
def test_foreach_div_():
    ours = lists()
    compat.foreach_div_(ours, 2)
    assert [each.tolist() for each in ours] == [[0.5, -1.0], [1.5]]


@canary
def test_foreach_mul_():
    ours = lists()
    compat.foreach_mul_(ours, 2)
    assert [each.tolist() for each in ours] == [[2.0, -4.0], [6.0]]


@canary
def test_foreach_norm():
    found = compat.foreach_norm(lists())
    assert [float(each) for each in found] == pytest.approx([5**0.5, 3])


@canary
def test_foreach_sign():
    assert [each.tolist() for each in compat.foreach_sign(lists())] == [[1.0, -1.0], [1.0]]


# Autograd and transforms


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


@canary
def test_apply_of():
    """It is what `apply` ends in: the same result, the same node in the graph."""
    x = torch.ones(2, requires_grad=True)
    ours, theirs = compat.apply_of(Double)(x), Double.apply(x)
    assert torch.equal(ours, theirs)
    assert type(ours.grad_fn) is type(theirs.grad_fn)
    ours.sum().backward()
    assert x.grad.tolist() == [2, 2]


def seen_inside(question):
    """What a question is answered by in a plain call, and within each transform of torch."""
    answers = {"plain": question()}

    def asked(name):
        def function(x):
            answers[name] = question()
            return (x * 2).sum()

        return function

    x = torch.ones(3)
    torch.func.grad(asked("grad"))(x)
    torch.func.vmap(asked("vmap"))(x)
    torch.func.jvp(asked("jvp"), (x,), (x,))
    with forward_ad.dual_level():
        answers["dual"] = question()
    torch.jit.trace(asked("trace"), x, check_trace=False)
    answers["after"] = question()
    return {name for name, answer in answers.items() if answer}


traced = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


@canary
@traced
def test_functorch_is_active():
    assert seen_inside(compat.functorch_is_active) == {"grad", "vmap", "jvp"}


@canary
def test_outside_functorch():
    kept = []

    def loss(x):
        with compat.outside_functorch():
            kept.append(torch.ones(2) + 1)
        kept.append(torch.ones(2) + 1)
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert kept[0].untyped_storage().nbytes() == 8
    with pytest.raises(NotImplementedError, match="storage"):
        kept[1].untyped_storage()


@canary
@traced
def test_is_tracing():
    assert seen_inside(compat.is_tracing) == {"trace"}


@canary
@traced
def test_is_rewritten():
    assert seen_inside(compat.is_rewritten) == {"grad", "vmap", "jvp", "dual", "trace"}


@canary
def test_current_backward_pass():
    """-1 outside; inside the same number for one pass, and another one for a pass within it."""
    seen = []

    def look(_):
        seen.append(compat.current_backward_pass())
        if len(seen) == 1:
            inner = torch.ones(1, requires_grad=True)
            inner.register_hook(look)
            with torch.enable_grad():
                inner.sum().backward()

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    y.register_hook(lambda _: seen.append(compat.current_backward_pass()))
    assert compat.current_backward_pass() == -1
    y.sum().backward()
    assert compat.current_backward_pass() == -1
    outer, inner, again = seen
    assert outer == again
    assert -1 not in seen
    assert inner != outer


@canary
def test_assumed_constant():
    """The mark is the one that torch sets, whose own function would import the compiler."""

    def ours():
        return True

    def theirs():
        return True

    assert compat.assumed_constant(ours) is ours
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


@canary
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older compilers refuse some of this; see speed.md")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_repeats_in_backward():
    """Nodes that torch.compile may run again in backward are told by what it notes about them."""
    assert not compat.repeats_in_backward()
    layer = streamnorm.StreamingNorm(3)
    x = torch.randn(4, 3, requires_grad=True)
    whole = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), backend="aot_eager")
    with pytest.raises(Exception, match="compile inside the checkpoint"):
        whole(x)
    torch.compiler.reset()


# Activation checkpointing


@canary
def test_top_hooks():
    """The innermost pair of hooks; asked so, also where hooks are forbidden."""
    if compat.top_hooks is None:
        pytest.skip("since torch 2.5")
    assert compat.top_hooks(True) is None

    def pack(x):
        return x

    def unpack(x):
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert compat.top_hooks(True) == (pack, unpack)
    assert compat.top_hooks(True) is None


@canary
def test_packing_hooks():
    """All of them, innermost first, and in force as before."""
    if compat.top_hooks is None:
        pytest.skip("since torch 2.5")
    hooks = [lambda x, _=i: x for i in range(3)]
    with (
        torch.autograd.graph.saved_tensors_hooks(hooks[0], hooks[2]),
        torch.autograd.graph.saved_tensors_hooks(hooks[1], hooks[2]),
    ):
        assert compat.packing_hooks() == [hooks[1], hooks[0]]
        assert compat.packing_hooks() == [hooks[1], hooks[0]]
    assert compat.packing_hooks() == []


@canary
def test_checkpoint_of():
    """The hooks of one segment lead to one thing, in its first run and in its repetition; other hooks to nothing."""
    if compat.top_hooks is None:
        pytest.skip("since torch 2.5")
    found = []

    def segment(x):
        (pack,) = compat.packing_hooks()
        found.append(compat.checkpoint_of(pack))
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        checkpoint(segment, x, use_reentrant=False).sum().backward()
    frames, again = zip(*found, strict=True)
    assert again == (False, True) * 2
    assert frames[0] is frames[1] is not None
    assert frames[2] is frames[3] is not frames[0]
    assert compat.checkpoint_of(lambda x: x) == (None, False)


@canary
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of older versions, about themselves
def test_reentrant_segments():
    """What tells them apart is one thing per segment; the stack says which one runs, and whether again."""
    found = []

    def segment(x):
        found.append(compat.reentrant_segments())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        checkpoint(segment, x, use_reentrant=True).sum().backward()
    assert compat.reentrant_segments() == ([], None)
    (first,), none = found[0]
    assert none is None
    assert found[1] == ([], first)
    assert found[2][0] == [found[3][1]] != [first]

    def outer(x):
        return checkpoint(segment, x, use_reentrant=True)

    found.clear()
    checkpoint(outer, x, use_reentrant=True)
    assert len(found[0][0]) == 2


# Modules and optimizers

REGISTER = {
    "register_forward_hook": {},
    "register_forward_pre_hook": {},
    "register_full_backward_hook": {},
    "register_full_backward_pre_hook": {},
    "register_state_dict_post_hook": {},
    "register_state_dict_pre_hook": {},
    "register_load_state_dict_pre_hook": {},
    "register_load_state_dict_post_hook": {},
}


@canary
@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_EveryOperation():
    """Also those of scripted functions and of views; not what reads memory by itself."""
    seen = []
    x = torch.randn(4, 4)
    scripted = torch.jit.trace(lambda x: x.sin(), x)
    with torch.no_grad(), compat.EveryOperation(lambda operation, arguments: seen.append((str(operation), arguments))):
        scripted(x)
        x.t()
        torch.add(x, other=x)
        x.tolist()
    assert [name.split(".")[1] for name, _ in seen] == ["sin", "t", "add"]
    assert all(arguments[0] is x for _, arguments in seen)
    assert seen[2][1][1] is x


@canary
def test_reads_value():
    found = []
    x = torch.randn(4)
    with compat.EveryOperation(lambda operation, arguments: found.append(compat.reads_value(operation))):
        for read in (lambda: bool(x.sum() > 0), lambda: x[0].item(), lambda: torch.equal(x, x)):
            found.clear()
            read()
            assert found[-1]
            assert not any(found[:-1])


@canary
def test_LAYER_METHODS():
    """They are what a call goes through: each one can change it."""
    called = []

    def overridden(base, name):
        def method(self, *args, **kwargs):
            called.append(name)
            return getattr(base, name)(self, *args, **kwargs)

        return type("Own", (base,), {name: method})

    for name in compat.LAYER_METHODS:
        base = nn.ConvTranspose1d if name == "_output_padding" else nn.Conv1d
        called.clear()
        overridden(base, name)(2, 2, 1)(torch.randn(1, 2, 3))
        assert called, name


@canary
def test_HOOKS():
    """Every dictionary of hooks that a module has, in whatever way hooks are registered."""
    module = nn.Module()
    kept = {name for name, value in vars(module).items() if "hook" in name and isinstance(value, dict)}
    assert kept == set(compat.HOOKS)
    for method, options in REGISTER.items():
        if not hasattr(module, method):  # in older versions some have a private name
            continue
        before = {name: len(getattr(module, name)) for name in kept}
        getattr(module, method)(lambda *_: None, **options)
        assert any(len(getattr(module, name)) > count for name, count in before.items()), method


@canary
def test_move_hooks():
    """They are called as the new module's, and the handles that were given out go on removing them."""
    old, new, heard = nn.Linear(2, 2), nn.Linear(2, 2), []
    old.register_forward_hook(lambda module, _, __: heard.append(("forward", module)))
    old.register_full_backward_hook(lambda module, _, __: heard.append(("backward", module)))
    old._register_load_state_dict_pre_hook(lambda module, *_: heard.append(("load", module)), with_module=True)
    handle = old.register_forward_pre_hook(lambda module, _: heard.append(("before", module)))
    new.register_forward_pre_hook(lambda module, _: heard.append(("own", module)))
    compat.move_hooks(old, new)
    new(torch.ones(1, 2, requires_grad=True)).sum().backward()
    new.load_state_dict(new.state_dict())
    assert {name for name, _ in heard} == {"own", "before", "forward", "backward", "load"}
    assert all(module is new for _, module in heard)
    handle.remove()
    heard.clear()
    new(torch.ones(1, 2))
    assert [name for name, _ in heard] == ["own", "forward"]


class Nested(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)

    def method(self, x):
        return self.inner(x)


class Asks(nn.Module):
    def forward(self, x):
        self.found = list(compat.calling_modules(self))
        return x


@canary
def test_calling_modules():
    layer = Asks()
    inner = nn.Sequential(layer)
    outer = Nested(inner)
    outer(torch.ones(1))
    assert layer.found == [layer, inner, inner, outer]  # the call of `inner`, and before it the method that it is in
    Nested(layer).method(torch.ones(1))
    assert [type(module) for module in layer.found] == [Asks, Nested]
    layer(torch.ones(1))
    assert layer.found == [layer]


@canary
def test_has_hooks():
    """Whatever a call of a module may do beyond `forward` of its class."""
    assert not compat.has_hooks(nn.Linear(1, 1))
    around_call = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
    for kind in around_call:
        module = nn.Linear(1, 1)
        handle = getattr(module, f"register_{kind}")(lambda *_: None)
        assert compat.has_hooks(module), kind
        handle.remove()
        assert not compat.has_hooks(module), kind
    everywhere = "forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"
    for kind in everywhere:
        handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
        try:
            assert compat.has_hooks(nn.Linear(1, 1)), kind
        finally:
            handle.remove()
    module = nn.Linear(1, 1)
    module.forward = lambda x: x
    assert compat.has_hooks(module)


@canary
def test_leave_encoder_fast_path():
    """In evaluation the encoders of torch leave their norms out, unless they are told so."""
    called = []

    class Noted(nn.LayerNorm):
        def forward(self, x):
            called.append(self)
            return super().forward(x)

    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0)
    layer.norm1 = Noted(8)
    encoder = nn.TransformerEncoder(layer, 1).eval()
    (inner,) = encoder.layers
    x, mask = torch.randn(2, 3, 8), torch.tensor([[False, False, True], [False, False, False]])
    with torch.no_grad():
        inner(x)
        assert called == [], "torch has no fast path any more"
        compat.leave_encoder_fast_path(inner)
        inner(x)
        assert len(called) == 1
        compat.leave_encoder_fast_path(encoder)
        y = encoder(x, src_key_padding_mask=mask)
    assert len(called) == 2
    assert y.shape == x.shape  # nested tensors would have cut or zeroed what is masked
    assert y[0, 2].any()


@canary
def test_stacklevel_outside(tmp_path):
    """Of a warning that is to name the first line outside of some folders."""
    inside = tmp_path / "inside.py"
    inside.write_text("def call(level, *folders):\n    return inner(level, *folders)\n", encoding="utf-8")
    inside.write_text(
        inside.read_text(encoding="utf-8") + "def inner(level, *folders):\n    return level(*folders)\n",
        encoding="utf-8",
    )
    space = {}
    exec(compile(inside.read_text(encoding="utf-8"), str(inside), "exec"), space)
    assert compat.stacklevel_outside(str(tmp_path)) == 1
    with pytest.warns(UserWarning, match="here") as found:
        sys.modules["warnings"].warn("here", stacklevel=1)
    here = found[0].filename
    levels = []

    def warn(*folders):
        levels.append(compat.stacklevel_outside(*folders))
        sys.modules["warnings"].warn("there", stacklevel=levels[-1])

    with pytest.warns(UserWarning, match="there") as found:
        space["call"](warn, str(tmp_path), here)
    assert found[0].filename not in (here, str(inside))
    assert levels[0] > 3


@canary
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it is imported
def test_within_sharded_step():
    """Told by the file of torch's optimizer that it runs in."""
    assert not compat.within_sharded_step()
    from torch.distributed.optim import zero_redundancy_optimizer as sharding

    asked = compile("def step(question):\n    return question()\n", sharding.__file__, "exec")
    space = {}
    exec(asked, space)
    assert space["step"](compat.within_sharded_step)
    assert not compat.within_sharded_step()
    assert "step" in vars(sharding.ZeroRedundancyOptimizer)


@canary
def test_torch_norm_base():
    """What torch's batch and instance norms have in common, and other norms have not."""
    ours = {
        name for name, kind in vars(nn).items() if isinstance(kind, type) and issubclass(kind, compat.torch_norm_base)
    }
    batch = {f"{lazy}{kind}Norm{d}d" for lazy in ("", "Lazy") for kind in ("Batch", "Instance") for d in (1, 2, 3)}
    assert ours == {*batch, "SyncBatchNorm"}


@canary
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it imports the compiler
def test_uncompiled():
    model = nn.Linear(1, 1)
    assert compat.uncompiled(model) is model
    assert compat.uncompiled(torch.compile(model)) is model


# Nothing else

# By which modules are made and saved: torch documents them for those who write modules, or every version has them.
OF_MODULES = {
    *("_parameters", "_modules", "_buffers", "_version"),
    *("_apply", "_load_from_state_dict", "_save_to_state_dict", "_non_persistent_buffers_set"),
}
OF_PYTHON = {"_replace", "_exit", "_asdict", "_fields"}
FRAMES = {"f_locals", "f_back", "f_code", "f_globals", "_getframe", "currentframe"}


def own_names(trees):
    """Private names that we give ourselves: to functions, classes, attributes, files."""
    names = {path.stem for path in SOURCE.rglob("*.py")} | {"_native"}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                names.add(node.slice.value)  # self.__dict__["_name"]
    return names


def is_self(node):
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def foreign_names(tree, own):
    """Private names of others that a file uses: as attributes, in imports, or as strings handed to getattr and such."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if (
                node.attr in FRAMES
                or re.match(r"torch(\.\w+)*\._[a-zA-Z]", chain)
                or re.search(r"(?<!self)\._version\b", chain)
            ):
                found.add(chain)
            elif node.attr.startswith("_") and not node.attr.startswith("__"):
                found |= {node.attr} - own - OF_MODULES - OF_PYTHON
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            found |= {name for name in parts if re.match(r"_[a-zA-Z]", name) or name in FRAMES}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if "._" in alias.name}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "attrgetter"):
            named = {each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            found |= {name for name in named if re.match(r"_[a-zA-Z]", name)} - own - OF_MODULES
    return found


def test_no_other_file_leans_on_a_private_symbol():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py") if path != COMPAT}
    own = own_names(trees.values()) - set(compat.HOOKS)
    used = {path.relative_to(SOURCE).as_posix(): foreign_names(tree, own) for path, tree in trees.items()}
    assert not {name: found for name, found in used.items() if found}


@pytest.mark.parametrize(
    "line",
    [
        "torch._C._is_tracing()",
        "torch.fx._symbolic_trace()",
        "from torch._dynamo import reset",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch._inductor",
        "frame.f_locals",
        "sys._getframe(1)",
        "weight._version",
        "module._forward_hooks.clear()",
        "getattr(model, '_orig_mod', model)",
    ],
)
def test_such_a_line_is_found(line):
    assert foreign_names(ast.parse(line), set())


def test_the_file_is_used():
    """Every symbol by another file, or by another one of this file."""
    others = "\n".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py") if path != COMPAT)
    for name in SYMBOLS:
        here = len(re.findall(rf"\b{name}\b", COMPAT.read_text(encoding="utf-8")))
        assert here > 1 or re.search(rf"\b{name}\b", others), name
