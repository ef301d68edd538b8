"""Tables and curves from any run or checkpoint.

    python eval.py --model runs/house-tiny-0                a run of train.py, in its environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_unseen
    python eval.py --table runs/*                           the paper's table, as Markdown
    python eval.py --plot runs/house-tiny-?                 the curves of training

Runs whose folders differ only in a trailing -SEED form a group. After ± stands the standard error
of a mean over its seeds. Each held-out game is played once.
"""
import contextlib
import gc
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from tqdm import tqdm

import envs
from machine.cli import Parser, one_line_errors, options_of
from machine.ranks import from_ranks, join_ranks, rank, say, world
from machine.runs import newest_checkpoint, read_json, read_log, settings_of, write_file
from model import load
from rollout import EVALUATION, Sampler, trajectories

SIDE_BY_SIDE = 128  # games played at once
TEMPERATURES = {"": 0.4, "_at_1": 1.0}  # by endings of names in eval.json; 0.4 is verl-agent's
NAMES = {"sapo": "SAPO", "sapo-separate": "SAPO, separate critic", "ppo": "PPO", "grpo": "GRPO",
         "rloo": "RLOO", "gigpo": "GiGPO", "gigpo-nostd": "GiGPO without std", "empg": "EMPG"}

# ----------------------------------------------------------------------------- games and reports

def attempt(sampler, games, pool, *, seed=0, rows=None, history=2):
    """Plays {number: game} and yields (number, record) of an episode as soon as it is over. Random
    numbers depend on seed and number alone, so ranks can share the games."""
    over = trajectories(sampler, [*games.values()], pool, trajs=games, seed=(seed, 0, EVALUATION),
                        rows=rows or SIDE_BY_SIDE, history=history)
    for number, turns, episode in tqdm(over, "games", len(games), leave=False, disable=None):
        yield number, record(pool.env, games[number], turns, episode)


def record(env, game, turns, episode):
    """An episode as it is written down. Without a turn, its first prompt did not fit."""
    info, cut = episode.info, not turns
    return {"task": game, "category": env.categories.get(info["category"], info["category"]),
            "won": info["won"], "score": info["score"], "turns": len(turns),
            "truncated": cut or turns[-1].truncated, "outgrown": cut or turns[-1].outgrown,
            "valid_actions": float(np.mean([not turn.invalid for turn in turns] or [0])),
            "actions": [turn.action for turn in turns], "responses": [turn.text for turn in turns]}


def sampler_for(lm, settings, temperature=1.0):
    """settings: of a run, or flags of an evaluation, which compiles nothing."""
    compile = temperature == 1 and getattr(settings, "compile", False)
    return Sampler(lm, settings.engine, settings.context, settings.max_new, temperature, compile,
                   settings.max_prompt)


