"""Tables and curves from any run or checkpoint.

    python eval.py --model runs/house-tiny-0                a run of train.py, in its environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_unseen
    python eval.py --table runs/*                           the paper's table, as Markdown
    python eval.py --plot runs/house-tiny-?                 the curves of training
    python eval.py --table runs/* --half 0.62               methods compared: how well they end, how
                                                            soon they win 62 %, what values explain
    python eval.py --plot runs/* --half 0.62                the same over episodes, as a picture

Runs whose folders differ only in a trailing -SEED form a group. After ± stands the standard error
of a mean over its seeds, or of a difference of such means. Each held-out game is played once.
"""
import contextlib
import gc
import io
import json
import math
import os
import re
import sys
from html import escape
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

import numpy as np
import torch

import envs
from machine.cli import Parser, choose_threads, one_line_errors, options_of, progress
from machine.ranks import from_ranks, join_ranks, mean, rank, say, world
from machine.runs import read_json, read_log, settings_of, write_file
from model import load
from rollout import EVALUATION, Sampler, trajectories

SIDE_BY_SIDE = 144  # games played at once: all of an evaluation on ALFWorld
TEMPERATURES = {"": 0.4, "_at_1": 1.0}  # by endings of names in eval.json; 0.4 is verl-agent's

# ----------------------------------------------------------------------------- games and reports

def attempt(sampler, games, pool, *, seed, rows, history):
    """Plays {number: game} and yields (number, record) of an episode as soon as it is over."""
    for number, turns, episode in trajectories(
            sampler, [*games.values()], pool, trajs=games, seed=(seed, 0, EVALUATION),
            rows=rows or SIDE_BY_SIDE, history=history, what="evaluation"):
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
    compile = temperature == 1 and bool(getattr(settings, "compile", False))
    check = (settings.context, compile) not in lm.fastest  # once for a model and a context
    with progress("preparing the sampler" + ", which compiles it" * compile):
        return Sampler(lm, settings.engine, settings.context, settings.max_new, temperature,
                       compile, settings.max_prompt, check)


def spaced(ids, limit):
    """`limit` of the sorted ids (0: all), evenly spaced so that every category keeps its share."""
    return [ids[i * len(ids) // limit] for i in range(limit)] if 0 < limit < len(ids) else ids


def report(records, end=""):
    """Success of n games, the mean score, success by category, under names that end so."""
    kinds = sorted({r["category"] for r in records})
    won = {kind: mean([r["won"] for r in records if r["category"] == kind]) for kind in kinds}
    return {f"success{end}": mean([r["won"] for r in records]), f"n{end}": len(records),
            f"score{end}": mean([r["score"] for r in records]), f"success{end}_by_category": won}


def play(sampler, ids, pool, settings, attempt=attempt, path=os.devnull):
    """Plays the games of these ids, split over the ranks -> records in order. Rank 0 also writes
    its own to `path` as they come."""
    games = {n: game for n, game in enumerate(ids) if n * world() // len(ids) == rank()}
    played = []
    with open(path if rank() == 0 else os.devnull, "w") as file:
        for numbered in attempt(sampler, games, pool, seed=settings.seed, rows=settings.rows,
                                history=settings.history):
            played.append(numbered)
            print(json.dumps(numbered[1]), file=file, flush=True)
    played.sort(key=lambda numbered: numbered[0])  # they end in any order
    return from_ranks([record for _, record in played])


def of_run(lm, pool, config, temperatures=TEMPERATURES):
    """A run of train.py plays its --eval_games, all at verl-agent's temperature and in the house at
    1 too -> {ending of the names in eval.json: records}."""
    split = envs.known(config.env).held_out[0]
    ids = envs.tasks(config.env, split, **envs.options_for(vars(config)))
    ids = spaced(ids, config.eval_games)
    out = {}
    for end, temperature in temperatures.items():
        if config.eval_games and (end == "" or config.env == "house"):
            out[end] = play(sampler_for(lm, config, temperature), ids, pool, config)
            gc.collect()  # a sampler refers to itself, and would keep its memory
    return out


def success_of(played):
    """What `of_run` gives, in words."""
    return ", ".join(f"{mean([r['won'] for r in records]):.1%} of {len(records)} held-out games at "
                     f"T = {TEMPERATURES[end]:g}" for end, records in played.items()) or "not asked"


def write_of_run(before, after, config):
    """eval.json: the report of a run before and after training; eval.jsonl: every episode. -> the
    paper's table of this run."""
    out = {"env": config.env, "temperature": TEMPERATURES[""]}
    lines = []
    for when, mark, played in (("before", "_before", before), ("after", "", after)):
        for end, records in played.items():
            out |= report(records, mark + end)
            played_at = {"when": when, "temperature": TEMPERATURES[end]}
            lines += [json.dumps(played_at | record) + "\n" for record in records]
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(lines))
    return paper_table([config.out])


# ------------------------------------------------------------------------- groups of finished runs

def group_runs(folders, finished=False):
    """{label: runs} by the folders' names without -SEED. What is no run is named and left out."""
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in folders])
    groups = {}
    for folder in map(Path, folders):
        try:
            run = SimpleNamespace(
                config=settings_of(folder), lines=read_log(folder / "metrics.jsonl"),
                result=read_json(folder / "eval.json"))
            if not (run.result if finished else run.lines):
                raise ValueError("it is not finished")
            label = re.sub(r"-\d+$", "", os.path.relpath(folder, parent))
            groups.setdefault(label, []).append(run)
        except (OSError, ValueError) as error:
            print(f"left out: {folder}: {error}", file=sys.stderr)
    if not groups:
        raise ValueError("none of these folders is a run of train.py")
    return groups


