"""The curves of training runs. It is not needed to understand SAPO."""
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

PANELS = {"success": "success", "v_explained_variance": "explained variance of V",
          "q_explained_variance": "explained variance of Q", "kl": "KL to the start (nats a token)"}
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #888888".split()  # Okabe and Ito
DASHES, MARKERS = ("-", "--", "-.", ":"), "os^Dv*PX"  # so that a picture can be read in grey too
CAPTION = ("thin: one seed, thick: mean of the seeds over five iterations (KL: median); "
           "lines: rollouts, sampled at T = 1, rimmed dots: held-out games at T = 0.4")


def style(n, points):
    """How the n-th group's line of so many points looks; but for the first, marks lie along it.
    From the ninth on colours come again, with other dashes and marks."""
    again = n // len(COLORS)
    return {"color": COLORS[n % len(COLORS)], "linestyle": DASHES[(n + again) % len(DASHES)],
            "marker": MARKERS[(n + 4 * again) % len(MARKERS)], "markersize": 5 if n else 0,
            "markevery": (points * (2 * n + 1) // 80, max(1, points // 5))}


def draw(groups, title, path):
    """groups: {label: runs with lines of metrics.jsonl and result, what eval.json holds} -> a
    picture at `path`. A colour for each group. What is always 0, such as a baseline's V, is not
    drawn. The KL has rare steps that are a thousand times larger: the axis cuts them off."""
    fig = Figure((4 * len(PANELS), 3.7 + 0.2 * (len(groups) // 6)), layout="constrained")
    axes, faint = fig.subplots(1, len(PANELS)), max(0.1, 0.5 / len(groups))
    for ax, (key, panel) in zip(axes, PANELS.items()):
        ax.set(title=panel, xlabel="iteration")
        ax.grid(True, alpha=0.3)
        for n, (label, runs) in enumerate(groups.items()):
            color = COLORS[n % len(COLORS)]
            curves = [[line[key] for line in run.lines] for run in runs]
            curves = [curve for curve in curves if any(curve) or key == "success"]
            for curve in curves:
                ax.plot(range(1, len(curve) + 1), curve, color=color, linewidth=0.7, alpha=faint)
            if curves:
                smooth = smoothed(curves, np.median if key == "kl" else np.mean)
                ax.plot(range(1, len(smooth) + 1), smooth, linewidth=2,
                        label=f"{label}, n = {len(curves)}", **style(n, len(smooth)))
            if key == "success" and (points := held_out_points(runs)):
                ax.scatter(*zip(*points), color=color, edgecolor="black", zorder=3,
                           marker=style(n, 1)["marker"])
    fig.suptitle(f"{title}\n{CAPTION}", fontsize=10)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", fontsize=8,
               ncols=min(6, len(groups)))
    axes[0].set_ylim(0, 1.02 if axes[0].get_ylim()[1] > 0.75 else None)
    for ax in axes[:-1]:
        ax.yaxis.set_major_formatter(PercentFormatter(1))
    thick = [max(line.get_ydata()) for line in axes[-1].lines if line.get_linewidth() > 1]
    axes[-1].set_yscale("symlog", linthresh=0.01)
    axes[-1].set_yticks([0, 0.01, 0.1, 1, 10, 100, 1000])
    axes[-1].yaxis.set_major_formatter("{x:g}")
    axes[-1].set_ylim(0, 10 * max(thick, default=1))
    fig.savefig(path, dpi=110)


def smoothed(curves, average):
    """The average of curves over five iterations, as long as the shortest of them."""
    middle = average([*zip(*curves)], 1)
    return [average(middle[max(0, i - 2):i + 3]) for i in range(len(middle))]


def held_out_points(runs):
    """(iteration, mean success on held-out games) before, after, and where it was looked at."""
    found = {}
    for run in runs:
        looks = {n: line.get("held_out") for n, line in enumerate(run.lines, 1)}
        looks[0], last = run.result.get("success_before"), len(run.lines)
        looks[last] = run.result.get("success", looks.get(last))
        for iteration, success in looks.items():
            found.setdefault(iteration, []).extend([success] * (success is not None))
    return sorted((n, np.mean(its)) for n, its in found.items() if len(its) == len(runs))