def spaced(ids, limit):
    """`limit` of the sorted ids (0: all), evenly spaced so that every category keeps its share."""
    return [ids[i * len(ids) // limit] for i in range(limit)] if 0 < limit < len(ids) else ids


def report(records):
    """Success of n games, the mean score, success by category."""
    n, won = len(records), sum(r["won"] for r in records)
    of = {c: [r["won"] for r in records if r["category"] == c]
          for c in sorted({r["category"] for r in records})}
    return {"success": won / max(1, n), "n": n,
            "score": sum(r["score"] for r in records) / max(1, n),
            "success_by_category": {c: float(np.mean(its)) for c, its in of.items()}}


def table(reports, env):
    """{title: report} -> a line of text for each, in percent and in the paper's columns for the
    environment. Below ± stands the standard error of success in n games."""
    names, width = list(env.categories.values()), max(map(len, reports)) + 2
    heads = [*names, "All", *["Score"] * env.graded]
    lines = ["".join(f"{name[:7]:>8}" for name in heads) + "     n       ±"]
    for r in reports.values():
        cells = [r["success_by_category"].get(c) for c in names] + [r["success"]]
        cells += [r["score"]] * env.graded
        error = 100 * (r["success"] * (1 - r["success"]) / r["n"]) ** 0.5
        lines.append("".join(f"{'-':>8}" if x is None else f"{100 * x:8.1f}" for x in cells)
                     + f"{r['n']:6}{error:8.1f}")
    return "\n".join(f"{title:{width}}{line}" for title, line in zip(["", *reports], lines))


def play(sampler, ids, pool, settings, attempt=attempt, path=os.devnull):
    """Plays the games of these ids, split over the ranks -> [(number, record)] in order. Rank 0
    also writes its own to `path` as they come."""
    games = {n: game for n, game in enumerate(ids) if n * world() // len(ids) == rank()}
    records = []
    with open(path if rank() == 0 else os.devnull, "w") as file:
        for numbered in attempt(sampler, games, pool, seed=settings.seed, rows=settings.rows,
                                history=settings.history):
            records.append(numbered)
            print(json.dumps(numbered[1]), file=file, flush=True)
    return from_ranks(sorted(records, key=lambda numbered: numbered[0]))  # they end in any order


def of_run(lm, pool, config, temperatures=TEMPERATURES):
    """A run of train.py plays its --eval_games, all at verl-agent's temperature and in the house at
    1 too -> {ending of the names in eval.json: records}."""
    env, options = envs.known(config.env), envs.options_for(vars(config))
    out = {}
    for end, temperature in temperatures.items() if config.eval_games else ():
        if end == "" or config.env == "house":
            ids = spaced(envs.tasks(config.env, env.held_out[0], **options), config.eval_games)
            played = play(sampler_for(lm, config, temperature), ids, pool, config)
            out[end] = [record for _, record in played]
            gc.collect()  # a sampler refers to itself, and would keep its memory
    return out


def write_of_run(before, after, config):
    """eval.json: the report of a run before and after training; eval.jsonl: every episode. -> the
    table, as text."""
    out, lines, reports = {"env": config.env, "temperature": TEMPERATURES[""]}, [], {}
    for when, mark, played in (("before", "_before", before), ("after", "", after)):
        for end, records in played.items():
            told, t = report(records), TEMPERATURES[end]
            reports[f"{when} {NAMES[config.algo]}, T = {t:g}"] = told
            lines += [json.dumps({"when": when, "temperature": t} | r) + "\n" for r in records]
            for key, x in told.items():
                head, *tail = key.split("_", 1)  # "success_by_category"
                out["_".join([f"{head}{mark}{end}", *tail])] = x
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(lines))
    return table(reports, envs.known(config.env)) if reports else "no evaluation, --eval_games is 0"


# ------------------------------------------------------------------------- groups of finished runs

def group_runs(folders, finished=False):
    """{label: runs} by the folders' names without -SEED. What is no run is named and left out."""
    groups, parent = {}, os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in folders])
    for folder in map(Path, folders):
        try:
            lines = read_log(folder / "metrics.jsonl")
            config, result = settings_of(folder), read_json(folder / "eval.json")
            if not lines or finished and not result:
                raise ValueError("it is not finished")
        except (OSError, ValueError) as error:
            print(f"left out: {folder}: {error}", file=sys.stderr)
            continue
        runs = groups.setdefault(re.sub(r"-\d+$", "", os.path.relpath(folder, parent)), [])
        runs.append(SimpleNamespace(config=config, lines=lines, result=result))
    if not groups:
        raise ValueError("none of these folders is a run of train.py")
    return groups


class Mean(NamedTuple):
    """A mean over seeds and its standard error, NaN where there is one seed only."""

    mean: float
    error: float

    @classmethod
    def of(cls, values):
        n = len(values)
        error = np.std(values, ddof=1) / n ** 0.5 if n > 1 else float("nan")
        return cls(float(np.mean(values)), float(error))

    def minus(self, other):
        """The difference of two means of independent runs."""
        return Mean(self.mean - other.mean, float(np.hypot(self.error, other.error)))

    def text(self, digits=1, sign=""):
        error = "" if np.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{error}"


def markdown(rows):
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def paper_table(folders):
    """The paper's Table 1 as Markdown: means over the seeds in percent, ± standard errors."""
    groups = group_runs(folders, finished=True)
    first = next(iter(groups.values()))
    env = envs.known(first[0].config["env"])
    kinds = [] if env.graded else [*env.categories.values()]
    totals = {"Score": "score{}", "Success": "success{}"} if env.graded else {"All": "success{}"}
    if "success_at_1" in first[0].result:
        totals["All, T = 1"] = "success{}_at_1"

    def row(label, runs, when=""):
        results = [run.result for run in runs]
        shares = [[r.get(f"success{when}_by_category", {}).get(kind) for r in results]
                  for kind in kinds]
        shares += [[r.get(key.format(when)) for r in results] for key in totals.values()]
        shares = [[100 * x for x in its if x is not None] for its in shares]
        cells = [Mean.of(its).text() if its else "–" for its in shares]
        return [label, str(len(runs)), *cells]

    rows = [["method", "seeds", *kinds, *totals, "seconds", "M tokens"],
            [*row("start", first, "_before"), "", ""]]  # which has cost nothing
    for label, runs in groups.items():
        seconds = [sum(line["time_total"] for line in run.lines) for run in runs]
        tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in run.lines) / 1e6
                  for run in runs]
        rows.append([*row(label, runs), Mean.of(seconds).text(0), Mean.of(tokens).text(2)])
    return markdown(rows)


