"""The house: a few arrows between folders, one list of settings and of state fields, and the public names."""

import ast
import re
import subprocess
import sys
from dataclasses import fields
from graphlib import TopologicalSorter
from inspect import Parameter, signature
from pathlib import Path

import pytest
from torch import nn

import streamnorm
from streamnorm import backends
from streamnorm.core.config import SETTINGS, STATISTIC, Config
from streamnorm.core.reference import resolve
from streamnorm.core.state import FIELDS, PARTS

SOURCE = Path(streamnorm.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = sorted(path.parent for path in FILES if path.name == "__init__.py" and path.parent != SOURCE)

# What a folder, or a file beside the folders, may import of ours; `__init__` collects public names from everywhere.
LAYERS = {"core", "backends", "engine", "nn"}
ARROWS = {
    "core": set(),
    "backends": {"core"},
    "engine": {"core", "backends"},
    "nn": {"core", "backends", "engine"},
    "functional": LAYERS,
    "convert": LAYERS,
    "training": LAYERS,
    "lab": {*LAYERS, "functional", "convert", "training", ""},  # "": public names, of the package itself
    "__main__": {"lab"},
}
# From the ground up: a file imports only from lines above its own.
LAB = [
    {"__init__", "errors", "runs", "shapes", "starting"},
    {"variations", "store", "figures", "scales", "peers", "health", "grid", "devices", "race"},
    {"data", "results", "models", "compare"},
    {"tasks", "measures", "online"},
    {"train", "claims", "goals", "compared"},
    {"jobs", "progress", "view", "check"},
    {"experiment", "remote"},
    {"bench", "comparing", "cluster"},
    {"commands"},
    {"cli"},
]
DATA = [{"download", "batches"}, {"tar", "index"}, {"cifar"}, {"__init__"}]
VIEW = [
    {"__init__", "lines", "looks", "page", "cells", "contest", "endings"},
    {"matrix", "findings"},
    {"plot"},
    {"panels", "varied", "versus"},
    {"report"},
]
CHECK = [{"__init__"}, {"agreement", "system", "times"}, {"sequences"}, {"cases"}, {"run"}]
FLOORS = {"lab": LAB, "lab.check": CHECK, "lab.data": DATA, "lab.view": VIEW}
LATE = {"drawing.py", "monitoring.py"}  # may import what torch does not need, inside functions and for types
KERNELS = SOURCE / "backends" / "triton"  # some files are imported by the first call that they serve


def named(path):
    """The dotted name of a file or folder within the package: "nn.recurrent.step", "core"."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {named(path): path for path in FILES}


def part(name):
    """The folder, or the file at the top of the package."""
    return name.split(".")[0]


def imports(path):
    """What a file imports of ours, anywhere in it, by dotted names; "" is the package itself."""
    package = path.relative_to(SOURCE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "streamnorm" for alias in node.names), (
                f"{path}: import relatively"
            )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert part(node.module) != "streamnorm", f"{path}: import relatively"
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module.split(".") if node.module else ())]
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                # `convert` is a public function, and a folder.
                yield inner if inner in MODULES and inner != "convert" else ".".join(base)


def strings(tree):
    """The strings of a file that are neither docstrings nor the device of a tensor."""
    nodes = list(ast.walk(tree))
    lone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    devices = {id(node.value) for node in nodes if isinstance(node, ast.keyword) and node.arg == "device"}
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    devices |= {id(node.value) for node in assigned if ast.unparse(node.targets[0]) == "DEFAULT_DEVICE"}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in lone | devices:
            yield node.value


# The arrows


@pytest.mark.parametrize("name", ARROWS)
def test_arrows_between_folders(name):
    for module, path in MODULES.items():
        if part(module) == name:
            for used in imports(path):
                assert part(used) in ARROWS[name] | {name}, (
                    f"{module} imports {used or 'the package'}, which is above it or beside it"
                )


def test_every_folder_has_its_arrows():
    """A new folder or file at the top needs a line above, and the top has at most ten."""
    top = {path.stem for path in SOURCE.iterdir() if path.name not in ("__pycache__", "py.typed")}
    assert top == {*ARROWS, "__init__"}
    assert len(top) <= 10


@pytest.mark.parametrize("folder", sorted({"core", "engine", "nn", "training", "convert"}))
def test_files_of_a_folder_import_each_other_one_way(folder):
    """No circles, also not by imports inside of functions."""
    inside = {module: path for module, path in MODULES.items() if part(module) == folder and module != folder}
    TopologicalSorter({module: set(imports(path)) & set(inside) for module, path in inside.items()}).prepare()


@pytest.mark.parametrize("folder", FLOORS)
def test_the_lab_keeps_its_order(folder):
    home = MODULES[folder].parent
    inside = {path.stem for path in home.glob("*.py")} | {path.parent.name for path in home.glob("*/__init__.py")}
    assert inside == set().union(*FLOORS[folder]), "a new file needs a floor"

    def floor_of(name):
        at = name.removeprefix(folder).lstrip(".").split(".")[0] or "__init__"
        return at, next(index for index, floor in enumerate(FLOORS[folder]) if at in floor)

    for module, path in MODULES.items():
        if not f"{module}.".startswith(f"{folder}."):
            continue
        (name, floor) = floor_of(module)
        for used in imports(path):
            if f"{used}.".startswith(f"{folder}."):
                other, below = floor_of(used)
                assert other == name or below < floor, f"{module} imports {used}, from its own floor or above"


# Backends


def test_nothing_outside_names_a_backend():
    """By an import, an attribute or a string; `_MOVED` alone, for a module that was public."""
    particular = {name for name in MODULES if re.fullmatch(r"backends\.\w+(\.\w+)*", name)} - {"backends.memory"}
    files = {name.split(".")[1] for name in particular}
    names = set(backends.registered())
    assert names
    assert {"plain"} <= names <= files
    for module, path in MODULES.items():
        if part(module) == "backends":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = set(imports(path)) & particular
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "backends":
                used |= {node.attr} & files
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MOVED" and module == "":
                node.value = ast.Constant(None)
        for text in strings(tree):
            used |= {text} & names | {word for word in re.findall(r"[\w.]+", text) if word in particular}
        assert not used, f"{module} names {used}"


# Folders and files


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: named(folder))
def test_every_folder_says_what_lives_there_and_what_does_not(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    assert text
    first, _, rest = text.partition("\n")
    assert first.endswith((".", ",")) or rest
    assert re.search(r"\b(not|nor|no|never|nothing)\b", text, re.IGNORECASE), "what does not live here?"


def test_files_are_small():
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert max(lines.values()) <= 350, lines
    assert sum(n > 300 for n in lines.values()) <= len(lines) / 4, lines


# What is needed


def test_the_library_does_not_notice_the_lab():
    """Imported, with a layer called, nothing of the lab is there; nor is anything that the lab needs."""
    code = "import sys, torch, streamnorm; streamnorm.StreamingNorm(2)(torch.randn(3, 2)); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "streamnorm.nn.streaming" in loaded
    assert not [name for name in loaded if name.startswith(("streamnorm.lab", "matplotlib", "sklearn"))]
    kernels = [path for path in KERNELS.glob("*.py") if "import triton\n" in path.read_text(encoding="utf-8")]
    assert not {f"streamnorm.{named(path)}" for path in kernels} & set(loaded)


def test_the_library_needs_torch_alone():
    """The lab and drawings too at the head of their files: what else they need is imported late."""
    standard = set(sys.stdlib_module_names) | {"torch"}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        late = SOURCE / "lab" in path.parents or path.name in LATE
        for node in tree.body if late else ast.walk(tree):
            if isinstance(node, ast.Import):
                used = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used = {node.module.split(".")[0]}
            else:
                continue
            allowed = standard | {"triton"} if path.parent == KERNELS else standard
            assert used <= allowed, f"{path.name} imports {used - allowed}"


# On every system

ROOT = Path(__file__).parent.parent
SCRIPTS = [
    ROOT / "setup.py",
    *(path for kind in ("tests", "benchmarks", "examples", "tools") for path in (ROOT / kind).rglob("*.py")),
]
POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
POSIX_NAMES = {"os.fork", "os.getuid", "os.geteuid", "os.killpg", "os.mkfifo", "os.setsid", "os.uname", "os.wait"}


def opens_text(call):
    """Whether a call opens a file, of which what is read or written are strings."""
    name = ast.unparse(call.func)
    if name.endswith((".read_text", ".write_text")):
        return True
    if name != "open" and not (isinstance(call.func, ast.Attribute) and call.func.attr in ("open", "fdopen")):
        return False
    modes = [node.value for node in call.args if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    modes += [node.value.value for node in call.keywords if node.arg == "mode"]
    return name not in ("os.open", "tarfile.open", "gzip.open") and not any("b" in mode for mode in modes[:2])


def test_text_is_read_and_written_in_utf_8():
    """Whatever the language of the system is: what is opened without an encoding differs between systems."""
    lacking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (*FILES, *SCRIPTS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and opens_text(node) and "encoding" not in {each.arg for each in node.keywords}
    ]
    assert not lacking, 'say encoding="utf-8"'


def test_nothing_is_imported_that_windows_does_not_have():
    """But inside of functions, which have to say what else they do; some calls are not there either."""
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        heads = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name for node in heads for alias in node.names} | {getattr(node, "module", "") for node in heads}
        assert not names & POSIX_MODULES, path
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not used & POSIX_NAMES, path
        assert not {name for name in used if re.fullmatch(r"signal\.SIG(KILL|ALRM|HUP|CHLD|PIPE|USR\d)", name)}, path


# Public names


def test_public_names():
    """The folders, Python and type checkers are told the same of what they are and where they come from."""
    homes = {home: set(sys.modules[f"streamnorm.{home}"].__all__) for home in streamnorm._HOMES}
    told = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            told.setdefault((node.module or "").split(".")[0], set()).update(alias.name for alias in node.names)
    assert told == homes | {"": {"backends", "functional"}}
    names = [name for home in told.values() for name in home]
    assert sorted([*names, "__version__"]) == sorted(streamnorm.__all__)
    for home in homes:
        for name in homes[home]:
            assert getattr(streamnorm, name) is getattr(sys.modules[f"streamnorm.{home}"], name)


def typed_calls():
    """The classes that tell type checkers how they are called: that of `nn.Module` takes anything, and returns it."""
    for path in FILES:
        kinds = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
        for kind in kinds:
            told = [
                each for each in kind.body if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
            ]
            if "__call__" in [getattr(part, "name", "") for each in told for part in each.body]:
                yield f"streamnorm.{named(path)}", kind.name


def test_calls_of_public_layers_have_types():
    public = [getattr(streamnorm, name) for name in streamnorm.__all__]
    layers = [each for each in public if isinstance(each, type) and issubclass(each, nn.Module)]
    assert len(layers) >= 20
    told = set(typed_calls())
    for layer in layers:
        assert any((base.__module__, base.__qualname__) in told for base in layer.__mro__), layer


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: named(folder))
def test_a_list_of_public_names_names_what_is_there(folder):
    module = __import__(f"streamnorm.{named(folder)}", fromlist=["*"])
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    assert not [name for name in listed if not hasattr(module, name)]


def test_old_names_lead_to_files_that_exist():
    assert set(streamnorm._MOVED.values()) <= set(MODULES)
    assert not set(streamnorm._MOVED) & set(ARROWS)


# One list of settings, one list of the fields of the state

NO_SETTINGS = ["num_features", "affine", "channel_dim", "process_group", "device", "dtype"]


def test_the_layer_takes_the_settings_of_the_list():
    """With the defaults of the list; what else it takes is not the rule's business."""
    taken = dict(signature(streamnorm.StreamingNorm.__init__).parameters)
    del taken["self"]
    assert set(taken) == {*SETTINGS, *NO_SETTINGS}
    for field in fields(Config):
        given = taken[field.name]
        assert given.kind is Parameter.KEYWORD_ONLY
        assert (resolve(given.default) if field.name == "ref" else given.default) == field.default, field.name


@pytest.mark.parametrize("norm", ["SampleNorm", "GeneralBatchNorm", "TimeSpecificNorm"])
def test_other_norms_take_settings_of_their_statistic(norm):
    taken = set(signature(getattr(streamnorm, norm).__init__).parameters)
    assert taken & set(SETTINGS) <= set(STATISTIC)
    assert {"ref", "p", "eps"} <= taken


def test_settings_are_attributes_of_the_layer_and_stand_in_its_config():
    layer = streamnorm.StreamingNorm(2)
    for name in SETTINGS:
        assert getattr(layer, name) == getattr(layer.config, name)
        assert name not in vars(layer)


def enumerated(node):
    """The names that a display, a call or a string of words lists; `replace` says what becomes of some of them."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = node.elts
    elif isinstance(node, ast.Dict):
        items = node.keys
    elif isinstance(node, ast.Call) and ast.unparse(node.func) != "replace":
        items = [*node.args, *(ast.Name(each.arg) for each in node.keywords if each.arg)]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        return set(re.findall(r"\w+", node.value))
    else:
        return set()
    names = {getattr(item, "id", None) or getattr(item, "attr", None) for item in items}
    return names | {item.value for item in items if isinstance(item, ast.Constant)}


def listing(names, many):
    """Files that list so many of `names` at one place outside of docstrings."""
    found = set()
    for module, path in MODULES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        if any(len(enumerated(node) & set(names)) >= many for node in ast.walk(tree) if id(node) not in lone):
            found.add(module)
    return found


def test_the_fields_of_the_state_are_listed_once():
    """As annotations of their classes: nowhere are four of them at one place again."""
    assert listing(FIELDS, 4) == set()
    assert listing(PARTS, 4) == set()


def test_the_settings_are_listed_once():
    """Five are at one place only where the list is, where the layer takes them, and where kernels are told of them."""
    places = {"core.config", "nn.streaming", "backends.cpu.binding", "backends.triton.launch"}
    assert listing(SETTINGS, 5) == places & set(MODULES)
