"""The paper's table and curves, from any checkpoint, prompted model or endpoint.

    python eval.py --model runs/house-tiny-0                a run of train.py, in its environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_unseen
    python eval.py --model gpt-4o --endpoint https://api.openai.com/v1 --prompt react
    python eval.py --table runs/*                           the paper's table, as Markdown
    python eval.py --plot runs/house-tiny-?                 the curves of training

Runs whose folders differ only in a trailing -SEED form a group. verl-agent draws 128 games with
replacement (84 of valid_seen's 140 on average); here each is played once, or --repeats times.
"""
import signal
if __name__ == "__main__":  # Ctrl-C while this imports leaves without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import contextlib
import gc
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

import envs
from model import load
from rollout import Sampler, next_prompts, trajectories, uniforms
from machine.cli import (Count, Parser, Size, Temperature, Workers, one_line_errors, options_of,
                         progress, typed)
from machine.ranks import barrier, gather, join_ranks, rank, world
from machine.runs import (new_file, newest_checkpoint, read_json, read_log, read_settings,
                          settings_of, verify, write_file)

SIDE_BY_SIDE, TEMPERATURE = 128, 0.4  # games played at once; verl-agent's temperature
EVALUATION = 5  # the seed of an attempt is (seed, 0, EVALUATION + attempt); see train.ROLLOUT
NAMES = {"sapo": "SAPO", "sapo-separate": "SAPO, separate critic", "ppo": "PPO", "grpo": "GRPO",
         "rloo": "RLOO", "gigpo": "GiGPO", "gigpo-nostd": "GiGPO without std", "empg": "EMPG"}


def play(sampler, games, pool, *, style="plain", seed=0, rows=None, history=2, quiet=False):
    """Plays {number: game} and yields (number, record) of an episode as soon as it is over. Random
    numbers depend on seed, number and attempt alone, so ranks can share the games. Reflexion tries
    a game up to TRIALS times, each time with the lessons that the model wrote after failures."""
    lessons, rows = {number: [] for number in games}, rows or SIDE_BY_SIDE
    prompts = None if style == "plain" else (
        lambda number, turns, episode: react(turns, episode, lessons[number]))
    for trial in range(TRIALS if style == "reflexion" else 1):
        stream, failed = (seed, 0, EVALUATION + trial), {}
        over = trajectories(sampler, [*games.values()], pool, trajs=games, rows=rows, seed=stream,
                            history=history, prompts=prompts)
        what = "games again" if trial else "games"
        for number, turns, episode in progress(over, what, total=len(games), quiet=quiet):
            about = {"trials": trial + 1, "lessons": [*lessons[number]]} if prompts else {}
            yield number, record(pool.env, games[number], turns, episode) | about
            if not episode.info["won"]:
                failed[number] = turns, episode
        games = {number: games[number] for number in failed}
        if trial + 1 < TRIALS and style == "reflexion":
            reflect(sampler, failed, lessons, rows, stream)


def record(env, game, turns, episode):
    """An episode as it is written down. Without a turn, its first prompt did not fit."""
    info, cut = episode.info, not turns
    return {"task": game, "category": env.categories.get(info["category"], info["category"]),
            "won": info["won"], "score": info["score"], "turns": len(turns),
            "truncated": cut or turns[-1].truncated, "outgrown": cut or turns[-1].outgrown,
            "valid_actions": float(np.mean([not turn.invalid for turn in turns] or [0])),
            "actions": [turn.action for turn in turns], "responses": [turn.text for turn in turns]}


