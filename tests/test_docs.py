"""The documents keep their word: examples run, links lead somewhere, the demo and the benchmark work."""

import importlib
import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections import Counter
from contextlib import nullcontext
from itertools import product
from math import hypot
from pathlib import Path

import digits
import pytest
import torch
from makefile import has_make, recipe, run_line

from streamnorm import StreamingNorm
from streamnorm.core.reference import CODES
from streamnorm.lab.compare import NETS, Entry, is_convolutional
from streamnorm.lab.compared import TEST, TRAINING, read_compared
from streamnorm.lab.models import NetC
from streamnorm.lab.online import read_online
from streamnorm.lab.results import read_folder
from streamnorm.lab.store import read_json
from streamnorm.lab.view import findings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(set(DOCS.rglob("*.md")) - set(DOCS.glob("results/*")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:.*should not be instantiated", "ignore:Dynamo detected")
# torch.export of torch 2.4, about itself:
@pytest.mark.filterwarnings("ignore:You are using .torch.load", "ignore:Attempted to insert a get_attr", "ignore:Node ")
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they may write files
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


def test_messages_are_those_that_people_meet():
    """Each that is quoted is raised, or warned of, by the example below it; "..." stands for any words."""
    page = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    quoted = re.findall(r"```text\n(.*?)\n```\n\n```python raises\n(.*?)```", page, re.DOTALL)
    assert len(quoted) == page.count("\n### ", 0, page.index("## Which forward passes")) == 10
    for message, example in quoted:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                exec(example, names)
            except Exception as refused:
                found = [f"{type(refused).__name__}: {refused}"]
            else:
                found = [f"{each.category.__name__}: {each.message}" for each in said]
        assert len(found) == 1
        assert re.fullmatch(".*".join(map(re.escape, message.split("..."))), found[0]), found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_named_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:src|tests|docs|examples|benchmarks|tools)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (ROOT / "src/streamnorm" / name).exists(), name


@pytest.mark.parametrize("source", [None, "https://example.org/streamnorm"])
def test_on_a_package_index_no_link_is_broken(source, tmp_path):
    """There are no files there: links are absolute, or words as long as the project has no address."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src/streamnorm/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    project = tmp_path / "pyproject.toml"
    settings = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    urls = "".join(
        f'{name} = "{url}"\n' for name, url in (settings.get("urls", {}) | {"Source": source}).items() if url
    )
    text = re.sub(r"\[project.urls\]\n(?:\S.*\n)*", "", project.read_text(encoding="utf-8"))
    project.write_text(
        text.replace("[tool.setuptools]", f"[project.urls]\n{urls}\n[tool.setuptools]", 1), encoding="utf-8"
    )
    (tmp_path / "made").mkdir()
    build = "from setuptools.build_meta import prepare_metadata_for_build_wheel as prepare; prepare('made')"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("made/*.dist-info/METADATA")
    shown = metadata.read_text(encoding="utf-8").partition("\n\n")[2]
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]*)\)", shown)
    assert "when not" in shown
    if source is None:
        assert links == []
        return
    assert len(links) > 20
    for picture, link in links:
        kind = "raw" if picture else "blob"
        path = link.removeprefix(f"{source}/{kind}/main/").partition("#")[0]
        assert (ROOT / path).is_file(), link


def test_the_map_of_the_paper_names_what_exists():
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("*.py"))
    named = re.findall(
        r"`((?!tests)[\w/]+\.py)`, `([\w.]+)(?<!\.py)`", (ROOT / "docs/design/paper.md").read_text(encoding="utf-8")
    )
    assert len(named) > 10
    for file, name in named:
        text = (ROOT / "src/streamnorm" / file).read_text(encoding="utf-8")
        assert re.search(rf"(def|class) {name.split('.')[-1]}\b", text), f"{name} is not in {file}"
    for test in re.findall(r"`(test_\w+)`", (ROOT / "docs/design/paper.md").read_text(encoding="utf-8")):
        assert f"def {test}(" in tests


def test_the_demo(tmp_path):
    out = tmp_path / "digits.png"
    options = ["--seeds", "2", "--rates", "0.02", "0.05", "--limit", "32", "--out", str(out)]
    (line,) = recipe("demo") if has_make else [f"{sys.executable} examples/digits.py"]
    done = run_line(line, *options)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "Expected more than 1 value per channel" in done.stdout
    assert done.stdout.count("is the last of the ladder") == 16  # of two rates each is at an end
    assert "68/68" in done.stderr  # the progress bar
    page = (ROOT / "docs/measured/demo.md").read_text(encoding="utf-8")
    printed, shown = (demo_rows(text) for text in (done.stdout, page))
    assert [row[0] for row in printed] == [row[0] for row in shown]
    for row in printed[1:] + shown[1:]:
        assert all(re.fullmatch(r"\d+\.\d ± \d+\.\d @ 0\.\d+|cannot run", cell) for cell in row[1:]), row
    for net, batch in product(digits.NORMS, digits.BATCHES):
        for text in (done.stdout, page):
            assert len(re.findall(rf"- {net}, {batch} per batch: (?:a tie with|ahead of|behind) \w+", text)) == 1


def demo_rows(text):
    """The table of the demo, header first, in what it prints or in a page that quotes it."""
    lines = [line for line in text.splitlines() if re.match(r"\| +\| 1 per batch|\| (fully-conn|convolu)", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_demo_chooses_by_validation_and_not_by_test():
    outcomes = {0.1: [[90.0, 99.0], [92.0, 99.0]], 0.05: [[94.0, 80.0], [90.0, 82.0]], 0.2: [[92.0, 0.0], [92.0, 0.0]]}
    assert digits.choose(outcomes) == (0.05, [94.0, 90.0], [80.0, 82.0])  # of two equals the lower
    assert digits.choose({0.1: ["refused"], 0.2: ["refused"]}) == "refused"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([1, 1.2, 0.8], "ahead of"),
        ([-1, -1.2, -0.8], "behind"),
        ([3, 3, 3, -0.1], "a tie with"),  # not every seed
        ([0.1, 0.1, 4], "a tie with"),  # not by two standard errors
        ([5], "no verdict"),
    ],
)
def test_the_verdicts_of_the_demo_are_computed(differences, verdict):
    ours = digits.Scores(0.1, [], [50 + d for d in differences])
    assert digits.compare(ours, digits.Scores(0.2, [], [50.0] * len(differences)), "other").startswith(verdict)


def test_the_demo_holds_out_what_it_says():
    (x, _), (validation, _), (test, _) = digits.load()
    assert [len(each) for each in (x, validation, test)] == [1200, 237, 360]


@pytest.mark.parametrize("name", digits.BY_SAMPLE)
def test_the_demo_trains_norms_of_single_samples_once_for_all_sizes(name):
    found = [digits.train((digits.Cell("convolutional", name, batch), 0.05, 0), limit=64) for batch in digits.BATCHES]
    assert found[0] == found[1] == found[2]


def run_script(*arguments):
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT)


def run_here(monkeypatch, script, *arguments):
    """As `run_script`, without a process that has to import torch first."""
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(ROOT / script), run_name="__main__")


def test_the_character_model_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Its checkpoint at update 20 and on to 40 is that of 40 updates without a stop."""
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "LICENSE").read_text(encoding="utf-8") * 4, encoding="utf-8")
    common = ["examples/char_model.py", text, "--hidden", 8, "--streams", 4, "--chunk", 5]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    done = run_script(*common, "--updates", 40, "--checkpoint", whole)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 300  # the sample
    assert "validation" in done.stderr
    for updates in (20, 40):
        run_here(monkeypatch, *common, "--updates", updates, "--checkpoint", parts)
    one, two = (torch.load(path, weights_only=True) for path in (whole, parts))
    assert one["update"] == two["update"] == 40
    for key, value in one["model"].items():
        assert torch.equal(two["model"][key], value), key
    text.write_text("short", encoding="utf-8")
    with pytest.raises(SystemExit, match="too short"):
        run_here(monkeypatch, *common)
    assert len((ROOT / "examples/char_model.py").read_text(encoding="utf-8").splitlines()) < 100


