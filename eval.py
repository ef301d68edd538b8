"""Evaluation, tables and curves of any run or checkpoint.

    python eval.py --model runs/house-tiny-0        plays a run's model in the run's environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_unseen
    python eval.py --table runs/*                   the paper's table, as Markdown
    python eval.py --plot runs/house-tiny-?         training curves
    python eval.py --table runs/* --reach 0.62      compares methods: final success, episodes until
                                                    success reaches 62 %, explained variance
    python eval.py --plot runs/* --reach 0.62       the same as curves over episodes

Runs of the same settings whose folders differ only in a trailing -SEED are seeds of one method. ±
is one standard error. In tables and curves (runtime/report.py makes them) it is that of a mean over
seeds, or of a difference of two such means; in the line that --model prints, that of a mean over
games. Each held-out game is played once per temperature.

Who calls whom:

    main, and tools/prompted.py
        evaluate                plays a split by the flags, and writes and prints the report
            play
    training/run.py
        evaluate_config         before and after training, at each temperature
            play_games
        success_of              what a run prints of the records that evaluate_config returns
        write_reports           what it writes of them
        success_while_training  with --eval_every
            play_games
    play_games                  games as a run plays them, at one temperature
        play
    play                        a list of games, split over the ranks
        run_episodes            the games of one rank; tools/prompted.py has a function in its place

What settings are called here:

    args        the flags of this file, as given
    stored      the settings by which the run of --model played
    settings    those of an evaluation, which `complete` makes of args and stored; what serves
                training, too, such as `play`, also takes a config as its `settings`
    config      the train.Config of the run that is training
    options     those of the settings that the environment is made with
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
from hf.loading import sapo_json_of
from model import load
from rollout import EVALUATION, Sampler, checked, trajectories
from runtime.checkpoint import RunDir, read_json, write_file
from runtime.cli import (LARGE, Parser, argparse_options, check_ranges, choose_threads, file_path,
                         one_line_errors, progress)
from runtime.distributed import (all_gather_list, init_distributed, mean_or_zero, print0, rank,
                                 world_size)
from runtime.report import Mean, comparison, draw, group_runs, key_of, paper_table

MAX_NUM_SEQS = 144  # games played side by side: all of an evaluation on ALFWorld

# --------------------------------------------------------------------------------- playing games

def run_episodes(sampler, games, pool, *, seed, max_num_seqs, history):
    """Plays {number: game} and yields (number, episode_record) as soon as an episode is over."""
    for number, turns, builder in trajectories(
            sampler, [*games.values()], pool, trajs=games, seed=(seed, 0, EVALUATION),
            max_num_seqs=max_num_seqs or MAX_NUM_SEQS, history=history, label="evaluation",
            check=checked):
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
            "metrics": info.get("metrics", {}),
            "actions": [turn.action for turn in turns], "responses": [turn.text for turn in turns]}


def mean_metrics(episodes) -> dict:
    """The environment's own metrics, {"env/NAME": mean over the episodes that have NAME}, of rows
    that may have {NAME: number} as "metrics"."""
    numbers = {}
    for episode in episodes:
        for name, number in episode.get("metrics", {}).items():
            numbers.setdefault(f"env/{name}", []).append(number)
    return {name: mean_or_zero(numbers[name]) for name in sorted(numbers)}


def sampler_for(lm, settings, temperature=1.0) -> Sampler:
    """Makes our Sampler; train.train can be given another such function. settings: a train.Config,
    or those of `complete`, with which nothing is compiled."""
    # compiling is for rollouts, so it is done and checked at training's temperature, 1; at another
    # one there are only evaluations, which take seconds without it
    compile = temperature == 1 and getattr(settings, "compile", False)
    with progress("preparing the sampler" + " (compiling)" * compile):
        return Sampler(lm, settings.engine, settings.context, settings.max_new_tokens, temperature,
                       compile, settings.max_prompt, check=None)


def evenly_spaced(ids, limit):
    """`limit` of the sorted ids (0: all), evenly spaced, so that categories keep their shares."""
    return [ids[i * len(ids) // limit] for i in range(limit)] if 0 < limit < len(ids) else ids


def report(records, when="after", temperature=None) -> dict:
    """Success, number of games, mean score, success by category, and the environment's own metrics
    ("env/NAME"), as eval.json has them. The keys come from runtime/report.py's key_of: "success"
    after training at the usual temperature, "success_before_at_1" before training at temperature
    1."""
    categories = sorted({r["category"] for r in records}, key=str)
    won = {c: mean_or_zero([r["won"] for r in records if r["category"] == c]) for c in categories}
    key = functools.partial(key_of, when=when, temperature=temperature)
    return {key("success"): mean_or_zero([r["won"] for r in records]),
            key("n"): len(records),
            key("score"): mean_or_zero([r["score"] for r in records]),
            f"{key('success')}_by_category": won,
            **{key(name): mean for name, mean in mean_metrics(records).items()}}


def without(ids, leave_out) -> list:
    """The ids that are not left out, which are compared as texts. ValueError: there are none."""
    left_out = {*map(str, leave_out or ())}
    kept = [task for task in ids if str(task) not in left_out]
    if not kept:
        raise ValueError("--leave_out leaves no task to play")
    return kept


def check_left_out(leave_out, ids) -> None:
    """ValueError: one that is left out is not among the ids."""
    if unknown := {*map(str, leave_out or ())} - {*map(str, ids)}:
        raise ValueError(f"--leave_out {min(unknown)}: there is no such task among those that are "
                         "played")


def share_of_this_rank(ids) -> dict:
    """{number: id} of the games that this rank plays, numbered over all ranks."""
    return {n: game for n, game in enumerate(ids) if n * world_size() // len(ids) == rank()}


def play(sampler, ids, pool, settings, episodes=run_episodes, path=os.devnull) -> list:
    """Plays the games with these ids, split over the ranks -> records in order. Rank 0 also writes
    its own to `path` as they come. `episodes`: another function that plays as run_episodes does.
    GameError: an environment failed, on whichever rank."""
    games = share_of_this_rank(ids)
    played, own_errors = [], []
    with open(path if rank() == 0 else os.devnull, "w", encoding="utf-8") as file:
        try:
            for number, record in episodes(sampler, games, pool, seed=settings.seed,
                                           max_num_seqs=settings.max_num_seqs,
                                           history=settings.history):
                played.append((number, record))
                print(json.dumps(record), file=file, flush=True)
        except envs.GameError as error:
            own_errors.append(str(error))
    errors = all_gather_list(own_errors)
    if errors:
        raise envs.GameError(errors[0])
    played.sort(key=lambda item: item[0])  # they end in any order
    return all_gather_list([record for _, record in played])


# ------------------------------------------------------------- the evaluations of a training run

def games_of(pool, config, split, number) -> list:
    """The ids of the games of a split, `number` of them (0: all), that a run plays."""
    ids = envs.tasks(pool.env, split, **pool.options)
    return without(evenly_spaced(ids, number), config.leave_out)


def play_games(lm, pool, config, make_sampler, ids, temperature) -> list:
    """Plays games as a run does -> records. make_sampler: that of train.train."""
    records = play(make_sampler(lm, config, temperature), ids, pool, config)
    # A Sampler refers to itself: its decode_step is a bound method of it, or has one
    # (hf/compile.py). So only the collector frees its KV cache, and the next sampler would be made
    # while this memory is still taken.
    gc.collect()
    return records


def success_while_training(lm, pool, config, make_sampler=sampler_for) -> tuple[str, float]:
    """("validation", success in an environment's games for validation); where it has none,
    ("held_out", success in the --eval_games of a run). At the environment's usual temperature.
    make_sampler: that of train.train."""
    env = pool.env
    name = "validation" if env.validation else "held_out"
    ids = games_of(pool, config, *env.validation or (env.held_out[0], config.eval_games))
    played = play_games(lm, pool, config, make_sampler, ids, env.eval_temperatures[0])
    return name, report(played)["success"]


def evaluate_config(lm, pool, config, make_sampler=sampler_for) -> dict:
    """Plays the --eval_games of a run at each temperature of the environment, of which the first is
    the usual one -> {temperature as text, because JSON has no other keys: records}; {} without
    --eval_games. make_sampler: that of train.train."""
    if not config.eval_games:
        return {}
    ids = games_of(pool, config, pool.env.held_out[0], config.eval_games)
    return {f"{temperature:g}": play_games(lm, pool, config, make_sampler, ids, temperature)
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
    env = envs.env_class(config.env)
    usual = float(f"{env.eval_temperatures[0]:g}")  # as evaluate_config writes it
    out = {"env": envs.name_of(env), "split": env.held_out[0], "temperature": usual}
    lines = []
    for when, played in (("before", before), ("after", after)):
        for text, records in played.items():
            temperature = float(text)
            out |= report(records, when, None if temperature == usual else temperature)
            about = {"when": when, "temperature": temperature}
            lines += [json.dumps(about | record) + "\n" for record in records]
    write_file(f"{config.out}/eval.json", json.dumps(out, indent=1))
    write_file(f"{config.out}/eval.jsonl", "".join(lines))
    # (by its class, because nobody could import that of a notebook)
    return paper_table([config.out], lambda stored: columns_of({"env": env}))


def columns_of(config) -> dict:
    """The columns of the paper's table for runs with these settings, {head: (success or score, a
    category of tasks or None for all)}."""
    env = envs.env_class(config["env"])
    if env.graded:
        return {"Score": ("score", None), "Success": ("success", None)}
    by_category = {name: ("success", name) for name in env.categories.values()}
    return by_category | {"All": ("success", None)}


# --------------------------------------------------------------------------------- command line

# The settings that an evaluation has in common with a run: flags of train.py, of which `places` and
# `objects` are the house's; and `date`, the day on which the run began.
SHARED = {"env": str, "data": file_path, "context": Literal["window", "full"],
          "engine": Literal["kv", "hf"], "dtype": Literal["float32", "bfloat16"],
          "max_num_seqs": int, "horizon": int, "history": int, "max_new_tokens": int,
          "max_prompt": int, "places": int, "objects": int, "leave_out": list, "date": str}
# What they are without a flag and without a run. train.Config has the same defaults, but stands
# above this file; training/test_settings.py compares them.
DEFAULTS = {"env": "house", "engine": "kv", "history": 2, "max_new_tokens": 512}


def make_parser(description):
    parser = Parser(description=description)
    add = parser.add_argument
    add("--model", default="tiny", type=file_path,
        help="a run, RUN/best, a model's folder, hub id or bare name")
    add("--split", help="default: that of reports; test (house, webshop), valid_unseen (alfworld)")
    add("--limit", type=int, default=0, help="number of games, evenly spaced (0: all)")
    add("--temperature", type=float, help="0: greedy; default: the environment's first one, which "
        f"is {envs.Env.eval_temperatures[0]} unless it has another")
    add("--seed", type=int, default=0)
    add("--out", type=file_path,
        help="NAME.json, or a folder, for eval-MODEL-SPLIT.json; default: the run, or runs/")
    defaults = {"max_num_seqs": f"{MAX_NUM_SEQS} games side by side per rank",
                "date": "today (for chat templates that print it)"}
    for name, kind in SHARED.items():
        default = defaults.get(name, "that of train.py for models that are not tiny")
        add(f"--{name}", help=f"default: the run's; without a run, {default}",
            **argparse_options(kind))
    return parser


def run_of(model, tiny):
    """-> (run, stored). run: the folder of the run that --model belongs to, however it is reached,
    or None. stored: the settings by which that run played, from the model's own sapo.json; if it
    has none, from the run's config.json; else {}. tiny: what "tiny" means."""
    def is_run(folder):
        return "env" in read_json(folder / "config.json")

    run = None
    if Path(model).is_dir():
        folder = Path(model).resolve()
        if is_run(folder):
            run = folder
        elif is_run(folder.parent):  # folder is RUN/best or the like
            run = folder.parent
    stored = sapo_json_of(model, tiny).get("run")
    if not stored and run:
        stored = RunDir(run).settings()
    return run, stored or {}