def spaced(ids, limit):
    """`limit` of the sorted ids (0: all), evenly spaced so that every category keeps its share."""
    return [ids[i * len(ids) // limit] for i in range(limit)] if 0 < limit < len(ids) else ids


def wilson(k, n):
    """The 95 % interval of a share k / n; the usual p ± 1.96 σ is too narrow near 0 and 1."""
    zz = 1.96 ** 2
    middle, half = k + zz / 2, (zz * k * (n - k) / max(n, 1) + zz * zz / 4) ** 0.5
    return max(0.0, (middle - half) / (n + zz)), min(1.0, (middle + half) / (n + zz))


def independent(records, key="won"):
    """The effective number of episodes: fewer where repeats of a game end alike."""
    games, spread = {}, np.var([r[key] for r in records] or [0])
    for r in records:
        games.setdefault(r["task"], []).append(r[key])
    if len(games) in (0, 1, len(records)) or not spread:
        return len(games)
    variance = np.var([np.mean(repeats) for repeats in games.values()], ddof=1)
    return min(len(records), spread * len(games) / max(variance, 1e-9))


def share(records):
    p, n = sum(r["won"] for r in records) / max(1, len(records)), independent(records)
    return {"success": p, "n": len(records), "interval": [round(x, 4) for x in wilson(p * n, n)]}


def report(records):
    """Success with n and interval, the score with half its 95 % interval, success by category."""
    shares = {category: share([r for r in records if r["category"] == category])
              for category in sorted({r["category"] for r in records})}
    scores = np.array([r["score"] for r in records] or [0.0])
    return share(records) | {
        "score": float(scores.mean()),
        "score_half": float(1.96 * scores.std() / max(1, independent(records, "score")) ** 0.5),
        "success_by_category": {c: x["success"] for c, x in shares.items()}, "by_category": shares,
        "turns": float(np.mean([r["turns"] for r in records] or [0.0]))}


def table(reports, env):
    """{title: report} -> a line of text for each, in the paper's columns for the environment."""
    names, width = list(env.categories.values()), max(map(len, reports)) + 2
    lines = ["".join(f"{name:>8}" for name in [*names, "All"]) + "     n   95 %"]
    if env.graded:
        lines = ["        Score        Success     n   ± half a 95 % interval"]
    for title, r in reports.items():
        (low, high), won = 100 * np.array(r["interval"]), r["success_by_category"]
        row = "".join(f"{100 * won[c]:8.1f}" if c in won else f"{'-':>8}" for c in names)
        row += f"{100 * r['success']:8.1f}{r['n']:6}   {low:.1f}-{high:.1f}"
        if env.graded:
            row = (f"{100 * r['score']:6.1f} ± {100 * r['score_half']:4.1f}"
                   f"{100 * r['success']:8.1f} ± {(high - low) / 2:4.1f}{r['n']:6}")
        lines.append(row)
    return "\n".join(f"{title:{width}}{line}" for title, line in zip(["", *reports], lines))


def of_run(config, pool, sampler_at, path=None, temperatures=None):
    """A run of train.py plays its --eval_games at verl-agent's temperature, in the house at 1 as
    well -> {temperature: records}. They are kept in the file `path`, where a resumed run finds
    them. sampler_at: temperature -> a Sampler."""
    if path and config.resume and gather([os.path.isfile(path)])[0]:  # all do as rank 0
        return {float(t): records for t, records in read_json(path).items()}
    env, options = envs.known(config.env), envs.options_for(vars(config))
    ids = envs.tasks(config.env, env.held_out[0], **options) if config.eval_games else []
    ids = spaced(ids, config.eval_games)
    first, last = (len(ids) * r // world() for r in (rank(), rank() + 1))
    usual, out = (TEMPERATURE, 1.0) if config.env == "house" else (TEMPERATURE,), {}
    for temperature in (temperatures or usual) if ids else ():
        over = play(sampler_at(temperature), dict(enumerate(ids[first:last], first)), pool,
                    seed=config.seed, rows=config.rows, history=config.history)
        out[temperature] = gather([record for _, record in sorted(over)])
        gc.collect()  # a sampler refers to itself, and would keep its memory while training goes on
    if path and rank() == 0:
        write_file(path, json.dumps(out))
    return out


def write_of_run(before, after, config):
    """eval.json: success and success_before (the same games) with n, interval and categories;
    eval.jsonl: every episode. -> the table, as text."""
    out, lines, reports = {"env": config.env, "temperature": TEMPERATURE}, [], {}
    for when, end, played in (("before", "_before", before), ("after", "", after)):
        for t, records in played.items():
            told = report(records)
            reports[f"{when} {NAMES[config.algo]}, T = {t:g}"] = told
            lines += [json.dumps({"when": when, "temperature": t} | r) + "\n" for r in records]
            if t == TEMPERATURE:
                out |= {f"{key}{end}": told[key] for key in ("success", "interval", "score")}
                out |= {f"success{end}_by_category": told["success_by_category"], "n": told["n"]}
            else:
                out[f"success{end}_at_1"] = told["success"]
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(lines))
    return table(reports, envs.known(config.env)) if reports else "no evaluation, --eval_games is 0"


def group_runs(folders, finished=False):
    """{label: runs} by the folders' names without -SEED. What is no run is named and left out."""
    groups, parent = {}, os.path.commonpath([os.path.dirname(os.path.abspath(f)) for f in folders])
    for folder in map(Path, folders):
        try:
            lines = read_log(folder / "metrics.jsonl")
            config, result = settings_of(folder), read_json(folder / "eval.json")
            if not lines:
                raise OSError("metrics.jsonl has no line yet")
            if finished and not result:
                raise OSError("eval.json is missing")
        except (OSError, ValueError) as error:
            print(f"left out: {folder} is no run, or not finished: {error}", file=sys.stderr)
            continue
        result |= read_json(folder / "cost.json")  # the first runs have none
        runs = groups.setdefault(re.sub(r"-\d+$", "", os.path.relpath(folder, parent)), [])
        if any(r.config["seed"] == config["seed"] or r.config["env"] != config["env"]
               for r in runs):
            raise ValueError(f"{folder}: a run of its name has the same --seed or another --env")
        runs.append(SimpleNamespace(config=config, lines=lines, result=result))
    if not groups:
        raise ValueError("none of these folders is a run of train.py")
    return groups


def mean_std(values, digits=1):
    std = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{std}" if values else "–"


def table_row(label, runs, columns, when=""):
    """The cells of a row. columns: {head: key in eval.json, None where the head is a category}.
    when: "_before" for the start of training, which has cost nothing."""
    cells = [label, str(len(runs))]
    for column, key in columns.items():
        shares = [run.result.get(key.format(when)) if key else
                  run.result.get(f"success{when}_by_category", {}).get(column) for run in runs]
        cells.append(mean_std([100 * x for x in shares if x is not None]))
    seconds = [sum(line["time_total"] for line in run.lines) for run in runs]
    tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in run.lines) / 1e6
              for run in runs]
    memory = max(run.result.get("peak_memory", 0) for run in runs)
    costs = [mean_std(seconds, 0), mean_std(tokens, 2), f"{memory:.2f}" if memory else "–"]
    return cells + (["", "", ""] if when else costs)


