"""What tests/test_devices.py looks at, made in a process that has a second device: see other_device.py."""

import io
import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import other_device
import torch
from other_device import NAME

from streamnorm import backends
from streamnorm.lab import jobs
from streamnorm.lab.check import times
from streamnorm.lab.cli import main
from streamnorm.lab.compare import NORMS
from streamnorm.lab.data import load_images, load_text
from streamnorm.lab.devices import find, on_cpu, present
from streamnorm.lab.figures import STREAMING_RECURRENT, TIME_SPECIFIC
from streamnorm.lab.models import build
from streamnorm.lab.runs import Norm, Run
from streamnorm.lab.train import Training, train

SMALL = Run(
    "A", STREAMING_RECURRENT, samples=4, batches=2, width=8, rates=((0.1, 1),), data="digits", train_size=32,
    test_size=8, evaluate=2,
)  # fmt: skip
TEXT = replace(SMALL, net="gru", chunk=5, optimizer="manhattan", momentum=0.0, rates=((0.01, 1),), train_size=60)
RESNET = replace(SMALL, net="resnet", width=4, side=8, train_size=16)
NETS = {
    "A": SMALL,
    "C": replace(SMALL, net="C", unroll=(2, 1), width=4, train_size=16),
    "C, time-specific": replace(SMALL, net="C", unroll=(2, 1), width=4, train_size=16, norm=TIME_SPECIFIC),
    "D": replace(SMALL, net="D", unroll=(2, 0), width=4, train_size=16),
    "rows": replace(SMALL, net="rows", chunk=8),
    "held out, standardized": replace(SMALL, held_out=20, standardized=True),
    "gru": TEXT,
    "rnn, time-specific": replace(TEXT, net="rnn", norm=TIME_SPECIFIC),
} | {
    f"resnet, {name}": replace(RESNET, norm=norm)
    for name, norm in NORMS.items()
    if "WS" not in name
}  # fmt: skip


def on(device, run):
    return replace(run, device=device)


def data_of(run, text):
    return text if run.is_text else load_images("digits")


def trainings(folder, text):
    """Of all nets and norms: the curves on both devices, and what was moved after the first update."""
    found = {}
    for name, run in NETS.items():
        norm = run.norm
        if norm.kind in ("renorm", "mabn"):
            run = replace(run, norm=replace(norm, schedule=(1, 2, 3)))
        data = data_of(run, text)
        curves = [train(on(device, run), data, folder)["curves"] for device in ("cpu", NAME)]
        training = Training(on(NAME, run), data, folder)
        training.update()
        other_device.moved.clear()
        training.update()
        tensors = [*training.model.parameters(), *training.model.state_dict().values()]
        places = Counter(str(tensor.device.type) for tensor in tensors)
        found[name] = {"curves": curves, "moved": list(other_device.moved), "places": places}
    return found


def resumed(folder, text):
    """Curves of a run that was stopped half way, saved, and gone on with on another device, or on the same."""
    found = {}
    for name in ("A", "gru"):
        run, data = NETS[name], data_of(NETS[name], text)
        for before in ("cpu", NAME):
            for after in ("cpu", NAME):
                (folder / "moves").mkdir(exist_ok=True)
                first, second = (Training(on(each, run), data, folder / "moves") for each in (before, after))
                while first.done < first.total // 2:
                    advance(first)
                first.save()
                second.resume()
                while second.done < second.total:
                    advance(second)
                (folder / "moves" / "checkpoint.pt").unlink()
                found[f"{name}: {before} to {after}"] = columns(second.rows)
        (folder / "whole").mkdir(exist_ok=True)
        for device in ("cpu", NAME):
            whole = Training(on(device, run), data, folder / "whole")
            while whole.done < whole.total:
                advance(whole)
            found[f"{name}: {device}"] = columns(whole.rows)
    return found


def advance(training):
    training.update()
    if training.due():
        training.note()


def columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def state_dicts():
    """What is saved is on the CPU, with what hangs on it; what it was made of is where it was."""
    model = build(on("cpu", SMALL)).to(NAME)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, 32, 32).to(NAME)).sum().backward()
    optimizer.step()
    state, steps = model.state_dict(), optimizer.state_dict()
    saved = on_cpu({"model": state, "optimizer": steps, "rest": [1, (2.0, "three"), None]})
    torch.save(saved, io.BytesIO())
    return {
        "model": sorted({value.device.type for value in saved["model"].values()}),
        "metadata": saved["model"]._metadata == state._metadata,
        "moments": sorted({v.device.type for part in saved["optimizer"]["state"].values() for v in part.values()}),
        "left": sorted({value.device.type for value in state.values()}),
        "rest": saved["rest"] == [1, (2.0, "three"), None],
        "groups": saved["optimizer"]["param_groups"] == steps["param_groups"],
    }


def commands(folder):
    """The command line on the device, and what it writes."""
    common = ["--data", "digits", "--out", str(folder / "out")]
    assert main(["run", "dau", "--preset", "smoke", *common, "--device", NAME]) == 0
    small = ["--samples", "2", "--batches", "1", "--rates", "1", "--size", "32", "--seeds", "1", *common]
    for rest in ([], ["--device", NAME], ["--device", NAME, "--no-train"]):
        assert main(["bench-online", "--net", "fully-connected", *small, *rest]) == 0
    few = ["--rounds", "1", "--compile-seconds", "0"]
    return {
        "check": main(["check", *few, "--device", NAME, "--out", str(folder / "check.json")]),
        "files": sorted(path.name for path in (folder / "out").glob("*.json")),
        "settings": sorted(
            json.loads(path.read_text(encoding="utf-8"))["settings"].get("device", "")
            for path in (folder / "out").glob("runs/*/result.json")
        ),
        "waits": other_device.Module.waits,
    }


def addresses():
    plain = Run("A", Norm("batch"))
    return {name: replace(plain, device=name).address("data") for name in ("cpu", NAME, f"{NAME}:0", f"{NAME}:1")}


def run_all(folder, source):
    jobs.MEASURED_SECONDS = times.SETTLING_SECONDS = times.ROUND_SECONDS = 1e-3  # what it takes matters to nobody here
    text = load_text(source)
    with other_device.there(), backends.use(backends.LAW.name):
        found = {"present": present(), "found": str(find(NAME)), "addresses": addresses(), "saved": state_dicts()}
        found |= {"trainings": trainings(folder / "runs", text), "resumed": resumed(folder, text)}
        found |= {"commands": commands(folder)}
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), sys.argv[2])
