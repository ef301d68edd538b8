"""Compares methods over seeds: how well they end, how soon they learn, what their values explain.

    python tools/compare.py --half 0.62 results/worth/b/{sapo,novalue,ppo}-?            two tables
    python tools/compare.py --half 0.62 --plot bed.png results/worth/b/{sapo,ppo}-?     a picture

Runs whose folders differ only in a trailing -SEED form a group. After ± stands a standard error:
of a mean over the seeds, or of its difference from the mean of the group that is named first.
"""
import signal
if __name__ == "__main__":  # Ctrl-C while this imports leaves without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from eval import group_runs
from worlds.curves import style
from machine.cli import Parser, Share, one_line_errors

WINDOW = 320  # episodes over which success is averaged
LAST = 0.25  # share of a run's iterations at its end, over which explained variance is averaged


class Mean(NamedTuple):
    """A mean and its standard error, NaN where there is one number only."""

    mean: float
    error: float

    @classmethod
    def of(cls, values):
        n = len(values)
        return cls(float(np.mean(values)), float(np.std(values, ddof=1) / n ** 0.5) if n > 1 else
                   float("nan"))

    def minus(self, other):
        """The difference of two means of independent runs."""
        return Mean(self.mean - other.mean, float(np.hypot(self.error, other.error)))

    def text(self, digits, sign=""):
        error = "" if np.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{error}"


def recent(lines, key):
    """Lines of metrics.jsonl -> of each iteration the episodes until its end, and the mean of a
    number over the last WINDOW of them. It starts where there are so many, or at the end."""
    episodes = np.array([line["episodes"] for line in lines])
    total, out = np.cumsum(episodes), []
    summed = np.cumsum(episodes * [line[key] for line in lines])
    for n in range(len(lines)):
        if total[n] >= WINDOW or n == len(lines) - 1:
            before = np.searchsorted(total, total[n] - WINDOW, side="right")  # iterations left out
            past = (total[before - 1], summed[before - 1]) if before else (0, 0.0)
            out.append((int(total[n]), float((summed[n] - past[1]) / (total[n] - past[0]))))
    return out


def episodes_until(lines, level):
    """-> the episodes after which success at T = 1 has reached `level`, else all of them; and
    whether it has."""
    for episodes, success in recent(lines, "success"):
        if success >= level:
            return episodes, True
    return sum(line["episodes"] for line in lines), False


def at_the_end(lines, key):
    """The mean of a number over the last iterations."""
    return float(np.mean([line[key] for line in lines[-max(1, round(LAST * len(lines))):]]))


def while_learning(lines):
    """The success of all episodes of a run, at T = 1."""
    won = sum(line["episodes"] * line["success"] for line in lines)
    return won / sum(line["episodes"] for line in lines)


HALF = "episodes to half"
MEASURES = {  # head: (of a run -> a number or None, digits)
    "end": (lambda run, half: percent(run.result.get("success")), 1),
    "end, T = 1": (lambda run, half: percent(run.result.get("success_at_1")), 1),
    "while learning": (lambda run, half: percent(while_learning(run.lines)), 1),
    HALF: (lambda run, half: episodes_until(run.lines, half)[0], 0),
    "V explains": (lambda run, half: percent(at_the_end(run.lines, "v_explained_variance")), 0),
    "Q explains": (lambda run, half: percent(at_the_end(run.lines, "q_explained_variance")), 0)}


def percent(share):
    return None if share is None else 100 * share


def measured(runs, half):
    """-> {head: Mean} of the measures that all of the runs have."""
    found = {head: [of(run, half) for run in runs] for head, (of, _) in MEASURES.items()}
    return {head: Mean.of(values) for head, values in found.items() if None not in values}


def tables(groups, half):
    """{label: runs} -> two tables as Markdown: what was measured, and the differences from the
    first group. A run that does not reach the half counts with all of its episodes, so that what
    is made of it is a bound, without an error; a difference of two bounds is left out. A method
    whose values explain exactly 0 has none."""
    means = {label: measured(runs, half) for label, runs in groups.items()}
    short = {label: sum(not episodes_until(run.lines, half)[1] for run in runs)
             for label, runs in groups.items()}  # how many runs do not reach it
    for label in filter(short.get, groups):
        means[label][HALF] = means[label][HALF]._replace(error=float("nan"))
    first, *others = groups
    heads = [head for head in MEASURES if all(head in its for its in means.values())]
    rows = [["run", "seeds", *heads]]
    for label, runs in groups.items():
        its = {head: means[label][head].text(MEASURES[head][1]) for head in heads}
        if short[label]:
            its[HALF] = f"≥ {its[HALF]} ({len(runs) - short[label]} of {len(runs)} do)"
        its |= {head: "–" for head in heads[-2:] if not means[label][head].mean}
        rows.append([label, str(len(runs)), *its.values()])
    heads = heads[:-2]  # all but what is explained
    less = [[f"less {first}", *heads]]
    for label in others:
        its = {head: means[label][head].minus(means[first][head]).text(MEASURES[head][1], "+")
               for head in heads}
        if short[first]:
            its[HALF] = "–" if short[label] else f"≤ {its[HALF]}"
        elif short[label]:
            its[HALF] = f"≥ {its[HALF]}"
        less.append([label, *its.values()])
    return f"{markdown(rows)}\n\n{markdown(less)}"


def markdown(rows):
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(groups, half, path):
    """Success and V's explained variance over the episodes: the mean over the seeds, within a
    standard error of it."""
    fig = Figure((10, 4.2 + 0.25 * (len(groups) // 4)), layout="constrained")
    axes = fig.subplots(1, 2)
    for n, (label, runs) in enumerate(groups.items()):
        for ax, key in zip(axes, ("success", "v_explained_variance")):
            curves = [recent(run.lines, key) for run in runs]
            x, y = np.array([*zip(*curves)]).transpose(2, 0, 1)  # each (iterations, seeds)
            if key == "success" or y.any():  # the values of a method without any are 0
                mean, error = np.array([Mean.of(row) for row in y]).T
                line, = ax.plot(x[:, 0], mean, linewidth=2, label=f"{label}, n = {len(runs)}",
                                **style(n, len(mean)))
                ax.fill_between(x[:, 0], mean - error, mean + error, color=line.get_color(),
                                alpha=0.12, linewidth=0)
    axes[0].axhline(half, color="black", linewidth=0.8, linestyle=":")
    axes[0].set(title="success at T = 1", ylim=(0, None))
    axes[1].set(title="explained variance of V")
    for ax in axes:
        ax.set_xlabel("episodes")
        ax.yaxis.set_major_formatter(PercentFormatter(1))
        ax.grid(True, alpha=0.3)
    fig.suptitle(f"mean of the last {WINDOW} episodes and of the seeds, ± a standard error",
                 fontsize=10)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9,
               ncols=min(4, len(groups)))
    fig.savefig(path, dpi=110)


def main():
    parser = Parser(description="Compares methods over seeds.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="finished runs of train.py")
    parser.add_argument("--half", type=Share, required=True, help="the success to be reached, half "
                        "of what can be gained")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture in place of the tables")
    with one_line_errors("compare.py"):
        args = parser.parse_args()
        groups = group_runs(args.runs, finished=True)
        if args.plot:
            draw(groups, args.half, args.plot)
            print(f"wrote {args.plot}")
        else:
            print(tables(groups, args.half))


if __name__ == "__main__":
    main()
