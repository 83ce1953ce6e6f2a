"""Figures with one setting changed, and the page that says what became of the claims."""

from collections import Counter
from dataclasses import replace

import pytest
from lab_results import assert_refused, results

from streamnorm.lab.claims import CLAIMS, NOT_RUN, OPEN, REPRODUCED, judge, judge_all
from streamnorm.lab.cli import main
from streamnorm.lab.errors import StoreError
from streamnorm.lab.figures import FIGURES
from streamnorm.lab.results import read_folder, read_results
from streamnorm.lab.variations import SETTINGS, read_variation, varied
from streamnorm.lab.view import findings
from streamnorm.lab.view.varied import build_varied, draw_varied

RUN = FIGURES["online"]["LN 32 x 1"]
PAGE = "# Results\n\n<!-- claims -->\n<!-- end of claims -->\n\nBetween.\n\n<!-- varied -->\n<!-- end of varied -->\n"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("start=4", {"start": 4.0}),
        ("rate=0.3", {"rates": ((0.03, 25), (0.003, 5))}),
        ("epochs=3", {"rates": ((0.1, 2.5), (0.01, 0.5))}),
        ("width=9", {"width": 9}),
        ("test=after", {"test_first": False}),
    ],
)
def test_a_variation_changes_one_thing(text, changes):
    assert varied(RUN, dict([read_variation(text)])) == replace(RUN, **changes)


def test_every_setting_is_tried_above():
    assert set(SETTINGS) == {"start", "rate", "epochs", "width", "test"}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--vary", "begin=4"], ["'begin'", "start, rate"]),
        (["--vary", "start"], ["start", "factor of the first weights"]),
        (["--vary", "start=-1"], ["'-1'", "factor"]),
        (["--vary", "start=inf"], ["'inf'"]),
        (["--vary", "width=2.5"], ["'2.5'", "units"]),
        (["--vary", "test=before"], ["'before'", "after"]),
        (["--curves", "LN"], ["'LN'", "LN 32 x 1"]),
    ],
)
def test_what_cannot_be_varied_is_refused(more, words, capsys):
    assert_refused(["run", "online", "--data", "digits", *more], words, capsys)


