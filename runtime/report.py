"""Tables of finished runs, training curves, and an episode as a page.

    group_runs      reads the folders of runs, and groups those that differ only in their seed
    paper_table     their results on held-out games, as Markdown
    comparison      what they reached, and after how many episodes, as Markdown
    draw            their training curves, as a picture
    episode_page    one trajectory as an HTML page

± and bands are one standard error: of a mean over seeds, or of a difference of two such means.
What depends on the environment, such as the columns of its table, comes from the caller (eval.py).
"""
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
from typing import NamedTuple

import numpy as np

from runtime.checkpoint import RunDir, read_json

# ---------------------------------------------------------------------------------------- numbers

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


def key_of(name, when="after", temperature=None) -> str:
    """The key of a result in eval.json: success, success_before, success_at_1, success_before_at_1.
    when: before or after training. temperature: None for the environment's usual one."""
    return (name + ("_before" if when == "before" else "")
            + ("" if temperature is None else f"_at_{temperature:g}"))


# ----------------------------------------------------------------------------------- groups of runs

# What may differ between seeds of one experiment: the machine, and what changes no result.
NOT_OF_THE_EXPERIMENT = {
    "seed", "out", "resume", "git", "versions", "date", "wandb", "data", "save_every",
    "max_num_seqs", "compile", "tokens_per_micro_batch", "gradient_checkpointing",
    "checksum", "workers"}  # the last two are in old runs only


def group_runs(folders, finished=False) -> dict:
    """Groups runs by their folders' names without -SEED, and by their settings -> {label: runs}.
    Folders without a run, or if `finished` without a finished one, and a second run of one seed,
    are skipped with a message. ValueError: none is left."""
    parent = os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in folders])
    found = {}  # {name of the folders without -SEED: {settings: {seed: run}}}
    for folder in {Path(f).resolve(): Path(f) for f in folders}.values():  # each run once
        try:
            run = read_run(folder, finished)
            name = re.sub(r"-\d+$", "", os.path.relpath(folder, parent))
            seeds = found.setdefault(name, {}).setdefault(common_settings(run.config), {})
            if run.config["seed"] in seeds:
                raise ValueError(f"seed {run.config['seed']} of {name} is there already")
            seeds[run.config["seed"]] = run
        except (OSError, ValueError) as error:
            print(f"skipping {folder}: {error}", file=sys.stderr)
    if not found:
        raise ValueError("none of these folders can be used")
    groups = {}
    for name, runs_of in found.items():
        for settings, seeds in runs_of.items():
            differs = differences(settings, [*runs_of])
            label = f"{name} ({differs})" if differs else name
            groups.setdefault(label, []).extend(seeds.values())
    return groups


def read_run(folder, finished):
    """A run's settings `config`, `lines` of metrics.jsonl, and `result`, its eval.json or {}.
    ValueError, OSError: it has no finished iteration, or if `finished` no eval.json; or there is no
    run."""
    stored = RunDir(folder)
    run = SimpleNamespace(config=stored.settings(), lines=stored.metrics(),
                          result=read_json(folder / "eval.json"))
    if finished and not run.result:
        raise ValueError("it has no eval.json")
    if not run.lines:
        raise ValueError("no iteration is finished")
    if missing := [key for key in NEEDED if any(key not in line for line in run.lines)]:
        raise ValueError(f"its metrics.jsonl lacks {', '.join(missing)}")
    return run


NEEDED = ("success", "episodes", "v_explained_variance", "q_explained_variance", "kl",
          "time_total", "tokens_encoded", "tokens_sampled")  # in each line of metrics.jsonl


def common_settings(config) -> tuple:
    """The settings that seeds of one experiment have in common, as ((name, value), ...). Their
    models may have names that differ in a trailing -SEED, too."""
    config = config | {"model": re.sub(r"-\d+$", "", str(config["model"]))}
    return tuple((name, str(value)) for name, value in sorted(config.items())
                 if name not in NOT_OF_THE_EXPERIMENT)


def differences(settings, experiments) -> str:
    """Those of an experiment's settings that another experiment has with another value, in words.
    All of them are as common_settings returns them."""
    others = [dict(other) for other in experiments]
    return ", ".join(f"{name}={value}" for name, value in settings
                     if any(other.get(name, value) != value for other in others))


def setting(config):
    """The model, the environment and its size."""
    size = [f"{config.get(k)} {k}" for k in ("places", "objects") if config["env"] == "house"]
    turns = f"{config.get('horizon')} turns"
    model = re.sub(r"-\d+$", "", str(config["model"]))  # one that was made for each seed
    return f"{model} on {config['env']} ({', '.join([*size, turns])})"


# ----------------------------------------------------------------------------------------- tables

