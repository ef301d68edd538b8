"""Evaluation, tables and curves of any run or checkpoint.

    python eval.py --model runs/house-tiny-0        plays a run's model in the run's environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_unseen
    python eval.py --table runs/*                   the paper's table, as Markdown
    python eval.py --plot runs/house-tiny-?         training curves
    python eval.py --table runs/* --reach 0.62      compares methods: final success, episodes until
                                                    success reaches 62 %, explained variance
    python eval.py --plot runs/* --reach 0.62       the same as curves over episodes

Runs whose folders differ only in a trailing -SEED are seeds of one method. ± is one standard
error. In tables and curves (runtime/report.py makes them) it is that of a mean over seeds, or of a
difference of two such means; in the line that --model prints, that of a mean over games. Each
held-out game is played once per temperature.
"""
import contextlib
import functools
import gc
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

import envs
from model import load, local_folder
from rollout import EVALUATION, Sampler, trajectories
from runtime.checkpoint import RunDir, read_json, write_file
from runtime.cli import Parser, argparse_options, choose_threads, one_line_errors, progress
from runtime.distributed import (all_gather_list, init_distributed, mean_or_zero, print0, rank,
                                 world_size)
from runtime.report import Mean, comparison, draw, group_runs, key_of, paper_table

MAX_NUM_SEQS = 144  # games played side by side: all of an evaluation on ALFWorld
USUAL_TEMPERATURE = envs.Env.eval_temperatures[0]  # that of --temperature, and verl-agent's

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
    """Makes a Sampler. settings: a train.Config, or those of `complete`, with which nothing is
    compiled."""
    compile = temperature == 1 and getattr(settings, "compile", False)
    with progress("preparing the sampler" + " (compiling)" * compile):
        return Sampler(lm, settings.engine, settings.context, settings.max_new_tokens, temperature,
                       compile, settings.max_prompt, check=None)