class Mean(NamedTuple):
    """A mean over seeds and its standard error, NaN where there is one seed only."""

    mean: float
    error: float

    @classmethod
    def of(cls, values):
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
        return cls(float(np.mean(values)), float(error))

    def minus(self, other):
        """The difference of two means of independent runs."""
        return Mean(self.mean - other.mean, float(np.hypot(self.error, other.error)))

    def text(self, digits=1, sign=""):
        if np.isnan(self.mean):
            return "–"
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
    keys = {"Score": "score{}", "Success": "success{}"} if env.graded else (
        {kind: kind for kind in env.categories.values()} | {"All": "success{}"})
    if "success_at_1" in first[0].result:
        keys["All, T = 1"] = "success{}_at_1"

    def row(label, runs, end=""):
        results = [run.result | run.result.get(f"success{end}_by_category", {}) for run in runs]
        columns = [[100 * its.get(key.format(end), np.nan) for its in results]
                   for key in keys.values()]
        return [label, str(len(runs)), *[Mean.of(shares).text() for shares in columns]]

    rows = [["method", "seeds", *keys, "seconds", "M tokens"],
            [*row("start", first, "_before"), "", ""]]  # which has cost nothing
    for label, runs in groups.items():
        seconds = [sum(line["time_total"] for line in run.lines) for run in runs]
        tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in run.lines) / 1e6
                  for run in runs]
        rows.append([*row(label, runs), Mean.of(seconds).text(0), Mean.of(tokens).text(2)])
    return markdown(rows)


# ----------------------------------------------------------------------------- methods compared

WINDOW = 320  # episodes over which success is averaged
HALF = "episodes to half"
DIGITS = {"end": 1, "end, T = 1": 1, "while learning": 1, HALF: 0, "V explains": 0, "Q explains": 0}


def recent(run, key):
    """A run -> [(episodes until the end of an iteration, mean of a number over the last WINDOW of
    them), ...]. It starts where there are so many, or at the end."""
    values, episodes = np.array([(line[key], line["episodes"]) for line in run.lines]).T
    total = np.cumsum(episodes)
    begin = np.searchsorted(total, total - WINDOW, side="right")  # iterations left out
    first = min(np.searchsorted(total, WINDOW), len(total) - 1)
    return [(int(total[n]), np.average(values[begin[n]:n + 1], weights=episodes[begin[n]:n + 1]))
            for n in range(first, len(total))]


def measured(run, half):
    """-> {head: number}, in percent but for HALF; NaN where the run does not have it. A method
    whose values explain exactly 0 has none. "late": it ends before its success reaches `half`."""
    episodes = [line["episodes"] for line in run.lines]
    last = run.lines[-max(1, round(len(run.lines) / 4)):]
    shares = {"end": run.result.get("success", np.nan),
              "end, T = 1": run.result.get("success_at_1", np.nan),
              "while learning": np.average([x["success"] for x in run.lines], weights=episodes),
              "V explains": np.mean([line["v_explained_variance"] for line in last]) or np.nan,
              "Q explains": np.mean([line["q_explained_variance"] for line in last]) or np.nan}
    until = [n for n, success in recent(run, "success") if success >= half]
    return {head: 100 * share for head, share in shares.items()} | {
        HALF: until[0] if until else sum(episodes), "late": not until}


