"""WebShop (princeton-nlp/WebShop 64fa2a5) in plain Python, without Java, Flask or conda.

    shop = Shop("webshop")                     the folder of the original's data files
    shop.enter(0)                              a new visit, with goal number 0
    shop.observation(), shop.actions()         the page and the commands it offers
    shop.act("search[red shoes]")              True if this command bought something
    shop.score                                 the original's reward of the last command, 0 to 1
    shop.expert()                              commands that score 1 from here, or None

The file reads from text to pages: how text becomes search terms, the catalogue and its index, the
goals, the reward, and the shop. Lines that look odd reproduce the original's oddities, so that
scores can be compared; results/NOTES.md lists the deliberate departures. webshop.py makes an
environment of a Shop.
"""
import difflib
import fcntl
import functools
import hashlib
import importlib.util
import json
import math
import mmap
import os
import random
import re
import shutil
import warnings
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import regex  # re lacks the Unicode properties of word boundaries
from nltk.stem.porter import PorterStemmer
from tqdm import tqdm

STOPWORDS = set("""a an and are as at be but by for if in into is it no not of on or such that the
their then there these they this to was will with""".split())
COLORS = """alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze
brown burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee
cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold
granite grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard
light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard
natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger
turquoise violet walnut wheat white wine yellow""".split()

# ---------------------------------------------------------------------------------- text analysis

# Lucene's StandardTokenizer: of the pieces between the word boundaries of Unicode's UAX #29 it
# keeps those with a letter, a digit, an ideograph or a pictograph
PIECE = regex.compile(r"\p{Line_Break=Complex_Context}+|.+?\b", regex.WORD | regex.S | regex.V1)
KEPT = regex.compile(
    r"[\p{WB=ALetter}\p{WB=Hebrew_Letter}\p{WB=Katakana}\p{WB=Numeric}\p{Han}\p{Hiragana}"
    r"\p{Line_Break=Complex_Context}]|\p{Regional_Indicator}{2}|"
    r"[[\p{Extended_Pictographic}\u2388\u2605\u2607-\u2612\u2614-\u2685\u2690-\u2712"
    r"\u2763-\u2767\U0001F000-\U0001FAFF]--\p{Regional_Indicator}]", regex.V1)

# as in Lucene: Martin Porter's own program, which differs from his paper in a few endings
stem = PorterStemmer(mode="MARTIN_EXTENSIONS").stem


@functools.lru_cache(1 << 18)
def terms_between_blanks(text):
    words = [re.sub(r"['\u2019\uff07]s$", "", w) for w in PIECE.findall(text) if KEPT.search(w)]
    return [stem(w) for w in words if w not in STOPWORDS]


def terms(text):
    """Text -> the terms that are indexed and searched, as by Lucene's English analyzer. The pieces
    between blanks are cached, because most of them repeat."""
    return [term for piece in text.lower().split() for term in terms_between_blanks(piece)]


@functools.lru_cache(1 << 18)
def key_of(term):
    """A 64-bit hash: an index of a million terms then needs no dictionary."""
    digest = hashlib.blake2b(term.encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def rounded_length(n):
    """A document's length as Lucene stores it in a byte: exact below 40, then with four bits."""
    if n < 40:
        return n
    shift = (n - 24).bit_length() - 4
    return 24 + ((n - 24) >> shift << shift)


# ------------------------------------------------------------------------------- reading the files

def data_files(data):
    """The paths of products, attributes, human goals and (optional) nouns: the whole catalogue's if
    it is there, else those of its first thousand products."""
    size = "" if os.path.isfile(os.path.join(data, "items_shuffle.json")) else "_1000"
    names = [f"items_shuffle{size}.json", f"items_ins_v2{size}.json", "items_human_ins.json"]
    files = [os.path.join(data, name) for name in names]
    for path in files:
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"webshop: {path} does not exist. The gdown commands in results/NOTES.md fetch "
                "WebShop's catalogue; --data (or WEBSHOP_DATA) names its folder")
    return files + [os.path.join(data, "title_nouns.json")]


