"""Tests of the pool, of its workers, and of what they check."""
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

import envs
import train
from environments.house import House
from envs import Pool, default_workers, make_env, tasks
from rollout import Sampler, rollout
from runtime.answers import as_command
from runtime.distributed import stop
from runtime.testing import (GAMES, HERE, MY_ENV, a_pool, on_the_cpu, random_lm,
                             run_main)


def side_by_side(pool, ids, disturb=lambda turn: None):
    """Plays the games with random commands -> {id: answers}. `disturb` is called while half of the
    answers are under way."""
    for task in ids:
        pool.start(task, task)
    answers, live, turn = {t: [answer] for t, answer in zip(ids, pool.gather(ids))}, list(ids), 0
    while live:
        for i, task in enumerate(live):
            if i == len(live) // 2:
                disturb(turn)
            commands = answers[task][-1][-1]["admissible"] + ["eat the moon"]
            pool.step(task, random.Random(f"{task} {turn}").choice(commands))
        for task, answer in zip(live, pool.gather(live)):
            answers[task].append(answer)
        live, turn = [t for t in live if not (answers[t][-1][2] or answers[t][-1][3])], turn + 1
    return answers


@pytest.fixture(scope="module")
def games():
    """Some games, and what is answered in them without workers."""
    ids = tasks("house", "test")[:7]
    with a_pool(0) as pool:
        return ids, side_by_side(pool, ids)


def test_worker_whose_pool_is_closed_while_it_starts_says_nothing():
    script = ("import multiprocessing, os; from runtime.workers import worker_main; "
              "a, b = multiprocessing.Pipe(); b.close(); worker_main(os.dup(a.fileno()))")
    ended = subprocess.run([sys.executable, "-c", script], cwd=HERE, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_pool_answers_do_not_depend_on_the_number_of_workers(games, workers):
    ids, answers = games
    env = make_env("house")
    assert all(env.reset(t) == answers[t][0] and len(answers[t]) == 13 for t in ids)
    with a_pool(workers) as pool:
        for order in (1, -1):  # the second time in used environments
            pool.load(ids[:5])
            assert side_by_side(pool, ids[::order]) == answers


def test_killed_workers_are_replaced_and_their_games_replayed(games):
    with a_pool(2) as pool:
        born = [p.pid for p in pool.procs]

        def kill(turn):
            if turn in (2, 3, 7):
                pool.procs[turn % 2].kill()
        pool.load(games[0])
        assert side_by_side(pool, games[0], kill) == games[1]
        assert all(p.pid != old for p, old in zip(pool.procs, born))


@pytest.mark.parametrize("workers", [0, 1])
def test_failed_and_dropped_games_leave_the_others_alone(games, workers):
    ids, answers = games
    with a_pool(workers) as pool:
        pool.load(["sofa"])
        pool.start("key", "sofa")
        with pytest.raises(RuntimeError, match="house: game sofa failed: ValueError: .*'sofa'"):
            pool.gather(["key"])
        pool.start("a", ids[0])
        assert pool.gather(["a"]) == answers[ids[0]][:1]
        pool.step("a", "look")
        pool.drop("a")  # with an answer under way
        assert side_by_side(pool, ids) == answers


@pytest.mark.parametrize("kill", [False, True])
def test_pool_does_not_deadlock_with_many_pending_answers(kill):
    with a_pool(1) as pool:
        for op in (pool.start, pool.start, pool.step):  # the second time, 800 games are dropped
            for i, task in enumerate(tasks("house", "train")[:800]):
                op(i, "look" if op == pool.step else task)
            if kill:
                pool.procs[0].kill()
            assert all(answer[-1]["task"] for answer in pool.gather(range(800)))


def test_game_that_kills_its_worker_is_named(tmp_path, monkeypatch):
    deadly = MY_ENV.replace("self.turn += 1", "self.turn += 1 if action != 'boom' else os._exit(1)")
    (tmp_path / "deadly.py").write_text("import os\n" + deadly)
    monkeypatch.chdir(tmp_path)
    ids = [f"test-{n}" for n in range(7)]
    with contextlib.closing(Pool("deadly:FrozenLake", workers=1)) as pool:
        for task in ids:
            pool.start(task, task)
        pool.gather(ids)
        pool.step(ids[5], "boom")
        with pytest.raises(envs.GameError, match=r"at game test-5 in turn 1. These "
                           r"games waited: \['test-5'"):
            pool.gather(ids[5:6])


def test_worker_that_hangs_is_named_and_replaced(tmp_path, monkeypatch, capsys):
    hang = ("self.turn += 1\n        if action == 'wait' and not os.path.exists('hung'):\n"
            "            open('hung', 'x').close()\n            time.sleep(1e6)")
    (tmp_path / "slow.py").write_text("import os, time\n" + MY_ENV.replace("self.turn += 1", hang))
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Pool("slow:FrozenLake", workers=1)) as pool:
        ids = [5, 10, 15]
        for task in ids:
            pool.start(task, task)
        pool.gather(ids)
        monkeypatch.setattr(pool, "warn_after", 1)
        monkeypatch.setattr(pool.env, "patience", 2)
        for task, action in ((10, "wait"), (5, "north"), (15, "north")):
            pool.step(task, action)
        assert len(pool.gather(ids)) == 3
        assert not any(game.losses for game in pool.games.values())
    assert "slow:FrozenLake: no answer for 1 seconds in [10, 5, 15]" in capsys.readouterr().err


