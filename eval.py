"""The paper's table and curves, from any checkpoint, prompted model or endpoint.

    python eval.py --model runs/house-tiny-0                             a run of train.py: its final model (or checkpoint), its environment
    python eval.py --model Qwen2.5-1.5B-Instruct --env alfworld --split valid_seen --out before.json
    python eval.py --model runs/webshop-tiny-0 --split test_500          in the shop: score and success
    python eval.py --model gpt-4o --endpoint https://api.openai.com/v1 --env alfworld --prompt react        or plain, reflexion
    python eval.py --plot runs/house-tiny-0 runs/house-tiny-1            one figure: seeds thin, their mean thick
    python eval.py --table runs/*                                        the paper's table: mean and deviation over seeds, as Markdown

Every game of the split is played exactly once (--repeats: so many times), in sorted order; success, and in the shop the score, are
printed in the paper's columns with n and a 95 % interval (Wilson's; repeats of a game count for what they add). Writes OUT (a JSON report) and beside it a line per
episode (.jsonl); of a prompted model a line per attempt, as it ends.

Departure from the paper: it draws its test games with replacement (128 draws hold about 84 of valid_seen's 140 games).
"""
import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from tqdm import tqdm

import envs
from model import load
from rollout import Sampler, rollout, uniforms
from sapo import GROUPED

SIDE_BY_SIDE = 128  # games played at once, unless --rows says otherwise
EVALUATION, PROMPTED = 5, 6  # streams of random numbers; train.py has 0 to 4


def play(sampler, games, pool, *, seed=0, first=0, rows=None, history=2, max_prompt=2048, max_context=None, title="evaluation", quiet=False):
    """Plays every game once -> a record each: task, category, won, score, turns, and what was said and done. `first` numbers the
    games; a game's random numbers depend on (seed, its number) alone."""
    records = []
    with tqdm(total=len(games), desc=title, disable=quiet, leave=False) as bar:
        turns = rollout(sampler, games, pool, seed=(seed, 0, EVALUATION), trajs=range(first, first + len(games)), rows=rows or SIDE_BY_SIDE, history=history,
                        max_prompt=max_prompt, max_context=max_context, bar=bar)
    for _, mine in itertools.groupby(turns, lambda t: t.traj):
        mine = list(mine)
        last = mine[-1]
        records.append(record(pool.env, last.task, vars(last), last.truncated, last.outgrown, [(t.text, t.action, not t.invalid) for t in mine]))
    return records


def record(env, task, info, truncated, outgrown, said):
    """An episode as it is written down. info: category, won and score; said: (response, action, whether that was valid) of every turn."""
    return {"task": task, "category": env.categories.get(info["category"], info["category"]), "won": info["won"], "score": info["score"], "turns": len(said),
            "truncated": truncated, "outgrown": outgrown, "valid_actions": float(np.mean([valid for _, _, valid in said] or [0])),
            "actions": [action for _, action, _ in said], "responses": [text for text, _, _ in said]}


def wilson(k, n):
    """95 % interval of a share k / n: honest near 0 and 1, where the usual +- is not."""
    if n == 0:
        return 0.0, 1.0
    z, p = 1.96, k / n
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n))


def independent(rows):
    """How many independent episodes say as much as these, of which some are of the same game."""
    games = {}
    for r in rows:
        games.setdefault(r["task"], []).append(r["won"])
    shares, p = [np.mean(won) for won in games.values()], np.mean([r["won"] for r in rows] or [0])
    if len(games) in (0, 1, len(rows)) or not 0 < p < 1:
        return len(games)
    return min(len(rows), p * (1 - p) * len(games) / max(np.var(shares, ddof=1), 1e-9))


def report(records):
    """Success with n and interval, the mean score with the half of its 95 % interval, and success by category."""
    def share(rows):
        p, n = sum(r["won"] for r in rows) / max(1, len(rows)), independent(rows)
        return {"success": p, "n": len(rows), "interval": [round(x, 4) for x in wilson(p * n, n)]}

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


# ----------------------------------------------------------------------------------------------------- prompted models

REACT = ("{role} Your task is to: {task}\n{lessons}What has happened so far:\n{trace}Observation: {obs}\nCommands that work now: [{commands}].\n\n"
         "Continue with your next thought and action. {answer}")