def markdown(rows) -> str:
    """Rows of texts, the first of which is the head, as a table."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def paper_table(folders, columns_of) -> str:
    """The paper's Table 1 as Markdown: means over seeds in percent, ± one standard error.
    columns_of(config) -> {head: (success or score, a category of tasks or None for all)}."""
    return for_each_setting(folders, lambda groups: one_table(groups, columns_of))


def for_each_setting(folders, table_of) -> str:
    """table_of({label: runs}) for the runs of each start and environment, which have a table of
    their own. One that cannot be made, because its environment cannot be imported here, is left out
    with a message. ValueError: none can be made."""
    groups_of, tables, why = {}, {}, ""  # by setting
    for label, runs in group_runs(folders, finished=True).items():
        groups_of.setdefault(setting(runs[0].config), {})[label] = runs
    for name, groups in groups_of.items():
        try:
            tables[name] = table_of(groups)
        except ValueError as error:
            why = f"{name}: {error}"
            print(f"skipping {why}", file=sys.stderr)
    if not tables:
        raise ValueError(why)
    return "\n\n".join(f"{name}:\n\n" * (len(groups_of) > 1) + table
                       for name, table in tables.items())


def one_table(groups, columns_of) -> str:
    """{label: runs of one model in one environment} -> a table."""
    first = next(iter(groups.values()))
    columns = {head: (*column, None) for head, column in columns_of(first[0].config).items()}
    if any(key_of("success", temperature=1) in run.result
           for runs in groups.values() for run in runs):
        columns["All, T = 1"] = "success", None, 1

    def share(result, when, name, category, temperature) -> float:
        if category is None:
            return 100 * result.get(key_of(name, when, temperature), np.nan)
        return 100 * result.get(f"{key_of(name, when)}_by_category", {}).get(category, np.nan)

    def row(label, runs, when) -> list:
        shares = [[share(run.result, when, *column) for run in runs] for column in columns.values()]
        return [label, str(len(runs)), *[Mean.of(x).text() for x in shares]]

    rows = [["method", "seeds", *columns, "seconds", "M tokens"],
            [*row("start", first, "before"), "", ""]]  # it cost no time
    for label, runs in groups.items():
        seconds = [sum(line["time_total"] for line in run.lines) for run in runs]
        tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in run.lines) / 1e6
                  for run in runs]
        rows.append([*row(label, runs, "after"), Mean.of(seconds).text(0), Mean.of(tokens).text(2)])
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
    """{column: number} for a run, in percent except for EPISODES; NaN where it does not apply.
    "never": whether success stays below `reach`."""
    episodes = [line["episodes"] for line in run.lines]
    shares = {"end": run.result.get("success", np.nan),
              "end, T = 1": run.result.get(key_of("success", temperature=1), np.nan),
              "while learning": np.average([x["success"] for x in run.lines], weights=episodes),
              "V explains": explained(run, "v_explained_variance"),
              "Q explains": explained(run, "q_explained_variance")}
    until = [n for n, success in recent(run, "success") if success >= reach]
    return {head: 100 * share for head, share in shares.items()} | {
        EPISODES: until[0] if until else sum(episodes), "never": not until}


def explained(run, key) -> float:
    """The mean explained variance in the last quarter of the iterations. NaN for a method whose
    values are always 0: it has none that could explain anything."""
    last = run.lines[-max(1, round(len(run.lines) / 4)):]
    shares = [line[key] for line in last]
    return np.mean(shares) if any(shares) else np.nan


def comparison(folders, reach) -> str:
    """Two tables as Markdown for each start and environment: the measurements, and their
    differences from the first group. A run whose success stays below `reach` counts with all of its
    episodes; the mean is then a lower bound and has no error, and a difference of two bounds is
    left out."""
    return for_each_setting(folders, lambda groups: compared(groups, reach))


def compared(groups, reach) -> str:
    """{label: runs of one model in one environment} -> the tables of `comparison`."""
    groups = {label: [measured(run, reach) for run in runs] for label, runs in groups.items()}
    heads = [head for head in DIGITS
             if not all(np.isnan(run[head]) for runs in groups.values() for run in runs)]
    first, means, never = next(iter(groups)), {}, {}
    differing = [head for head in heads if not head.endswith("explains")]
    rows = [["run", "seeds", *(head.format(reach) for head in heads)]]
    differences = [[f"minus {first}", *(head.format(reach) for head in differing)]]
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
               for head in differing}
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
EVALUATIONS = (("held_out", "held-out games", "D"), ("validation", "validation", "o"))
DASHES, MARKERS = ("-", "--", "-.", ":"), " s^Dv*PX"  # for pictures printed in grey


def over_iterations(run, key):
    """A metric averaged over five iterations; of the KL, the median."""
    values = [line[key] for line in run.lines]
    average = np.median if key == "kl" else np.mean
    return [(n + 1, average(values[max(0, n - 2):n + 3])) for n in range(len(values))]


def evaluations(run, name):
    """Success before training and after each iteration, NaN where unknown: on "held_out" games, or
    in "validation"."""
    success = [np.nan, *(line.get(name, np.nan) for line in run.lines)]
    if name == "held_out":
        success[0] = run.result.get("success_before", np.nan)
        success[-1] = run.result.get("success", success[-1])
    return success


def plain(text) -> str:
    """A text that matplotlib shows as it is: between two $ it would read mathematics."""
    return text.replace("$", r"\$")


def draw(groups, path, reach=None) -> None:
    """Draws {label: runs}, one panel per metric: lines are means over seeds with a band of one
    standard error, diamonds are success on held-out games, circles in validation. With `reach`, a
    success rate, it shows what `comparison` measures, over episodes."""
    from matplotlib.figure import Figure  # here, because it takes a while to load
    from matplotlib.ticker import PercentFormatter
    if len(groups) > len(COLORS):
        raise ValueError(f"{len(groups)} groups of runs: a picture shows at most {len(COLORS)}")
    curve_of, panels, xlabel, note = over_iterations, [*PANELS], "iteration", ""
    if reach is not None:
        curve_of, panels, xlabel, note = recent, panels[:2], "episodes", f"; last {WINDOW} episodes"
    configs = [runs[0].config for runs in groups.values()]
    # an unfinished run does not say at which temperature it is evaluated
    temperature = next(iter(groups.values()))[0].result.get("temperature", 0.4)
    gammas = [config.get("gamma") for config in configs]  # of the returns that V and Q explain
    fig = Figure((4.2 * len(panels), 4.2), layout="constrained")
    axes, named = fig.subplots(1, len(panels)), set()
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
                        label=f"{plain(label)}, n = {len(runs)}")
                ax.fill_between(x, mean - error, mean + error, color=color, alpha=0.15, lw=0)
            if key == "success" and reach is None:
                for name, words, marker in EVALUATIONS:
                    success = np.mean([*zip(*(evaluations(run, name) for run in runs))], axis=1)
                    known = np.flatnonzero(~np.isnan(success))
                    if len(known):
                        label = f"{words}, T = {temperature:g}"
                        ax.scatter(known, success[known], color=color, edgecolor="black",
                                   marker=marker, label=None if label in named else label)
                        named.add(label)
    axes[0].set_ylim(0, None)
    if reach is not None:
        axes[0].axhline(reach, color="black", lw=0.8, ls=":", label=f"{reach:.0%}")
    title = ", ".join(sorted({*map(setting, configs)}))
    fig.suptitle(f"{plain(title)}{note}; mean over seeds ± one standard error", fontsize=10)
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


SYMBOLS = {n: 0x2400 + n for n in range(32) if chr(n) not in "\t\n"}  # of control characters


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
        if text.endswith("\ufffd") and n - done < 3 and n + 1 < len(turn.logp):
            text = ""  # part of a character, of at most four, shown with the next token
        else:
            done = n + 1
        shade = 1 - math.exp(logp) if math.isfinite(logp) else 1
        out.append(f'<mark style="background:rgba(230,159,0,{shade:.2f})" '
                   f'title="log-prob {logp:.3f}">{escape(text)}</mark>')
    return "".join(out)


def episode_page(title, turns, lines, decode, tools=None) -> str:
    """One trajectory as an HTML page without scripts: V and Q over its turns, the training curves
    so far (`lines` of metrics.jsonl), the schemas of tools, and each turn's messages with their
    roles, response (shaded by the probability of its tokens), V before and Q after it if the
    sampler gave them, and the environment's answer where it is text (but for the last turn, of
    which it is not kept). decode(ids) -> text."""
    end = "won" if turns[-1].won else "truncated" if turns[-1].truncated else "lost"
    curves = {name: [line[key] for line in lines] for name, key in (
        ("success", "success"), ("explained variance of V", "v_explained_variance"),
        ("explained variance of Q", "q_explained_variance"))}
    body = [f"<h1>{escape(title)}, game {escape(str(turns[0].task))}: {end}</h1>"]
    has_values = not any(math.isnan(turn.v + turn.q) for turn in turns)
    if has_values:
        body.append(svg("V and Q of this episode", "turn", {
            "V before the response": [turn.v for turn in turns],
            "Q after the response": [turn.q for turn in turns]}))
    body.append(svg("This run", "iteration", curves))
    if tools:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        body.append(f"<h2>Tools</h2><pre>{escape(schemas)}</pre>")
    for turn, after in zip_longest(turns, turns[1:]):
        numbers = {"V": turn.v, "Q": turn.q} if has_values else {}
        numbers |= {"reward": turn.reward, "normalized advantage": turn.advantage}
        heads = [f"<b>{name} {x:.2f}</b>" for name, x in numbers.items()]
        heads += ["<b>invalid format</b>"] * turn.invalid
        heads += ["<b>not admissible</b>"] * (not turn.admissible)
        sent = [f"<h3>{escape(m['role'])}</h3><pre>{escape(m['content'])}</pre>"
                for m in turn.messages]
        answer = ""  # messages are shown where they were sent, in the next turn
        if after and isinstance(after.obs, str):
            answer = f"Answer of the environment:<pre>{escape(after.obs)}</pre>"
        body.append(f"<section><h2>Turn {turn.turn + 1}</h2>{''.join(heads)}{''.join(sent)}"
                    f"<h3>assistant</h3><p>{shaded(turn, decode)}</p>{answer}</section>")
    page = (f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style>'
            f"{''.join(body)}</html>")
    # a lone surrogate cannot be written, and a control character is shown by its symbol
    return page.encode("utf-8", "replace").decode().translate(SYMBOLS)