@pytest.mark.parametrize("old, new, says", [
    ("terminated, truncated, info", "truncated, info", "step.. must return"),
    ('{self.observation()}", self.info()', '{self.observation()}"',
     "reset.. must return .obs, info., and returned 'Your"),
    ('float(self.at == self.goal)', "2", "score is 2.0, not a number from 0 to 1"),
    ('float(self.at == self.goal)', 'float("nan")', "failed: ValueError: score is nan"),
    ('envs.REWARD * info["won"]', 'float("-inf")', "failed in turn 1: ValueError: reward is -inf"),
    ('self.at == self.goal, "sc', '"no", "sc', "won is 'no', not True or False"),
    ("[*WAYS]", '["north "]', "'north ': it would be read as 'north', .*without blanks"),
    ("[*WAYS]", '"north"', "not a list of commands"),
    ("return self.observation(), envs", "return b'ice', envs", "obs is b'ice', not a string"),
    ("return self.observation(), envs", "return [{'role': 'assistant', 'content': 'x'}], envs",
     "in turn 1: ValueError: obs has a message of 'assistant' where only user and tool can"),
    ("[*WAYS]", "[WAYS]", "a command is {'north': .*, not a string"),
    ("if (n % 5 == 0)", "if print(n)", "no tasks in the split 'train'"),
    ("range(5000)", "range(1)", "no tasks in the split 'train'"),
    ('"lake"', 'float("nan")', "category is nan, not a string, a finite number"),
    ("self.turn += 1", "raise KeyError('a\\n\\n  b\\r')", r"KeyError: 'a.*b.*' .*py:\d+\)"),
    ("self.turn += 1", "raise ValueError('a\\n\\n  b\\u2028c')", r"Error: a b c \(/.*py:\d+\)"),
    ("self.turn += 1", "raise ValueError('a' * 10 ** 7)", r": a{1000} \(/.*py:\d+\)")])
def test_errors_of_an_environment_are_named(tmp_path, monkeypatch, old, new, says):
    assert MY_ENV.count(old) == 1
    name = tmp_path.name  # modules are kept by their names
    (tmp_path / f"{name}.py").write_text(MY_ENV.replace(old, new))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=says):
        run_main(train, monkeypatch, "--env", f"{name}:FrozenLake", "--batch_size", 2,
                 "--iterations", 1, "--horizon", 4, "--eval_games", 2, "--out", "run")


def test_command_that_no_response_can_give_is_refused():
    for command in "SELECT Name", "click[\u767d\u8272 (white)]":
        assert as_command(command, envs.Env) == command
    Shy = type("Shy", (envs.Env,), {"parse_action": lambda text: ("north", False)})
    with pytest.raises(ValueError, match="and the response would count as invalid"):
        as_command("north", Shy)
    Own = type("Own", (envs.Env,), {"parse_action": lambda text: (text.split()[-1], True)})
    with pytest.raises(ValueError, match="read as '</action>', .* what format_response writes"):
        as_command("north", Own)
    Own.format_response = lambda thought, action: f"{thought} {action}"
    assert as_command("north", Own) == "north"
    with pytest.raises(ValueError, match="read as 'select name', .*lower case"):
        as_command("SELECT Name", House)


def test_workers_cannot_import_a_class_of_the_main_module():
    Mine = type("Mine", (House,), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="put the class into a module"):
        Pool(Mine, workers=1)