def test_the_benchmark_of_sequence_length():
    done = run_script("benchmarks/sequence_length.py", "--seeds", 2, "--updates", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("±") == 12


NAMES = ("nn.BatchNorm1d", "nn.LayerNorm", "an empty Function", "copy + triad")


def test_the_benchmark_of_cost(tmp_path):
    """As `make bench` runs it, with few rounds of one case."""
    common = ["--rounds", 1, "--out", tmp_path]
    (line,) = recipe("bench") if has_make else [f"{sys.executable} benchmarks/bench.py"]
    done = run_line(line, *common, "--only", "layers/1x512")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert results["complete"]
    assert [(row["against"], row["threads"]) for row in results["rows"]] == [
        (name, threads) for threads in (1, 2) for name in NAMES
    ]
    assert results["rows"][0]["median"] is None  # one sample: batch norm raises
    assert results["rows"][1]["median"] > 0
    assert "raises" in done.stdout
    for name in ("headline", "networks"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    refused = run_script("benchmarks/bench.py", *common, "--only", "nothing")
    assert refused.returncode == 2
    assert "there are layers/" in refused.stderr
    refused = run_script("benchmarks/bench.py", *common, "--device", "nowhere")
    assert refused.returncode == 2
    assert "no device called 'nowhere' here: there is cpu" in refused.stderr


@pytest.mark.filterwarnings("ignore::UserWarning")  # forward and backward alone are no weight updates
def test_every_case_of_the_benchmark_runs(monkeypatch):
    """Each contender is built and called once; what the compiler makes of one is another test's business."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from cases import CASES

    stance = getattr(torch.compiler, "set_stance", None)
    with stance("force_eager") if stance else nullcontext():
        for case in CASES:
            for contender, make in case.contenders().items():
                try:
                    make().call()
                except ValueError as refused:
                    if "more than 1 value" not in str(refused):  # batch norm, of one sample
                        raise AssertionError((case.name, contender)) from refused


def test_the_committed_results_are_whole_and_quoted_as_they_are():
    folder = ROOT / "benchmarks/results"
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["complete"]
    assert {row["threads"] for row in results["rows"]} == {1, 2}
    measured = set((folder / "results.md").read_text(encoding="utf-8").splitlines())
    quoted = [
        line
        for line in (ROOT / "docs/measured/speed.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| \w+/", line)
    ]
    apart = set((folder / "evaluation/results.md").read_text(encoding="utf-8").splitlines())
    assert len(quoted) > 20
    assert len(apart & set(quoted)) == 6
    assert set(quoted) <= measured | apart
    measured = set((folder / "lab/results.md").read_text(encoding="utf-8").splitlines())
    quoted = [
        line
        for line in (ROOT / "docs/guide/lab.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| lab/")
    ]
    assert len(quoted) == 4
    assert set(quoted) <= measured
    measured = set((folder / "agent/results.md").read_text(encoding="utf-8").splitlines())
    quoted = [
        line
        for line in (ROOT / "docs/guide/basics.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| agent/")
    ]
    assert len(quoted) == 4
    assert set(quoted) <= measured
    measured = set((folder / "monitor/results.md").read_text(encoding="utf-8").splitlines())
    page = (ROOT / "docs/guide/monitoring.md").read_text(encoding="utf-8")
    quoted = [line for line in page.splitlines() if line.startswith("| monitor/")]
    assert len(quoted) == 4
    assert set(quoted) <= measured


def test_the_results_of_the_experiments_are_quoted_as_they_are():
    """Every table, number and outcome on the page is written again from the committed results, and is the same."""
    page, folder = DOCS / "measured/results.md", DOCS / "results"
    found = read_folder(folder)
    assert findings.with_findings(page, found, folder) == page.read_text(encoding="utf-8")
    assert {each.figure.name for each in found} >= {"lp", "dau", "online", "conv", "rnn", "gru"}
    for each in found:
        assert (folder / f"{each.file_name}.json").exists()
        if not each.variation:
            assert f"<!-- {each.file_name} -->" in page.read_text(encoding="utf-8")
            assert f"(../results/{each.file_name}.png)" in page.read_text(encoding="utf-8")
            assert (folder / f"{each.file_name}.svg").exists()


@pytest.mark.parametrize(("options", "folder"), [([], "benchmarks/results"), (["--only", "lay"], "build/bench")])
def test_a_part_of_the_benchmark_is_not_written_over_the_whole(options, folder, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(sys, "argv", ["bench.py", *options])
    bench = importlib.import_module("bench")
    assert bench.arguments().out.resolve() == (ROOT / folder).resolve()
    monkeypatch.setattr(sys, "argv", ["bench.py", *options, "--out", "there"])
    assert bench.arguments().out == Path("there")


def test_the_memory_of_the_benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from bench import bytes_alive
    finally:
        sys.path.pop(0)
    from streamnorm import StreamingNorm

    x = torch.randn(8, 16, 32, 32, requires_grad=True)
    size = x.numel() * x.element_size()
    assert 0 <= bytes_alive(StreamingNorm(16), x) < 0.01 * size

    class Greedy(torch.nn.Module):  # the measure can tell
        def forward(self, x):
            return (x * 2).exp().sin()

    assert bytes_alive(Greedy(), x) > 0.99 * size


def quotes(page, times):
    """As in "recurrent 2x1: streaming 33.3; layer norm 32.7", by net, samples, batches and norm."""
    pattern = rf"\b((?:[a-z]+-)?[a-z\d]+) (\d+){times}(\d+): ([^|<\n]+)"
    for net, samples, batches, numbers in re.findall(pattern, (ROOT / page).read_text(encoding="utf-8")):
        for each in numbers.split(";"):
            norm, *accuracy = re.fullmatch(r" *(.+?) ([\d.]+(?: ± [\d.]+)?) *", each).groups()
            yield net, norm, int(samples), int(batches), *accuracy


def test_what_is_quoted_from_the_measure_of_online_learning():
    found = list(quotes("docs/guide/settings.md", " x "))
    assert len(found) >= 6
    for net, norm, samples, batches, accuracy in found:
        measured = read_online(ROOT / f"docs/results/online-{net}.json")
        assert f"{measured.cell(norm, samples, batches).best[0]:.1f}" == accuracy


@pytest.mark.parametrize(("page", "least"), [("README.md", 15), ("docs/guide/settings.md", 20)])
def test_what_is_quoted_from_the_comparison(page, least):
    found = list(quotes(page, "x"))
    assert len(found) >= least
    for net, norm, samples, batches, accuracy in found:
        measured = read_compared(ROOT / f"docs/results/compare-{net}.json")
        assert "{:.1f} ± {:.1f}".format(*measured.cell(Entry(net, norm, samples, batches)).accuracy) == accuracy


def test_how_often_streaming_is_ahead_of_layer_and_group_norm():
    """As README says, by two standard errors of the difference."""
    counts = {"layer norm": Counter(), "group norm": Counter(), "group norm + WS": Counter()}
    for net, (norm, count) in product(NETS, counts.items()):
        if is_convolutional(net) != norm.startswith("group norm"):
            continue
        measured = read_compared(ROOT / f"docs/results/compare-{net}.json")
        for size in measured.plan.sizes:
            pair = "streaming" + norm.removeprefix("layer norm").removeprefix("group norm"), norm
            (a, a_error), (b, b_error) = (measured.cell(Entry(net, n, *size)).accuracy for n in pair)
            level = abs(a - b) <= 2 * hypot(a_error, b_error)
            count["level" if level else "ahead" if a > b else "behind"] += 1
    layer, group, standardized = counts.values()
    words = (
        f"ahead of layer norm in {layer['ahead']} and level in {layer['level']} of {layer.total()} such cells, "
        f"and ahead of group norm in {group['ahead']} of {group.total()} with convolutions; with weight "
        f"standardization in both, it is ahead of group norm in {standardized['ahead']} and level in "
        f"{standardized['level']} of {standardized.total()}."
    )
    assert words in (ROOT / "README.md").read_text(encoding="utf-8")
    assert not any(count["behind"] for count in counts.values())


def test_how_many_cells_of_the_comparison_are_lost():
    """As docs/measured/compare.md says: as listed there, and for the form of ours that suits a network beside all."""
    listed, best = Counter(), Counter()
    for net in NETS:
        measured = read_compared(ROOT / f"docs/results/compare-{net}.json")
        for part in (TEST, TRAINING):
            for verdict in measured.verdicts(part):
                listed[part, verdict.ours, verdict.outcome] += 1
                listed[part, verdict.ours] += 1
        ours = "streaming + WS" if is_convolutional(net) else "streaming"
        for size in measured.plan.sizes:
            cells = {norm: measured.cell(Entry(net, norm, *size)) for norm in measured.plan.rows}
            theirs = [cell.accuracy for norm, cell in cells.items() if cell and not norm.startswith("streaming")]
            (a, a_error), (b, b_error) = cells[ours].accuracy, max(theirs)
            best["level" if abs(a - b) <= hypot(a_error, b_error) else "ahead" if a > b else "behind"] += 1
    lost = {
        (part, ours): f"{listed[part, ours, 'lost']} of {listed[part, ours]}"
        for part, ours in product((TEST, TRAINING), ("streaming", "streaming + WS"))
    }
    page = " ".join((DOCS / "measured/compare.md").read_text(encoding="utf-8").split())
    assert (
        f"`streaming` is behind in {lost[TEST, 'streaming']} cells and `streaming + WS` in "
        f"{lost[TEST, 'streaming + WS']}; by training loss in {lost[TRAINING, 'streaming']} and "
        f"{lost[TRAINING, 'streaming + WS']}."
    ) in page
    assert (
        f"streaming is ahead in {best['ahead']} of {best.total()} cells by accuracy, level in {best['level']}, "
        f"and behind in {best['behind']}:"
    ) in page


def test_the_best_rates_of_streaming_and_layer_norm_are_neighbours():
    """As docs/guide/settings.md says."""
    for net in ("fully-connected", "recurrent"):
        measured = read_online(ROOT / f"docs/results/online-{net}.json")
        rates = measured.grid.rates
        for samples, batches in product(measured.grid.samples, measured.grid.batches):
            ours, theirs = (measured.cell(norm, samples, batches).rate for norm in ("streaming", "layer norm"))
            assert abs(rates.index(ours) - rates.index(theirs)) <= 1


def test_the_table_of_the_guard_is_that_of_its_measurement():
    command = [sys.executable, "benchmarks/divergence.py", "--table", "benchmarks/results/divergence.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout in (ROOT / "docs/design/guard.md").read_text(encoding="utf-8")


def test_a_training_is_watched_from_inside(tmp_path):
    options = ["--data", "digits", "--updates", "8", "--every", "4", "--out", str(tmp_path / "seen.json"), "--only"]
    arms = "paper", "guard", "guard without scale", "guard without average, longest memory"
    subprocess.run(
        [sys.executable, "benchmarks/divergence.py", *options, *arms], capture_output=True, check=True, cwd=ROOT
    )
    found = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert [[look["update"] for look in found[arm]["looks"]] for arm in arms] == [[4, 8]] * 4
    assert found["paper"]["looks"][1] != found["guard"]["looks"][1] != found["guard without scale"]["looks"][1]


def test_the_benchmark_of_averages_runs():
    options = ["--seeds", "1", "--epochs", "1", "--samples", "40", "--depth", "1"]
    done = subprocess.run(
        [sys.executable, "benchmarks/averaging.py", *options], capture_output=True, text=True, check=True, cwd=ROOT
    )
    page = (ROOT / "docs/guide/averaging.md").read_text(encoding="utf-8")
    for row in done.stdout.splitlines()[2:]:
        assert row.split(" | ")[0] in page  # the rows of the page are those that it prints


def test_the_bytes_of_a_merge_are_those_of_the_page():
    """Of network B, by the size of a message that tests/test_distributed.py has seen sent."""
    net = NetC(lambda channels, steps: StreamingNorm(channels), 64, 1, 1)
    sizes = [layer.num_features for layer in net.modules() if isinstance(layer, StreamingNorm)]
    page = (ROOT / "docs/guide/distributed.md").read_text(encoding="utf-8")
    assert f"({len(sizes)} norms of {sizes[0]} channels)" in page
    for batches in (1, 4, 32):
        theirs = sum(4 * (2 * c + 1) + 4 * 2 * c for c in sizes) * batches
        ours = sum(4 * (10 * c + 11) for c in sizes)
        assert f"| {batches} | 1, {ours:,} | {2 * len(sizes) * batches}, {theirs:,} |" in page


def printed_by(*words):
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, check=True, cwd=ROOT, text=True).stdout


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("closer", "measured/compare"),
        ("evaluation", "design/guard"),
        ("finetune", "design/guard"),
        ("gains", "measured/compare"),
        ("own_gradient", "design/guard"),
        ("references", "measured/speed"),
        ("tasks", "measured/online"),
        ("weights", "measured/compare"),
        ("without_guard", "design/guard"),
    ],
)
def test_tables_are_those_of_their_measurement(name, where):
    page = DOCS / f"{where}.md"
    shown = printed_by(f"benchmarks/{name}.py", "--table", f"benchmarks/results/{name}.json")
    assert shown.strip() in page.read_text(encoding="utf-8")


def test_a_memory_for_evaluation_is_measured(tmp_path):
    """Without a memory and with one it is the same training, tested by the same images."""
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/evaluation.py", "--data", "digits", "--size", 64, "--looks", 2, "--out", out)
    assert shown.count("| 2 x 1 + WS |") == 2  # as it goes on, and in the table
    assert len(read_json(out)["rows"]) == 8


def test_the_share_of_a_batch_s_own_gradient_is_measured(tmp_path):
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/own_gradient.py", "--data", "digits", "--size", 64, "--out", out)
    assert shown.count("| convolutional-recurrent, 2x16 @ 0.03 |") == 2  # as it goes on, and in the table
    assert printed_by("benchmarks/own_gradient.py", "--table", out) in shown


def test_what_is_done_to_the_weights_is_measured(tmp_path):
    """Every row is another training, even where it begins from the same weights."""
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/weights.py", "--data", "digits", "--size", 48, "--seeds", 1, "--out", out)
    assert shown.count("| standardized, scale kept | streaming |") == 2  # as it goes on, and in the table
    assert printed_by("benchmarks/weights.py", "--table", out) in shown
    rows = read_json(out)["rows"]
    assert len({json.dumps(row["cells"]) for row in rows}) == len(rows)


def test_what_gains_begin_with_is_measured(tmp_path):
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/gains.py", "--data", "digits", "--size", 48, "--seeds", 1, "--out", out)
    assert shown.count("| 2x1 | streaming |") == 2
    assert printed_by("benchmarks/gains.py", "--table", out) in shown
    cells = [json.dumps(cell) for row in read_json(out)["rows"] for cell in row["cells"]]
    assert len(set(cells)) == len(cells)


def test_the_comparison_is_looked_at_more_closely(tmp_path):
    out, options = tmp_path / "found.json", ("--data", "digits", "--size", 32, "--seeds", 2)
    shown = printed_by("benchmarks/closer.py", *options, "--net", "recurrent", "--runs", tmp_path, "--out", out)
    assert shown.count("| recurrent | 2x16 |") == 2
    again = printed_by("benchmarks/closer.py", *options, "--net", "recurrent", "--runs", tmp_path)
    assert again == shown
    assert printed_by("benchmarks/closer.py", "--table", out) in shown
    rows = read_json(out)["rows"]
    assert len(rows) == 6
    rates = [rate for row in rows for side in ("ours", "theirs") for rate in row[side]["rates"]]
    assert all(len(rate["held out"]) == len(rate["accuracy"]) == len(rate["loss"]) == 2 for rate in rates)
    assert len(rates) > 2 * len(rows)  # of some norms several rates were close
    assert all(row["ours"]["norm"] == "streaming" != row["theirs"]["norm"] for row in rows)


def test_what_each_reference_costs_is_measured(tmp_path):
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/references.py", "--rounds", 1, "--out", out)
    assert printed_by("benchmarks/references.py", "--table", out) == shown
    assert list(read_json(out)["milliseconds"])[1:] == list(CODES)


def test_a_converted_network_is_trained_on_and_tested_three_ways(tmp_path):
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/finetune.py", "--seeds", 1, "--out", out)
    assert printed_by("benchmarks/finetune.py", "--table", out) == shown
    assert min(read_json(out)["rows"][0]["accuracies"]) > 80
    rows = [row["accuracies"] for row in read_json(ROOT / "benchmarks/results/finetune.json")["rows"]]
    latest, memory, anew = zip(*rows, strict=True)
    assert sum(latest) < sum(memory) < sum(anew)  # as the page says


def test_the_comparison_without_the_guard_is_measured(tmp_path):
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/without_guard.py", "--data", "digits", "--size", 64, "--out", out)
    assert shown.count("| 2x1 | ") == 2
    assert printed_by("benchmarks/without_guard.py", "--table", out) in shown


def test_a_stream_of_tasks_is_measured(tmp_path):
    out = tmp_path / "found.json"
    shown = printed_by("benchmarks/tasks.py", "--seeds", 2, "--tasks", 2, "--samples", 5, "--out", out)
    assert "| labels | layer norm |" in shown
    assert printed_by("benchmarks/tasks.py", "--table", out) in shown
