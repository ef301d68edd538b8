"""Evaluation, tables and curves of any run or checkpoint.

    python eval.py --model runs/house-tiny-0        plays a run's model in the run's environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_unseen
    python eval.py --table runs/*                   the paper's table, as Markdown
    python eval.py --plot runs/house-tiny-?         training curves
    python eval.py --table runs/* --reach 0.62      compares methods: final success, episodes until
                                                    success reaches 62 %, explained variance
    python eval.py --plot runs/* --reach 0.62       the same as curves over episodes

Runs whose folders differ only in a trailing -SEED are seeds of one method. ± is one standard
error. In tables and curves it is that of a mean over seeds, or of a difference of two such means;
in the line that --model prints, that of a mean over games. Each held-out game is played once per
temperature.
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
from model import load, local_folder
from rollout import EVALUATION, Sampler, trajectories
from runtime.checkpoint import RunDir, read_json, write_file
from runtime.cli import Parser, argparse_options, choose_threads, one_line_errors, progress
from runtime.distributed import (all_gather_list, init_distributed, mean_or_zero, print0, rank,
                                 world_size)

MAX_NUM_SEQS = 144  # games played side by side: all of an evaluation on ALFWorld
TEMPERATURES = {"": 0.4, "_at_1": 1.0}  # by suffixes of names in eval.json; 0.4 is verl-agent's

# --------------------------------------------------------------------------------- playing games

def run_episodes(sampler, games, pool, *, seed, max_num_seqs, history):
    """Plays {number: game} and yields (number, episode_record) as soon as an episode is over."""
    for number, turns, builder in trajectories(
            sampler, [*games.values()], pool, trajs=games, seed=(seed, 0, EVALUATION),
            max_num_seqs=max_num_seqs or MAX_NUM_SEQS, history=history, label="evaluation"):
        yield number, episode_record(pool.env, games[number], turns, builder)


def episode_record(env, game, turns, builder) -> dict:
    """An episode as it is stored in eval.jsonl. If its first prompt did not fit, it has no
    turns."""
    info, unplayed = builder.info, not turns
    return {"task": game, "category": env.categories.get(info["category"], info["category"]),
            "won": info["won"], "score": info["score"], "turns": len(turns),
            "truncated": unplayed or turns[-1].truncated,
            "context_overflow": unplayed or turns[-1].context_overflow,
            "valid_actions": mean_or_zero([not turn.invalid for turn in turns]),
            "actions": [turn.action for turn in turns], "responses": [turn.text for turn in turns]}


def sampler_for(lm, settings, temperature=1.0):
    """Makes a Sampler. settings: a train.Config, or the flags of eval.py, with which nothing is
    compiled."""
    compile = temperature == 1 and bool(getattr(settings, "compile", False))
    check = (settings.context, compile) not in lm.fast_sampling  # once per model
    with progress("preparing the sampler" + " (compiling)" * compile):
        return Sampler(lm, settings.engine, settings.context, settings.max_new_tokens, temperature,
                       compile, settings.max_prompt, check)


def evenly_spaced(ids, limit):
    """`limit` of the sorted ids (0: all), evenly spaced, so that categories keep their shares."""
    return [ids[i * len(ids) // limit] for i in range(limit)] if 0 < limit < len(ids) else ids


def report(records, suffix="") -> dict:
    """Success, number of games, mean score, and success by category, under names with a suffix."""
    categories = sorted({r["category"] for r in records}, key=str)
    won = {c: mean_or_zero([r["won"] for r in records if r["category"] == c]) for c in categories}
    success, score = (mean_or_zero([r[name] for r in records]) for name in ("won", "score"))
    return {f"success{suffix}": success, f"n{suffix}": len(records), f"score{suffix}": score,
            f"success{suffix}_by_category": won}


def play(sampler, ids, pool, settings, run_episodes=run_episodes, path=os.devnull) -> list:
    """Plays the games with these ids, split over the ranks -> records in order. Rank 0 also writes
    its own to `path` as they come. GameError: an environment failed, on whichever rank."""
    games = {n: game for n, game in enumerate(ids) if n * world_size() // len(ids) == rank()}
    played, errors = [], []
    with open(path if rank() == 0 else os.devnull, "w") as file:
        try:
            for number, record in run_episodes(sampler, games, pool, seed=settings.seed,
                                               max_num_seqs=settings.max_num_seqs,
                                               history=settings.history):
                played.append((number, record))
                print(json.dumps(record), file=file, flush=True)
        except envs.GameError as error:
            errors.append(str(error))
    if errors := all_gather_list(errors):
        raise envs.GameError(errors[0])
    played.sort(key=lambda item: item[0])  # they end in any order
    return all_gather_list([record for _, record in played])


def evaluate_config(lm, pool, config, temperatures=TEMPERATURES) -> dict:
    """Plays the --eval_games of a run, at temperature 0.4 as verl-agent does, and in the house also
    at 1 -> {suffix of the names in eval.json: records}."""
    ids = envs.tasks(pool.env, pool.env.held_out[0], **pool.options)
    ids = evenly_spaced(ids, config.eval_games)
    out = {}
    for suffix, temperature in temperatures.items():
        if config.eval_games and (suffix == "" or config.env == "house"):
            out[suffix] = play(sampler_for(lm, config, temperature), ids, pool, config)
            gc.collect()  # the sampler's reference cycle would keep its KV cache
    return out


def held_out_success(lm, pool, config) -> float:
    """Success in the --eval_games of a run at the usual temperature."""
    played = evaluate_config(lm, pool, config, {"": TEMPERATURES[""]})
    return report(*played.values())["success"]


def success_of(played) -> str:
    """The result of `evaluate_config` in words."""
    return ", ".join(
        f"{mean_or_zero([r['won'] for r in records]):.1%} of {len(records)} held-out games at "
        f"T = {TEMPERATURES[suffix]:g}" for suffix, records in played.items()) or "not evaluated"


def write_reports(before, after, config) -> str:
    """Writes eval.json, the report of a run before and after training, and eval.jsonl, every
    episode. Returns the paper's table of this run."""
    out = {"env": envs.name_of(config.env), "temperature": TEMPERATURES[""]}
    lines = []
    for when, prefix, played in (("before", "_before", before), ("after", "", after)):
        for suffix, records in played.items():
            out |= report(records, prefix + suffix)
            about = {"when": when, "temperature": TEMPERATURES[suffix]}
            lines += [json.dumps(about | record) + "\n" for record in records]
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(lines))
    return paper_table([config.out])