def test_worker_processes_are_shared_among_the_ranks(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(32))
    for ranks, workers in ((1, 16), (4, 4), (40, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert default_workers("alfworld") == workers
    assert default_workers("house") == 0


def test_workers_are_in_a_session_of_their_own():
    with a_pool(1) as pool:
        assert os.getsid(pool.procs[0].pid) != os.getsid(0)


def test_a_worker_does_not_import_torch(tmp_path, monkeypatch):
    """It would start slowly, and hold memory."""
    (tmp_path / "light.py").write_text("import sys\n" + MY_ENV.replace(
        "self.turn += 1", "self.turn += 1\n        assert 'torch' not in sys.modules"))
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Pool("light:FrozenLake", workers=1)) as pool:
        pool.start(0, 5)
        pool.gather([0])
        pool.step(0, "north")
        assert len(pool.gather([0])[0]) == 5


def test_commands_in_a_set_are_sorted():
    class Mine(House):
        def info(self):
            return super().info() | {"admissible": {*super().info()["admissible"]}}

    answers = []
    for env in (House, Mine):
        pool = Pool(env)
        pool.start(0, GAMES[0])
        answers += pool.gather([0])
    assert answers[0] == answers[1]


def test_task_and_category_of_the_first_info_hold_for_the_episode():
    class Dice(envs.Env):
        tasks = lambda self, split: [1]
        reset = lambda self, task: ("6 dice", {"task": "roll", "category": "low"})
        step = lambda self, action: ("a 5", 0.0, False, action == "end", {})

    pool = Pool(Dice)
    pool.start(0, 1)
    (_, first), = pool.gather([0])
    for action in "roll", "end":
        pool.step(0, action)
        *_, info = pool.gather([0])[0]
        assert {**info, "won": False} == first and info["category"] == "low"


@pytest.mark.parametrize("reward", [None, "1", float("nan"), float("inf"), 1e39, [1.0]])
def test_reward_that_is_no_number_is_named(reward):
    class Bad(envs.Env):
        tasks = lambda self, split: [1]
        reset = lambda self, task: ("?", {})
        step = lambda self, action: ("?", reward, False, False, {})

    pool = Pool(Bad)
    pool.start(0, 1)
    pool.gather([0])
    pool.step(0, "x")
    with pytest.raises(envs.GameError, match="reward is .*, not a finite number"):
        pool.gather([0])


@pytest.mark.parametrize("metrics, says", [
    ({"calls": "3"}, r"metrics\['calls'\] is '3', not a finite number"),
    ({"calls": float("nan")}, r"metrics\['calls'\] is nan, not a finite number"),
    ({"calls": None}, r"metrics\['calls'\] is None, not a finite number"),
    ({None: 3}, "a name of metrics is None, not a string"),
    ([3], r"metrics is \[3\], not a dict of numbers")])
def test_metrics_that_are_no_numbers_are_named(metrics, says):
    class Bad(envs.Env):
        tasks = lambda self, split: [1]
        reset = lambda self, task: ("?", {})
        step = lambda self, action: ("?", 0.0, False, False, {"metrics": metrics})

    pool = Pool(Bad)
    pool.start(0, 1)
    assert "metrics" not in pool.gather([0])[0][1]
    pool.step(0, "x")
    with pytest.raises(envs.GameError, match=f"Bad: game 1 failed in turn 1: ValueError: {says}"):
        pool.gather([0])


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Makes a module of a frozen lake, in which some text is replaced -> the name for --env."""
    monkeypatch.chdir(tmp_path)

    def make(*changes):
        text = MY_ENV
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (tmp_path / f"{tmp_path.name}.py").write_text("import os, subprocess, sys\n" + text)
        return f"{tmp_path.name}:FrozenLake"
    return make


RAISES = """
        class Silent(ArithmeticError):
            __traceback__ = None
            def __str__(self): sys.exit("no text")
        import asyncio
        raise {"north": GeneratorExit(1), "east": sys.exit, "south": asyncio.CancelledError(2),
               "west": Silent()}[action] if action != "east" else SystemExit(3)
        self.turn += 1"""


@pytest.mark.parametrize("workers", [0, 1])
def test_every_exception_is_named_and_no_worker_is_lost(own, workers):
    pool = Pool(own(("self.turn += 1", RAISES.strip())), workers=workers)
    pool.remedy = ". Leave out {}"
    with contextlib.closing(pool):
        procs = [*pool.procs]
        for action, says in (("north", "GeneratorExit: 1"), ("east", "SystemExit: 3"),
                             ("south", "CancelledError: 2"),
                             ("west", r"Silent: .it cannot be printed.")):
            pool.start(0, 5)
            pool.gather([0])
            pool.step(0, action)
            with pytest.raises(envs.GameError, match=rf"game 5 failed in turn 1: {says} \(.*py:\d+"
                                                     r"\)\. Leave out 5$"):
                pool.gather([0])
        assert pool.procs == procs and all(proc.poll() is None for proc in procs)


def test_exception_of_parse_action_is_named():
    class Mine(House):
        parse_action = classmethod(lambda cls, text: sys.exit(text))

    with pytest.raises(envs.GameError, match="parse_action must return .* 'x' .*SystemExit: x"):
        Pool(Mine).parse_action("x")


def test_category_that_other_processes_cannot_read_is_plain_text(own):
    local = "type('Kind', (str,), {})('lake')"  # an instance of a class that no module has
    with contextlib.closing(Pool(own(('"lake"', local)), workers=1)) as pool:
        pool.start(0, 5)
        (_, info), = pool.gather([0])
        assert type(info["category"]) is str and info["category"] == "lake"


def test_workers_start_whatever_is_in_the_path(own, tmp_path, monkeypatch):
    class Path(str):  # as that of the package path
        __repr__ = lambda self: f"Path({str(self)!r})"

    name = own()
    (tmp_path / "aside").mkdir()
    (tmp_path / f"{tmp_path.name}.py").rename(tmp_path / "aside" / f"{tmp_path.name}.py")
    before = sys.path
    monkeypatch.setattr(sys, "path", [*before, str(tmp_path / "aside")])
    env = envs.env_class(name)
    for entry in (pathlib.Path("aside"), Path("aside"), b"aside"):
        monkeypatch.setattr(sys, "path", [None, 5, object(), entry, *before])
        with contextlib.closing(Pool(env, workers=1)) as pool:
            pool.start(0, 5)
            assert pool.gather([0])


def test_module_that_starts_workers_when_it_is_imported_is_refused(own, tmp_path):
    """Else every worker would start workers, and so on."""
    name = own()
    module = tmp_path / f"{tmp_path.name}.py"
    module.write_text(module.read_text() + f"\n\nPool = envs.Pool({name!r}, workers=1)\n")
    with contextlib.closing(envs.env_class(name) and sys.modules[tmp_path.name].Pool) as pool:
        pool.start(0, 5)
        with pytest.raises(envs.GameError, match="a worker process cannot start workers"):
            pool.gather([0])


def test_what_a_game_prints_fails_in_no_locale(own, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    reset = "    def reset(self, task):"
    name = own((reset, f"{reset}\n        print('d\u00e9j\u00e0')"))
    with contextlib.closing(Pool(name, workers=1)) as pool:
        pool.start(0, 5)
        assert pool.gather([0])


# ---- asynchronous games

@pytest.fixture
def slow(own, monkeypatch):
    """Makes a pool of an asynchronous frozen lake, whose first step does what is given, and that
    fails the test if it waits for two minutes."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the pool waits forever"))
    signal.alarm(120)
    with contextlib.ExitStack() as stack:
        def make(first_step="pass", workers=1, *changes):
            name = own(("    role =", "    asynchronous = True\n    role ="),
                       ("self.turn += 1", f"self.turn += 1\n        {first_step}"), *changes)
            return stack.enter_context(contextlib.closing(Pool(name, workers=workers)))
        yield make
        signal.alarm(0)


