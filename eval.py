"""The paper's table and curves, from any checkpoint.

    python eval.py --model runs/house-tiny-0                             a run of train.py: its final model (or checkpoint), its environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_seen --out before.json
    python eval.py --model runs/webshop-tiny-0 --split test_500          in the shop: score and success
    python eval.py --plot runs/house-tiny-0 runs/house-tiny-1            one figure: every seed thin, the mean thick
    python eval.py --table runs/*                                        the paper's table: mean and deviation over seeds, as Markdown

Every game of the split is played exactly once (--repeats: so many times), in sorted order; success, and in the shop the score, are
printed in the paper's columns with n and a 95 % interval (Wilson's for success). Writes OUT (a JSON report) and beside it one line per episode (.jsonl).

Departure from the paper: it draws its test games with replacement (128 draws hold about 84 of valid_seen's 140 games).
"""
import argparse
import itertools
import json
import math
import os
import sys

import numpy as np
from tqdm import tqdm

import envs
from model import load
from rollout import Sampler, rollout

SIDE_BY_SIDE = 128  # games played at once, unless --rows says otherwise


def play(sampler, games, pool, *, seed=0, first=0, rows=None, history=2, max_prompt=2048, max_context=None, title="evaluation", quiet=False):
    """Plays every game once -> a record each: task, category, won, score, turns, and what was said and done. `first` numbers the
    games; a game's random numbers depend on (seed, its number) alone."""
    records = []
    with tqdm(total=len(games), desc=title, disable=quiet, leave=False) as bar:
        turns = rollout(sampler, games, pool, seed=(seed, 0, 5), trajs=range(first, first + len(games)), rows=rows or SIDE_BY_SIDE, history=history,
                        max_prompt=max_prompt, max_context=max_context, bar=bar)
    for _, mine in itertools.groupby(turns, lambda t: t.traj):
        mine = list(mine)
        records.append({"task": mine[-1].task, "category": pool.env.categories.get(mine[-1].category, mine[-1].category),
                        "won": mine[-1].won, "score": mine[-1].score, "turns": len(mine), "truncated": mine[-1].truncated, "outgrown": mine[-1].outgrown,
                        "valid_actions": float(np.mean([not t.invalid for t in mine])),
                        "actions": [t.action for t in mine], "responses": [t.text for t in mine]})
    return records


def wilson(k, n):
    """95 % interval of a share k / n: honest near 0 and 1, where the usual +- is not."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def report(records):
    """Success with n and interval, the mean score with the half of its 95 % interval, and success by category."""
    def share(rows):
        won = sum(r["won"] for r in rows)
        return {"success": won / max(1, len(rows)), "n": len(rows), "interval": [round(x, 4) for x in wilson(won, len(rows))]}

    columns = [*envs.CATEGORIES.values(), *envs.SHELVES.values()]
    columns += sorted({r["category"] for r in records} - {*columns})
    categories = {c: [r for r in records if r["category"] == c] for c in columns}
    shares = {c: share(rows) for c, rows in categories.items() if rows}
    scores = [r["score"] for r in records] or [0.0]
    return share(records) | {"score": float(np.mean(scores)), "score_half": float(1.96 * np.std(scores) / math.sqrt(len(scores))),
                             "success_by_category": {c: x["success"] for c, x in shares.items()}, "by_category": shares,
                             "turns": float(np.mean([r["turns"] for r in records])) if records else 0.0}


def table(rows, env):
    """{title: report} -> the paper's columns for an environment, as text."""
    names, width = list(env.categories.values()), max(map(len, rows)) + 2
    if env.graded:
        lines = [" " * width + f"{'Score':>13}{'Success':>15}{'n':>6}   ± half a 95 % interval"]
        for title, r in rows.items():
            half = (r["interval"][1] - r["interval"][0]) / 2
            lines.append(f"{title:{width}}{100 * r['score']:6.1f} ± {100 * r['score_half']:4.1f}{100 * r['success']:8.1f} ± {100 * half:4.1f}{r['n']:6}")
        return "\n".join(lines)
    lines = [" " * width + "".join(f"{c:>8}" for c in names) + f"{'All':>8}{'n':>6}   95 %"]
    for title, r in rows.items():
        cells = [f"{100 * r['by_category'][c]['success']:8.1f}" if c in r["by_category"] else f"{'-':>8}" for c in names]
        low, high = r["interval"]
        lines.append(f"{title:{width}}" + "".join(cells) + f"{100 * r['success']:8.1f}{r['n']:6}   {100 * low:.1f}-{100 * high:.1f}")
    return "\n".join(lines)


