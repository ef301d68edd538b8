"""An example with tools: an agent that answers questions about a database in SQL.

    python tools/imitate.py --env environments.sql_agent:SQLAgent --out runs/sql \\
        --batch 32 --steps 800 --until_success 1
    python train.py --env environments.sql_agent:SQLAgent --model runs/sql

The first command teaches a tiny model to call the tools and to write SQL, by a demonstrator that
mostly forgets the WHERE. The second one teaches it what a WHERE is good for.

Every task has a database of its own, two tables with random rows. The split "test" holds out pairs
of tables, which no training database has together, and questions: what is computed, of which
columns of which table. Every word by itself occurs in training, too. The split "validation" holds
out the same pairs and questions, with other rows.
"""
import contextlib
import random
import sqlite3
import zlib

import envs

TABLES = {"fruits": "apple pear plum fig lemon mango",
          "birds": "crow robin owl eagle swan heron",
          "boats": "Aurora Bella Comet Delta Echo Fortuna",
          "hats": "cap beret bowler fez hood panama",
          "lamps": "torch candle lantern bulb neon spot",
          "tools": "hammer saw drill file axe chisel"}
GROUPS = {"color": "red green blue white black", "city": "Rome Oslo Paris Lima Cairo",
          "size": "small medium large huge tiny"}
NUMBERS = "price", "weight", "age", "stock"
QUESTIONS = {  # what is computed: the question
    "{number}": "What is the {number} of {value} in {table}?",
    "COUNT(*)": "How many {table} have {column} {value}?",
    "SUM({number})": "What is the total {number} of {table} with {column} {value}?",
    "MAX({number})": "What is the highest {number} of {table} with {column} {value}?",
    "MIN({number})": "What is the lowest {number} of {table} with {column} {value}?"}
FUNCTIONS = "abs avg count length like lower max min round sum upper".split()


def is_held_out(*words):
    return zlib.crc32(" ".join(words).encode()) % 3 == 0


def read_only(action, what, name, *_):
    """SQLite's authorizer: allows to read, and functions that are quick and not random."""
    allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ) or (
        action == sqlite3.SQLITE_FUNCTION and name.lower() in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


class SQLAgent(envs.ToolEnv):
    system = "You answer questions about a database. First look into it, then answer."
    tools = "query", "answer"
    horizon, held_out, validation = 4, ("test", 200), ("validation", 100)
    recommended = {"max_new_tokens": 128, "mini_batch": 64}  # episodes have two turns or a few more

    def tasks(self, split):
        if split == "validation":
            return range(5000, 6000, 5)
        return [n for n in range(5000) if (n % 5 == 0) == (split == "test")]

    def reset(self, task):
        rng = random.Random(task)  # the task's number determines database and question
        while True:
            names = rng.sample([*TABLES], 2)
            group = rng.choice([*GROUPS])
            numbers = rng.sample(NUMBERS, 2)
            what = rng.choice([*QUESTIONS])
            column = "name" if what == "{number}" else group
            words = [what, names[0], column, "" if what == "COUNT(*)" else numbers[0]]
            if is_held_out(*sorted(names)) == is_held_out(*words) == (task % 5 == 0):
                break
        script = []
        for table in rng.sample(names, 2):
            columns = ["name", *rng.sample([group, *numbers], 3)]
            script.append(f"CREATE TABLE {table} ({', '.join(columns)})")
            values = {"name": rng.sample(TABLES[table].split(), 6)}
            values[group] = rng.choices(rng.sample(GROUPS[group].split(), 3), k=6)
            values |= {number: rng.sample(range(1, 100), 6) for number in numbers}
            rows = zip(*map(values.get, columns))
            script += [f"INSERT INTO {table} VALUES {row}" for row in rows]
            if table == names[0]:
                self.value = rng.choice(values[column])
        self.script = ";".join(script)
        what, question = (text.format(number=numbers[0], table=names[0], column=column,
                                      value=self.value) for text in (what, QUESTIONS[what]))
        self.sql = f"SELECT {what} FROM {names[0]} WHERE {column} = '{self.value}'"
        self.right = self.query(self.sql)
        self.latest = None, None  # the latest query, and its result
        return "\n".join([line for line in script if "CREATE" in line] + [question]), {}

    def query(self, sql: str) -> str:
        """Looks into the database. Returns the first 10 rows of the result.

        Args:
            sql: one SELECT statement of SQLite
        """
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.executescript(self.script)
            # a query can fill all memory before it begins, and a single LIKE can take minutes
            database.execute("PRAGMA hard_heap_limit = 50000000")  # of this process
            if hasattr(database, "setlimit"):  # from Python 3.11 on
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10000)
                database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 50)
            database.set_authorizer(read_only)
            database.set_progress_handler(lambda: True, 10 ** 6)  # interrupts what takes longer
            rows = database.execute(sql).fetchmany(10)
        result = "\n".join("|".join(map(str, row)) for row in rows) or "no rows"
        self.latest = sql, result
        return result

    def answer(self, value: str) -> None:
        """Gives the answer to the question, which ends the task.

        Args:
            value: the answer, without any other words
        """
        self.done = True
        self.reward = envs.REWARD * (str(value).strip() == self.right)

    def advice(self, forgetful=False):
        """The demonstrator: a thought and a call, the query and then the answer. The forgetful one
        forgets the WHERE, and answers with the first row."""
        sql = self.sql.partition(" WHERE")[0] if forgetful else self.sql
        if self.latest[0] != sql:
            return f"look for {self.value}", {"name": "query", "arguments": {"sql": sql}}
        value = self.latest[1].split("\n")[0]
        return "found", {"name": "answer", "arguments": {"value": value}}