WAIT_FOR = """import time
        while action == 'wait' and not os.path.exists('go'):
            time.sleep(0.01)"""
LAKES = range(5, 40, 5)


def play_lakes(pool, tasks, turns=4, disturb=lambda turn: None):
    """Plays some turns -> {task: answers}."""
    for task in tasks:
        pool.start(task, task)
    answers = {task: pool.gather([task]) for task in tasks}
    for turn in range(turns):
        going = [task for task in tasks if task in pool.games]
        for task in going:
            pool.step(task, random.Random(f"{task} {turn}").choice(["north", "east", "south"]))
        disturb(turn)
        for task in going:
            answers[task] += pool.gather([task])
    return answers


@pytest.mark.parametrize("workers", [1, 3])
def test_asynchronous_games_answer_as_others_do_whatever_happens_to_workers(slow, own, workers):
    expected = play_lakes(Pool(own()), LAKES)
    pool = slow(workers=workers)
    for order in (1, -1):  # the second time in used environments
        pool.load([*LAKES])
        assert play_lakes(pool, LAKES[::order]) == expected
    kill = lambda turn: pool.procs[turn % workers].kill()
    assert play_lakes(pool, LAKES, disturb=kill) == expected
    for task in LAKES:
        pool.start(task, task)
        pool.drop(task)
    assert play_lakes(pool, LAKES) == expected


def test_rollout_is_interrupted_while_it_waits_for_a_slow_game(own):
    name = own(("self.turn += 1", "import time; time.sleep(600)"))
    told = iter([False] * 4)
    with contextlib.closing(Pool(name, workers=1)) as pool:
        sampler = Sampler(random_lm("qwen2", 1), max_new_tokens=2)
        assert rollout(sampler, [5, 10], pool, interrupted=lambda: next(told, True)) == []
        assert not pool.games


def test_no_asynchronous_game_waits_for_a_slow_one(slow):
    pool = slow(WAIT_FOR)
    for task in LAKES:
        pool.start(task, task)
    pool.gather(LAKES)
    others = [*LAKES[1:]]
    pool.step(LAKES[0], "wait")
    for task in others:
        pool.step(task, "north")
    answered = []
    while len(answered) < len(others):
        answered = pool.answered(LAKES, seconds=1)
    assert answered == others == pool.answered(LAKES, seconds=1)
    open("go", "x").close()
    assert len(pool.gather(LAKES)) == len(LAKES)