def comparison(folders, half):
    """Two tables as Markdown: what was measured, and the differences from the first group. A run
    that does not reach the half counts with all of its episodes, so that what is made of it is a
    bound, without an error; a difference of two bounds is left out."""
    groups = {label: [measured(run, half) for run in runs]
              for label, runs in group_runs(folders, finished=True).items()}
    heads = [head for head in DIGITS
             if not all(np.isnan(run[head]) for runs in groups.values() for run in runs)]
    first, means, late = next(iter(groups)), {}, {}
    rows = [["run", "seeds", *heads]]
    less = [[f"less {first}", *(head for head in heads if not head.endswith("explains"))]]
    for label, runs in groups.items():
        its = means[label] = {head: Mean.of([run[head] for run in runs]) for head in heads}
        late[label] = sum(run["late"] for run in runs)
        if late[label]:
            its[HALF] = its[HALF]._replace(error=np.nan)
        row = {head: mean.text(DIGITS[head]) for head, mean in its.items()}
        if late[label]:
            row[HALF] = f"≥ {row[HALF]} ({len(runs) - late[label]} of {len(runs)} do)"
        rows.append([label, str(len(runs)), *row.values()])
        row = {head: its[head].minus(means[first][head]).text(DIGITS[head], "+")
               for head in less[0][1:]}
        if late[label] or late[first]:
            sign = "≥" if late[label] else "≤"
            row[HALF] = "–" if late[label] and late[first] else f"{sign} {row[HALF]}"
        less.append([label, *row.values()])
    del less[1]  # of the first group from itself
    return f"{markdown(rows)}\n\n{markdown(less)}"


# ------------------------------------------------------------------------------------- pictures

PANELS = {"success": "success: lines, of rollouts at T = 1",
          "v_explained_variance": "explained variance of V",
          "q_explained_variance": "explained variance of Q", "kl": "KL to the start (nats a token)"}
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #888888".split()  # Okabe and Ito
DASHES, MARKERS = ("-", "--", "-.", ":"), " s^Dv*PX"  # so that a picture can be read in grey too


def over_iterations(run, key):
    """A number of metrics.jsonl, averaged over five iterations; the KL's median."""
    values = [line[key] for line in run.lines]
    average = np.median if key == "kl" else np.mean
    return [(n + 1, average(values[max(0, n - 2):n + 3])) for n in range(len(values))]


def held_out(run):
    """Success on held-out games before training and after each iteration, NaN where unknown."""
    before = run.result.get("success_before", np.nan)
    looks = [before, *(line.get("held_out", np.nan) for line in run.lines)]
    looks[-1] = run.result.get("success", looks[-1])
    return looks


def setting(config):
    """The model, the environment and its size."""
    size = [f"{config.get(k)} {k}" for k in ("places", "objects") if config["env"] == "house"]
    turns = f"{config.get('horizon')} turns"
    return f"{Path(config['model']).name} on {config['env']} ({', '.join([*size, turns])})"


def draw(groups, path, half=None):
    """{label: runs} -> a picture at `path` with a panel for each of some keys of metrics.jsonl: of
    each group the mean over the seeds within a standard error. Dots are success on held-out games.
    With `half`, a success to be reached, it shows what methods are compared by, over episodes."""
    from matplotlib.figure import Figure  # here, because it takes a while to load
    from matplotlib.ticker import PercentFormatter
    if len(groups) > len(COLORS):
        raise ValueError(f"{len(groups)} groups of runs: a picture shows at most {len(COLORS)}")
    curve_of, panels, xlabel, note = over_iterations, [*PANELS], "iteration", ""
    if half is not None:
        curve_of, panels, xlabel, note = recent, panels[:2], "episodes", f"; last {WINDOW} episodes"
    configs = [runs[0].config for runs in groups.values()]
    # the discount of the return that V and Q explain; verl-agent's PPO pays the whole one
    targets = [1.0 if c.get("algo") == "ppo" else c.get("gamma") for c in configs]
    fig = Figure((4.2 * len(panels), 4.2), layout="constrained")
    axes = fig.subplots(1, len(panels))
    for ax, key in zip(axes, panels):
        ax.set(title=PANELS[key], xlabel=xlabel)
        ax.grid(True, alpha=0.3)
        if key == "kl":
            ax.set_yscale("symlog", linthresh=0.01)  # it has rare steps a thousand times larger
        ax.yaxis.set_major_formatter("{x:g}" if key == "kl" else PercentFormatter(1))
        for place, (label, runs) in enumerate(groups.items()):
            color = COLORS[place]
            # (n, runs, 2), as long as the shortest run
            points = np.array([*zip(*(curve_of(run, key) for run in runs))])
            x, y = points[:, 0, 0], points[..., 1]
            alike = targets[place] == targets[0] or "explained" not in key
            if alike and (y.any() or key == "success"):  # a baseline's V is always 0
                mean, error = np.array([Mean.of(row) for row in y]).T
                ax.plot(x, mean, color=color, linestyle=DASHES[place % 4], marker=MARKERS[place],
                        markersize=5, markevery=(len(x) * place // 40, max(1, len(x) // 5)),
                        label=f"{label}, n = {len(runs)}")
                ax.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, lw=0)
            if key == "success" and half is None:
                looks = [np.mean(its) for its in zip(*map(held_out, runs))]
                ax.scatter(range(len(looks)), looks, color=color, edgecolor="black", marker="D",
                           label=None if place else "held-out games, T = 0.4")
    axes[0].set_ylim(0, None)
    if half is not None:
        axes[0].axhline(half, color="black", lw=0.8, ls=":", label=f"{half:.0%}, to be reached")
    title = ", ".join(sorted({*map(setting, configs)}))
    fig.suptitle(f"{title}{note}; mean of the seeds ± a standard error", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=5)
    fig.savefig(path, dpi=110)