LESSONS = "You have tried this task before and failed. What you told yourself then:\n{lessons}\n"
REFLECT = ("{role} Your task was to: {task}\n{lessons}This is what happened:\n{trace}Observation: {obs}\n\nYou did not succeed. In a few "
           "sentences, tell yourself what went wrong and what to do differently in your next attempt.")
TRIALS = 3  # of Reflexion
ALL_TURNS = 8192  # tokens a prompt of ReAct or Reflexion may take, unless --max_prompt says otherwise: an episode of ALFWorld fits


def react_prompt(episode, thoughts, lessons, start=0, template=REACT):
    """ReAct (arXiv 2210.03629): every thought, action and observation so far, from turn `start` on. With lessons and REFLECT: Reflexion (arXiv
    2303.11366)."""
    trace = "".join(f"Observation: {episode.shown(obs)}\nThought: {thought}\nAction: {action}\n"
                    for (obs, action), thought in list(zip(episode.history, thoughts))[start:])
    told = LESSONS.format(lessons="\n".join(f"- {' '.join(lesson.split())}" for lesson in lessons)) if lessons else ""
    return template.format(**episode.now(episode.info["admissible"]), trace=trace, lessons=told)


class Local:
    """Answers of a model of ours. `keys` (trajectory, turn) decide the random numbers."""

    def __init__(self, sampler, rows, max_prompt, seed):
        self.sampler, self.rows, self.limit, self.seed = sampler, rows, min(max_prompt, sampler.lm.max_length - sampler.max_new), seed

    def fits(self, text):
        return len(self.sampler.lm.chat.first(text)) <= self.limit

    def __call__(self, texts, keys):
        lm, out = self.sampler.lm, []
        for n in range(0, len(texts), self.rows):
            u = [uniforms((self.seed, 0, PROMPTED), *key, self.sampler.max_new) for key in keys[n:n + self.rows]]
            responses = self.sampler(range(len(u)), [lm.chat.first(text) for text in texts[n:n + self.rows]], u)
            self.sampler.forget()
            out += [lm.text(r.ids) for r in responses]
        return out


class Endpoint:
    """Answers of an OpenAI-compatible server: POST URL/chat/completions, so many at once. The key, if it wants one, is in OPENAI_API_KEY. What
    is busy or broken is asked again after 1, 2, 4 ... seconds (or what Retry-After says), six times in all; ValueError then, or where the key is refused."""

    def __init__(self, url, model, temperature, max_new, at_once=16, max_prompt=2048, tries=6, wait=1.0):
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--endpoint {url}: an address begins with http:// or https://")
        self.url, self.at_once, self.limit, self.tries, self.wait = url.rstrip("/") + "/chat/completions", at_once, 4 * max_prompt, tries, wait
        self.body = {"model": model, "temperature": temperature, "max_tokens": max_new}
        self.headers = {"Content-Type": "application/json"}
        if os.environ.get("OPENAI_API_KEY"):
            self.headers["Authorization"] = f"Bearer {os.environ['OPENAI_API_KEY']}"

    def fits(self, text):
        return len(text) <= self.limit  # about four letters a token

    def __call__(self, texts, keys):
        with ThreadPoolExecutor(self.at_once) as pool:
            return list(pool.map(self.ask, texts))

    def ask(self, text):
        body = json.dumps(self.body | {"messages": [{"role": "user", "content": text}]}).encode()
        for n in range(self.tries):
            pause = self.wait * 2 ** n
            try:
                with urllib.request.urlopen(urllib.request.Request(self.url, body, self.headers), timeout=300) as answer:
                    return json.load(answer)["choices"][0]["message"]["content"] or ""
            except urllib.error.HTTPError as error:
                why = f"{error.code} {error.reason}"
                with contextlib.suppress(OSError, http.client.HTTPException):  # the line may break while it explains itself
                    why += f": {error.read(300).decode(errors='replace')}"
                if error.code in (401, 403):
                    raise ValueError(f"{self.url} refuses the key in OPENAI_API_KEY ({why})" if "Authorization" in self.headers
                                     else f"{self.url} wants a key: set OPENAI_API_KEY ({why})") from None
                if error.code not in (408, 409, 425, 429) and error.code < 500:
                    raise ValueError(f"{self.url}: {why}") from None
                with contextlib.suppress(TypeError, ValueError):
                    pause = min(60.0, max(0.0, float(error.headers.get("Retry-After"))))
            except (OSError, http.client.HTTPException) as error:
                why = str(error)
            except (ValueError, KeyError, IndexError, TypeError) as error:
                why = f"no answer of the OpenAI kind ({type(error).__name__}: {error})"
            if n + 1 < self.tries:
                time.sleep(pause)
        raise ValueError(f"{self.url} did not answer in {self.tries} tries: {why}")