def complete(args):
    """The flags -> (the folder of the run that --model belongs to, or None; all settings of the
    evaluation). A setting of SHARED comes from the first of these that has it (but ids of
    --leave_out are added to those of 2 or 3):

        1. its flag
        2. the model's own sapo.json, with the settings of its run
        3. the run's config.json, if sapo.json has none
        4. the environment: its context and max_prompt. Other settings of environments stay None
           here, and have their defaults where the environment is made
        5. DEFAULTS, and for dtype the machine

    If --env is not the environment of 2 or 3, they do not count for data, horizon, max_prompt,
    context and leave_out; if --context is not theirs, for max_prompt."""
    run, stored = run_of(args.model, envs.env_class(args.env or "house").tiny_model)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    usual = DEFAULTS | {"dtype": dtype} | stored  # what a setting is without its flag
    if args.env and envs.name_of(args.env) != usual["env"]:
        usual |= dict.fromkeys(("data", "horizon", "max_prompt", "context", "leave_out"))
    if args.context not in (None, usual.get("context")):
        usual["max_prompt"] = None

    settings = SimpleNamespace(**vars(args))
    for name in SHARED:
        if getattr(args, name) is None:
            setattr(settings, name, usual.get(name))
    if args.leave_out:
        settings.leave_out = [*(usual.get("leave_out") or ()), *args.leave_out]

    settings.env = envs.name_of(settings.env)
    env = envs.env_class(settings.env)
    settings.context = envs.context_for(settings.env, settings.context)
    if settings.context == "window":
        settings.max_prompt = settings.max_prompt or env.max_prompt
    settings.split = settings.split or env.held_out[0]
    if settings.temperature is None:
        settings.temperature = env.eval_temperatures[0]
    settings.weights = args.model
    # it is the run itself, not RUN/best, and it is finished
    if run and run == Path(args.model).resolve() and (run / "final").is_dir():
        settings.weights = f"{run}/final"
    return run, settings