# ---------------------------------------------------------------------------------------- tables

# What may differ between seeds of one experiment: the machine, and what changes no result.
NOT_OF_THE_EXPERIMENT = {
    "seed", "out", "resume", "git", "versions", "date", "wandb", "data", "save_every",
    "max_num_seqs", "compile", "tokens_per_micro_batch", "gradient_checkpointing",
    "checksum", "workers"}  # the last two are in old runs only


def group_runs(folders, finished=False):
    """Groups runs by their folders' names without -SEED, and by their settings -> {label: runs}.
    Folders without a run, or if `finished` without a finished one, and a second run of one seed,
    are skipped with a message."""
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in folders])
    found = {}
    for folder in {Path(f).resolve(): Path(f) for f in folders}.values():  # each run once
        try:
            stored = RunDir(folder)
            run = SimpleNamespace(config=stored.settings(), lines=stored.metrics(),
                                  result=read_json(folder / "eval.json"))
            if not (run.result if finished else run.lines):
                raise ValueError("it has no eval.json" if finished else "no iteration is finished")
            label = re.sub(r"-\d+$", "", os.path.relpath(folder, parent))
            seeds = found.setdefault(label, {}).setdefault(experiment(run.config), {})
            if run.config["seed"] in seeds:
                raise ValueError(f"seed {run.config['seed']} of {label} is there already")
            seeds[run.config["seed"]] = run
        except (OSError, ValueError) as error:
            print(f"skipping {folder}: {error}", file=sys.stderr)
    if not found:
        raise ValueError("none of these folders can be used")
    groups = {}
    for label, experiments in found.items():
        for settings, seeds in experiments.items():
            others = [dict(other) for other in experiments]
            differs = [f"{name}={value}" for name, value in settings
                       if any(other.get(name, value) != value for other in others)]
            name = f"{label} ({', '.join(differs)})" if differs else label
            groups.setdefault(name, []).extend(seeds.values())
    return groups