def paper_table(folders):
    """The paper's Table 1 as Markdown: mean ± standard deviation over the seeds, in percent."""
    groups = group_runs(folders, finished=True)
    first = next(iter(groups.values()))
    env = envs.known(first[0].config["env"])
    columns = {"Score": "score{}"} if env.graded else dict.fromkeys(env.categories.values())
    columns["Success" if env.graded else "All"] = "success{}"
    if "success_at_1" in first[0].result:
        columns["All, T = 1"] = "success{}_at_1"
    heads = ["method", "seeds", *columns, "seconds", "M tokens", "GB"]
    rows = [heads, ["---"] * len(heads), table_row("start", first, columns, "_before")]
    rows += [table_row(label, runs, columns) for label, runs in groups.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot(folders, path):
    """Curves of training, in a colour for each group of runs."""
    from worlds.curves import draw
    groups = group_runs(folders)
    draw(groups, ", ".join(sorted({setting(runs[0].config) for runs in groups.values()})), path)


def setting(config):
    """The model, the environment and its size."""
    size = [f"{k} {config[k]}" for k in envs.known(config["env"]).flags
            if k not in ("data", "goals") and config.get(k)]
    return f"{Path(config['model']).name} on {config['env']} ({', '.join(size)})"


SHARED = {"env": str, "data": str, "goals": str, "context": Literal["window", "full"],
          "engine": Literal["kv", "hf"], "dtype": Literal["float32", "bfloat16"], "rows": Size,
          "horizon": Size, "history": Count, "max_new": Size, "max_prompt": Size,
          "max_context": Size, "places": Size, "objects": Size, "workers": Workers}  # train.py's


def make_parser():
    parser = Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", help="a run, a model folder, a hub id or a bare name; tiny is random here")
    add("--split", help="default: test (house, webshop), valid_seen (alfworld)")
    add("--limit", type=Count, default=0, help="play only so many games, evenly spaced (0: all)")
    add("--repeats", type=Size, default=1, help="how often every game is played")
    add("--temperature", type=Temperature, default=TEMPERATURE, help="greedy below 0.001")
    add("--seed", type=Count, default=0)
    add("--out", help="NAME.json, or where eval-SPLIT.json is replaced; default: the run, or here")
    add("--prompt", default="plain", choices=("plain", "react", "reflexion"), help="plain: as in "
        "training; react: all thoughts, in window prompts; reflexion: also attempts with lessons")
    add("--endpoint", metavar="URL", help="an OpenAI-compatible server; its key in OPENAI_API_KEY")
    for name, kind in SHARED.items():
        add(f"--{name}", help="default: the run's", **options_of(kind))
    add("--plot", nargs="+", metavar="RUN", help="only draw their curves (--out, curves.png)")
    add("--table", nargs="+", metavar="RUN", help="only print the paper's table of finished runs")
    return parser


def complete(args):
    """Fills in the flags that were not given, from the run that --model names or else by default.
    -> the folder of the run's weights, or None where --model is no run."""
    if not args.model:
        raise ValueError("--model is missing: a run of train.py, a model folder, a hub id, or tiny")
    run = Path(args.model)
    part = (re.fullmatch(r"best|final|checkpoint-\d+", run.name)  # of a run
            and "env" in read_settings(run.parent / "config.json"))
    stored = read_settings(config := Path(run.parent if part else run, "config.json"))
    weights = run if part else next(run.glob("final"), None) or newest_checkpoint(run)
    weights = weights if "env" in stored and not args.endpoint else None
    known = {"env": "house", "context": "window", "engine": "kv", "history": 2, "max_new": 512,
             "dtype": "bfloat16" if torch.cuda.is_available() else "float32"}
    known |= typed(SHARED, stored, config) if weights else {}
    if args.env not in (None, known["env"]):  # these values of a run fit its own environment alone
        known |= dict.fromkeys(("data", "goals", "horizon", "max_prompt", "workers"))
    if args.prompt != "plain":  # each turn shows the past anew; 8192 tokens hold all of ALFWorld's
        args.context, known["max_prompt"] = "window", 8192
    idle = [f"--{k}" for k in envs.OPTIONS if getattr(args, k) is not None
            and k not in envs.known(args.env or known["env"]).flags]
    if idle:
        raise ValueError(f"{', '.join(idle)} does nothing with --env {args.env or known['env']}")
    if args.temperature < 0.001:  # nothing else is left of the distribution
        args.temperature = 0.0
    vars(args).update({k: known.get(k) for k in SHARED if getattr(args, k) is None})
    args.max_prompt = args.max_prompt or envs.known(args.env).max_prompt
    args.rows = args.rows or (16 if args.endpoint else SIDE_BY_SIDE)
    return weights


def play_all(args, sampler, games, pool, path):
    """Plays the games --repeats times, split over the ranks -> the last attempts' records. Each is
    written to PATH.new as soon as it is known, so that a failure loses no answer."""
    records, new = [], Path(f"{path}.new-{rank()}" if rank() else f"{path}.new")
    mine = {n: games[n] for n in range(rank(), len(games), world())}
    with new_file(new) as file:
        try:
            for n in range(args.repeats):
                for _, r in play(sampler, mine, pool, style=args.prompt, seed=args.seed + n,
                                 rows=args.rows, history=args.history):
                    records.append({"repeat": n} | r)
                    print(json.dumps(records[-1]), file=file, flush=True)
        except (ValueError, envs.GameError) as error:
            raise ValueError(f"{error}; {len(records)} episodes that had ended are in {new}"
                             ) from error
        except KeyboardInterrupt:
            raise SystemExit(f"\ninterrupted; {len(records)} episodes that had ended are in {new}"
                             ) from None
    order = {game: n for n, game in enumerate(games)}  # games end in any order
    records = sorted(gather(records), key=lambda r: (r["repeat"], order[r["task"]]))
    if rank() == 0:
        write_file(f"{path}.all", "".join(json.dumps(r) + "\n" for r in records))
        os.replace(f"{path}.all", path)
    barrier()  # a rank's own answers go when all are written
    new.unlink(missing_ok=True)
    return [*{(r["repeat"], r["task"]): r for r in records}.values()]


def evaluate(args):
    """Plays the split with --model, writes the report and prints its table."""
    weights = complete(args)
    args.weights = str(weights or args.model)
    env, options = envs.known(args.env), envs.options_for(vars(args))
    args.split, args.goals = args.split or env.held_out[0], options.get("goals")
    games = spaced(envs.tasks(args.env, args.split, **options), args.limit)
    kinds = [args.split, *sorted({args.goals, args.prompt} - {None, "synthetic", "plain"})]
    if weights == Path(args.model):  # RUN/best and the like: files of their own in the run
        kinds.insert(0, weights.name)
    run = weights.parent if weights else Path(args.model)
    out = args.out or (str(run) if weights else ".")
    out = Path(out) if out.endswith(".json") else Path(out, f"eval-{'-'.join(kinds)}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.endpoint:
        from worlds.endpoint import Endpoint
        sampler = Endpoint(args.endpoint, args.model, args.temperature, args.max_new,
                           args.max_prompt)
    else:
        verify(args.weights)
        lm = load(args.weights, words=envs.words(), dtype=getattr(torch, args.dtype))
        sampler = Sampler(lm, args.engine, args.context, args.max_new, args.temperature,
                          max_prompt=args.max_prompt)
    workers = envs.default_workers(args.env) if args.workers is None else args.workers
    with contextlib.closing(envs.Pool(args.env, options, workers)) as pool:
        records = play_all(args, sampler, games, pool, out.with_suffix(".jsonl"))
    if rank() > 0:
        return
    asked = {k: v for k, v in vars(args).items() if k not in ("out", "plot", "table", "workers")}
    result = report(records) | asked
    write_file(out, json.dumps(result, indent=1))
    title = f"{run.name}, {', '.join(kinds)}, T = {args.temperature:g}"
    print(table({title: result}, env))
    if outgrown := sum(r["outgrown"] for r in records):
        print(f"{outgrown} of {len(records)} episodes outgrew --max_prompt or --max_context")
    print(f"wrote {out}")


def main():
    with one_line_errors("eval.py", envs.GameError):
        args = make_parser().parse_args()
        join_ranks()
        if args.table:
            print(paper_table(args.table))
        elif args.plot:
            out = Path(args.out or "curves.png")
            out = out / "curves.png" if out.is_dir() else out
            plot(args.plot, out)
            print(f"wrote {out}")
        else:
            evaluate(args)


# ----------------------------------------------------------------------------- prompted models

REACT = ("{role} Your task is to: {task}\n{lessons}What has happened so far:\n{trace}Observation: "
         "{obs}\nCommands that work now: [{commands}].\n\nContinue with your next thought and "
         "action. {answer}")
LESSONS = "You have tried this task before and failed. What you told yourself then:\n{lessons}\n"
REFLECT = ("{role} Your task was to: {task}\n{lessons}This is what happened:\n{trace}Observation: "
           "{obs}\n\nYou did not succeed. In a few sentences, tell yourself what went wrong and "
           "what to do differently in your next attempt.")
TRIALS = 3  # attempts at a game in Reflexion


def react(turns, episode, lessons, template=REACT):
    """Prompts with all thoughts and turns (ReAct, arXiv 2210.03629), then with fewer of the oldest;
    and with lessons (Reflexion, arXiv 2303.11366)."""
    told, fields = "", episode.now(episode.info["admissible"])
    if lessons:
        told = LESSONS.format(lessons="\n".join(f"- {' '.join(x.split())}" for x in lessons))
    past = [f"Observation: {episode.shown(turn.seen)}\nThought: {thought_of(turn.text)}\n"
            f"Action: {turn.action}\n" for turn in turns]
    for n in range(len(past) + 1):
        yield template.format(**fields, lessons=told, trace="".join(past[n:]))


def thought_of(text):
    """What stands between the think tags, or before the action."""
    found = (re.search("<think>(.*?)</think>", text, re.I | re.S)
             or re.match("(.*?)<action>", text, re.I | re.S))
    return " ".join(found[1].split()) if found else ""


def reflect(sampler, failed, lessons, rows, seed):
    """Adds to the lessons what the model says of its failures, where a prompt fits."""
    asks = [(react(*played, lessons[n], REFLECT), []) for n, played in failed.items()]
    shown = next_prompts(sampler.lm, asks, sampler.limit)
    asked = [(n, ids, uniforms(seed, n, len(turns), sampler.max_new))
             for (n, (turns, _)), (_, ids) in zip(failed.items(), shown)
             if len(ids) <= sampler.limit]
    while asked or sampler.busy:
        while asked and sampler.busy < rows:
            sampler.add(*asked.pop())
        for number, response in sampler.run():
            lessons[number].append(sampler.lm.text(response.ids))


if __name__ == "__main__":
    main()
