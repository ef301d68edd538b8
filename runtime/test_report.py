"""Tests of runtime/report.py: tables, curves, and the page of an episode."""
import json
import os
import re
import types
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import envs
import eval as evaluation
from runtime import report
from runtime.testing import GAMES, INF, NAN, a_run, on_the_cpu, play, random_lm, run_main


def test_runs_with_other_settings_are_other_rows_and_a_seed_counts_once(tmp_path, capsys):
    def groups(*settings):
        place = tmp_path / f"{len(os.listdir(tmp_path))}"
        runs = [a_run(place / f"run-{n}", 0.5, 1, **config) for n, config in enumerate(settings)]
        found = report.group_runs([*runs, runs[0]])  # each run counts once
        return {name: len(runs) for name, runs in found.items()}

    # what changes no result may differ, and a model made for its seed
    assert groups({"seed": 0, "compile": True, "model": "runs/start-0"},
                  {"seed": 1, "compile": False, "model": "runs/start-1"}) == {"run": 2}
    for name, values in (("algo", ("sapo", "grpo")), ("gamma", (0.9, 0.95)), ("places", (5, 8)),
                         ("context", ("window", "full")), ("eval_games", (10, 100))):
        assert groups(*({"seed": seed, name: value} for seed, value in enumerate(values))) == {
            f"run ({name}={value})": 1 for value in values}
    assert groups({"seed": 3}, {"seed": 3}) == {"run": 1}
    assert "seed 3 of" in capsys.readouterr().err


def test_episode_page_shows_all_numbers_and_escapes_text():
    lm = random_lm("qwen2", 1)
    turns, _ = play(lm, "kv", "window", 1.0, games=GAMES[:1])
    evil = "<script>alert(1)</script>"
    turns[0].messages, turns[0].task, turns[0].advantage = envs.user_message(evil), evil, -1.25
    turns[1].obs = f"An answer. {evil}"
    text = {turns[0].action_ids[0]: evil}
    lines = [{"success": 0.5, "v_explained_variance": NAN, "q_explained_variance": INF}] * 3
    page = report.episode_page(evil, turns, lines,
                                   lambda ids: "".join(text.get(i, f" w{i}") for i in ids))
    assert "<script" not in page and page.count("&lt;script&gt;alert(1)") >= 6
    prompt, response, answer = map(page.index, ("<pre>&lt;script", "<mark", "<pre>An answer. &lt;"))
    assert prompt < response < answer < page.index("Turn 2") and "<details" not in page
    assert page.count("<svg") == page.count("</svg>") == 2 and "Q after the response" in page
    # a browser need not fetch anything: the pictures refer to parts of themselves only
    assert not re.search(r"""src=|@import|<link|href=(?!"#)|url\((?!#)""", page)
    assert page.count("<section>") == len(turns) and "normalized advantage -1.25" in page
    assert page.count("<mark") == sum(len(turn.logp) for turn in turns)
    assert f"V {turns[0].v:.2f}" in page and f"Q {turns[-1].q:.2f}" in page


def test_table_and_curves_of_runs(tmp_path, capsys, monkeypatch):
    runs = [a_run(tmp_path / "sapo-1", 0.8, 10, seed=1),
            a_run(tmp_path / "sapo-2", 0.9, 20, seed=2),
            a_run(tmp_path / "ppo-0", 0.5, 5, algo="ppo", gamma=1.0)]
    (tmp_path / "torn").mkdir()
    run_main(evaluation, monkeypatch, "--table", *runs, tmp_path / "torn")
    printed = capsys.readouterr()
    rows = [line.strip("| ").split(" | ") for line in printed.out.splitlines()]
    assert rows[0] == ["method", "seeds", "Pick", "Look", "Clean", "Heat", "Cool", "Pick2", "All",
                       "All, T = 1", "seconds", "M tokens"] and printed.err.count("skipping") == 1
    assert rows[2][:4] == ["start", "2", "20.0 ± 0.0", "–"] and "25.0 ± 0.0" in rows[2]
    assert rows[3] == ["sapo", "2", "85.0 ± 5.0", *["–"] * 5, "85.0 ± 5.0", "42.5 ± 2.5",
                       "30 ± 10", "2.00 ± 0.00"]
    assert rows[4][0] == "ppo" and rows[4][2] == "50.0"
    shop = report.paper_table([a_run(tmp_path / "shop", 0.5, 10, env="webshop")],
                              evaluation.columns_of).splitlines()
    both = report.paper_table([*runs, f"{tmp_path}/shop"], evaluation.columns_of)
    assert both.count("| start |") == 2 and both.startswith("tiny on house (None places, None obj")
    assert "\n\ntiny on webshop (None turns):\n\n| method | seeds | Score |" in both
    other = a_run(tmp_path / "other", 0.5, 1, model="runs/other/final")
    tables = report.paper_table([*runs, other], evaluation.columns_of)
    assert tables.count("| start |") == 2 and "\n\nruns/other/final on house" in tables
    compared = report.comparison([*runs, f"{tmp_path}/shop"], 0.5)
    assert compared.count("| run |") == 2 and "| shop | 1 |" in compared
    odd = a_run(tmp_path / "odd", 0.5, 10, env="nowhere:Env")
    lacking = a_run(tmp_path / "lacking", 0.5, 10)
    text = Path(lacking, "metrics.jsonl").read_text()
    Path(lacking, "metrics.jsonl").write_text(text.replace("time_total", "time"))
    capsys.readouterr()
    assert "| sapo | 2 |" in report.paper_table([odd, lacking, *runs], evaluation.columns_of)
    said = capsys.readouterr().err
    assert "skipping tiny on nowhere:Env" in said and "lacks time_total" in said
    assert "| Score | Success | " in shop[0] and shop[2] == "| start | 1 | 50.0 | 25.0 | – |  |  |"
    drawn, save = {}, Figure.savefig

    def record_lines(figure, *args, **options):
        drawn.update({ax.get_title(): [line.get_label() for line in ax.lines]
                      for ax in figure.axes})
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", record_lines)
    run_main(evaluation, monkeypatch, "--plot", *runs, "--out", tmp_path / "curves.png")
    both, alone = ["sapo, n = 2", "ppo, n = 1"], ["sapo, n = 2"]
    assert [*drawn.values()] == [both, alone, alone, both]  # PPO's V has another target