def experiment(config) -> tuple:
    """The settings that seeds of one experiment have in common, as ((name, value), ...). Their
    models may have names that differ in a trailing -SEED, too."""
    config = config | {"model": re.sub(r"-\d+$", "", str(config["model"]))}
    return tuple((name, str(value)) for name, value in sorted(config.items())
                 if name not in NOT_OF_THE_EXPERIMENT)


class Mean(NamedTuple):
    """A mean, usually over seeds, and its standard error, which is NaN for one value."""

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
    """The paper's Table 1 as Markdown: means over seeds in percent, ± one standard error. Runs with
    another start or environment have a table of their own."""
    tables = {}  # setting: {label: runs}
    for label, runs in group_runs(folders, finished=True).items():
        tables.setdefault(setting(runs[0].config), {})[label] = runs
    heads = [f"{name}:\n\n" * (len(tables) > 1) for name in tables]
    return "\n\n".join(head + one_table(groups) for head, groups in zip(heads, tables.values()))


def one_table(groups) -> str:
    """{label: runs of one model in one environment} -> a table."""
    first = next(iter(groups.values()))
    env = envs.env_class(first[0].config["env"])
    keys = {"Score": "score{}", "Success": "success{}"} if env.graded else (
        {name: name for name in env.categories.values()} | {"All": "success{}"})
    if "success_at_1" in first[0].result:
        keys["All, T = 1"] = "success{}_at_1"

    def row(label, runs, when=""):
        results = [run.result | run.result.get(f"success{when}_by_category", {}) for run in runs]
        columns = [[100 * result.get(key.format(when), np.nan) for result in results]
                   for key in keys.values()]
        return [label, str(len(runs)), *[Mean.of(shares).text() for shares in columns]]

    rows = [["method", "seeds", *keys, "seconds", "M tokens"],
            [*row("start", first, "_before"), "", ""]]  # it cost no time
    for label, runs in groups.items():
        seconds = [sum(line["time_total"] for line in run.lines) for run in runs]
        tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in run.lines) / 1e6
                  for run in runs]
        rows.append([*row(label, runs), Mean.of(seconds).text(0), Mean.of(tokens).text(2)])
    return markdown(rows)


# ------------------------------------------------------------------------- comparison of methods

WINDOW = 320  # episodes over which success is averaged
EPISODES = "episodes to {:.0%}"  # until that success is reached
DIGITS = {"end": 1, "end, T = 1": 1, "while learning": 1, EPISODES: 0, "V explains": 0,
          "Q explains": 0}


def recent(run, key) -> list:
    """A metric averaged over the last WINDOW episodes, after each iteration, as [(episodes so far,
    mean), ...], from where there are that many episodes (or at the end, if there never are)."""
    values, episodes = np.array([(line[key], line["episodes"]) for line in run.lines]).T
    total = np.cumsum(episodes)
    # for each iteration, the first one of the window that ends with it
    begin = np.searchsorted(total, total - WINDOW, side="right")
    first = min(np.searchsorted(total, WINDOW), len(total) - 1)
    return [(int(total[n]), np.average(values[begin[n]:n + 1], weights=episodes[begin[n]:n + 1]))
            for n in range(first, len(total))]


def measured(run, reach) -> dict:
    """{column: number} for a run, in percent except for EPISODES; NaN where it does not apply, as
    the explained variance of a method whose values are always 0. Explained variances are those of
    the last quarter of the iterations. "never": whether success stays below `reach`."""
    episodes = [line["episodes"] for line in run.lines]
    last = run.lines[-max(1, round(len(run.lines) / 4)):]
    shares = {"end": run.result.get("success", np.nan),
              "end, T = 1": run.result.get("success_at_1", np.nan),
              "while learning": np.average([x["success"] for x in run.lines], weights=episodes),
              "V explains": np.mean([line["v_explained_variance"] for line in last]) or np.nan,
              "Q explains": np.mean([line["q_explained_variance"] for line in last]) or np.nan}
    until = [n for n, success in recent(run, "success") if success >= reach]
    return {head: 100 * share for head, share in shares.items()} | {
        EPISODES: until[0] if until else sum(episodes), "never": not until}