def report_path(run, settings, kind) -> Path:
    """The file for the report of an evaluation: --out, or in that folder, the run's or runs/, a
    name. It has the model, but for a run's last one in the run's folder; another environment than
    the run's (without a run, than house); the split; and another temperature or seed than usual.
    With other flags, such as --limit, a report replaces the one that was there."""
    out = Path(settings.out or run or "runs")
    if out.suffix == ".json":
        return out
    model, env = Path(settings.model).resolve(), envs.env_class(settings.env)
    usual = RunDir(run).settings()["env"] if run else "house"
    parts = ["eval", "" if run == model and out.resolve() == run else model.name,
             "" if settings.env == usual else settings.env.rpartition(":")[2],
             settings.split, kind]
    if settings.temperature != env.eval_temperatures[0]:
        parts.append(f"temperature={settings.temperature:g}")
    if settings.seed:
        parts.append(f"seed={settings.seed}")
    return out / ("-".join(filter(None, parts)) + ".json")


RANGES = ((0, 2 ** 63 - 1, "seed"), (0, LARGE, "limit history temperature"),
          (1, LARGE, "max_num_seqs horizon max_new_tokens max_prompt places objects"))


def evaluate(args, sampler_of, episodes=run_episodes, kind=""):
    """Plays a split with sampler_of(settings), writes the report and prints it. `episodes` is
    that of `play`. `kind` becomes part of the files' names."""
    check_ranges(args, RANGES)
    run, settings = complete(args)
    options = envs.options_for(vars(settings))
    ids = envs.tasks(settings.env, settings.split, **options)
    check_left_out(args.leave_out, ids)
    ids = without(evenly_spaced(ids, settings.limit), settings.leave_out)
    out = report_path(run, settings, kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    answers = out.with_suffix(".jsonl")
    if out.exists():
        print0(f"{out} will be replaced")
    print0(f"playing {len(ids)} games of {settings.env}, context {settings.context}"
           f"{'' if run else ', by default settings and flags'}; finished ones are written to "
           f"{answers}.new")
    sampler = sampler_of(settings)
    workers = envs.default_workers(settings.env)
    with contextlib.closing(envs.Pool(settings.env, options, workers)) as pool:
        pool.remedy = ". --leave_out {} plays the others"
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
    shares = {"score": result["score"]}
    for category, share in result["success_by_category"].items():
        if category is not None:  # there are games without one
            shares[category] = share
    rest = ", ".join([*(f"{name} {100 * share:.1f}" for name, share in shares.items()),
                      *(f"{name} {mean:.4g}" for name, mean in mean_metrics(records).items())])
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
    runs = {"nargs": "+", "metavar": "RUN", "type": file_path}
    parser.add_argument("--plot", **runs, help="only draw training curves")
    parser.add_argument("--table", **runs, help="only print the paper's table")
    parser.add_argument("--reach", type=float, help="a success rate, such as half-way from start "
                        "to end: --table and --plot then compare how soon methods reach it")
    with one_line_errors("eval.py", envs.GameError):
        args = parser.parse_args()
        init_distributed()
        if args.reach is not None and not (args.table or args.plot):
            raise ValueError("--reach goes with --table or --plot")
        if args.table and args.plot:
            raise ValueError("--table and --plot are two commands")
        check_ranges(args, ((0, 1, "reach"),))
        if args.table:
            print(paper_table(args.table, columns_of) if args.reach is None else
                  comparison(args.table, args.reach))
        elif args.plot:
            out = Path(args.out or Path(args.plot[0]).parent / "curves.png")
            out = out if out.suffix else out.with_suffix(".png")
            draw(group_runs(args.plot, finished=args.reach is not None), out, args.reach)
            print(f"wrote {out}")
        else:
            evaluate(args, load_sampler)


if __name__ == "__main__":
    main()