def thought_of(text):
    """What stands between the think tags, or before the action."""
    found = re.search("<think>(.*?)</think>", text, re.I | re.S) or re.match("(.*?)<action>", text, re.I | re.S)
    return " ".join(found[1].split()) if found else ""


def play_prompted(answers, games, pool, style, *, first=0, history=2, quiet=False, keep=lambda record: None):
    """Every game once by a prompted model -> records as of `play`, with trials and lessons. plain: the prompt of training. react: all thoughts and
    turns so far. reflexion: the same up to TRIALS times, each after lessons the model wrote about its failures. `keep` sees each attempt as it ends."""
    records, lessons = [None] * len(games), [[] for _ in games]
    for trial in range(TRIALS if style == "reflexion" else 1):
        left = [i for i, r in enumerate(records) if r is None or not r["won"]]
        for n in range(0, len(left), SIDE_BY_SIDE):
            for i, played in play_once(answers, games, left[n:n + SIDE_BY_SIDE], pool, style, lessons, trial, first, history, quiet, keep):
                records[i] = played
    return records


def play_once(answers, games, numbers, pool, style, lessons, trial, first, history, quiet, keep):
    """One attempt at some of the games, side by side -> [(number, record)]; in reflexion a lesson is added for each that failed."""
    for i in numbers:
        pool.start(i, games[i])
    episodes = {i: pool.env.episode(*answer) for i, answer in zip(numbers, pool.gather(numbers))}
    said, thoughts, live, out = {i: [] for i in numbers}, {i: [] for i in numbers}, list(numbers), {}

    def prompt(i, template=REACT):
        """The newest part of the history that fits; None where not even the observation does."""
        parts = range(history, -1, -1) if style == "plain" else range(len(thoughts[i]) + 1)
        texts = (episodes[i].window_prompt(k) if style == "plain" else react_prompt(episodes[i], thoughts[i], lessons[i], k, template) for k in parts)
        return next((text for text in texts if answers.fits(text)), None)

    def end(i, truncated, outgrown=False):
        live.remove(i)
        out[i] = record(pool.env, games[i], episodes[i].info, truncated, outgrown, said[i]) | {"trials": trial + 1, "lessons": list(lessons[i])}
        keep(out[i])

    with tqdm(total=len(numbers), desc=f"{style}, attempt {trial + 1}", disable=quiet, leave=False) as bar:
        while live:
            prompts = {i: prompt(i) for i in live}
            for i in [i for i, text in prompts.items() if text is None]:
                pool.drop(i)
                end(i, True, True)
            asked = list(live)
            texts = answers([prompts[i] for i in asked], [(first + i, 1000 * trial + len(said[i])) for i in asked])
            for i, text in zip(asked, texts):
                said[i].append((text, *envs.parse_action(text, pool.env.fallback)))
                thoughts[i].append(thought_of(text))
                pool.step(i, said[i][-1][1])
            for i, (obs, _, terminated, truncated, info) in zip(asked, pool.gather(asked)):
                episodes[i].took(said[i][-1][1], obs, info)
                if terminated or truncated:
                    end(i, truncated)
            bar.update(len(numbers) - len(live) - bar.n)
    failed = [i for i in numbers if not out[i]["won"] and style == "reflexion" and trial + 1 < TRIALS]
    prompts = {i: prompt(i, REFLECT) for i in failed}
    asked = [i for i in failed if prompts[i]]
    for i, text in zip(asked, answers([prompts[i] for i in asked], [(first + i, 1000 * trial + 999) for i in asked])):
        lessons[i].append(text)
    return out.items()


# -------------------------------------------------------------------------------------------------------------- curves


def json_of(*path):
    with open(os.path.join(*path)) as file:
        return json.load(file)