def comparison(folders, reach) -> str:
    """Two tables as Markdown: the measurements, and their differences from the first group. A run
    whose success stays below `reach` counts with all of its episodes; the mean is then a lower
    bound and has no error, and a difference of two bounds is left out."""
    groups = {label: [measured(run, reach) for run in runs]
              for label, runs in group_runs(folders, finished=True).items()}
    heads = [head for head in DIGITS
             if not all(np.isnan(run[head]) for runs in groups.values() for run in runs)]
    first, means, never = next(iter(groups)), {}, {}
    compared = [head for head in heads if not head.endswith("explains")]
    rows = [["run", "seeds", *(head.format(reach) for head in heads)]]
    differences = [[f"minus {first}", *(head.format(reach) for head in compared)]]
    for label, runs in groups.items():
        row_means = means[label] = {head: Mean.of([run[head] for run in runs]) for head in heads}
        never[label] = sum(run["never"] for run in runs)
        if never[label]:
            row_means[EPISODES] = row_means[EPISODES]._replace(error=np.nan)
        row = {head: mean.text(DIGITS[head]) for head, mean in row_means.items()}
        if never[label]:
            reached = len(runs) - never[label]
            row[EPISODES] = f"≥ {row[EPISODES]} ({reached} of {len(runs)} reach it)"
        rows.append([label, str(len(runs)), *row.values()])
        row = {head: row_means[head].minus(means[first][head]).text(DIGITS[head], "+")
               for head in compared}
        if never[label] or never[first]:
            sign = "≥" if never[label] else "≤"
            row[EPISODES] = "–" if never[label] and never[first] else f"{sign} {row[EPISODES]}"
        differences.append([label, *row.values()])
    del differences[1]  # the first group minus itself
    return "\n\n".join(markdown(table) for table in (rows, differences) if len(table) > 1)


# ------------------------------------------------------------------------------------- pictures

PANELS = {"success": "success (lines: rollouts at T = 1)",
          "v_explained_variance": "explained variance of V",
          "q_explained_variance": "explained variance of Q",
          "kl": "KL to the initial model (nats per token)"}
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #888888".split()  # Okabe and Ito
DASHES, MARKERS = ("-", "--", "-.", ":"), " s^Dv*PX"  # for pictures printed in grey


def over_iterations(run, key):
    """A metric averaged over five iterations; of the KL, the median."""
    values = [line[key] for line in run.lines]
    average = np.median if key == "kl" else np.mean
    return [(n + 1, average(values[max(0, n - 2):n + 3])) for n in range(len(values))]


def held_out(run):
    """Success on held-out games before training and after each iteration, NaN where unknown."""
    before = run.result.get("success_before", np.nan)
    success = [before, *(line.get("held_out", np.nan) for line in run.lines)]
    success[-1] = run.result.get("success", success[-1])
    return success


def setting(config):
    """The model, the environment and its size."""
    size = [f"{config.get(k)} {k}" for k in ("places", "objects") if config["env"] == "house"]
    turns = f"{config.get('horizon')} turns"
    model = re.sub(r"-\d+$", "", Path(config["model"]).name)  # one that was made for each seed
    return f"{model} on {config['env']} ({', '.join([*size, turns])})"