# --------------------------------------------------------------------------- an episode as a page

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 1rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 0 } section { border-top: 1px solid #ccc }
svg { width: 30rem; max-width: 100%; height: auto } b { margin-right: 1rem; font-weight: 600 }
pre, p { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .5rem }
pre { background: #f4f4f4; font-size: .85rem } p { font-family: ui-monospace, monospace }
"""


def svg(title, xlabel, series):
    """{name: numbers} -> a picture of them over 1, 2, ..., as text that depends on nothing else."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        fig = Figure((4.8, 2.4), layout="constrained")
        ax = fig.subplots()
        for (name, numbers), color in zip(series.items(), COLORS):
            ax.plot(range(1, len(numbers) + 1), numbers, marker=".", color=color, label=name)
        ax.set(title=title, xlabel=xlabel)
        ax.locator_params("x", integer=True)
        ax.grid(True, alpha=0.3)
        ax.legend(fontsize=8)
        fig.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()[out.getvalue().index("<svg"):]


def shaded(turn, decode):
    """The tokens of a response as HTML, the darker the less probable they were."""
    out, done = [], 0  # tokens that are shown
    for n, logp in enumerate(turn.logp):
        before = turn.action_ids[max(0, done - 1):done]  # spaces depend on the neighbour
        text = decode(before + turn.action_ids[done:n + 1])[len(decode(before)):]
        if text.endswith("\ufffd") and n + 1 < len(turn.logp):
            text = ""  # a part of a character, which is shown with the next
        else:
            done = n + 1
        shade = 1 - math.exp(logp) if math.isfinite(logp) else 1
        out.append(f'<mark style="background:rgba(230,159,0,{shade:.2f})" '
                   f'title="log-prob {logp:.3f}">{escape(text)}</mark>')
    return "".join(out)


def episode_page(title, turns, lines, decode):
    """The turns of a trajectory (rollout.Turn) as a page for a browser: what the agent saw and
    said, how sure it was of each token, V before and Q after each response, and what the
    environment answered; and the curves of the run, whose metrics.jsonl has these lines. There is
    no script in it and nothing from elsewhere. decode(ids) -> text."""
    end = "won" if turns[-1].won else "cut short" if turns[-1].truncated else "lost"
    curves = {name: [line[key] for line in lines] for name, key in (
        ("success", "success"), ("V explains", "v_explained_variance"),
        ("Q explains", "q_explained_variance"))}
    body = [f"<h1>{escape(title)}, game {escape(str(turns[0].task))}: {end}</h1>",
            svg("V and Q of this episode", "turn", {
                "V, before the response": [turn.v for turn in turns],
                "Q, after it": [turn.q for turn in turns]}),
            svg("This run", "iteration", curves)]
    for turn, after in zip_longest(turns, turns[1:]):
        numbers = {"V": turn.v, "Q": turn.q, "reward": turn.reward, "advantage": turn.advantage}
        heads = [f"<b>{name} {x:.2f}</b>" for name, x in numbers.items()]
        heads += ["<b>breaks the format</b>"] * turn.invalid
        heads += ["<b>not admissible</b>"] * (not turn.admissible)
        answer = f"The environment answered:<pre>{escape(after.obs)}</pre>" if after else ""
        body.append(f"<section><h2>Turn {turn.turn + 1}</h2>{''.join(heads)}"
                    f"<pre>{escape(turn.prompt)}</pre><p>{shaded(turn, decode)}</p>{answer}"
                    "</section>")
    return (f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
            f"{''.join(body)}</html>")


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
    add("--temperature", type=float, default=TEMPERATURES[""], help="0: greedy")
    add("--seed", type=int, default=0)
    add("--out", help="NAME.json, or a folder for eval-SPLIT.json; default: the run, or runs/")
    for name, kind in SHARED.items():
        add(f"--{name}", help="default: the run's, else as for train.py", **options_of(kind))
    return parser


def run_of(model):
    """-> the run that --model is of, as RUN or RUN/best, and its settings, or None and {}."""
    for folder in (Path(model), Path(model).parent):
        if "env" in (stored := read_json(folder / "config.json")):
            return folder, stored
    return None, {}


def complete(args):
    """Fills in the flags that were not given, by the run that --model names or else by default.
    -> the run's folder, or None where --model is of no run."""
    run, stored = run_of(args.model)
    args.weights = f"{run}/final" if run == Path(args.model) else args.model
    settings = {"env": "house", "context": "window", "engine": "kv", "history": 2, "max_new": 512,
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32"} | stored
    if args.env not in (None, settings["env"]):  # these fit the run's own environment alone
        settings |= dict.fromkeys(("data", "horizon", "max_prompt"))
    vars(args).update({k: settings.get(k) for k in SHARED if getattr(args, k) is None})
    env = envs.known(args.env)
    if args.context == "window":
        args.max_prompt = args.max_prompt or env.max_prompt
    args.split = args.split or env.held_out[0]
    return run


def evaluate(args, sampler_of, attempt=attempt, kind=""):
    """Plays the split with --model, writes the report and prints it. sampler_of(args): what
    answers; kind: a word for the files' name."""
    run = complete(args)
    options = envs.options_for(vars(args))
    ids = spaced(envs.tasks(args.env, args.split, **options), args.limit)
    own = "" if run == Path(args.model) else Path(args.model).name  # RUN/best has its own files
    out = Path(args.out or run or "runs")
    if out.suffix != ".json":
        out /= "-".join(filter(None, ["eval", own, args.split, kind])) + ".json"
    out.parent.mkdir(parents=True, exist_ok=True)
    answers = out.with_suffix(".jsonl")
    say(f"{len(ids)} games; what is played is in {answers}.new until all are")
    sampler = sampler_of(args)
    with contextlib.closing(envs.Pool(args.env, options, envs.default_workers(args.env))) as pool:
        played = play(sampler, ids, pool, args, attempt, f"{answers}.new")
    if rank() > 0:
        return
    write_file(answers, "".join(json.dumps(record) + "\n" for record in played))
    last = {record["task"]: record for record in played}.values()  # of several attempts at a game
    result = report(last) | vars(args)
    write_file(out, json.dumps(result, indent=1))
    shares = {"score": result["score"]} | result["success_by_category"]
    rest = ", ".join(f"{name} {100 * share:.1f}" for name, share in shares.items())
    print(f"{args.model}, {args.split}, T = {args.temperature:g}, {len(last)} games: success "
          f"{Mean.of([100 * record['won'] for record in last]).text()}, {rest}")
    if outgrown := sum(record["outgrown"] for record in played):
        print(f"{outgrown} of {len(played)} episodes outgrew --max_prompt")
    print(f"wrote {out}")


def local(args):
    """The model of --model as a Sampler."""
    lm = load(args.weights, env=args.env, dtype=getattr(torch, args.dtype))
    choose_threads(lm.model)
    return sampler_for(lm, args, args.temperature)


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="only draw their curves (--out)")
    parser.add_argument("--table", nargs="+", metavar="RUN", help="only print the paper's table")
    parser.add_argument("--half", type=float, help="a success to be reached, half of what can be "
                        "gained: --table and --plot then compare methods by it")
    with one_line_errors("eval.py", envs.GameError):
        args = parser.parse_args()
        join_ranks()
        if args.half is not None and not (args.table or args.plot):
            raise ValueError("--half goes with --table or --plot")
        if args.table:
            compared = args.half is not None
            print(comparison(args.table, args.half) if compared else paper_table(args.table))
        elif args.plot:
            out = args.out or Path(args.plot[0]).parent / "curves.png"
            draw(group_runs(args.plot, finished=args.half is not None), out, args.half)
            print(f"wrote {out}")
        else:
            evaluate(args, local)


if __name__ == "__main__":
    main()