def json_items(path, chunk=1 << 22):
    """The elements of a JSON array, one at a time, because the whole catalogue is 5 GB."""
    decode, between = json.JSONDecoder().raw_decode, re.compile(r"[\s,]*")
    with open(path, encoding="utf-8") as file:
        text, at = file.read(chunk), 1  # after the array's bracket
        while True:
            at = between.match(text, at).end()
            try:
                item, at = decode(text, at)
            except json.JSONDecodeError:  # the rest of the item is in the next chunk
                more = file.read(chunk)
                if not more:
                    break
                text, at = text[at:] + more, 0
            else:
                yield item
    if text[at:].strip() != "]":
        raise ValueError(f"{path} ends too early")


def read_products(files):
    """Yields the products of the files, each asin once."""
    about, human, nouns = (json.loads(Path(path).read_bytes()) if os.path.isfile(path) else {}
                           for path in files[1:])
    seen = {"nan"}
    for item in tqdm(json_items(files[0]), "indexing", unit=" products", delay=2):
        asin = item["asin"]
        if len(asin) <= 10 and asin not in seen:
            seen.add(asin)
            try:
                yield make_product(item, about.get(asin, {}), human.get(asin, []), nouns.get(asin))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"product {asin}: {error!r}") from error


def make_product(item, about, human, nouns):
    """What the index keeps of a product, from its entries in the four files."""
    bullets = item["small_description"]
    bullets = bullets if isinstance(bullets, list) else [bullets]
    prices = re.findall(r"\$([^$]*)", item.get("pricing") or "")[:2]
    prices = [float(re.sub(r"[^\d.]", "", price)) for price in prices] or [100.0]
    attributes = about.get("attributes", ["DUMMY_ATTR"])
    options = {name.lower(): [v["value"].strip().replace("/", " | ").lower() for v in values]
               for name, values in (item["customization_options"] or {}).items()
               if values is not None}
    synthetic = about.get("instruction")
    return {
        "asin": item["asin"], "title": item["name"], "description": item["full_description"],
        "bullets": bullets, "prices": prices, "options": options, "attributes": attributes,
        "category": item["category"], "query": item["query"].lower().strip(),
        "product_category": item["product_category"], "nouns": nouns,
        "synthetic": None if synthetic is None else [synthetic, about["instruction_attributes"]],
        "human": [[h["instruction"], h["instruction_attributes"], h["instruction_options"]]
                  for h in human if h["instruction_attributes"]]}


def document(product):
    """The text of a product that is searched."""
    options = ", and ".join(f"{name}: {', '.join(values)}"
                            for name, values in product["options"].items())
    first_bullet = (product["bullets"] or [""])[0]
    return " ".join([product["title"], product["description"], first_bullet, options])


# ----------------------------------------------------------------------------------- the catalogue

BEST = 50  # maximum number of products that a search finds
# What the index stores of a product: its prices (high is NaN if there is only one), the number of
# its synthetic goals (-1: it has no instruction) and of its human goals.
FACTS = [("asin", "S10"), ("low", float), ("high", float), ("synthetic", int), ("human", int)]