@pytest.mark.parametrize("success, episodes, averages", [
    ([0.2, 0.4, 0.8], 160, [(320, 0.3), (480, 0.6)]), ([0.2, 0.4], 400, [(400, 0.2), (800, 0.4)]),
    ([0.2, 0.4], 10, [(20, 0.3)])])
def test_success_is_averaged_over_the_last_320_episodes(success, episodes, averages):
    run = types.SimpleNamespace(lines=[{"success": x, "episodes": episodes} for x in success])
    assert report.recent(run, "success") == [(n, pytest.approx(x)) for n, x in averages]


def test_methods_are_compared_by_how_soon_they_reach_a_success_rate(tmp_path, monkeypatch, capsys):
    runs = [a_run(tmp_path / name, end, 1, curve=curve, values=values, seed=int(name[-1]))
            for name, end, values, curve in (("with-0", 0.9, 0.5, [0.1, 0.3, 0.7, 0.9]),
                                             ("with-1", 0.7, 0.3, [0.1, 0.1, 0.3, 0.7]),
                                             ("without-0", 0.4, 0, [0.1, 0.1, 0.2, 0.2]),
                                             ("without-1", 0.6, 0, [0.1, 0.1, 0.9, 0.2]))]
    run_main(evaluation, monkeypatch, "--reach", 0.5, "--table", *runs, tmp_path / "nothing-0")
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert "skipping" in printed.err and [*lines[2:4], lines[-1]] == [
        "| with | 2 | 80.0 ± 10.0 | 40.0 ± 5.0 | 40.0 ± 10.0 | 560 ± 80 | 40 ± 10 | 40 ± 10 |",
        "| without | 2 | 50.0 ± 10.0 | 25.0 ± 5.0 | 23.8 ± 8.8 | ≥ 560 (1 of 2 reach it) | – | – |",
        "| without | -30.0 ± 14.1 | -15.0 ± 7.1 | -16.2 ± 13.3 | ≥ +0 |"]
    assert report.comparison(runs[2:] + runs[:2], 0.5).endswith("| ≤ +0 |")
    assert report.comparison(runs, 1.0).endswith("| – |")
    picture = tmp_path / "bed.png"
    run_main(evaluation, monkeypatch, "--plot", *runs, "--reach", 0.5, "--out", picture)
    assert picture.stat().st_size > 10000
    capsys.readouterr()
    run_main(evaluation, monkeypatch, "--table", *runs[:2], "--reach", 0.5)  # nothing to subtract
    only_table = capsys.readouterr().out
    assert "| episodes to 50% |" in only_table and len(only_table.splitlines()) == 3


def test_category_of_any_name_is_not_the_total(tmp_path):
    columns = {"success": ("success", "success"), "score": ("success", "score"),
               "All": ("success", None), "Score": ("score", None)}
    run = a_run(tmp_path / "run", 0.5, 1)
    result = json.loads(Path(run, "eval.json").read_text())
    result["success_by_category"] = {"success": 0.25, "score": 0.75}
    Path(run, "eval.json").write_text(json.dumps(result))
    *_, row = report.paper_table([run], lambda config: columns).splitlines()
    assert row.startswith("| run | 1 | 25.0 | 75.0 | 50.0 | 50.0 | 25.0 |")


@pytest.mark.parametrize("finished", [False, True])
def test_run_without_lines_is_skipped(tmp_path, capsys, finished):
    runs = [a_run(tmp_path / name, 0.5, 1) for name in ("sapo-0", "empty-0")]
    Path(runs[1], "metrics.jsonl").write_text("")
    assert list(report.group_runs(runs, finished)) == ["sapo"]
    assert "empty-0: no iteration is finished" in capsys.readouterr().err


def test_a_name_with_dollars_is_no_mathematics(tmp_path):
    run = a_run(tmp_path / "$x_{$-0", 0.5, 1, model="$\\frac$")
    report.draw(report.group_runs([run]), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()
