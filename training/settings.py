"""The settings of a run. `settings(**given)` makes them, for the command line and for Python.

    Config          every setting: a flag, a field, a line of config.json
    settings        the paper's values, what environment, method and model recommend, what is given,
                    and what depends on the machine -> a complete Config
    parse           the flags of train.py -> that Config
    learner_class   a method by its name

Code that takes a Config fills in no default, but for those that are named in a comment here.
"""
import dataclasses
import json
import numbers
import os
import pkgutil
from typing import Literal, get_args

import torch

import envs
from hf.loading import sapo_json_of
from runtime.answers import as_python, as_text
from runtime.checkpoint import RunDir, default_run_name
from runtime.cli import LARGE, check_ranges, file_path, parser_for
from runtime.distributed import print0

# The methods that have a short name; any other is MODULE:CLASS, as for environments.
ALGOS = {"sapo": "train:Learner", "ppo-turns": "baselines.learners:PPOTurns",
         "ppo": "baselines.learners:PPO", "grpo": "baselines.learners:GRPO",
         "rloo": "baselines.learners:RLOO", "gigpo": "baselines.learners:GiGPO",
         "gigpo-nostd": "baselines.learners:GiGPOWithoutStd", "empg": "baselines.learners:EMPG"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting is a flag, and its comment is the flag's --help. Defaults are the paper's where
    it gives them, else verl-agent's, else ours. What is None here is filled in by `settings`, from
    the environment, the model or the machine, or means that there is none. ValueError: a value
    cannot be used."""

    env: str = "house"  # house, alfworld, webshop, webshop-human (goals by people), MODULE:CLASS
    model: str = "tiny"  # tiny (results/tiny-*), a hub id, a bare name (Qwen2.5-1.5B), a folder
    data: str = None  # the folder that contains alfworld's json_2.1.1, or webshop's catalogue
    out: str = None  # folder of the run; default runs/ENV-MODEL[-ALGO][-FLAG=VALUE ...]-SEED, but
        # from Python none, and nothing is written
    seed: int = 0  # random seed
    iterations: int = 150  # number of iterations, each a rollout and an update
    algo: str = "sapo"  # the method; those that SAPO is compared with: ppo-turns, ppo, grpo, rloo,
        # gigpo, gigpo-nostd, empg; your own learner is MODULE:CLASS
    batch_size: int = 128  # |B|: trajectories (not turns) per iteration
    group_size: int = 1  # trajectories of the same task, for the group-based methods in baselines/
    context: Literal["window", "full"] = None  # a new prompt each turn, or one conversation;
        # default the environment's, which is window for all that are named here
    engine: Literal["kv", "hf"] = "kv"  # kv: our sampler; hf: transformers' generate
    max_num_seqs: int = None  # games played side by side per rank; default all of an iteration,
        # and 144 in evaluations
    compile: bool = None  # torch.compile scoring, and sampling at temperature 1; default on a GPU
    dtype: Literal["float32", "bfloat16"] = None  # of the weights; default bfloat16 on a GPU
    history: int = 2  # past turns shown in a prompt of --context window
    horizon: int = None  # maximum number of turns per episode; default the environment's
    places: int = 5  # house: number of places
    objects: int = 4  # house: number of things to carry
    max_new_tokens: int = 512  # maximum length of a response
    max_prompt: int = None  # maximum tokens of a prompt, or of a whole conversation with full;
        # default the environment's, with full the model's

    gamma: float = 0.95  # discount per turn, Eq. 4
    gae_lambda: float = 0.95  # lambda of GAE over turns, Eq. 5
    r_max: float = None  # R_max, Eq. 2: returns must be within [-R_max, R_max]; default the
        # model's, which is 10 for a new one
    tau_v: float = None  # temperature of the value readout, Eq. 1; default the model's, which is 1
        # for a new one
    value_tokens: tuple = None  # w+ and w-, Eq. 1; default: two vocabulary entries no text uses
    c_inv: float = 0.1  # penalty for a response in the wrong format, in units of return: subtracted
        # from the advantage before Eq. 7 normalizes it
    clip: float = 0.2  # epsilon, Eq. 9, and epsilon_V, epsilon_Q, Eq. 10
    c_v: float = 0.5  # weight of V's loss in Eq. 12; with 0, GAE uses V = 0
    c_q: float = 0.25  # weight of Q's loss in Eq. 12
    beta: float = 0.01  # weight of the KL to the initial model
    c_h: float = 0.001  # weight of the entropy bonus

    lora_rank: int = 0  # above 0: train adapters of this rank (LoRA) in place of all parameters;
        # --lr and --critic_lr are then ten times as large by default. Default that of --model, if
        # it is an adapter
    lr: float = 1e-6  # AdamW's learning rate
    lr_warmup: int = 0  # optimizer steps of linear warmup
    lr_final_fraction: float = 1.0  # the learning rate decays linearly, and would reach this
        # fraction of --lr after the last iteration
    value_lr_factor: float = 10.0  # the learning rate of w+ and w- is so many times --lr (with
        # adapters, whose --lr is larger, the default is 1)
    critic_lr: float = 1e-5  # learning rate of a separate critic, in baselines/
    mini_batch: int = 256  # maximum number of turns per optimizer step; an iteration's turns are
        # split evenly into as few steps as that allows (full: about, as trajectories stay whole)
    tokens_per_micro_batch: int = 8192  # tokens per forward pass, padding included
    old_logprobs: Literal["recompute", "rollout"] = "recompute"  # old log-probs, V and Q, line 3:
        # from a forward pass, or those of the sampler
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    optim_state_dtype: Literal["float32", "bfloat16"] = "float32"  # of AdamW's moments, and of a
        # bfloat16 model's gradients; bfloat16 takes 6 bytes less per parameter (2 for each of them)

    leave_out: list = None  # ids of tasks that are not played, because their games fail; they are
        # added to those that a resumed run has left out. Without ids: none is left out any more
    eval_games: int = None  # number of held-out games; default the environment's
    eval_every: int = 0  # iterations between evaluations while training (0: none), on games for
        # validation, if the environment has some: the best model is then kept as RUN/best
    save_every: int = 5  # iterations between checkpoints
    resume: bool = False  # continue the run in --out, with its settings. Beside flags of a new run
        # it starts this one if there is none yet
    wandb: str = None  # Weights & Biases project to log to; needs pip install wandb

    def __post_init__(self):  # also after dataclasses.replace
        check_types(vars(self))
        check_ranges(self, RANGES)
        if self.batch_size % self.group_size:
            raise ValueError(f"--group_size {self.group_size} does not divide --batch_size "
                             f"{self.batch_size}")


RANGES = (  # (smallest, largest, settings)
    (1, 10 ** 6, "batch_size group_size"), (0, 2 ** 63 - 1, "seed"),
    (1, LARGE, "iterations horizon max_new_tokens mini_batch save_every tokens_per_micro_batch "
               "max_num_seqs max_prompt"),
    (0, LARGE, "history lr value_lr_factor critic_lr lr_warmup lr_final_fraction eval_games "
               "eval_every beta c_v c_q c_h c_inv clip lora_rank"),
    (0, 1, "gamma gae_lambda"), (1e-6, LARGE, "r_max tau_v"))
# What may change when a run is resumed: its length, its surroundings, and what saves memory. With
# another length, a learning rate that decays (--lr_final_fraction) jumps.
RESUME_MUTABLE = {"iterations", "save_every", "data", "out", "resume", "max_num_seqs", "wandb",
                  "max_prompt", "tokens_per_micro_batch", "gradient_checkpointing", "compile",
                  "optim_state_dtype", "leave_out"}


def check_types(config: dict) -> None:
    """ValueError: one of these settings that is not None is of the wrong type, none of its choices,
    or a folder whose name cannot be written."""
    for f in dataclasses.fields(Config):
        value, choices = config.get(f.name), get_args(f.type)
        if value is None:
            continue
        if choices and value not in choices:
            raise ValueError(f"{f.name} is {value!r}; it can be {', '.join(choices)}")
        texts = (str, os.PathLike) if f.name in PATHS else (str, type) if f.name == "env" else str
        if f.type is str and not isinstance(value, texts):
            more = {"env": ", MODULE:CLASS or the short name, or a class",
                    "algo": ", MODULE:CLASS or the short name; a learner itself goes to train()"}
            raise ValueError(f"{f.name} is {value!r:.200}; it must be a text"
                             + more.get(f.name, ""))
        is_bool = isinstance(value, bool)  # Python counts it as a number, too
        if f.type is int and (is_bool or not isinstance(value, numbers.Integral)):
            raise ValueError(f"{f.name} is {value!r}; it must be a whole number")
        if f.type is float and (is_bool or not isinstance(value, numbers.Real)):
            raise ValueError(f"{f.name} is {value!r}; it must be a number")
        if f.type is bool and not is_bool:
            raise ValueError(f"{f.name} is {value!r}; it must be True or False")
        if f.type is tuple and not (isinstance(value, (list, tuple)) and len(value) == 2
                                    and all(isinstance(token, (str, int)) for token in value)):
            raise ValueError(f"{f.name} is {value!r}; it must be two names or ids")
        if f.type is list and not (isinstance(value, (list, tuple))
                                   and all(isinstance(task, (str, int)) for task in value)):
            raise ValueError(f"{f.name} is {value!r}; it must be a list of task ids")
        if f.name == "out" and str(value) != as_text(str(value), "out"):
            raise ValueError(f"--out {value!r}: the folder's name must be UTF-8")


# Settings that only some environments have, those that name them in their `flags`.
OPTIONS = "data", "places", "objects"
PATHS = {"data", "model", "out"}
# Settings that decide what the others are by default.
CHOICE = "env", "model", "algo", "context", "lora_rank"
LORA_LR_FACTOR = 10  # adapters learn at so many times the learning rate of all parameters


def settings(lm=None, pool=None, **given) -> Config:
    """The settings of a run, complete, as the command line has them. Of several values for one
    setting the last one counts:

        1. the paper's: the defaults of Config
        2. what depends on the environment or the machine
        3. what the environment, the method and the model's folder recommend ("settings" in its
           sapo.json, and the R_max and tau_v that it was trained with). Learning rates are those
           for all parameters; with adapters they are multiplied by 10, and value_lr_factor is
           divided by 10, so that w+ and w- keep theirs
        4. `given`; None counts as not given

    An ActorCritic or an envs.Pool of one's own goes in here, too: R_max, tau_v and dtype are the
    model's then, and the environment and its options the pool's. With resume=True, all settings are
    those of the run in `out`, if there is one.

    ValueError: a value cannot be used; it is not that of the run that is resumed (those in
    RESUME_MUTABLE may be others); or it contradicts the model or the pool."""
    given = {name: as_python(value) for name, value in given.items() if value is not None}
    describes_a_run = lm or pool or given.keys() - RESUME_MUTABLE
    if "env" in given:
        given["env"] = short_name(given["env"])
    if pool:
        check_class(given.get("env"), pool)
        given = with_those_of("pool", given, options_of(pool))
    if unknown := given.keys() - {f.name for f in dataclasses.fields(Config)}:
        raise ValueError(f"{', '.join(sorted(unknown))}: there is no such setting")
    check_types(given)
    given = expanded(given)
    if lm:
        given = with_those_of("model", given, model_settings(lm))
        if given.get("value_tokens"):
            raise ValueError("value_tokens: the model has its own, give them to model.load")
    if given.get("resume") and given.get("out"):
        # a job can always have resume=True, beside what describes its run: then it starts the run
        # if there is none yet. Without, a run that there is is meant
        if (RunDir(given["out"]) / "config.json").exists() or not describes_a_run:
            return resumed(given)
    if lm:
        given.setdefault("model", lm.model.name_or_path or "given")

    choice = Config(**{name: given[name] for name in CHOICE if name in given})
    env, learner = envs.env_class(choice.env), learner_class(choice.algo)
    context = envs.context_for(choice.env, choice.context)
    folder = {} if lm else sapo_json_of(choice.model, env.tiny_model)
    lora_rank = given.get("lora_rank", folder.get("lora_rank", 0))
    if lora_rank != folder.get("lora_rank", lora_rank):
        raise ValueError(f"--lora_rank {lora_rank}: {choice.model} is an adapter of rank "
                         f"{folder['lora_rank']}: leave the flag out, or start from the whole "
                         "model into which it is merged, such as RUN/final")
    advice = env.recommended | learner.recommended | (
        lm.recommended if lm else folder.get("settings", {}))
    # (what decides the others cannot be recommended, because it is decided already)
    if unknown := {*advice} - {f.name for f in dataclasses.fields(Config)} | {*advice} & {*CHOICE}:
        raise ValueError(f"{', '.join(sorted(unknown))}: recommended by --env {choice.env}, --algo "
                         f"{choice.algo} or --model {choice.model}, but no setting of train.py "
                         "that can be")
    # those of trained values, which others would misread
    advice |= {name: folder[name] for name in ("r_max", "tau_v") if name in folder}
    if context == "full":
        # it is meant for single prompts, and would limit the whole conversation
        advice.pop("max_prompt", None)
    if lora_rank:
        for name in ("lr", "critic_lr"):
            advice[name] = LORA_LR_FACTOR * advice.get(name, getattr(Config, name))
        value_lr_factor = advice.get("value_lr_factor", Config.value_lr_factor)
        advice["value_lr_factor"] = value_lr_factor / LORA_LR_FACTOR
    gpu = torch.cuda.is_available()
    surroundings = {
        "context": context, "horizon": env.horizon, "eval_games": env.held_out[1],
        "max_prompt": env.max_prompt if context == "window" else None,
        "dtype": "bfloat16" if gpu else "float32", "compile": gpu,
        "r_max": 10.0, "tau_v": 1.0, "lora_rank": lora_rank}
    config = Config(**(surroundings | advice | given))
    check_fit(config)
    return config


def expanded(given: dict) -> dict:
    """`given`, with the home folder in place of ~ at the beginning of a path. ValueError: one is
    no path."""
    paths = {}
    for name in PATHS & given.keys():
        try:
            paths[name] = file_path(given[name])
        except ValueError as error:
            raise ValueError(f"--{name} {given[name]!r}: {error}") from None
    return given | paths


def short_name(env):
    """The short name of an environment of environments/, however it is called; else what was given,
    a name or a class."""
    name = envs.name_of(env)
    return name if name in envs.ENVS else env


def model_settings(lm) -> dict:
    """The settings that a model has itself."""
    dtype = str(lm.model.dtype).removeprefix("torch.")  # as --dtype has it
    return {"r_max": lm.r_max, "tau_v": lm.tau_v, "dtype": dtype, "lora_rank": lm.lora_rank}


def check_model_settings(config: Config, lm) -> None:
    """ValueError: a setting is not the model's."""
    for name, value in model_settings(lm).items():
        if getattr(config, name) not in (None, value):
            raise ValueError(f"the config has {name} {getattr(config, name)!r}, and the model "
                             f"{value!r}: make it by settings(lm=lm)")