def draw(groups, path, reach=None) -> None:
    """Draws {label: runs}, one panel per metric: lines are means over seeds with a band of one
    standard error, diamonds are success on held-out games. With `reach`, a success rate, it shows
    what `comparison` measures, over episodes."""
    from matplotlib.figure import Figure  # here, because it takes a while to load
    from matplotlib.ticker import PercentFormatter
    if len(groups) > len(COLORS):
        raise ValueError(f"{len(groups)} groups of runs: a picture shows at most {len(COLORS)}")
    curve_of, panels, xlabel, note = over_iterations, [*PANELS], "iteration", ""
    if reach is not None:
        curve_of, panels, xlabel, note = recent, panels[:2], "episodes", f"; last {WINDOW} episodes"
    configs = [runs[0].config for runs in groups.values()]
    gammas = [config.get("gamma") for config in configs]  # of the returns that V and Q explain
    fig = Figure((4.2 * len(panels), 4.2), layout="constrained")
    axes = fig.subplots(1, len(panels))
    for ax, key in zip(axes, panels):
        ax.set(title=PANELS[key], xlabel=xlabel)
        ax.grid(True, alpha=0.3)
        if key == "kl":
            ax.set_yscale("symlog", linthresh=0.01)  # rare values are a thousand times larger
        ax.yaxis.set_major_formatter("{x:g}" if key == "kl" else PercentFormatter(1))
        for place, (label, runs) in enumerate(groups.items()):
            color = COLORS[place]
            # (n, runs, 2), as long as the shortest run
            points = np.array([*zip(*(curve_of(run, key) for run in runs))])
            x, y = points[:, 0, 0], points[..., 1]
            alike = gammas[place] == gammas[0] or "explained" not in key
            if alike and (y.any() or key == "success"):  # a method without values has V = 0
                mean, error = np.array([Mean.of(row) for row in y]).T
                ax.plot(x, mean, color=color, linestyle=DASHES[place % 4], marker=MARKERS[place],
                        markersize=5, markevery=(len(x) * place // 40, max(1, len(x) // 5)),
                        label=f"{label}, n = {len(runs)}")
                ax.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, lw=0)
            if key == "success" and reach is None:
                success = [np.mean(values) for values in zip(*map(held_out, runs))]
                ax.scatter(range(len(success)), success, color=color, edgecolor="black", marker="D",
                           label=None if place else f"held-out games, T = {TEMPERATURES['']}")
    axes[0].set_ylim(0, None)
    if reach is not None:
        axes[0].axhline(reach, color="black", lw=0.8, ls=":", label=f"{reach:.0%}")
    title = ", ".join(sorted({*map(setting, configs)}))
    fig.suptitle(f"{title}{note}; mean over seeds ± one standard error", fontsize=10)
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=5)
    fig.savefig(path, dpi=110)