class Catalogue:
    """WebShop's products and the index of their terms. It is made once from the files of a folder,
    kept below ~/.cache/sapo ($XDG_CACHE_HOME), and mapped into memory, so that processes share it.

    product(n)    a product as make_product has it
    search(text)  the numbers of the best products for a query
    N products:   facts, with the fields of FACTS; places (N + 1): offsets in products.jsonl
    M terms:      keys: hashes, sorted; first (M + 1); term i occurs in the products
                  docs[first[i]:first[i + 1]], with the weights of the same places"""

    ARRAYS = "facts", "places", "keys", "first", "docs", "weights"

    def __init__(self, data):
        files = data_files(data)
        folder = index_folder(files)
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        with open(f"{folder}.lock", "wb") as lock:  # one process builds, the others wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.isdir(folder):
                build_index(files, folder)
        for name in self.ARRAYS:
            setattr(self, name, np.asarray(np.load(f"{folder}/{name}.npy", mmap_mode="r")))
        with open(f"{folder}/products.jsonl", "rb") as file:
            self.text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @functools.lru_cache(1 << 13)
    def product(self, n):
        return json.loads(self.text[self.places[n]:self.places[n + 1]])

    @functools.lru_cache(1 << 12)
    def search(self, query):
        """The BEST products for a query by Lucene's BM25 (k1 = 0.9, b = 0.4, in float32 as there).
        Ties are in the order of their asins."""
        scores, one = np.zeros(len(self.facts)), np.float32(1)
        for term, times in Counter(terms(query)).items():
            key = key_of(term)
            i = np.searchsorted(self.keys, key)
            if i < len(self.keys) and self.keys[i] == key:
                span = slice(self.first[i], self.first[i + 1])
                n = span.stop - span.start
                rarity = np.float32(math.log(1 + (len(self.facts) - n + 0.5) / (n + 0.5)))
                idf = np.float32(times) * rarity
                scores[self.docs[span]] += idf - idf / (one + self.weights[span])
        scores = scores.astype(np.float32)
        hits = np.flatnonzero(scores)
        if len(hits) > BEST:
            hits = hits[scores[hits] >= np.partition(scores[hits], -BEST)[-BEST]]
        return hits[np.lexsort((self.facts["asin"][hits], -scores[hits]))][:BEST].tolist()


def index_folder(files):
    """The folder of the index. Its name depends on the files and on the format of the index."""
    version = 5
    stamps = [(os.path.abspath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns)
              for path in files if os.path.isfile(path)]
    name = hashlib.sha256(json.dumps([version, stamps]).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "sapo", f"webshop-{name}")


def build_index(files, folder):
    """Builds the index in another folder and renames that, so that it is never incomplete."""
    new = f"{folder}.new"
    shutil.rmtree(new, ignore_errors=True)  # a killed build may have left one
    os.mkdir(new)
    try:
        arrays = index(files, f"{new}/products.jsonl")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"webshop: {files[0]} or a file beside it is broken, or is not WebShop's: "
                         f"{error!r}") from error
    for name, values in arrays.items():
        np.save(f"{new}/{name}.npy", values)
    os.rename(new, folder)


def index(files, path):
    """Writes the products to `path` and returns the arrays of the catalogue."""
    facts, places = [], [0]
    keys, docs, times, lengths = array("Q"), array("I"), array("I"), array("I")
    with open(path, "wb") as file:
        for n, product in enumerate(read_products(files)):
            low, high = (product["prices"] + [math.nan])[:2]
            combinations = math.prod(map(len, product["options"].values()))
            facts.append((product["asin"].encode(), low, high,
                          combinations if product["synthetic"] else -1, len(product["human"])))
            count = Counter(terms(document(product)))
            keys.extend(map(key_of, count))
            docs.extend([n] * len(count))
            times.extend(count.values())
            lengths.append(count.total())
            file.write(json.dumps(product).encode() + b"\n")
            places.append(file.tell())
    arrays = {"facts": np.array(facts, FACTS), "places": np.array(places)}
    return arrays | postings(*map(np.asarray, (keys, docs, times, lengths)))


def postings(keys, docs, times, lengths):
    """The term keys[i] occurs times[i] times in product docs[i] -> the index by term. A weight is
    BM25's tf / (k1 (1 - b + b length / mean))."""
    one, k1, b = np.float32(1), np.float32(0.9), np.float32(0.4)
    kept = np.array([rounded_length(int(n)) for n in lengths], np.float32)
    inverse = one / (k1 * ((one - b) + b * kept / np.float32(lengths.mean())))
    order = np.argsort(keys, kind="stable")
    keys, first = np.unique(keys[order], return_index=True)
    return {"keys": keys, "first": np.append(first, len(docs)), "docs": docs[order],
            "weights": times[order].astype(np.float32) * inverse[docs[order]]}


