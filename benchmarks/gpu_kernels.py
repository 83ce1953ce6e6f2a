"""Every GPU kernel compiled ahead of time for three kinds of GPUs: registers, and what does not fit into them.

No GPU is needed, and none is used: nothing here is a time. It needs triton, whose package brings the assembler along.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from streamnorm.backends import H2, Sequence
from streamnorm.backends.triton import launch
from streamnorm.backends.triton.sequence import Looked, Sequences
from streamnorm.backends.triton.tiling import tiling_of
from streamnorm.core.config import Config
from streamnorm.core.state import new_state
from streamnorm.lab.store import write_text

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Inputs as networks have them, and the settings by which kernels differ.
INPUTS = {"planes": ((32, 64, 56, 56), False), "channels last": ((32, 64, 56, 56), True), "rows": ((4096, 768), False)}
SETTINGS: dict[str, dict[str, Any]] = {
    "p=2": {},
    "p=2 mean": {"center": "mean"},
    "p=1": {"p": 1},
    "p=1 mean": {"p": 1, "center": "mean"},
}
LAYERS = {"RNN": (1, False), "GRU": (3, False), "LSTM": (4, False), "LSTM-cell": (4, True)}  # gates, norm on the cell
SAMPLES, HIDDEN = 64, 512
FEW = ("p=2, planes", "p=1 mean, channels last", "p=1 mean, RNN")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
TYPES |= {torch.int64: "i64", torch.bool: "i1"}
Launch = tuple[Any, dict[str, Any], dict[str, Any]]  # a kernel, what it is given, and its constants and options


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """What is launched, noted down and not started: tensors are without memory."""
    found: list[Launch] = []
    start = launch.start
    launch.start = lambda kernel, grid, given, options: found.append((kernel, given, options))
    try:
        yield found
    finally:
        launch.start = start


def of_layer(config: Config, x: torch.Tensor, on_vectors: bool) -> list[Launch]:
    """Of a training call."""
    channels, tiling = x.shape[1], tiling_of(x)
    assert tiling is not None
    state, gain = new_state((channels,), x.new_empty(0, dtype=torch.float32)), x.new_empty(channels)
    with noted() as found:
        if on_vectors:
            kept = launch.push_statistics(config, state, state.mean, state.sigma, tiling.elements, 8, True)
            launch.push_gradients(config, state.grads, kept, state.mean, state.sigma, None)
        else:
            kept = launch.stream(config, state, x, tiling, x.shape[0], True)
            launch.normalize(x, gain, gain, kept, tiling, x)
            vectors = launch.stream_back(config, state.grads, x, x, gain, kept, tiling, None)
            launch.pull_back(config, x, x, kept, vectors, tiling, x)
    return found


def of_sequence(config: Config, gates: int, cell_norm: bool) -> list[Launch]:
    """Of a timestep of a recurrent layer, forward and backward."""
    weight = torch.empty(gates * HIDDEN, HIDDEN, device="meta")
    products, hidden = weight.new_empty(SAMPLES, gates * HIDDEN), weight.new_empty(SAMPLES, HIDDEN)
    start = torch.stack([hidden, hidden]) if gates == 4 else hidden
    states = [new_state((HIDDEN,), weight) for _ in range(2 * gates + cell_norm)]
    looked, affine = [Looked(state, (), []) for state in states], [weight[0]] * 2 * len(states)
    call, runner = Sequence(gates, cell_norm, False, False, True, False, False, (SAMPLES,), config), Sequences()
    with noted() as found:
        output, final, saved = runner.forward(call, products, start, weight, affine, looked)
        runner.backward(call, output, final, saved, affine, looked, [H2(state.grads) for state in states], True)
    return found


def all_launches(dtype: torch.dtype) -> Iterator[tuple[str, str, list[Launch]]]:
    """With what they are of: the settings, and the input or the layer. Recurrent layers are in float32."""
    for layout, (shape, channels_last) in INPUTS.items():
        x = torch.empty(shape, dtype=dtype, device="meta")
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        for words, settings in SETTINGS.items():
            for on_vectors in (False, True):
                yield words, "vectors" if on_vectors else layout, of_layer(Config(**settings), x, on_vectors)
    for layer, kind_of_layer in LAYERS.items():
        for words, settings in reversed(SETTINGS.items()):
            yield words, layer, of_sequence(Config(**settings), *kind_of_layer)


def every_launch(dtype: torch.dtype) -> dict[str, Launch]:
    """One of each kind, by name: settings that a kernel is not told make no difference to it."""
    found: dict[str, Launch] = {}
    known = set()
    for words, place, launches in all_launches(dtype):
        for kernel, given, options in launches:
            kinds = {name: kind(value, parameter_of(kernel, name)) for name, value in given.items()}
            key = kernel.__name__, tuple(kinds.items()), tuple(options.items())
            if key in known:
                continue
            known.add(key)
            part = options.get("CELL", "")
            part = f" {part}" if part in ("gates", "state", "cell") else ""
            name = f"{kernel.__name__}{part}, {words}, {place}"
            second = kernel is launch.kernels().note_addresses and name in found  # of H2, after H1
            if given.get("sums_before") is not None or second:
                name = f"{kernel.__name__} again, {words}, {place}"
            found[name] = kernel, given, options
    return found


def parameter_of(kernel: Any, name: str) -> Any:
    return next(parameter for parameter in kernel.params if parameter.name == name)


def kind(value: Any, parameter: Any) -> tuple[Any, Any]:
    """Type of an argument, and what is known of it: as triton looks at the arguments of a launch."""
    if isinstance(value, tuple):
        return tuple(kind(each, parameter)[0] for each in value), False
    if value is None or (value == 1 if isinstance(value, int) and not parameter.do_not_specialize else False):
        return "constexpr", value
    if isinstance(value, int):
        return "i32", not parameter.do_not_specialize and value % 16 == 0
    return f"*{TYPES[value.dtype]}", True


def compiled(kernel: Any, given: dict[str, Any], options: dict[str, Any], target: GPUTarget) -> Any:
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[name] = "constexpr", options[name]
            continue
        signature[name], known = kind(given[name], parameter)
        if signature[name] == "constexpr":
            constants[name] = given[name]
        elif known:
            attributes[(index,)] = [["tt.divisibility", 16]]
    rest = {name: value for name, value in options.items() if name not in constants}
    if target.backend == "hip":
        rest.pop("maxnreg", None)  # as on a machine with such a GPU
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=rest)


def resources(found: Any) -> dict[str, int]:
    """Registers of a thread, what did not fit into them (0: nothing), and bytes of memory that a program shares.

    None of the kernels has an array of its own, so what a thread has on its stack are registers that were spilled.
    """
    if "amdgcn" in found.asm:
        counts = dict(re.findall(r"\.(\w+_count|private_segment_fixed_size):\s+(\d+)", found.asm["amdgcn"]))
        registers = int(counts["vgpr_count"])
        spilled = sum(int(n) for name, n in counts.items() if "spill" in name or "private" in name)
    else:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(found.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said))
        registers, spilled = int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"])
    return {"registers": registers, "spilled": spilled, "shared": found.metadata.shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--few", action="store_true", help="each kernel for a few settings, layouts and layers")
    arguments = parser.parse_args()
    rows = []
    print(f"{'kernel':40} {'target':7} {'registers':>9} {'spilled':>8} {'shared':>7}")
    for name, made in every_launch(torch.bfloat16).items():
        if arguments.few and not name.endswith(FEW):
            continue
        for target, gpu in TARGETS.items():
            row = resources(compiled(*made, gpu))
            rows.append({"kernel": name, "target": target} | row)
            print(f"{name:40} {target:7} {row['registers']:9} {row['spilled']:8} {row['shared']:7}")
    if arguments.out:
        found = {"triton": triton.__version__, "input": "bfloat16", "kernels": rows}
        write_text(arguments.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
