"""Compares methods over seeds: how well they end, how soon they learn, what their values explain.

    python tools/compare.py --half 0.62 results/runs/b/{sapo,novalue,ppo}-?              two tables
    python tools/compare.py --half 0.62 --plot bed.png results/runs/b/{sapo,ppo}-?       a picture

Runs whose folders differ only in a trailing -SEED form a group. After ± stands a standard error:
of a mean over the seeds, or of its difference from the mean of the group that is named first.
"""
import os
import sys

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from eval import Mean, draw, group_runs, markdown
from machine.cli import Parser, one_line_errors

WINDOW = 320  # episodes over which success is averaged
LAST = 0.25  # share of a run's iterations at its end, over which explained variance is averaged


def recent(run, key):
    """A run -> of each iteration the episodes until its end, and the mean of a number over the
    last WINDOW of them. It starts where there are so many, or at the end."""
    episodes = np.array([line["episodes"] for line in run.lines])
    total = np.cumsum(episodes)
    summed = np.cumsum(episodes * [line[key] for line in run.lines])
    out = []
    for n in range(len(total)):
        if total[n] >= WINDOW or n == len(total) - 1:
            before = np.searchsorted(total, total[n] - WINDOW, side="right")  # iterations left out
            past = (total[before - 1], summed[before - 1]) if before else (0, 0.0)
            out.append((int(total[n]), float((summed[n] - past[1]) / (total[n] - past[0]))))
    return out


def episodes_until(run, level):
    """-> the episodes after which success at T = 1 has reached `level`, else all of them; and
    whether it has."""
    for episodes, success in recent(run, "success"):
        if success >= level:
            return episodes, True
    return sum(line["episodes"] for line in run.lines), False


HALF = "episodes to half"
DIGITS = {"end": 1, "end, T = 1": 1, "while learning": 1, HALF: 0, "V explains": 0, "Q explains": 0}


def measured(run, half):
    """-> {head: number}, in percent but for HALF; NaN where the run does not have it. A method
    whose values explain exactly 0 has none."""
    lines = run.lines
    last = lines[-max(1, round(LAST * len(lines))):]
    won = sum(line["episodes"] * line["success"] for line in lines)
    shares = {"end": run.result.get("success", np.nan),
              "end, T = 1": run.result.get("success_at_1", np.nan),
              "while learning": won / sum(line["episodes"] for line in lines),
              "V explains": np.mean([line["v_explained_variance"] for line in last]) or np.nan,
              "Q explains": np.mean([line["q_explained_variance"] for line in last]) or np.nan}
    numbers = {head: 100 * share for head, share in shares.items()}
    return numbers | {HALF: episodes_until(run, half)[0]}


def tables(groups, half):
    """{label: runs} -> two tables as Markdown: what was measured, and the differences from the
    first group. A run that does not reach the half counts with all of its episodes, so that what
    is made of it is a bound, without an error; a difference of two bounds is left out."""
    means, short = {}, {}
    for label, runs in groups.items():
        found = [measured(run, half) for run in runs]
        means[label] = {head: Mean.of([its[head] for its in found]) for head in DIGITS}
        short[label] = sum(not episodes_until(run, half)[1] for run in runs)  # do not reach it
        if short[label]:
            means[label][HALF] = means[label][HALF]._replace(error=np.nan)
    first, *others = groups
    heads = [head for head in DIGITS
             if not all(np.isnan(its[head].mean) for its in means.values())]
    rows = [["run", "seeds", *heads]]
    for label, runs in groups.items():
        its = {head: means[label][head].text(DIGITS[head]) for head in heads}
        if short[label]:
            its[HALF] = f"≥ {its[HALF]} ({len(runs) - short[label]} of {len(runs)} do)"
        rows.append([label, str(len(runs)), *its.values()])
    heads = [head for head in heads if not head.endswith("explains")]
    less = [[f"less {first}", *heads]]
    for label in others:
        its = {head: means[label][head].minus(means[first][head]).text(DIGITS[head], "+")
               for head in heads}
        if short[first]:
            its[HALF] = "–" if short[label] else f"≤ {its[HALF]}"
        elif short[label]:
            its[HALF] = f"≥ {its[HALF]}"
        less.append([label, *its.values()])
    return f"{markdown(rows)}\n\n{markdown(less)}"


def main():
    parser = Parser(description="Compares methods over seeds.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="finished runs of train.py")
    parser.add_argument("--half", type=float, required=True, help="the success to be reached, half "
                        "of what can be gained")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture in place of the tables")
    with one_line_errors("compare.py"):
        args = parser.parse_args()
        groups = group_runs(args.runs, finished=True)
        if args.plot:
            note = f"; last {WINDOW} episodes"
            draw(groups, args.plot, recent, ("success", "v_explained_variance"), "episodes", note,
                 args.half)
            print(f"wrote {args.plot}")
        else:
            print(tables(groups, args.half))


if __name__ == "__main__":
    main()