def test_varied_runs_stand_beside_the_others(tmp_path, capsys):
    command = ["run", "online", "--data", "digits", "--preset", "smoke", "--out", str(tmp_path)]
    command += ["--curves", "LN 32 x 1,streaming 32 x 1"]
    for vary in ([], ["--vary", "start=4"], ["--vary", "start=4", "--vary", "test=after"]):
        assert main([*command, *vary]) == 0
    assert "smoke, start x 4, tested after updates, 1 seed, on digits" in capsys.readouterr().out
    names = ["online-smoke-digits", "online-smoke-digits-start-4", "online-smoke-digits-start-4-test-after"]
    assert sorted(path.stem for path in tmp_path.glob("*.json")) == names
    found = {each.file_name: each for each in read_folder(tmp_path)}
    assert set(found) == set(names)
    plain, larger, after = (found[name].of("LN 32 x 1", 0) for name in names)
    assert [run["settings"].get("start") for run in (plain, larger, after)] == [None, 4.0, 4.0]
    assert larger["curves"]["train_loss"] == after["curves"]["train_loss"] != plain["curves"]["train_loss"]
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert main(["report", "--out", str(tmp_path), "--page", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "as it is (1) | start x 4 (1) | start x 4, tested after updates (1) |" in text
    assert "Between." in text
    assert text.count("\n| online |") == sum(claim.figure == "online" for claim in CLAIMS)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "What was varied" in html
    assert html.count("<img") == 1  # those that were varied are in the table alone


def test_a_page_without_a_place_for_the_claims_is_refused(tmp_path, capsys):
    results("rnn").write(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Results\n", encoding="utf-8")
    assert_refused(["report", "--out", str(tmp_path), "--page", str(page)], ["no place", "<!-- claims -->"], capsys)
    assert page.read_text(encoding="utf-8") == "# Results\n"


def test_a_variation_that_does_not_exist_is_no_result(tmp_path):
    path = replace(results("rnn"), variation={"start": 2.0}).write(tmp_path)
    assert read_results(path).variation == {"start": 2.0}
    path.write_text(path.read_text(encoding="utf-8").replace('"start"', '"begin"'), encoding="utf-8")
    with pytest.raises(StoreError, match="no result of streamnorm"):
        read_results(path)


def test_all_claims_are_listed_whether_they_were_run_or_not():
    found = [results("rnn"), replace(results("rnn"), variation={"start": 2.0}), results("lp", scale="paper")]
    claims = judge_all(found)
    assert [claim.name for claim in claims] == [claim.name for claim in CLAIMS]
    known = {claim.name: claim.outcome for each in (found[0], found[2]) for claim in judge(each)}
    assert all(claim.outcome == known.get(claim.name, NOT_RUN) for claim in claims)
    twice = judge_all([*found, results("lp")])
    assert len(twice) == len(CLAIMS) + sum(claim.figure == "lp" for claim in CLAIMS)
    counts = Counter(claim.outcome for claim in claims)
    assert counts[NOT_RUN] == len(CLAIMS) - len(known)
    told = findings.summary(claims)
    assert told.startswith(f"{len(CLAIMS)} claims: ")
    assert told.endswith(f"{counts[NOT_RUN]} {NOT_RUN}.")
    assert findings.summary(twice).startswith(f"{len(CLAIMS)} claims, judged {len(twice)} times: ")


def test_a_claim_keeps_its_line_and_its_sign():
    base, more = results("rnn"), replace(results("rnn"), variation={"start": 2.0})
    for each, level in ((base, 0.9), (more, 0.1)):
        for run in each.curves["streaming"]:
            run["curves"]["test_loss"] = [level] * len(run["curves"]["test_loss"])
        for run in each.curves["LN"]:
            run["curves"]["test_loss"] = [0.5 + 0.01 * run["settings"]["seed"]] * len(run["curves"]["test_loss"])
    text = findings.varied_table([base, more])
    (row,) = (line for line in text.splitlines() if "streaming ends with a lower test loss than LN" in line)
    assert [cell.strip()[:2] for cell in row.split("|")[2:4]] == ["✗ ", "✓ "]
    assert findings.SIGNS[OPEN] not in findings.SIGNS[REPRODUCED]


def test_claims_are_drawn_against_a_factor(tmp_path):
    def group(*variations):
        return [replace(results("rnn"), variation=each) for each in variations]

    tried = group({}, {"start": 2.0}, {"start": 8.0})
    paths = draw_varied(tried, tmp_path)
    (name,) = findings.drawings(tried)
    assert [path.name for path in paths] == [f"{name}.{kind}" for kind in ("png", "svg")]
    assert findings.drawings([*tried, *group({"test": "after"})]) == {name: tried}
    drawn = paths[1].read_text(encoding="utf-8")
    for text, _ in findings.lines(tried):
        assert text in drawn  # the legend
    assert f"({'../results'}/{paths[0].name})" in findings.varied_part(tried, "../results")
    for others in (
        tried[:2],
        group({}, {"width": 8}, {"width": 9}),
        group({}, {"start": 2.0, "rate": 2.0}, {"rate": 2.0}),
    ):
        assert draw_varied(others, tmp_path) == []
        assert "![" not in findings.varied_part(others, "../results")
    told = findings.varied_part(tried, "../results").splitlines()
    assert sum(f"`{tried[0].command}`; {len(tried[0].runs)} runs, " in line for line in told) == 2


def test_no_two_claims_have_the_same_colour():
    tried = [replace(results("online"), variation=each) for each in ({}, {"rate": 0.3}, {"rate": 0.1})]
    curves = [curve for axes in build_varied(tried).axes for curve in axes.containers]
    assert len(curves) == len(findings.lines(tried)) > 4
    assert len({curve.lines[0].get_color() for curve in curves}) == len(curves)


def test_claims_are_drawn_by_their_unit_and_only_where_something_was_varied():
    tried = [replace(results("online"), variation=each) for each in ({}, {"rate": 0.3}, {"rate": 0.1})]
    assert [axes.get_ylabel() for axes in build_varied(tried).axes] == ["nats", "points"]
    for each in tried[1:]:
        del each.curves["streaming 1 x 32"]
    shown = [text for text, _ in findings.lines(tried)]
    assert shown
    assert not any("1 x 32" in text for text in shown)
    assert "1 x 32" not in findings.varied_table(tried)
    for each in tried[1:]:
        del each.curves["streaming 2 x 16"], each.curves["streaming 32 x 1"]
    assert findings.drawings(tried) == {}


def test_groups_begin_with_what_was_not_varied():
    found = [replace(results("rnn"), variation=each) for each in ({"start": 8.0}, {"start": 2.0}, {})]
    (group,) = findings.groups([*found, results("gru")])
    assert [each.variation for each in group] == [{}, {"start": 2.0}, {"start": 8.0}]