# --------------------------------------------------------------------------------------- the goals

ANY_PRICE = 1000000
OUR_SPLITS = {"test": (0,), "valid": (1,), "train": range(2, 10)}  # which tenths of the products
ORIGINAL_SPLITS = {"test_500": slice(0, 500), "eval_1000": slice(500, 1500),
                   "train_rest": slice(1500, None)}


class Goals:
    """The original's goals in the original's order, and the prices that are drawn with them.

    goals[i] -> {text, asin, options, attributes, price_upper, title, query, category,
    product_category, nouns}
    drawn     a row per goal: product, part (which of its goals), cap (the highest price)"""

    def __init__(self, catalogue, source):
        """Prices and then price caps are drawn from one random stream, in the order of the
        products; then the goals are shuffled with the original's seed."""
        self.catalogue, self.source = catalogue, source
        low, high = catalogue.facts["low"], catalogue.facts["high"]
        rng = random.Random(0)
        self.prices = np.array(low)
        for n in np.flatnonzero(~np.isnan(high)):
            self.prices[n] = rng.uniform(low[n], high[n])
        drawn = list(self.draw(rng))
        random.Random(233).shuffle(drawn)
        self.drawn = np.array(drawn, [("product", int), ("part", int), ("cap", float)])

    def __len__(self):
        return len(self.drawn)

    def draw(self, rng):
        """Yields (product, part, price cap) of every goal. All combinations of a product's options
        share a cap, which is drawn even if there is none; each human goal has its own."""
        many = self.catalogue.facts[self.source]
        for n in np.flatnonzero(many >= 0):
            least = int(self.prices[n] // 10) + 1
            above = [10.0 * i for i in range(least, min(least + 4, 100))]  # all are below 1000
            caps = [max(rng.sample(above, 2)) if len(above) > 1 else ANY_PRICE
                    for _ in range(many[n] if self.source == "human" else 1)]
            for part in range(many[n]):
                yield n, part, caps[part % len(caps)]

    def __getitem__(self, i):
        n, part, cap = self.drawn[i].item()
        product = self.catalogue.product(n)
        if self.source == "human":
            text, attributes, options = product["human"][part]
            text = text.strip(".")
        else:
            text, attributes = product["synthetic"]
            # combination number `part`: in the order of the names, the last changes fastest
            names = sorted(product["options"])
            choices = np.unravel_index(part, [len(product["options"][name]) for name in names])
            options = {name: product["options"][name][i] for name, i in zip(names, choices)}
            if options:
                text += " with " + ", and ".join(f"{k}: {v}" for k, v in options.items())
        if cap < ANY_PRICE:
            text += f", and price lower than {cap:.2f} dollars"
        same = "asin", "title", "query", "category", "product_category", "nouns"
        return {k: product[k] for k in same} | {
            "text": text, "attributes": attributes, "options": options, "price_upper": cap}

    def split(self, split):
        """The numbers of a split's goals. train, valid and test share no product; the original's
        test_500, eval_1000 and train_rest do."""
        if split in ORIGINAL_SPLITS:
            return list(range(len(self)))[ORIGINAL_SPLITS[split]]
        if split not in OUR_SPLITS:
            known = ", ".join([*OUR_SPLITS, *ORIGINAL_SPLITS])
            raise ValueError(f"webshop has no split {split!r}; known: {known}")
        products, asins = self.drawn["product"], self.catalogue.facts["asin"]
        tenth = {n: hashlib.sha256(asins[n]).digest()[0] % 10 for n in np.unique(products)}
        return [i for i, n in enumerate(products) if tenth[n] in OUR_SPLITS[split]]


# All shops of a process share their catalogue and goals.
catalogue_of, goals_of = functools.cache(Catalogue), functools.cache(Goals)

# -------------------------------------------------------------------------------------- the reward

@functools.lru_cache(1 << 16)
def token_set_ratio(a, b):
    """thefuzz 0.19's token_set_ratio: the similarity of two strings as sets of words, 0 to 100."""
    plain = [re.sub(r"\W", " ", re.sub(r"[\x80-\xff]", "", s)).lower().split() for s in (a, b)]
    if not all(plain):
        return 0
    one, two = map(set, plain)
    both = sorted(one & two)
    texts = [" ".join(both + sorted(rest)) for rest in (set(), one - two, two - one)]
    pairs = (texts[0], texts[1]), (texts[0], texts[2]), (texts[1], texts[2])
    return max(round(100 * difflib.SequenceMatcher(None, x, y).ratio()) for x, y in pairs)


def first_color(option):
    """An option with a colour's name anywhere in it ("standard" holds "tan") counts as that colour,
    a pair (name, value) if one of the two is a colour."""
    return next((color for color in COLORS if color in option), option)


@functools.cache
def spacy_model():
    """spaCy's small English model, or None and a warning if it is not installed."""
    if importlib.util.find_spec("en_core_web_sm"):
        import spacy
        return spacy.load("en_core_web_sm", disable=["ner", "lemmatizer"])
    warnings.warn(
        "webshop: neither spaCy's model (python -m spacy download en_core_web_sm) nor "
        "title_nouns.json beside the catalogue: every word of a title that is not a stopword "
        "counts as a noun, which changes the type's reward of about one product in eleven",
        stacklevel=2)


@functools.lru_cache(1 << 13)
def nouns_in(title):
    """The nouns of a title by spaCy's model; without it all words but stopwords."""
    if spacy_model() is None:
        return [word for word in re.findall("[a-z]+", title.lower()) if word not in STOPWORDS]
    return [token.text.lower() for token in spacy_model()(title) if token.pos_ in ("NOUN", "PROPN")]


def nouns_of(product):
    """Those of title_nouns.json, which do not depend on what is installed, or else nouns_in."""
    return nouns_in(product["title"]) if product["nouns"] is None else product["nouns"]


def type_reward(product, goal):
    """1, 0.5, 0.1 or 0: whether a product is of the right type."""
    bought, wanted = nouns_of(product), nouns_of(goal)
    title = len(set(bought) & set(wanted)) / len(wanted) if wanted else 0.2
    if title < 0.1:
        return 0.1 if title else 0.0
    path, other = ({part.strip() for part in x["product_category"].split("\u203a")}
                   for x in (product, goal))
    similar = product["query"] == goal["query"] or len(path & other) >= 2 or title > 0.2
    return 1.0 if similar else 0.5


def purchase_score(product, price, options, goal):
    """The original's reward, 0 to 1: the share of the goal's attributes, options and price that are
    met, times the type's reward. `options`: what was chosen, {name: value}."""
    texts = [product["title"], " ".join(product["bullets"]), product["description"]]
    texts = [text.lower() for text in texts]
    met = [any(token_set_ratio(has, wanted) > 85 for has in product["attributes"])
           or any(wanted in text for text in texts) for wanted in goal["attributes"]]
    wanted = goal["options"].items() if isinstance(goal["options"], dict) else goal["options"]
    chosen = [first_color(value) for value in options.values()]
    met += [any(token_set_ratio(has, str(first_color(option))) > 85 for has in chosen)
            for option in wanted]
    met.append(price <= goal["price_upper"])
    return float(sum(met) / len(met) * type_reward(product, goal))


# --------------------------------------------------------------------------------------- the pages

PER_PAGE = 10
SUBPAGES = ("description", "features", "reviews")
BACK, PREV, NEXT = ("Back to Search", "button"), ("< Prev", "button"), ("Next >", "button")
ITEM_BUTTONS = [(text, "button") for text in ("Description", "Features", "Reviews", "Buy Now")]


def shop_command(action):
    """-> (name, argument in lower case), or (None, None) if it is no command. The match is greedy,
    so that "search[a[b]" is none."""
    found = re.match(r"(.+)\[(.+)\]", action)
    return (found[1], found[2].lower()) if found else (None, None)


def plain(*texts):
    """Nodes that cannot be clicked."""
    return [(text, "") for text in texts]


def price_tag(product):
    return " to ".join(f"${price}" for price in product["prices"])


class Shop:
    """One visit at a time, in the original's mode `text`.

    page: search, results, item, one of SUBPAGES or done. On results: query, page_number, hits (all
    products found), on_page (those shown). On an item: item (its number), options {name: value}."""

    def __init__(self, data=None, goals="synthetic"):
        self.catalogue = catalogue_of(
            os.path.expanduser(data or os.environ.get("WEBSHOP_DATA", "")))
        self.goals = goals_of(self.catalogue, goals)
        nouns_of(self.catalogue.product(0))  # a missing table of nouns is then reported at once

    def enter(self, number):
        """Starts a visit with the goal of that number."""
        self.goal = self.goals[number]
        self.target = int(self.goals.drawn["product"][number])
        self.score = 0.0
        self.go_home()

    def act(self, command):
        """Executes a command -> whether it bought. A command that the page does not offer changes
        nothing."""
        self.score = 0.0
        name, argument = shop_command(command)
        if name == "search":
            self.look_up(argument, 1)
        elif name == "click" and argument != "search" and argument in self.clickables():
            self.click(argument)
            return argument == "buy now"
        return False

    # ---- commands
    def go_home(self):
        self.page = "search"
        self.item = None
        self.options = {}

    def look_up(self, query, number):
        """Opens page `number` of a search's results."""
        self.page = "results"
        self.item = None
        self.options = {}
        self.query = query
        self.page_number = number
        self.hits = self.catalogue.search(query)
        self.on_page = self.hits[PER_PAGE * (number - 1):PER_PAGE * number]

    def click(self, x):
        """Follows a link, presses a button or chooses an option; `x` is one of the clickables."""
        if x == "buy now":
            self.page = "done"
            self.score = self.paid = purchase_score(
                self.catalogue.product(self.item), self.goals.prices[self.item], self.options,
                self.goal)
        elif x == "back to search":
            self.go_home()
        elif x == "< prev" and self.page in SUBPAGES:
            self.page = "item"
        elif x == "< prev" and self.page == "item":
            self.look_up(self.query, self.page_number)
        elif x in ("< prev", "next >"):
            self.look_up(self.query, self.page_number + (1 if x == "next >" else -1))
        elif self.page == "results":
            self.page = "item"
            self.item = next(n for n in self.on_page
                             if self.catalogue.product(n)["asin"].lower() == x)
        elif x in SUBPAGES:
            self.page = x
        else:
            self.options[self.option_names(self.item)[x]] = x

    def option_names(self, item):
        """{option value: its option's name}; if two options share a value, the last one has it."""
        options = self.catalogue.product(item)["options"]
        return {value: name for name, values in options.items() for value in values}

    def clickables(self):
        """Buttons, links and options, in this order; options are in lower case already."""
        nodes = self.nodes()
        buttons, links, labels = ([text for text, role in nodes if role == wanted]
                                  for wanted in ("button", "link", "label"))
        return list(dict.fromkeys([text.lower() for text in buttons + links] + labels))

    def actions(self):
        clicks = [f"click[{x}]" for x in self.clickables()]
        return ["search[<your query>]"] + clicks if self.page == "search" else clicks

    # ---- pages
    def nodes(self):
        """The page's pieces of text in their order: (text, role). The role is button, link, label
        (an option's value) or empty."""
        if self.page == "search":
            return plain("WebShop", "Instruction: ", self.goal["text"]) + [("Search", "button")]
        if self.page == "done":
            return plain("Thank you for shopping with us!", "Reward",
                         "Your score (min 0.0, max 1.0)", str(self.paid))
        out = plain("Instruction:", self.goal["text"]) + [BACK]
        if self.page == "results":
            out += plain(f"Page {self.page_number} (Total results: {len(self.hits)})")
            out += [PREV, NEXT] if self.page_number > 1 else [NEXT]
            for product in map(self.catalogue.product, self.on_page):
                out += [(product["asin"], "link")] + plain(product["title"], price_tag(product))
            return out
        product = self.catalogue.product(self.item)
        if self.page in SUBPAGES:
            texts = {"description": [product["description"]],
                     "features": [f" {bullet}" for bullet in product["bullets"]], "reviews": []}
            return out + [PREV] + plain(*texts[self.page])
        out.append(PREV)
        for name, values in product["options"].items():
            out += plain(name) + [(value, "label") for value in values]
        out += plain(product["title"], f"Price: {price_tag(product)}", "Rating: N.A.")
        return out + ITEM_BUTTONS

    def observation(self):
        """The page as text. As in HTML, texts of blanks with a line break are dropped, and texts of
        other blanks become empty."""
        shown = [text for text, _ in self.nodes()
                 if text.strip(" \t\n\f\r") or text and "\n" not in text]
        return " [SEP] ".join(text.strip() for text in shown)

    # ---- the expert
    def expert(self):
        """The commands that buy the goal's product from here, or None if that does not score 1: one
        synthetic goal in fifteen cannot be reached by buying exactly what it asks for."""
        product, options = self.catalogue.product(self.target), self.choices()
        price = self.goals.prices[self.target]
        if self.page == "done" or purchase_score(product, price, options, self.goal) < 1:
            return None
        if self.item == self.target:
            way = ["click[< prev]"] if self.page in SUBPAGES else []
            chosen = self.options
        else:
            way = self.way_to(product)
            chosen = {}
        if way is None:
            return None
        clicks = [f"click[{value}]" for name, value in options.items() if chosen.get(name) != value]
        return way + clicks + ["click[buy now]"]

    def choices(self):
        """{option: value} of the goal's product: the values that are asked for, or the most similar
        ones."""
        wanted, names, out = self.goal["options"], self.option_names(self.target), {}
        for option in wanted.items() if isinstance(wanted, dict) else wanted:
            word = option if isinstance(option, str) else option[1]

            def likeness(value):
                ratio = token_set_ratio(first_color(value), str(first_color(option)))
                return value == word, ratio

            # an option with a bracket cannot be chosen: the command would be cut there
            free = [value for value, name in names.items() if name not in out and "[" not in value]
            best = max(free, key=likeness, default=None)
            if best is not None and likeness(best) > (False, 85):
                out[names[best]] = best
        return out

    def link_to(self, item):
        return f"click[{self.catalogue.product(item)['asin'].lower()}]"

    def goal_without_price(self):
        return self.goal["text"].split(", and price lower than ")[0]

    @staticmethod
    def as_query(text):
        """A text without brackets, which commands use."""
        return " ".join(re.sub(r"[][]", " ", text).split())

    def way_to(self, product):
        """Commands from any page to the goal's product: through the current results, or by the
        query that finds it on the earliest page. None if no query finds it."""
        link = [self.link_to(self.target)]
        if self.page == "results" and self.target in self.hits[PER_PAGE * (self.page_number - 1):]:
            pages = self.hits.index(self.target) // PER_PAGE + 1 - self.page_number
            return ["click[next >]"] * pages + link
        text, found = self.goal_without_price(), []
        for query in (text, text.split(" with ")[0], product["query"], product["title"],
                      document(product)[:500]):
            query = self.as_query(query)
            hits = self.catalogue.search(query)
            if self.target in hits:
                pages = hits.index(self.target) // PER_PAGE
                found.append([f"search[{query}]"] + ["click[next >]"] * pages + link)
        return min(found, key=len, default=None)
