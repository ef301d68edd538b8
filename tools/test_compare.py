"""Tests of tools/compare.py."""
import json
import math
import types

import pytest

from eval import Mean, group_runs
from tools import compare


def run_of(success, episodes=160, values=0.0):
    return types.SimpleNamespace(lines=lines_of(success, episodes, values))


def lines_of(success, episodes=160, values=0.0):
    return [{"success": x, "episodes": episodes, "v_explained_variance": values,
             "q_explained_variance": 0.0, "time_total": 1.0, "tokens_encoded": 1,
             "tokens_sampled": 1} for x in success]


def write_run(folder, success, end, values=0.0):
    folder.mkdir()
    config = {"env": "house", "model": "tiny", "seed": int(folder.name[-1])}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "eval.json").write_text(json.dumps({"success": end, "success_at_1": end / 2}))
    lines = [json.dumps(line) + "\n" for line in lines_of(success, values=values)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return str(folder)


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / "with-0", [0.1, 0.3, 0.7, 0.9], 0.9, 0.5),
            write_run(tmp_path / "with-1", [0.1, 0.1, 0.3, 0.7], 0.7, 0.3),
            write_run(tmp_path / "without-0", [0.1, 0.1, 0.2, 0.2], 0.4),
            write_run(tmp_path / "without-1", [0.1, 0.1, 0.9, 0.2], 0.6)]


def test_success_is_averaged_over_the_last_episodes():
    """320 of them, so two iterations of 160 and one of 400."""
    assert compare.recent(run_of([0.2, 0.4, 0.8]), "success") == [
        (320, pytest.approx(0.3)), (480, pytest.approx(0.6))]
    assert compare.recent(run_of([0.2, 0.4], 400), "success") == [
        (400, pytest.approx(0.2)), (800, pytest.approx(0.4))]
    assert compare.recent(run_of([0.2, 0.4], 10), "success") == [(20, pytest.approx(0.3))]


def test_the_episodes_until_a_level_is_reached():
    run = run_of([0.2, 0.4, 0.8, 0.8])
    assert compare.episodes_until(run, 0.6) == (480, True)
    assert compare.episodes_until(run, 0.9) == (640, False)


def test_standard_errors_are_of_means_and_of_their_differences():
    a, b = Mean.of([1.0, 3.0]), Mean.of([4.0, 4.0, 7.0])
    assert a == (2.0, pytest.approx(1.0)) and b == (5.0, pytest.approx(1.0))
    assert b.minus(a) == (3.0, pytest.approx(math.sqrt(2)))
    assert Mean.of([2.0]).text(1) == "2.0" and a.minus(b).text(2, "+") == "-3.00 ± 1.41"


def test_tables_of_finished_runs(folders, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare.py", "--half", "0.5", *folders])
    compare.main()
    first, second = capsys.readouterr().out.strip().split("\n\n")
    assert first.splitlines()[2:] == [
        "| with | 2 | 80.0 ± 10.0 | 40.0 ± 5.0 | 40.0 ± 10.0 | 560 ± 80 | 40 ± 10 | – |",
        "| without | 2 | 50.0 ± 10.0 | 25.0 ± 5.0 | 23.8 ± 8.8 | ≥ 560 (1 of 2 do) "
        "| – | – |"]
    assert second.splitlines()[2:] == [
        "| without | -30.0 ± 14.1 | -15.0 ± 7.1 | -16.2 ± 13.3 | ≥ +0 |"]


def test_a_difference_from_what_never_reaches_the_half_is_a_bound(folders):
    groups = dict(reversed(group_runs(folders).items()))  # `without` is first
    for half, rest in ((0.5, "≤ +0"), (0.7, "–"), (0.2, "-160 ± 113")):
        assert compare.tables(groups, half).split(" | ")[-1] == f"{rest} |"


def test_a_picture_of_finished_runs(folders, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "bed.png"
    monkeypatch.setattr("sys.argv", ["compare.py", "--half", "0.5", "--plot", str(picture),
                                     *folders, str(tmp_path / "nothing-0")])
    compare.main()
    assert picture.stat().st_size > 10000
    said = capsys.readouterr()
    assert f"wrote {picture}" in said.out and "left out" in said.err