def with_those_of(what: str, given: dict, own: dict) -> dict:
    """`given`, with the settings that a model or a pool has itself. ValueError: they differ."""
    for name in given.keys() & own.keys():
        if given[name] != own[name]:
            raise ValueError(f"{name} is {given[name]!r}, and that of the {what} is "
                             f"{own[name]!r}: leave it out")
    return given | own


def check_class(env, pool) -> None:
    """ValueError: env is a class, and the pool plays another one of the same name, such as an older
    one of a notebook."""
    name = envs.name_of(pool.env)
    if isinstance(env, type) and env is not pool.env and envs.name_of(env) == name:
        raise ValueError(f"the pool plays another class {name} than this one, such as an older "
                         "one: make the pool anew")


def options_of(pool) -> dict:
    """The environment of a pool and all options of environments, also those that are defaults."""
    options = {name: getattr(Config, name) for name in OPTIONS}
    options |= {"horizon": pool.env.horizon} | pool.options
    options = {name: value for name, value in options.items() if value is not None}
    return options | {"env": short_name(pool.env)}


def resumed(given: dict) -> Config:
    """The settings of the run in `out`, with those of RESUME_MUTABLE that are given. ValueError:
    another one is given that is not the run's."""
    stored = RunDir(given["out"]).settings()
    # (a run that was started before there was this setting had one learning rate for all)
    stored = {"value_lr_factor": 1.0} | {
        f.name: stored[f.name] for f in dataclasses.fields(Config) if f.name in stored}
    if other := [name for name, value in as_json(given).items()
                 if name not in RESUME_MUTABLE and value != stored.get(name)]:
        was = "; ".join(f"--{name} was {stored.get(name)}" for name in other)
        raise ValueError(f"--resume: {given['out']} was started with different settings ({was})")
    if given.get("leave_out"):
        before = stored.get("leave_out") or ()
        given = given | {"leave_out": [*dict.fromkeys([*before, *given["leave_out"]])]}
    return Config(**(stored | given))