def test_every_asynchronous_game_has_a_thread_of_its_own(slow):
    """It alone makes the environment, plays in it and closes it, also for later games."""
    pool = slow("self.note()", 1, ("    def reset(self, task):", """    def __init__(self):
        self.number = os.urandom(8).hex()
        self.note()

    def note(self):
        import threading
        with open("threads", "a") as file:
            print(self.number, threading.get_ident(), file=file)

    close = note

    def reset(self, task):
        self.note()"""))
    for _ in range(3):
        play_lakes(pool, LAKES)
        for task in [*pool.games]:
            pool.drop(task)
    pool.close()
    lines = [line.split() for line in pathlib.Path("threads").read_text().splitlines()]
    threads = {number: {thread for n, thread in lines if n == number} for number, _ in lines}
    assert len(threads) >= len(LAKES) and all(len(used) == 1 for used in threads.values())


def test_failures_of_asynchronous_games_are_named_and_leave_the_others_alone(slow):
    pool = slow("if action in ('raise', 'stop'): raise {'raise': OSError('x'), "
                "'stop': KeyboardInterrupt('y')}[action]")
    for action, says in (("raise", "OSError: x"), ("stop", "KeyboardInterrupt: y")):
        for task in LAKES:
            pool.start(task, task)
        pool.gather(LAKES)
        pool.step(10, action)
        pool.step(5, "north")
        with pytest.raises(envs.GameError, match=f"game 10 failed in turn 1: {says} "):
            pool.gather([10])
        assert len(pool.gather([5])[0]) == 5


@pytest.mark.parametrize("deed, says", [
    ("os._exit(1)", "a worker died with status 1, the fourth one lost in a row, at game 10"),
    ("import time; time.sleep(1e6)", "gave no answer for 2 seconds, the fourth .*, at game 10")])
def test_asynchronous_game_that_kills_or_hangs_is_named_though_the_others_answer(
        slow, monkeypatch, deed, says):
    pool = slow(f"if action == 'bad': {deed}")
    monkeypatch.setattr(pool.env, "patience", 2 if "sleep" in deed else 600)
    monkeypatch.setattr("runtime.workers.GRACE", 0.5)
    for task in LAKES:
        pool.start(task, task)
    pool.gather(LAKES)
    pool.step(10, "bad")
    with pytest.raises(envs.GameError, match=says):
        for turn in range(10 ** 6):  # the others play on meanwhile
            for task in pool.answered([*pool.games], seconds=1):
                pool.gather([task])
                if task in pool.games:
                    pool.step(task, "nowhere")


def test_asynchronous_game_that_takes_long_is_named_once(slow, monkeypatch, capsys):
    pool = slow(WAIT_FOR)
    monkeypatch.setattr(pool, "warn_after", 0.1)
    pool.start(5, 5)
    pool.gather([5])
    capsys.readouterr()
    pool.step(5, "wait")
    for _ in range(3):
        pool.answered([5], seconds=0.2)
    open("go", "x").close()
    pool.gather([5])
    assert capsys.readouterr().err.count("no answer for 0.1 seconds in [5]") == 1


def test_asynchronous_games_need_workers(own):
    name = own(("    role =", "    asynchronous = True\n    role ="))
    assert default_workers(name) > 0
    with pytest.raises(ValueError, match="FrozenLake is asynchronous, which needs worker proc"):
        Pool(name)
    Mine = type("Mine", (envs.env_class(name),), {"__module__": "__main__"})
    with pytest.raises(ValueError, match="a class in a module"):
        Pool(Mine, workers=default_workers(Mine))


# ---- tools that run what a model writes

RUNS_CODE = """
import os, signal, sys, time
import envs

class Python(envs.ToolEnv):
    tools = "run",
    patience = 5
    horizon = 1000
    asynchronous = {}

    def tasks(self, split):
        return [1, 2, 3] if split == "test" else [4, 5]

    def reset(self, task):
        if task == 3:
            os._exit(3)
        self.names = globals() | {{"self": self}}
        return f"Task {{task}}.", {{"category": f"kind {{task}}"}}

    def run(self, code: str) -> str:
        '''Runs it.

        Args:
            code: of Python
        '''
        self.reward += 1
        exec(code, self.names)
        return f"ran {{code}}"
"""