def evenly_spaced(ids, limit):
    """`limit` of the sorted ids (0: all), evenly spaced, so that categories keep their shares."""
    return [ids[i * len(ids) // limit] for i in range(limit)] if 0 < limit < len(ids) else ids


def report(records, when="after", temperature=None) -> dict:
    """Success, number of games, mean score, and success by category, under their names in
    eval.json, which depend on `when` and `temperature` as in key_of."""
    success, score = (mean_or_zero([r[name] for r in records]) for name in ("won", "score"))
    categories = sorted({r["category"] for r in records}, key=str)
    won = {c: mean_or_zero([r["won"] for r in records if r["category"] == c]) for c in categories}
    key = functools.partial(key_of, when=when, temperature=temperature)
    return {key("success"): success, key("n"): len(records), key("score"): score,
            f"{key('success')}_by_category": won}


def play(sampler, ids, pool, settings, episodes=run_episodes, path=os.devnull) -> list:
    """Plays the games with these ids, split over the ranks -> records in order. Rank 0 also writes
    its own to `path` as they come. `episodes`: another function that plays as run_episodes does.
    GameError: an environment failed, on whichever rank."""
    games = {n: game for n, game in enumerate(ids) if n * world_size() // len(ids) == rank()}
    played, errors = [], []
    with open(path if rank() == 0 else os.devnull, "w") as file:
        try:
            for number, record in episodes(sampler, games, pool, seed=settings.seed,
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


# ------------------------------------------------------------- the evaluations of a training run

def play_held_out(lm, pool, config, temperature) -> list:
    """Plays the --eval_games of a run -> records."""
    ids = envs.tasks(pool.env, pool.env.held_out[0], **pool.options)
    ids = evenly_spaced(ids, config.eval_games)
    records = play(sampler_for(lm, config, temperature), ids, pool, config)
    # a Sampler refers to itself, so only the collector frees its KV cache, and the next sampler
    # would be made while this memory is still taken
    gc.collect()
    return records


def held_out_success(lm, pool, config) -> float:
    """Success in the --eval_games of a run at the environment's usual temperature."""
    return report(play_held_out(lm, pool, config, pool.env.eval_temperatures[0]))["success"]


def evaluate_config(lm, pool, config) -> dict:
    """Plays the --eval_games of a run at each temperature of the environment, of which the first is
    the usual one -> {temperature as text, because JSON has no other keys: records}; {} without
    --eval_games."""
    if not config.eval_games:
        return {}
    return {f"{temperature:g}": play_held_out(lm, pool, config, temperature)
            for temperature in pool.env.eval_temperatures}


def success_of(played) -> str:
    """The result of `evaluate_config` in words."""
    return ", ".join(
        f"{mean_or_zero([r['won'] for r in records]):.1%} of {len(records)} held-out games at "
        f"T = {temperature}" for temperature, records in played.items()) or "not evaluated"


def write_reports(before, after, config) -> str:
    """Writes eval.json, the report of a run before and after training, and eval.jsonl, every
    episode. before, after: as evaluate_config returns them. Returns the paper's table of this
    run."""
    usual = envs.env_class(config.env).eval_temperatures[0]
    out = {"env": envs.name_of(config.env), "temperature": usual}
    lines = []
    for when, played in (("before", before), ("after", after)):
        for text, records in played.items():
            temperature = float(text)
            out |= report(records, when, None if temperature == usual else temperature)
            about = {"when": when, "temperature": temperature}
            lines += [json.dumps(about | record) + "\n" for record in records]
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(lines))
    return paper_table([config.out], columns_of)


def columns_of(config) -> dict:
    """The columns of the paper's table for runs with these settings, {head: score, success or a
    category of tasks}."""
    env = envs.env_class(config["env"])
    if env.graded:
        return {"Score": "score", "Success": "success"}
    return {name: name for name in env.categories.values()} | {"All": "success"}


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
    add("--temperature", type=float, default=USUAL_TEMPERATURE, help="0: greedy")
    add("--seed", type=int, default=0)
    add("--out", help="NAME.json, or a folder for eval-SPLIT.json; default: the run, or runs/")
    defaults = {"max_num_seqs": f"{MAX_NUM_SEQS} games side by side per rank",
                "date": "today (for chat templates that print it)"}
    for name, kind in SHARED.items():
        default = defaults.get(name, "that of train.py for models that are not tiny")
        add(f"--{name}", help=f"default: the run's; without a run, {default}",
            **argparse_options(kind))
    return parser


def run_of(model, tiny):
    """The folder of the run that --model belongs to, however it is reached, or None; and the
    settings by which that run played, from the model's own sapo.json or else from the run's
    config.json, or {}. tiny: what "tiny" means."""
    folder, run = Path(model), None
    if folder.is_dir():
        real = folder.resolve()
        run = next((place for place in (real, real.parent)
                    if "env" in read_json(place / "config.json")), None)
    settings = read_json(local_folder(model, tiny) / "sapo.json").get("run") or {}
    if run and not settings:
        settings = RunDir(run).settings()
    return run, settings


def complete(args):
    """The flags -> (the folder of the run that --model belongs to, or None; all settings of the
    evaluation). What was not given is taken from that run, else it has a default."""
    run, stored = run_of(args.model, envs.env_class(args.env or "house").tiny_model)
    defaults = {"env": "house", "context": None, "engine": "kv", "history": 2,
                "max_new_tokens": 512,
                "dtype": "bfloat16" if torch.cuda.is_available() else "float32"} | stored
    if args.env not in (None, defaults["env"]):  # these fit only the run's own environment
        defaults |= dict.fromkeys(("data", "horizon", "max_prompt", "context"))
    if args.context not in (None, defaults["context"]):  # it is meant for the run's own context
        defaults["max_prompt"] = None
    settings = SimpleNamespace(**vars(args))
    for name in SHARED:
        if getattr(args, name) is None:
            setattr(settings, name, defaults.get(name))
    env = envs.env_class(settings.env)
    settings.context = envs.context_for(settings.env, settings.context)
    if settings.context == "window":
        settings.max_prompt = settings.max_prompt or env.max_prompt
    settings.split = settings.split or env.held_out[0]
    is_run = run and run == Path(args.model).resolve()
    settings.weights = f"{run}/final" if is_run else args.model
    return run, settings


def report_path(run, settings, kind) -> Path:
    """The file for the report of an evaluation: --out, or in that folder, the run's or runs/, a
    name with what is unusual about it. RUN/best has its own files, and so has another temperature
    or seed."""
    out = Path(settings.out or run or "runs")
    if out.suffix == ".json":
        return out
    model = Path(settings.model).resolve()
    parts = ["eval", "" if run == model else model.name, settings.split, kind]
    parts += [f"{name}={getattr(settings, name):g}" for name, usual in
              (("temperature", USUAL_TEMPERATURE), ("seed", 0)) if getattr(settings, name) != usual]
    return out / ("-".join(filter(None, parts)) + ".json")


def evaluate(args, make_sampler, episodes=run_episodes, kind=""):
    """Plays a split with make_sampler(settings), writes the report and prints it. `episodes` is
    that of `play`. `kind` becomes part of the files' names."""
    run, settings = complete(args)
    options = envs.options_for(vars(settings))
    ids = evenly_spaced(envs.tasks(settings.env, settings.split, **options), settings.limit)
    out = report_path(run, settings, kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    answers = out.with_suffix(".jsonl")
    if out.exists():
        print0(f"{out} will be replaced")
    print0(f"playing {len(ids)} games of {settings.env}, context {settings.context}"
           f"{'' if run else ', by default settings and flags'}; finished ones are written to "
           f"{answers}.new")
    sampler = make_sampler(settings)
    workers = envs.default_workers(settings.env)
    with contextlib.closing(envs.Pool(settings.env, options, workers)) as pool:
        played = play(sampler, ids, pool, settings, episodes, f"{answers}.new")
    if rank() == 0:
        write_file(answers, "".join(json.dumps(record) + "\n" for record in played))
        # Reflexion (tools/prompted.py) plays a game several times, and the last one counts
        last = {record["task"]: record for record in played}
        write_file(out, json.dumps(report(last.values()) | vars(settings), indent=1))
        print_summary(settings, [*last.values()], played)
        print(f"wrote {out}")


def print_summary(settings, records, played):
    """Prints success by category. records: one per game; played: all episodes."""
    success = Mean.of([100 * record["won"] for record in records])
    result = report(records)
    shares = {"score": result["score"]} | result["success_by_category"]
    shares.pop(None, None)  # games without a category
    rest = ", ".join(f"{name} {100 * share:.1f}" for name, share in shares.items())
    print(f"{settings.model}, {settings.split}, T = {settings.temperature:g}, {len(records)} "
          f"games: success {success.text()}, {rest}")
    if context_overflow := sum(record["context_overflow"] for record in played):
        print(f"{context_overflow} of {len(played)} episodes ended because the next prompt did not "
              "fit (--max_prompt, or the model's context)")


def load_sampler(settings):
    """A Sampler with the model of --model."""
    lm = load(settings.weights, tiny=envs.env_class(settings.env).tiny_model,
              dtype=getattr(torch, settings.dtype))
    if settings.date:
        lm.chat.date = settings.date
    choose_threads(lm.model)
    return sampler_for(lm, settings, settings.temperature)


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
            print(paper_table(args.table, columns_of) if args.reach is None else
                  comparison(args.table, args.reach))
        elif args.plot:
            out = args.out or Path(args.plot[0]).parent / "curves.png"
            draw(group_runs(args.plot, finished=args.reach is not None), out, args.reach)
            print(f"wrote {out}")
        else:
            evaluate(args, load_sampler)


if __name__ == "__main__":
    main()