# --------------------------------------------------------------------------- an episode as a page

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 1rem auto; padding: 0 1rem }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 0 } section { border-top: 1px solid #ccc }
h3 { font-size: .85rem; margin: .3rem 0 0; font-weight: 400; color: #666 }
svg { width: 30rem; max-width: 100%; height: auto } b { margin-right: 1rem; font-weight: 600 }
pre, p { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .5rem }
pre { background: #f4f4f4; font-size: .85rem } p { font-family: ui-monospace, monospace }
"""


def svg(title, xlabel, series):
    """{name: numbers} -> a line plot over 1, 2, ... as an SVG element."""
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


def shaded(turn, decode) -> str:
    """The tokens of a response as HTML, the darker the less likely they were."""
    out, done = [], 0  # done: tokens shown so far
    for n, logp in enumerate(turn.logp):
        before = turn.action_ids[max(0, done - 1):done]  # spaces depend on the previous token
        text = decode(before + turn.action_ids[done:n + 1])[len(decode(before)):]
        if text.endswith("\ufffd") and n + 1 < len(turn.logp):
            text = ""  # part of a character, shown with the next token
        else:
            done = n + 1
        shade = 1 - math.exp(logp) if math.isfinite(logp) else 1
        out.append(f'<mark style="background:rgba(230,159,0,{shade:.2f})" '
                   f'title="log-prob {logp:.3f}">{escape(text)}</mark>')
    return "".join(out)


def episode_page(title, turns, lines, decode, tools=None) -> str:
    """One trajectory as an HTML page without scripts: V and Q over its turns, the training curves
    so far (`lines` of metrics.jsonl), the schemas of tools, and each turn's messages with their
    roles, response (shaded by the probability of its tokens), V before and Q after it, and the
    environment's answer where it is text (but for the last turn, of which it is not kept).
    decode(ids) -> text."""
    end = "won" if turns[-1].won else "truncated" if turns[-1].truncated else "lost"
    curves = {name: [line[key] for line in lines] for name, key in (
        ("success", "success"), ("explained variance of V", "v_explained_variance"),
        ("explained variance of Q", "q_explained_variance"))}
    body = [f"<h1>{escape(title)}, game {escape(str(turns[0].task))}: {end}</h1>",
            svg("V and Q of this episode", "turn", {
                "V before the response": [turn.v for turn in turns],
                "Q after the response": [turn.q for turn in turns]}),
            svg("This run", "iteration", curves)]
    if tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        body.append(f"<h2>Tools</h2><pre>{escape(schemas)}</pre>")
    for turn, after in zip_longest(turns, turns[1:]):
        numbers = {"V": turn.v, "Q": turn.q, "reward": turn.reward,
                   "normalized advantage": turn.advantage}
        heads = [f"<b>{name} {x:.2f}</b>" for name, x in numbers.items()]
        heads += ["<b>invalid format</b>"] * turn.invalid
        heads += ["<b>not admissible</b>"] * (not turn.admissible)
        sent = [f"<h3>{m['role']}</h3><pre>{escape(m['content'])}</pre>" for m in turn.messages]
        answer = ""  # messages are shown where they were sent, in the next turn
        if after and isinstance(after.obs, str):
            answer = f"Answer of the environment:<pre>{escape(after.obs)}</pre>"
        body.append(f"<section><h2>Turn {turn.turn + 1}</h2>{''.join(heads)}{''.join(sent)}"
                    f"<h3>assistant</h3><p>{shaded(turn, decode)}</p>{answer}</section>")
    return (f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
            f"{''.join(body)}</html>")


# --------------------------------------------------------------------------------- command line

SHARED = {"env": str, "data": str, "context": Literal["window", "full"],
          "engine": Literal["kv", "hf"], "dtype": Literal["float32", "bfloat16"],
          "max_num_seqs": int, "horizon": int, "history": int, "max_new_tokens": int,
          "max_prompt": int, "places": int, "objects": int,
          "date": str}  # settings of a run: flags of train.py, and the day on which it began


def make_parser(description):
    parser = Parser(description=description)
    add = parser.add_argument
    add("--model", default="tiny", help="a run, RUN/best, a model's folder, hub id or bare name")
    add("--split", help="default: test (house, webshop), valid_seen (alfworld)")
    add("--limit", type=int, default=0, help="number of games, evenly spaced (0: all)")
    add("--temperature", type=float, default=TEMPERATURES[""], help="0: greedy")
    add("--seed", type=int, default=0)
    add("--out", help="NAME.json, or a folder for eval-SPLIT.json; default: the run, or runs/")
    defaults = {"max_num_seqs": f"{MAX_NUM_SEQS} games side by side per rank",
                "date": "today (for chat templates that print it)"}
    for name, kind in SHARED.items():
        default = defaults.get(name, "that of train.py for models that are not tiny")
        add(f"--{name}", help=f"default: the run's; without a run, {default}",
            **argparse_options(kind))
    return parser


def run_of(model, env=None):
    """The folder of the run that --model belongs to, however it is reached, or None; and the
    settings by which that run played, from the model's own sapo.json or else from the run's
    config.json, or {}."""
    folder, run = Path(model), None
    if folder.is_dir():
        real = folder.resolve()
        run = next((place for place in (real, real.parent)
                    if "env" in read_json(place / "config.json")), None)
    settings = read_json(local_folder(model, env) / "sapo.json").get("run") or {}
    if run and not settings:
        settings = RunDir(run).settings()
    return run, settings


def complete(args):
    """Sets the flags that were not given: from the run that --model belongs to, else by default.
    Returns the run's folder, or None."""
    run, stored = run_of(args.model, args.env)
    args.weights = args.model
    if run and run == Path(args.model).resolve():
        args.weights = f"{run}/final"
    settings = {"env": "house", "context": None, "engine": "kv", "history": 2,
                "max_new_tokens": 512,
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32"} | stored
    if args.env not in (None, settings["env"]):  # these fit only the run's own environment
        settings |= dict.fromkeys(("data", "horizon", "max_prompt", "context"))
    if args.context not in (None, settings["context"]):  # it is meant for the run's own context
        settings["max_prompt"] = None
    vars(args).update({k: settings.get(k) for k in SHARED if getattr(args, k) is None})
    env, args.context = envs.env_class(args.env), envs.context_for(args.env, args.context)
    if args.context == "window":
        args.max_prompt = args.max_prompt or env.max_prompt
    args.split = args.split or env.held_out[0]
    return run


def evaluate(args, make_sampler, run_episodes=run_episodes, kind=""):
    """Plays a split with make_sampler(args), writes the report and prints it. `kind` becomes part
    of the files' names."""
    run = complete(args)
    options = envs.options_for(vars(args))
    ids = evenly_spaced(envs.tasks(args.env, args.split, **options), args.limit)
    model = Path(args.model).resolve()
    # RUN/best has its own files, and so has another temperature or seed
    own = "" if run == model else model.name
    other = [f"{name}={getattr(args, name):g}" for name, usual in
             (("temperature", TEMPERATURES[""]), ("seed", 0)) if getattr(args, name) != usual]
    out = Path(args.out or run or "runs")
    if out.suffix != ".json":
        out /= "-".join(filter(None, ["eval", own, args.split, kind, *other])) + ".json"
    out.parent.mkdir(parents=True, exist_ok=True)
    answers = out.with_suffix(".jsonl")
    if out.exists():
        print0(f"{out} will be replaced")
    print0(f"playing {len(ids)} games of {args.env}, context {args.context}"
           f"{'' if run else ', by default settings and flags'}; finished ones are written to "
           f"{answers}.new")
    sampler = make_sampler(args)
    with contextlib.closing(envs.Pool(args.env, options, envs.default_workers(args.env))) as pool:
        played = play(sampler, ids, pool, args, run_episodes, f"{answers}.new")
    if rank() > 0:
        return
    write_file(answers, "".join(json.dumps(record) + "\n" for record in played))
    # Reflexion (tools/prompted.py) plays a game several times, and the last one counts
    last = {record["task"]: record for record in played}.values()
    result = report(last) | vars(args)
    write_file(out, json.dumps(result, indent=1))
    shares = {"score": result["score"]} | result["success_by_category"]
    shares.pop(None, None)  # games without a category
    rest = ", ".join(f"{name} {100 * share:.1f}" for name, share in shares.items())
    print(f"{args.model}, {args.split}, T = {args.temperature:g}, {len(last)} games: success "
          f"{Mean.of([100 * record['won'] for record in last]).text()}, {rest}")
    if context_overflow := sum(record["context_overflow"] for record in played):
        print(f"{context_overflow} of {len(played)} episodes ended because the next prompt did not "
              "fit (--max_prompt, or the model's context)")
    print(f"wrote {out}")


def load_sampler(args):
    """A Sampler with the model of --model."""
    lm = load(args.weights, env=args.env, dtype=getattr(torch, args.dtype))
    if args.date:
        lm.chat.date = args.date
    choose_threads(lm.model)
    return sampler_for(lm, args, args.temperature)


def main():
    parser = make_parser(__doc__.partition("\n")[0])
    parser.add_argument("--plot", nargs="+", metavar="RUN", help="only draw training curves")
    parser.add_argument("--table", nargs="+", metavar="RUN", help="only print the paper's table")
    parser.add_argument("--reach", type=float, help="a success rate, such as half-way from start "
                        "to end: --table and --plot then compare how soon methods reach it")
    with one_line_errors("eval.py", envs.GameError):
        args = parser.parse_args()
        init_distributed()
        if args.reach is not None and not (args.table or args.plot):
            raise ValueError("--reach goes with --table or --plot")
        if args.table:
            compared = args.reach is not None
            print(comparison(args.table, args.reach) if compared else paper_table(args.table))
        elif args.plot:
            out = args.out or Path(args.plot[0]).parent / "curves.png"
            draw(group_runs(args.plot, finished=args.reach is not None), out, args.reach)
            print(f"wrote {out}")
        else:
            evaluate(args, load_sampler)


if __name__ == "__main__":
    main()