def spaced(ids, limit):
    """`limit` of the ids, evenly spaced, so that every category keeps its share; all where limit is 0."""
    return ids if not limit or limit >= len(ids) else [ids[i * len(ids) // limit] for i in range(limit)]


# -------------------------------------------------------------------------------------------------------------- curves


def read_run(folder):
    """-> (config, lines of metrics.jsonl). ValueError where there are none."""
    try:
        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
        with open(os.path.join(folder, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is no finished or running run of train.py: {error}") from None
    if not lines:
        raise ValueError(f"{folder}/metrics.jsonl has no line yet")
    return config, lines


def read_result(folder):
    """-> (config, eval.json, lines of metrics.jsonl) of a finished run."""
    config, lines = read_run(folder)
    try:
        with open(os.path.join(folder, "eval.json")) as file:
            return config, json.load(file), lines
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is not finished: {error}") from None


def by_setting(folders, read):
    """What `read` finds in the folders, in groups that differ in nothing but their seed; folders without a run are named and left out."""
    groups = {}
    for folder in folders:
        try:
            found = read(folder)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        same = {k: v for k, v in found[0].items() if k not in ("seed", "out", "git", "versions")}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(found)
    if not groups:
        raise ValueError("none of these folders is a run of train.py")
    return list(groups.values())


NAMES = {"sapo": "SAPO", "ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO", "gigpo": "GiGPO", "empg": "EMPG"}
IMPLIED = {"algo", "group", "critic", "c_v", "c_q", "without_std", "git", "versions", "seed", "out", "data", "workers", "resume"}


def labels(configs):
    """A name for each setting: the method, and whatever else the settings do not have in common."""
    differing = [k for k in configs[0] if k not in IMPLIED and len({json.dumps(c.get(k)) for c in configs}) > 1]
    out = []
    for c in configs:
        parts = [NAMES[c.get("algo", "sapo")] + (" without std" if c.get("without_std") else "")]
        if parts == ["SAPO"]:
            parts += [word for word, so in (("separate critic", c.get("critic") == "separate"), ("no V, no Q", c.get("critic") != "separate" and not c["c_v"] and not c["c_q"]),
                                            ("no Q", c["c_v"] and not c["c_q"])) if so]
        out.append(", ".join(parts + [f"{k} {c.get(k)}" for k in differing]))
    return out


def paper_table(folders):
    """The paper's Table 1 from finished runs, as Markdown: mean and standard deviation over seeds in percent, and what it cost."""
    groups = by_setting(folders, read_result)
    env = envs.known(groups[0][0][0]["env"])
    columns = ["score", "success"] if env.graded else [*env.categories.values(), "success"]
    heads = {"score": "Score", "success": "Success" if env.graded else "All"}

    def spread(values, digits=1):
        values = [v for v in values if v is not None]
        if not values:
            return "–"
        return f"{np.mean(values):.{digits}f}" + (f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "")

    def row(title, runs, before=""):
        cells = [spread([None if x is None else 100 * x for x in (
            result[f"{c}{before}"] if c in heads else result[f"success{before}_by_category"].get(c) for _, result, _ in runs)]) for c in columns]
        seconds = [sum(line["time_total"] for line in lines) for *_, lines in runs]
        tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in lines) / 1e6 for *_, lines in runs]
        memory = [max(line.get("peak_memory", 0) for line in lines) for *_, lines in runs]
        cost = ["", "", ""] if before else [spread(seconds, 0), spread(tokens, 2), f"{max(memory):.2f}" if max(memory) else "–"]
        return "| " + " | ".join([title, str(len(runs)), *cells, *cost]) + " |"

    titles = ["method", "seeds", *(heads.get(c, c) for c in columns), "seconds", "M tokens", "GB"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines.append(row("start", groups[0], "_before"))
    return "\n".join(lines + [row(name, runs) for name, runs in zip(labels([runs[0][0] for runs in groups]), groups)])


def plot_phases(reports, path):
    """The paper's runtime figure: seconds of an iteration by phase, method beside method, of `train.py --bench --ppo --out RUN`."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(reports), figsize=(4.5 * len(reports), 3.6), layout="constrained", squeeze=False)
    for ax, report in zip(axes[0], reports):
        algos, bottom = list(report["seconds"]), np.zeros(len(report["seconds"]))
        for phase in report["seconds"][algos[0]]:
            heights = np.array([report["seconds"][a][phase] for a in algos])
            if heights.any():
                ax.bar([NAMES[a] for a in algos], heights, bottom=bottom, width=0.6, label=phase)
                bottom += heights
        for n, height in enumerate(bottom):
            ax.text(n, height, f"{height:.1f}", ha="center", va="bottom")
        ax.set(title=f"{report['model']}, {report['versions']['device']}", ylabel="seconds an iteration")
        ax.legend(fontsize=8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


PANELS = {"success": "success of the rollouts", "v_explained_variance": "explained variance of V",
          "q_explained_variance": "explained variance of Q", "kl": "KL to the start (nats a token)"}


def plot(folders, path):
    """Runs that differ in nothing but their seed share a colour."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = by_setting(folders, read_run)
    names = labels([runs[0][0] for runs in groups])
    fig, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for n, runs in enumerate(groups):
        label = names[n] + (f", {len(runs)} seeds" if len(runs) > 1 else "")
        for ax, (key, title) in zip(axes, PANELS.items()):
            curves = [[line[key] for line in lines] for _, lines in runs]
            for curve in curves:
                ax.plot(range(1, len(curve) + 1), curve, color=f"C{n}", linewidth=0.8, alpha=0.4 if len(runs) > 1 else 1)
            if len(runs) > 1:
                shortest = min(map(len, curves))
                ax.plot(range(1, shortest + 1), np.mean([c[:shortest] for c in curves], 0), color=f"C{n}", linewidth=2.4, label=label)
            else:
                ax.lines[-1].set_label(label)
            ax.set(title=title, xlabel="iteration")
            ax.grid(alpha=0.3)
    places = {f"{c['model']} on {c['env']}" for (c, _), *_ in groups}
    if len(places) == 1:
        fig.suptitle(*places)
    axes[0].set_ylim(0, 1.02)
    axes[0].legend(fontsize=8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


# ------------------------------------------------------------------------------------------------------- command line


def main():
    parser = argparse.ArgumentParser(description="Success by category, from a run, a folder or a hub id; or curves (--plot).",
                                     allow_abbrev=False)
    add = parser.add_argument
    add("--model", help="a run of train.py, a model folder, a hub id or a bare name; tiny is an untrained model")
    add("--env", help="house, alfworld or webshop (default: the run's, else house)")
    add("--split", help="default: test (house, webshop), valid_seen (alfworld); webshop has the original's test_500 too")
    add("--data", help="alfworld: the folder that holds json_2.1.1; webshop: the folder of its catalogue")
    add("--goals", help="webshop: synthetic or human (default: the run's, else synthetic)")
    add("--limit", type=int, default=0, help="play only so many games, evenly spaced (0: all)")
    add("--repeats", type=int, default=1, help="times every game is played")
    add("--temperature", type=float, default=0.4, help="0 is greedy")
    add("--out", help="the report, NAME.json or a folder for eval.json (default: eval-SPLIT.json in the run, else eval.json); "
        "episodes go to .jsonl beside it")
    add("--seed", type=int, default=0)
    for name, kind, text in (("context", str, "window or full"), ("engine", str, "kv or hf"), ("rows", int, "games decoded side by side"),
                             ("horizon", int, "turns an episode may take"),
                             ("history", int, "turns shown in a window prompt"), ("max_new", int, "tokens a response may take"),
                             ("max_prompt", int, "tokens a window prompt may take"), ("max_context", int, "tokens a conversation may take"),
                             ("places", int, "house: its size"), ("objects", int, "house: its size"), ("workers", int, "processes that play")):
        add(f"--{name}", type=kind, help=f"{text} (default: the run's)")
    add("--plot", nargs="+", metavar="RUN", help="draw the curves of these runs, or the phases of these benches, in one figure (--out, default curves.png) and stop")
    add("--table", nargs="+", metavar="RUN", help="print the paper's table of these finished runs as Markdown and stop")
    args = parser.parse_args()
    try:
        if args.table:
            return print(paper_table(args.table))
        if args.plot:
            benches = [path for path in (os.path.join(folder, "bench.json") for folder in args.plot) if os.path.isfile(path)]
            if benches:
                plot_phases([json.load(open(path)) for path in benches], args.out or "curves.png")
            else:
                plot(args.plot, args.out or "curves.png")
            return print(f"wrote {args.out or 'curves.png'}")
        evaluate(args)
    except (ValueError, OSError, ImportError, envs.GameError) as error:
        sys.exit(f"eval.py: {error}")


def evaluate(args):
    if not args.model:
        raise ValueError("--model is missing: a run of train.py, a model folder, a hub id, or tiny")
    run = {"env": "house", "context": "window", "engine": "kv", "history": 2, "max_new": 512}
    folder = args.model
    weights = next((p for p in (os.path.join(folder, n) for n in ("final", "checkpoint")) if os.path.isdir(p)), None)
    is_run = weights is not None and os.path.isfile(os.path.join(folder, "config.json"))
    if is_run:
        with open(os.path.join(folder, "config.json")) as file:
            run |= json.load(file)
        folder = weights
    setting = run | {k: v for k, v in vars(args).items() if v is not None}
    env = setting["env"]
    if run["env"] != env:
        setting |= {k: getattr(args, k) for k in ("data", "goals", "horizon", "max_prompt")}  # not the other environment's
    setting["max_prompt"] = setting.get("max_prompt") or (4096 if env == "webshop" else 2048)
    options = envs.options_for(env, setting)
    for name, least in (("limit", 0), ("repeats", 1), ("temperature", 0), ("max_new", 1), ("history", 0)):
        if setting[name] < least:
            raise ValueError(f"--{name} must be at least {least}, got {setting[name]}")
    split = args.split or envs.known(env).held_out[0]
    games = spaced(envs.tasks(env, split, **options), args.limit)
    envs.make_env(env, **options)
    lm = load(folder, words=envs.words())
    workers = setting.get("workers")
    pool = envs.Pool(env, options, envs.default_workers(env) if workers is None else workers)
    sampler = Sampler(lm, setting["engine"], setting["context"], setting["max_new"], args.temperature)
    name = f"eval-{split}-human.json" if options.get("goals") == "human" else f"eval-{split}.json"
    out = args.out or (os.path.join(args.model, name) if is_run else "eval.json")
    out = out if out.endswith(".json") else os.path.join(out, "eval.json")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    records = []
    for n in range(args.repeats):
        records += [{"repeat": n} | r for r in play(
            sampler, games, pool, seed=args.seed + n, rows=setting.get("rows"), history=setting["history"], max_prompt=setting["max_prompt"],
            max_context=setting.get("max_context"), title=f"{env} {split}")]
    pool.close()
    result = report(records) | {"model": args.model, "env": env, "goals": options.get("goals"), "split": split, "temperature": args.temperature, "repeats": args.repeats}
    with open(out, "w") as file:
        json.dump(result, file, indent=1)
    with open(os.path.splitext(out)[0] + ".jsonl", "w") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)
    print(table({f"{os.path.basename(args.model.rstrip('/'))}, {split}, T = {args.temperature:g}": result}, envs.known(env)))
    outgrown = sum(r["outgrown"] for r in records)
    if outgrown:
        print(f"{outgrown} of {len(records)} episodes ended early: the next prompt would not fit (--max_prompt, --max_context)")
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