@pytest.fixture(params=[False, True], ids=["in_turn", "asynchronous"])
def python(tmp_path, monkeypatch, request):
    """The name of an environment whose tool runs Python. What holds for games that a worker plays
    in turn holds for asynchronous ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{tmp_path.name}_python.py").write_text(RUNS_CODE.format(request.param))
    return f"{tmp_path.name}_python:Python"


IN_TURN = pytest.mark.parametrize("python", [False], indirect=True)
ASYNCHRONOUS = pytest.mark.parametrize("python", [True], indirect=True)


def run_in(pool, key, code):
    """One step of a game -> (what it read, reward, terminated, info)."""
    pool.step(key, {"name": "run", "arguments": {"code": code}})
    (obs, reward, terminated, truncated, info), = pool.gather([key])
    assert not truncated
    return envs.obs_text(obs), reward, terminated, info


@IN_TURN
def test_worker_that_reads_nothing_does_not_stop_its_parent(python, monkeypatch):
    """One call in C keeps the GIL, so nothing reads the pipe, which more requests fill."""
    with contextlib.closing(Pool(python, workers=1)) as pool:
        monkeypatch.setattr(pool.env, "patience", 2)
        for key in range(100):
            pool.start(key, 1)
        pool.gather([*range(100)])
        for key in range(100):
            code = "7 ** 10 ** 9" if key == 0 else f"x = '{'a' * 4000}'"
            pool.step(key, {"name": "run", "arguments": {"code": code}})
        obs, _, terminated, _, info = pool.gather([*range(100)])[0]
        assert "gave no answer for 2 seconds" in obs and terminated and not info["won"]


@pytest.mark.parametrize("code, says", [
    ("raise KeyboardInterrupt('no')", "KeyboardInterrupt: no"),
    ("os.kill(os.getpid(), signal.SIGINT); x = 1", "ran "), ("signal.raise_signal(2)", "ran "),
    ("class E(Exception):\n def __str__(self): raise KeyboardInterrupt\nraise E", "E")])
def test_keyboard_interrupt_of_a_tool_is_that_calls_error(python, code, says):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        pool.start(0, 1)
        pool.gather([0])
        worker = pool.procs[0].pid
        text, reward, terminated, _ = run_in(pool, 0, code)
        assert text.startswith(says) and (reward, terminated) == (1, False)
        assert run_in(pool, 0, "pass")[0] == "ran pass" and pool.procs[0].pid == worker


@IN_TURN
def test_ctrl_c_stops_games_of_this_process(python):
    with contextlib.closing(Pool(python)) as pool:
        pool.start(0, 1)
        pool.gather([0])
        with stop.handle_signals():
            assert run_in(pool, 0, "raise KeyboardInterrupt(1)")[0] == "KeyboardInterrupt: 1"
            assert not stop.requested()
            signals = "for _ in range(99): time.sleep(0.1); signal.raise_signal(signal.SIGINT)"
            with pytest.raises(KeyboardInterrupt):  # at the second one, a second after the first
                run_in(pool, 0, signals)
            assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            run_in(pool, 0, "signal.raise_signal(signal.SIGINT)")


ENDS = [("os._exit(7)", "its worker died with status 7"),
        ("os.kill(os.getpid(), 9)", "its worker died with status -9"),
        ("os.closerange(3, 256)", "its worker died"),
        ("while True: pass", "its worker gave no answer for 5 seconds"),
        # a child that lives longer has the worker's pipe, too
        ("if os.fork(): os._exit(7)\ntime.sleep(600)", "its worker died with status 7")]


@pytest.mark.parametrize("code, says", ENDS)
def test_call_that_costs_its_worker_loses_its_episode_alone(python, capsys, code, says):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        for task in 1, 2:
            pool.start(task, task)
        pool.gather([1, 2])
        assert [run_in(pool, task, "x = [5]")[0] for task in (1, 2)] == ["ran x = [5]"] * 2
        for task, what in ((1, code), (2, "x.append(6)")):
            pool.step(task, {"name": "run", "arguments": {"code": what}})
        (obs, reward, *over, info), (other, *_) = pool.gather([1, 2])
        assert says in obs and (reward, *over) == (0, True, False)
        assert (info["won"], info["score"], info["category"]) == (False, 0, "kind 1")
        assert envs.obs_text(other) == "ran x.append(6)"
        pool.start(1, 1)  # its key can be used again
        pool.gather([1])
        assert run_in(pool, 1, "assert 'x' not in globals()")[:2] == (
            "ran assert 'x' not in globals()", 1)
        text, *_ = run_in(pool, 2, "assert x == [5, 6]")
        assert text == "ran assert x == [5, 6]"
    err = capsys.readouterr().err
    assert f"game 1 is lost in turn 2: {says}" in err and repr(code)[1:9] in err
    assert err.count("is lost") == 1


def test_call_that_costs_its_worker_once_is_repeated(python):
    once = "if not os.path.exists('been'): open('been', 'x'), os._exit(1)"
    with contextlib.closing(Pool(python, workers=1)) as pool:
        pool.start(0, 1)
        pool.gather([0])
        for turn in range(5):
            with contextlib.suppress(FileNotFoundError):
                os.remove("been")
            assert run_in(pool, 0, once)[:3] == (f"ran {once}", 1, False)


def test_patience_is_that_of_one_step_also_where_steps_are_repeated(python, capsys):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        pool.start(0, 1)
        pool.gather([0])
        for _ in range(4):
            run_in(pool, 0, "time.sleep(1.5)")  # all of them take longer than its patience
        pool.procs[0].kill()
        assert run_in(pool, 0, "pass")[0] == "ran pass"
        assert not pool.workers[0].losses and not pool.games[0].losses
    assert "no answer" not in capsys.readouterr().err


def test_games_that_are_lost_one_after_the_other_end_the_run(python):
    with contextlib.closing(Pool(python, workers=2)) as pool:
        pool.max_lost = 4
        with pytest.raises(envs.GameError, match=r"4 games in a row were lost, .* game 2 in turn 1:"
                                                 r" its worker died with status 1"):
            for game in range(9):
                pool.start(game, 2)
                pool.gather([game])
                assert run_in(pool, game, "os._exit(1)")[2] and game < 3


def test_many_calls_that_cost_their_workers_lose_their_episodes(python):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        for game in range(8):
            pool.start(game, 1)
        pool.gather(range(8))
        for game in range(8):
            code = "pass" if game == 5 else "os._exit(1)"
            pool.step(game, {"name": "run", "arguments": {"code": code}})
        pool.drop(0)
        answers = pool.gather(range(1, 8))
        assert [over for _, _, over, _, _ in answers] == [n != 5 for n in range(1, 8)]
        assert run_in(pool, 5, "pass")[1] == 1


def at_work_together(pool):
    """Seven games, of which two kill their worker while five are in a step that takes longer."""
    for game in range(7):
        pool.start(game, 1)
    pool.gather(range(7))
    for game in range(7):
        code = "time.sleep(0.1); os._exit(7)" if game in (2, 5) else "time.sleep(0.4)"
        pool.step(game, {"name": "run", "arguments": {"code": code}})


@ASYNCHRONOUS
def test_games_that_are_at_work_when_another_one_kills_their_worker_are_not_lost(python, capsys):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        at_work_together(pool)
        answers = pool.gather(range(7))
        assert [(reward, over) for _, reward, over, _, _ in answers] == [
            (0, True) if game in (2, 5) else (1, False) for game in range(7)]
        for game in (0, 1, 3, 4, 6):
            assert run_in(pool, game, "pass")[1] == 1
    assert capsys.readouterr().err.count("died with status 7, and so did the next one") == 2


@ASYNCHRONOUS
def test_of_games_that_are_at_work_together_the_one_that_kills_is_named(python, monkeypatch):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        monkeypatch.setattr(pool.env, "step_may_kill", False)
        at_work_together(pool)
        with pytest.raises(envs.GameError, match="died with status 7, the fourth one lost in a row,"
                                                 " at game 1 in turn 1"):
            pool.gather(range(7))
        assert [pool.games[game].losses for game in range(7)] == [0, 0, 4, 0, 0, 0, 0]


@ASYNCHRONOUS
def test_game_that_hangs_is_lost_and_the_others_play_on_meanwhile(python, monkeypatch):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        monkeypatch.setattr(pool.env, "patience", 3)
        for game in 1, 2:
            pool.start(game, game)
        pool.gather([1, 2])
        pool.step(1, {"name": "run", "arguments": {"code": "time.sleep(1e6)"}})
        turns = 0
        while not pool.answered([1], seconds=0):
            turns += run_in(pool, 2, "time.sleep(0.1)")[1]
        assert pool.gather([1])[0][1:4] == (0, True, False) and turns > 20


def test_reset_that_kills_its_worker_is_named(python):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        pool.start(0, 3)
        with pytest.raises(envs.GameError, match="status 3, the fourth one lost in a row, at game"):
            pool.gather([0])


def test_child_of_a_worker_gives_no_answers(python):
    with contextlib.closing(Pool(python, workers=1)) as pool:
        pool.start(0, 1)
        pool.gather([0])
        for code in ("os.fork() or time.sleep(0.1)", "print(file=open('ran', 'a'))",
                     "time.sleep(0.4)", "pass"):
            assert run_in(pool, 0, code)[0] == f"ran {code}"
        pool.procs[0].kill()
        assert run_in(pool, 0, "time.sleep(0.4)")[1] == 1
        assert len(pathlib.Path("ran").read_text()) == 2  # in the worker, and when it is replayed


@IN_TURN
@pytest.mark.parametrize("workers", [0, 1])
def test_working_directory_is_each_games_own(python, tmp_path, workers):
    (tmp_path / "a").mkdir()
    with contextlib.closing(Pool(python, workers=workers)) as pool:
        for task in 1, 2:
            pool.start(task, task)
        pool.gather([1, 2])
        ran = lambda task, code: run_in(pool, task, code)[0] == f"ran {code}"
        assert ran(1, "os.chdir('a')") and os.getcwd() == str(tmp_path)
        for task, name in ((1, "a"), (2, tmp_path.name)):
            assert ran(task, f"assert os.path.basename(os.getcwd()) == {name!r}")
        assert ran(1, "os.rmdir(os.getcwd())") and ran(1, "pass") and ran(2, "os.listdir()")
        assert ran(1, f"assert os.path.basename(os.getcwd()) == {tmp_path.name!r}")


@ASYNCHRONOUS
def test_asynchronous_games_share_the_working_directory(python, tmp_path):
    (tmp_path / "a").mkdir()
    with contextlib.closing(Pool(python, workers=1)) as pool:
        for task in 1, 2:
            pool.start(task, task)
        pool.gather([1, 2])
        assert run_in(pool, 1, "os.chdir('a')")[1] == 1
        for task in 1, 2:
            assert run_in(pool, task, "assert os.path.basename(os.getcwd()) == 'a'")[1] == 1


# ---- what workers leave

SERVER = ("    def reset(self, task):", """    def __init__(self):
        self.server = subprocess.Popen(["sleep", "600"])
        with open("servers", "a") as file:
            print(os.getpid(), self.server.pid, file=file)

    def close(self):
        with open("closed", "a") as file:
            print(self.server.pid, file=file)
        SHUTDOWN

    def reset(self, task):""")


def with_server(shutdown):
    return SERVER[0], SERVER[1].replace("SHUTDOWN", shutdown)


def numbers(name):
    return [[*map(int, line.split())] for line in pathlib.Path(name).read_text().splitlines()]


def is_running(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def all_end(pids, seconds=20):
    end = time.time() + seconds
    while any(map(is_running, pids)) and time.time() < end:
        time.sleep(0.05)
    return not any(map(is_running, pids))


@pytest.mark.parametrize("shutdown", ["self.server.kill()", "pass", "raise SystemExit('no')"])
def test_pool_closes_environments_and_ends_their_processes(own, shutdown):
    """An environment's close() is called once, whatever it does, and what it leaves is killed. A
    worker that crashed leaves nothing, either."""
    pool = Pool(own(with_server(shutdown)), workers=2)
    for task in range(5, 30, 5):
        pool.start(task, task)
    pool.gather(range(5, 30, 5))
    started = numbers("servers")
    worker = pool.procs[0].pid
    pool.procs[0].kill()
    for task in range(5, 30, 5):
        pool.step(task, "north")
    pool.gather(range(5, 30, 5))
    lost = [server for pid, server in started if pid == worker]
    assert lost and all_end(lost)
    pool.close()
    pool.close()
    servers = {server for _, server in numbers("servers")}
    assert all_end(servers)
    assert sorted(numbers("closed")) == sorted([server] for server in servers - {*lost})


def test_environments_of_this_process_are_closed_too(own, capsys):
    with contextlib.closing(Pool(own(with_server("self.server.kill(); self.server.wait(); 1 / 0")))
                            ) as pool:
        for _ in range(2):
            pool.start(0, 5)
            pool.gather([0])
    (_, server), = numbers("servers")
    assert numbers("closed") == [[server]] and not is_running(server)
    assert "close() of an environment failed: ZeroDivisionError" in capsys.readouterr().err


def test_worker_that_does_not_end_is_killed_with_what_it_started(own, monkeypatch):
    monkeypatch.setattr("runtime.workers.GRACE", 0.5)
    wait = "import time; open('hung', 'w').close(); time.sleep(600)"
    hang = own(with_server("pass"), ("self.turn += 1", wait))
    with contextlib.closing(Pool(hang, workers=1)) as pool:
        pool.start(0, 5)
        pool.gather([0])
        pool.step(0, "north")
        while not os.path.exists("hung"):
            time.sleep(0.01)
    (worker, server), = numbers("servers")
    assert all_end([worker, server], 2) and not os.path.exists("closed")


@pytest.mark.parametrize("how", ["end", "error", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_a_run_remains_and_its_pipe_ends(own, how):
    """As with `train.py ... | tail`."""
    wait = "" if how == "end" else "1 / 0; " if how == "error" else "time.sleep(0.2); "
    name = own(with_server("pass"), ("self.turn += 1", f"import time; {wait}self.turn += 1"))
    program = f"""
import sys, contextlib, signal; sys.path.insert(0, {str(HERE)!r})
import envs
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as runtime/cli.py does
with contextlib.closing(envs.Pool({name!r}, workers=2)) as pool:
    for turn in range({2 if how == "end" else 999}):
        for task in 5, 10:
            pool.start(task, task)
        pool.gather([5, 10])
        print("started", flush=True)
        for task in 5, 10:
            pool.step(task, "north")
        pool.gather([5, 10])
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "started\n"
        if isinstance(how, signal.Signals):
            run.send_signal(how)
        run.communicate(timeout=20)  # it ends as soon as nobody can write any more
    assert run.returncode == {"end": 0, "error": 1, signal.SIGKILL: -9}.get(how, -2)
    pids = {pid for pair in numbers("servers") for pid in pair}
    assert len(pids) >= 4 and all_end(pids)
    assert {pid for pid, in numbers("closed")} == {server for _, server in numbers("servers")}
