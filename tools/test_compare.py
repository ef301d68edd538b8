"""Tests of tools/compare.py."""
import json
import math
import types

import pytest

from eval import Mean
from test_sapo import run_main
from tools import compare


def lines_of(success, episodes=160, values=0.0):
    return [{"success": x, "episodes": episodes, "v_explained_variance": values,
             "q_explained_variance": 0.0} for x in success]


@pytest.fixture
def folders(tmp_path):
    """Two groups of two runs each."""
    found = []
    for name, success, end, values in (("with-0", [0.1, 0.3, 0.7, 0.9], 0.9, 0.5),
                                       ("with-1", [0.1, 0.1, 0.3, 0.7], 0.7, 0.3),
                                       ("without-0", [0.1, 0.1, 0.2, 0.2], 0.4, 0.0),
                                       ("without-1", [0.1, 0.1, 0.9, 0.2], 0.6, 0.0)):
        folder = tmp_path / name
        folder.mkdir()
        config = {"env": "house", "model": "tiny", "seed": int(name[-1])}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "eval.json").write_text(json.dumps({"success": end, "success_at_1": end / 2}))
        lines = [json.dumps(line) + "\n" for line in lines_of(success, values=values)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        found.append(str(folder))
    return found


def test_success_is_averaged_over_the_last_episodes():
    """320 of them, so two iterations of 160 and one of 400."""
    for success, episodes, averages in (
            ([0.2, 0.4, 0.8], 160, [(320, 0.3), (480, 0.6)]),
            ([0.2, 0.4], 400, [(400, 0.2), (800, 0.4)]), ([0.2, 0.4], 10, [(20, 0.3)])):
        run = types.SimpleNamespace(lines=lines_of(success, episodes))
        assert compare.recent(run, "success") == [(n, pytest.approx(x)) for n, x in averages]


def test_standard_errors_are_of_means_and_of_their_differences():
    a, b = Mean.of([1.0, 3.0]), Mean.of([4.0, 4.0, 7.0])
    assert a == (2.0, pytest.approx(1.0)) and b == (5.0, pytest.approx(1.0))
    assert b.minus(a) == (3.0, pytest.approx(math.sqrt(2)))
    assert Mean.of([2.0]).text(1) == "2.0" and a.minus(b).text(2, "+") == "-3.00 ± 1.41"


def test_tables_and_a_picture_of_finished_runs(folders, tmp_path, monkeypatch, capsys):
    run_main(compare, monkeypatch, "--half", 0.5, *folders, tmp_path / "nothing-0")
    said = capsys.readouterr()
    assert "left out" in said.err and said.out.splitlines()[2:4] + said.out.splitlines()[-1:] == [
        "| with | 2 | 80.0 ± 10.0 | 40.0 ± 5.0 | 40.0 ± 10.0 | 560 ± 80 | 40 ± 10 |",
        "| without | 2 | 50.0 ± 10.0 | 25.0 ± 5.0 | 23.8 ± 8.8 | ≥ 560 (1 of 2 do) | – |",
        "| without | -30.0 ± 14.1 | -15.0 ± 7.1 | -16.2 ± 13.3 | ≥ +0 |"]
    run_main(compare, monkeypatch, "--half", 0.5, "--plot", tmp_path / "bed.png", *folders)
    assert (tmp_path / "bed.png").stat().st_size > 10000