# ------------------------------------------------------------------------------------- pictures

PANELS = {"success": "success", "v_explained_variance": "explained variance of V",
          "q_explained_variance": "explained variance of Q", "kl": "KL to the start (nats a token)"}
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #888888".split()  # Okabe and Ito
DASHES, MARKERS = ("-", "--", "-.", ":"), "os^Dv*PX"  # so that a picture can be read in grey too


def draw(groups, curve_of, panels, path, title, xlabel, level=None):
    """{label: runs} -> a picture at `path` with a panel for each key of metrics.jsonl: of each
    group the mean over the seeds within a standard error. curve_of(run, key): [(x, y), ...].
    What is always 0, such as a baseline's V, is not drawn, nor is a V or Q with another target than
    the first group's. level: a success to mark. Dots are success on held-out games."""
    if len(groups) > len(COLORS):
        raise ValueError(f"{len(groups)} groups of runs are too many for a picture: name at most "
                         f"{len(COLORS)}")
    fig = Figure((4.2 * len(panels), 4.2), layout="constrained")
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    target = value_target(next(iter(groups.values()))[0].config)
    for ax, key in zip(axes, panels):
        ax.set(title=PANELS[key], xlabel=xlabel)
        ax.grid(True, alpha=0.3)
        for (label, runs), color, marker in zip(groups.items(), COLORS, MARKERS):
            curves = [curve_of(run, key) for run in runs]
            n = min(map(len, curves))
            x = [x for x, _ in curves[0][:n]]
            y = np.array([[y for _, y in curve[:n]] for curve in curves])
            alike = value_target(runs[0].config) == target or "explained" not in key
            if alike and (y.any() or key == "success"):
                means = [Mean.of(column) for column in y.T]
                mean, error = np.array(means).T
                place = COLORS.index(color)  # the first line has no marks
                ax.plot(x, mean, color=color, linestyle=DASHES[place % 4], marker=marker,
                        markersize=5 if place else 0, label=f"{label}, n = {len(runs)}",
                        markevery=(n * place // 40, max(1, n // 5)))
                ax.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, lw=0)
            if key == "success" and xlabel == "iteration":
                looks = [held_out(run) for run in runs]
                at = sorted(set.intersection(*map(set, looks)))
                dots = ax.scatter(at, [np.mean([look[n] for look in looks]) for n in at],
                                  color=color, edgecolor="black", marker="D")
                dots.set_label("held-out games, T = 0.4" if color == COLORS[0] else None)
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    axes[0].set(ylim=(0, None), title="success: lines, of rollouts at T = 1")
    if level is not None:
        axes[0].axhline(level, color="black", lw=0.8, ls=":", label=f"{level:.0%}, to be reached")
    if "kl" in panels:
        axes[-1].set_yscale("symlog", linthresh=0.01)  # it has rare steps a thousand times larger
        axes[-1].yaxis.set_major_formatter("{x:g}")
    fig.suptitle(f"{title}; mean of the seeds ± a standard error", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=5)
    fig.savefig(path, dpi=110)


def value_target(config):
    """The discount of the return that V explains: verl-agent's PPO pays the whole one."""
    return 1.0 if config.get("algo") == "ppo" else config.get("gamma")


def held_out(run):
    """{iteration: success on held-out games} before, after, and where it was looked at."""
    looks = {n: line["held_out"] for n, line in enumerate(run.lines, 1) if "held_out" in line}
    ends = {0: run.result.get("success_before"), len(run.lines): run.result.get("success")}
    return looks | {n: success for n, success in ends.items() if success is not None}


def over_iterations(run, key):
    """A number of metrics.jsonl, averaged over five iterations; the KL's median."""
    values, average = [line[key] for line in run.lines], np.median if key == "kl" else np.mean
    return [(n + 1, average(values[max(0, n - 2):n + 3])) for n in range(len(values))]


def plot(folders, path):
    """Curves of training, in a colour for each group of runs."""
    groups = group_runs(folders)
    title = ", ".join(sorted({setting(runs[0].config) for runs in groups.values()}))
    draw(groups, over_iterations, PANELS, path, title, "iteration")


def setting(config):
    """The model, the environment and its size."""
    size = [f"{config.get(k)} {k}" for k in ("places", "objects") if config["env"] == "house"]
    turns = f"{config.get('horizon')} turns"
    return f"{Path(config['model']).name} on {config['env']} ({', '.join([*size, turns])})"


# --------------------------------------------------------------------------------- command line

SHARED = {"env": str, "data": str, "context": Literal["window", "full"],
          "engine": Literal["kv", "hf"], "dtype": Literal["float32", "bfloat16"], "rows": int,
          "horizon": int, "history": int, "max_new": int, "max_prompt": int, "places": int,
          "objects": int}  # flags that train.py has too


def make_parser(description):
    parser = Parser(description=description)
    add = parser.add_argument
    add("--model", default="tiny", help="a run, RUN/best, a model's folder, hub id or bare name")
    add("--split", help="default: test (house, webshop), valid_seen (alfworld)")
    add("--limit", type=int, default=0, help="play only so many games, evenly spaced (0: all)")
    add("--temperature", type=float, default=TEMPERATURES[""], help="greedy below 0.001")
    add("--seed", type=int, default=0)
    add("--out", help="NAME.json, or a folder for eval-SPLIT.json; default: the run, or runs/")
    for name, kind in SHARED.items():
        add(f"--{name}", help="default: the run's, else as for train.py", **options_of(kind))
    return parser


def complete(args):
    """Fills in the flags that were not given, by the run that --model names or else by default.
    -> the folder of the run's weights, or None where --model is no run."""
    run = weights = Path(args.model)
    if re.fullmatch(r"best|final|checkpoint-\d+", run.name):
        run = run.parent
    elif not (weights := run / "final").is_dir():
        weights = newest_checkpoint(run)
    stored = read_json(run / "config.json")
    if "env" not in stored:
        stored, weights = {}, None
    elif not weights:
        raise ValueError(f"{run} has no weights yet")
    settings = {"env": "house", "context": "window", "engine": "kv", "history": 2, "max_new": 512,
             "dtype": "bfloat16" if torch.cuda.is_available() else "float32"} | stored
    if args.env not in (None, settings["env"]):  # these fit the run's own environment alone
        settings |= dict.fromkeys(("data", "horizon", "max_prompt"))
    vars(args).update({k: settings.get(k) for k in SHARED if getattr(args, k) is None})
    if args.temperature < 0.001:  # nothing else is left of the distribution
        args.temperature = 0.0
    env = envs.known(args.env)
    if args.context == "window":
        args.max_prompt = args.max_prompt or env.max_prompt
    args.split = args.split or env.held_out[0]
    return weights


def evaluate(args, sampler_of, attempt=attempt, kind=""):
    """Plays the split with --model, writes the report and prints its table. sampler_of(args): what
    answers; kind: a word for the files' name."""
    weights = complete(args)
    args.weights = str(weights or args.model)
    options = envs.options_for(vars(args))
    ids = spaced(envs.tasks(args.env, args.split, **options), args.limit)
    # RUN/best, and a model that is of no run, have files of their own
    part = Path(args.model).name if weights in (None, Path(args.model)) else ""
    out = Path(args.out or (weights.parent if weights else "runs"))
    if out.suffix != ".json":
        out /= "-".join(filter(None, ["eval", part, args.split, kind])) + ".json"
    out.parent.mkdir(parents=True, exist_ok=True)
    answers = out.with_suffix(".jsonl")
    say(f"{len(ids)} games; what is played is in {answers}.new until all are")
    sampler = sampler_of(args)
    pool = envs.Pool(args.env, options, envs.default_workers(args.env))
    with contextlib.closing(pool):
        played = play(sampler, ids, pool, args, attempt, f"{answers}.new")
    if rank() > 0:
        return
    write_file(answers, "".join(json.dumps(record) + "\n" for _, record in played))
    records = [*dict(played).values()]  # of several attempts the last
    options = {k: v for k, v in vars(args).items() if k not in ("out", "plot", "table")}
    result = report(records) | options
    write_file(out, json.dumps(result, indent=1))
    print(table({f"{args.model}, {args.split}, T = {args.temperature:g}": result}, pool.env))
    if outgrown := sum(r["outgrown"] for r in records):
        print(f"{outgrown} of {len(records)} episodes outgrew --max_prompt")
    print(f"wrote {out}")


def local(args):
    """The model of --model as a Sampler."""
    lm = load(args.weights, env=args.env, dtype=getattr(torch, args.dtype))
    return sampler_for(lm, args, args.temperature)


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="only draw their curves (--out)")
    parser.add_argument("--table", nargs="+", metavar="RUN", help="only print the paper's table")
    with one_line_errors("eval.py", envs.GameError):
        args = parser.parse_args()
        join_ranks()
        if args.table:
            print(paper_table(args.table))
        elif args.plot:
            out = Path(args.out or "runs/curves.png")
            out.parent.mkdir(parents=True, exist_ok=True)
            plot(args.plot, out)
            print(f"wrote {out}")
        else:
            evaluate(args, local)


if __name__ == "__main__":
    main()