def check_fit(config: Config) -> None:
    """ValueError: a setting does not fit the environment, or another setting."""
    env = envs.env_class(config.env)
    if unknown := {*env.flags} - {*OPTIONS}:
        raise ValueError(f"--env {config.env}: its `flags` name {', '.join(sorted(unknown))}, "
                         "which are no settings of train.py for environments; it has "
                         f"{', '.join(OPTIONS)}")
    for name in OPTIONS:
        if name not in env.flags and getattr(config, name) not in (None, getattr(Config, name)):
            raise ValueError(f"--{name} has no effect with --env {config.env}")
    if config.eval_every and not config.eval_games and not env.validation:
        raise ValueError(f"--eval_every needs --eval_games, because {envs.name_of(config.env)} "
                         "has no games for validation")
    if config.wandb and not config.out:
        raise ValueError("--wandb needs --out, the folder of the run")


def as_json(config: dict) -> dict:
    """Settings by name, with values as config.json has them."""
    if "env" in config:
        config = config | {"env": envs.name_of(config["env"])}
    return json.loads(json.dumps(config))


def parse(argv: list[str] = ()) -> Config:
    """Flags -> Config. Without --out, the run's folder is named after the flags that differ from
    their defaults. ValueError: they cannot be used."""
    given = expanded(vars(parser_for(Config, "SAPO, Algorithm 1.").parse_args(argv)))
    if "out" not in given:
        usual = settings(**{name: given[name] for name in CHOICE if name in given})
        env = envs.env_class(usual.env)
        defaults = vars(usual) | {
            "context": env.context,
            "lora_rank": sapo_json_of(usual.model, env.tiny_model).get("lora_rank", 0)}
        given["out"] = f"runs/{default_run_name(given, defaults, RESUME_MUTABLE)}"
    config = settings(**given)
    for name in learner_class(config.algo).unused:
        if name in given:
            print0(f"Warning: --{name} has no effect with --algo {config.algo}")
    return config


def learner_class(algo: str) -> type:
    """The learner of a method: one of ALGOS, or MODULE:CLASS, which is imported from the working
    directory, too. ValueError: there is none of this name."""
    try:
        with envs.working_directory_importable():
            found = pkgutil.resolve_name(ALGOS.get(algo, algo))
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--algo {algo}: {error}; known: {', '.join(ALGOS)}, or a learner of your "
                         "own as MODULE:CLASS") from error
    if not hasattr(found, "learn"):
        raise ValueError(f"--algo {algo}: it is no train.Learner; known: {', '.join(ALGOS)}, or a "
                         "learner of your own as MODULE:CLASS")
    return found