def read_run(folder):
    """-> (config, lines of metrics.jsonl). ValueError where there are none."""
    try:
        config = json_of(folder, "config.json")
        with open(os.path.join(folder, "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is no finished or running run of train.py: {error}") from None
    if not lines:
        raise ValueError(f"{folder}/metrics.jsonl has no line yet")
    return config, lines


def read_result(folder):
    """-> (config, eval.json and cost.json, lines of metrics.jsonl) of a finished run."""
    config, lines = read_run(folder)
    try:
        result = json_of(folder, "eval.json")
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is not finished: {error}") from None
    with contextlib.suppress(OSError):
        result |= json_of(folder, "cost.json")
    return config, result, lines


# What may differ between runs of one setting
NO_SETTING = {"seed", "out", "git", "versions", "resume", "workers", "data", "save_every", "rows", "tokens_per_micro_batch", "checkpointing", "compile", "log"}


def by_setting(folders, read):
    """What `read` finds in the folders, in groups that differ in nothing but their seed; folders without a run are named and left out."""
    groups = {}
    for folder in folders:
        try:
            found = read(folder)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        same = {k: v for k, v in found[0].items() if k not in NO_SETTING}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(found)
    if not groups:
        raise ValueError("none of these folders is a run of train.py")
    return list(groups.values())


NAMES = {"sapo": "SAPO", "ppo": "PPO", "grpo": "GRPO", "rloo": "RLOO", "gigpo": "GiGPO", "empg": "EMPG"}


def labels(configs):
    """A name for each setting: the method, and whatever else it does not have in common with most of the settings."""
    named = NO_SETTING | {"algo", "critic", "without_std", "c_v", "c_q", "group"}
    common = {}  # of each other key the value that goes without saying, if there is one
    for k in dict.fromkeys(k for c in configs for k in c if k not in named):
        value, count = Counter(json.dumps(c.get(k)) for c in configs).most_common(1)[0]
        common[k] = value if 2 * count > len(configs) else None
    out = []
    for c in configs:
        parts = [NAMES[c.get("algo", "sapo")] + (" without std" if c.get("without_std") else "")]
        if parts == ["SAPO"] and c.get("critic") == "separate":
            parts.append("separate critic")
        elif parts == ["SAPO"] and not c["c_v"] + c["c_q"]:
            parts.append("no V, no Q")
        elif parts == ["SAPO"]:
            parts += [f"{k} {c[k]:g}" for k, usual in (("c_v", 0.5), ("c_q", 0.25)) if c[k] != usual]
        usual = 8 if c.get("algo") in GROUPED else 1
        if c.get("group", usual) != usual:
            parts.append(f"groups of {c['group']}")
        out.append(", ".join(parts + [f"{k} {c.get(k)}" for k, value in common.items() if json.dumps(c.get(k)) != value]))
    return out


def paper_table(folders):
    """The paper's Table 1 from finished runs, as Markdown: mean and standard deviation over seeds in percent, and what it cost."""
    groups = by_setting(folders, read_result)
    env = envs.known(groups[0][0][0]["env"])
    columns = ["score", "success"] if env.graded else [*env.categories.values(), "success"]
    heads = {"score": "Score", "success": "Success" if env.graded else "All", "at_1": "All, T = 1"}
    if "success_at_1" in groups[0][0][1]:
        columns.append("at_1")

    def number(result, c, before):
        if c == "at_1":
            return result.get(f"success{before}_at_1")
        return result[f"{c}{before}"] if c in heads else result[f"success{before}_by_category"].get(c)

    def spread(values, digits=1):
        values = [v for v in values if v is not None]
        if not values:
            return "–"
        return f"{np.mean(values):.{digits}f}" + (f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else "")

    def row(title, runs, before=""):
        cells = [spread([None if x is None else 100 * x for x in (number(result, c, before) for _, result, _ in runs)]) for c in columns]
        seconds = [sum(line["time_total"] for line in lines) for *_, lines in runs]
        tokens = [sum(line["tokens_encoded"] + line["tokens_sampled"] for line in lines) / 1e6 for *_, lines in runs]
        memory = [result.get("peak_memory", 0) for _, result, _ in runs]
        cost = ["", "", ""] if before else [spread(seconds, 0), spread(tokens, 2), f"{max(memory):.2f}" if max(memory) else "–"]
        return "| " + " | ".join([title, str(len(runs)), *cells, *cost]) + " |"

    titles = ["method", "seeds", *(heads.get(c, c) for c in columns), "seconds", "M tokens", "GB"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines.append(row("start", groups[0], "_before"))
    return "\n".join(lines + [row(name, runs) for name, runs in zip(labels([runs[0][0] for runs in groups]), groups)])


def pyplot():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def plot_phases(reports, path):
    """The paper's runtime figure: seconds of an iteration by phase, method beside method, of `train.py --bench --ppo --out RUN`."""
    plt = pyplot()
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
        ax.set(title=f"{report['model']}, {report['context']}, old values by {report['old']}", ylabel="seconds an iteration")
        ax.margins(y=0.12)
    axes[0][0].legend(fontsize=8, loc="lower center")
    fig.suptitle(reports[0]["versions"]["device"])
    fig.savefig(path, dpi=110)
    plt.close(fig)


PANELS = {"success": "success of the rollouts", "v_explained_variance": "explained variance of V",
          "q_explained_variance": "explained variance of Q", "kl": "KL to the start (nats a token)"}


def learned(config, key):
    """Whether a run has the value that a panel is about. (c_q is 0 where the critic is not shared.)"""
    critic = config.get("critic", "shared")
    return {"v": config["c_v"] if critic == "shared" else critic == "separate", "q": config["c_q"]}.get(key.split("_")[0], True)


def smooth(curve, reach=2):
    """Each point's mean with its neighbours, two on either side where there are as many."""
    return [np.mean(curve[max(0, i - reach):i + reach + 1]) for i in range(len(curve))]


def plot(folders, path):
    """Runs that differ in nothing but their seed share a colour: each of them thin; thick the mean over seeds (of the KL, whose outliers are
    orders of magnitude away, the median) and five iterations."""
    plt, groups = pyplot(), by_setting(folders, read_run)
    names = labels([runs[0][0] for runs in groups])
    fig, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for n, runs in enumerate(groups):
        label = names[n] + (f", {len(runs)} seeds" if len(runs) > 1 else "")
        for ax, (key, title) in zip(axes, PANELS.items()):
            ax.set(title=title, xlabel="iteration")
            ax.grid(True, alpha=0.3)
            if not learned(runs[0][0], key):
                continue
            curves = [[line[key] for line in lines] for _, lines in runs]
            for curve in curves:
                ax.plot(range(1, len(curve) + 1), curve, color=f"C{n}", linewidth=0.8, alpha=1 if len(runs) == 1 else 0.4 if len(groups) < 4 else 0.1)
            if len(runs) > 1:
                shortest = min(map(len, curves))
                ax.plot(range(1, shortest + 1), smooth((np.median if key == "kl" else np.mean)([c[:shortest] for c in curves], 0)), color=f"C{n}", linewidth=2.4, label=label)
            else:
                ax.lines[-1].set_label(label)
    places = {f"{c['model']} on {c['env']}" for (c, _), *_ in groups}
    if len(places) == 1:
        fig.suptitle(*places)
    axes[0].set_ylim(0, 1.02 if axes[0].get_ylim()[1] > 0.75 else None)
    axes[-1].set_yscale("symlog", linthresh=0.01)
    axes[-1].set_ylim(bottom=0)
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
    add("--prompt", default="plain", choices=("plain", "react", "reflexion"), help="plain: as in training; react: all thoughts and turns so far; reflexion: up to "
        f"{TRIALS} attempts with lessons in between")
    add("--endpoint", metavar="URL", help="an OpenAI-compatible server (https://api.openai.com/v1) that serves --model; its key in OPENAI_API_KEY")
    for name, kind, text in (("context", str, "window or full"), ("engine", str, "kv or hf"), ("dtype", str, "float32 or bfloat16"), ("rows", int, "games decoded side by side"),
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
            if benches and len(benches) < len(args.plot):
                raise ValueError("--plot draws either runs or benches, not both in one figure")
            if benches:
                plot_phases([json_of(path) for path in benches], args.out or "curves.png")
            else:
                plot(args.plot, args.out or "curves.png")
            return print(f"wrote {args.out or 'curves.png'}")
        evaluate(args)
    except (ValueError, OSError, ImportError, envs.GameError) as error:
        sys.exit(f"eval.py: {error}")


def evaluate(args):
    setting, options, weights, is_run = setting_of(args)
    env, repeats = setting["env"], range(args.repeats)
    split = args.split or envs.known(env).held_out[0]
    games = spaced(envs.tasks(env, split, **options), args.limit)
    kinds = [split] + [word for word in (options.get("goals"), args.prompt) if word not in (None, "synthetic", "plain")]
    name = f"eval-{'-'.join(kinds)}.json"
    out = args.out or (os.path.join(args.model, name) if is_run else "eval.json")
    out = out if out.endswith(".json") else os.path.join(out, "eval.json")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    sampler = None
    if not args.endpoint:
        lm = load(weights, words=envs.words(), dtype=getattr(torch, setting["dtype"]))
        sampler = Sampler(lm, setting["engine"], setting["context"], setting["max_new"], args.temperature)
    workers = setting.get("workers")
    pool = envs.Pool(env, options, envs.default_workers(env) if workers is None else workers)
    lines = os.path.splitext(out)[0] + ".jsonl"
    try:
        if args.prompt != "plain" or args.endpoint:
            records = [r for n in repeats for r in evaluate_prompted(args, setting, sampler, games, pool, n, lines)]
        else:
            records = [{"repeat": n} | r for n in repeats for r in play(
                sampler, games, pool, seed=args.seed + n, rows=setting.get("rows"), history=setting["history"], max_prompt=setting["max_prompt"],
                max_context=setting.get("max_context"), title=f"{env} {split}")]
            with open(lines, "w") as file:
                file.writelines(json.dumps(r) + "\n" for r in records)
    finally:
        pool.close()
    result = report(records) | {"model": args.model, "prompt": args.prompt, "env": env, "goals": options.get("goals"), "split": split,
                                "temperature": args.temperature, "repeats": args.repeats}
    with open(out, "w") as file:
        json.dump(result, file, indent=1)
    print(table({f"{os.path.basename(args.model.rstrip('/'))}, {', '.join(kinds)}, T = {args.temperature:g}": result}, envs.known(env)))
    outgrown = sum(r["outgrown"] for r in records)
    if outgrown:
        print(f"{outgrown} of {len(records)} episodes ended early: the next prompt would not fit (--max_prompt, --max_context)")
    print(f"wrote {out}")


def setting_of(args):
    """The flags over the settings of the run that --model names -> (settings, the environment's options, where the weights are, whether it is a run)."""
    if not args.model:
        raise ValueError("--model is missing: a run of train.py, a model folder, a hub id, or tiny")
    run = {"env": "house", "context": "window", "engine": "kv", "history": 2, "max_new": 512, "dtype": "bfloat16" if torch.cuda.is_available() else "float32"}
    weights = next((p for p in (os.path.join(args.model, n) for n in ("final", "checkpoint")) if os.path.isdir(p)), args.model)
    is_run = not args.endpoint and weights != args.model and os.path.isfile(os.path.join(args.model, "config.json"))
    if is_run:
        run |= json_of(args.model, "config.json")
    setting = run | {k: v for k, v in vars(args).items() if v is not None}
    if run["env"] != setting["env"]:
        setting |= {k: getattr(args, k) for k in ("data", "goals", "horizon", "max_prompt")}  # not the other environment's
    if args.prompt != "plain" and not args.max_prompt:
        setting["max_prompt"] = ALL_TURNS
    setting["max_prompt"] = setting.get("max_prompt") or envs.known(setting["env"]).max_prompt
    for name, least in (("limit", 0), ("repeats", 1), ("temperature", 0), ("max_new", 1), ("history", 0)):
        if setting[name] < least:
            raise ValueError(f"--{name} must be at least {least}, got {setting[name]}")
    if setting["dtype"] not in ("float32", "bfloat16"):
        raise ValueError(f"unknown --dtype {setting['dtype']!r}; known: float32, bfloat16")
    if args.prompt != "plain" or args.endpoint:
        setting["context"] = "window"
    return setting, envs.options_for(setting["env"], setting), weights if is_run else args.model, is_run


def evaluate_prompted(args, setting, sampler, games, pool, n, path):
    """The n-th repeat of a prompted model. Every attempt is written down as it ends: an hour of an endpoint's answers is not lost to its last one."""
    rows = setting.get("rows") or (16 if args.endpoint else SIDE_BY_SIDE)
    answers = Endpoint(args.endpoint, args.model, args.temperature, setting["max_new"], rows, setting["max_prompt"]) if args.endpoint else Local(
        sampler, rows, setting["max_prompt"], args.seed + n)
    with open(path, "a" if n else "w") as file:
        keep = lambda r: print(json.dumps({"repeat": n} | r), file=file, flush=True)
        return [{"repeat": n} | r for r in play_prompted(answers, games, pool, args.prompt, history=setting["history"], keep=keep)]


if __name__ == "__main__":
    main()
