"""Tests of the shop, on a small catalogue. One test looks at the original's thousand
products in WEBSHOP_DATA, and is skipped, visibly, if that is unset."""
import math
import os
import random
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

import envs
from environments import webshop_engine
from environments.webshop import ShopPrompts
from environments.webshop_engine import Catalogue, Shop
from envs import make_env
from runtime.testing import (DRESS, GADGETS, INFO, SHIRT, attributes_entry, caches, on_the_cpu,
                             write_catalogue)

TASK = "Find me airy dresses with color: red | white, and size: s"


@pytest.fixture
def shop_data(tmp_path, recwarn):
    return write_catalogue(tmp_path / "shop")


def test_data_is_found_in_the_home_folder(shop_data, monkeypatch):
    monkeypatch.setenv("HOME", os.path.dirname(shop_data))
    monkeypatch.setenv("WEBSHOP_DATA", "~/shop")
    for data in None, "~/shop":
        assert Shop(data).goals == Shop(shop_data).goals


def goal_of(shop, text):
    return next(i for i in range(len(shop.goals)) if shop.goals[i]["text"].startswith(text))


def see(shop, command):
    shop.act(command)
    return shop.observation()


def test_shop_pages_as_text(shop_data):
    shop = Shop(shop_data)
    shop.enter(goal_of(shop, TASK))
    task = shop.goal["text"]
    assert shop.observation() == f"WebShop [SEP] Instruction: [SEP] {task} [SEP] Search"
    top = f"Instruction: [SEP] {task} [SEP] Back to Search"
    assert see(shop, "search[summer dresses]") == (
        f"{top} [SEP] Page 1 (Total results: 1) [SEP] Next > [SEP] B00DRESS01 [SEP] Acme Women's "
        "Summer Dress [SEP] $19.99 to $1029.5")
    assert shop.actions() == ["click[back to search]", "click[next >]", "click[b00dress01]"]
    item = (f"{top} [SEP] < Prev [SEP] color [SEP] red | white [SEP] rectangular \"x\" [SEP] size "
            "[SEP] s [SEP] l [SEP] Acme Women's Summer Dress [SEP] Price: $19.99 to $1029.5 [SEP] "
            "Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now")
    assert see(shop, "click[b00dress01]") == item
    assert shop.actions() == [f"click[{x}]" for x in (
        "back to search", "< prev", "description", "features", "reviews", "buy now", "red | white",
        "rectangular \"x\"", "s", "l")]
    assert see(shop, "click[Red | White]") == item  # a chosen option does not show in this mode
    for subpage, text in (("description", " [SEP] Light & airy.\nWash cold."), ("reviews", ""),
                          ("features", " [SEP] Soft  cotton [SEP] ")):  # " \n " is no text, "" is
        assert see(shop, f"click[{subpage}]") == f"{top} [SEP] < Prev{text}"
        assert shop.actions() == ["click[back to search]", "click[< prev]"]
        assert see(shop, "click[< prev]") == item
    assert not shop.act("click[s]")
    assert shop.act("click[buy now]") and shop.score == 1 and shop.actions() == []
    assert shop.observation().endswith("[SEP] 1.0")
    assert see(shop, "search[shirt]").startswith(top)  # the original goes on after a purchase


def test_pages_of_results(shop_data):
    shop = Shop(shop_data)
    shop.enter(0)
    for query in ("the and of", " ", "!["):  # no words
        assert "Page 1 (Total results: 0)" in see(shop, f"search[{query}]")
    pages = [see(shop, "search[GADGET and more]")] + [see(shop, "click[next >]") for _ in range(4)]
    # There are pages beyond the last result.
    assert [page.count("Thing") for page in pages] == [10, 10, 10, 0, 0]
    assert all(f"Page {n} (Total results: 30)" in page for n, page in enumerate(pages, 1))
    assert [see(shop, "click[< prev]") for _ in range(3)] == pages[3:0:-1]
    assert see(shop, "click[< prev]") == pages[0] and "click[< prev]" not in shop.actions()


def test_odd_products_and_goals(tmp_path):
    """Products with a known, no or a long asin are left out; a value of two options belongs to the
    last; a human goal has no full stop."""
    odd = DRESS | {"asin": "B00ODD0001", "customization_options": {
        "Color": [{"value": "one"}, {"value": "two"}], "Size": [{"value": "one"}]}}
    products = [odd, odd, SHIRT | {"asin": "nan"}, SHIRT | {"asin": "B0000000000"}, SHIRT]
    data = write_catalogue(tmp_path / "shop", products, {"B00ODD0001": attributes_entry()})
    shop = Shop(data)
    assert len(shop.catalogue.facts) == 2
    shop.enter(0)
    for action in ("search[dress]", "click[b00odd0001]", "click[two]", "click[one]"):
        shop.act(action)
    assert shop.options == {"color": "two", "size": "one"}
    assert Shop(data, "human").goals[0]["text"].startswith("i want a shirt, and price lower than 1")


@pytest.mark.parametrize("goals", ["synthetic", "human"])
def test_shop_expert_wins_from_any_page(shop_data, goals):
    shop = Shop(shop_data, goals)
    for i in range(len(shop.goals)):
        shop.enter(i)
        reachable, rng = shop.expert() is not None, random.Random(i)
        # "rectangular" counts as "tan", so that the exact option does not match.
        assert reachable == ("rectangular" not in shop.goals[i]["text"])
        for start in range(25):
            shop.enter(i)
            for _ in range(start):
                actions = [a for a in shop.actions() if a != "click[buy now]"]
                actions += ["search[gadget]", "search[dress]", "search[shirt]"]
                shop.act(rng.choice(actions))
            for action in shop.expert() or []:
                assert action.startswith("search[") or action in shop.actions()
                shop.act(action)
            assert (shop.score == 1) == reachable


@pytest.mark.parametrize("text, expected", [
    ("O'Neil's 3.5 1,000 foo_bar U.S.A. a:b", "o'neil 3.5 1,000 foo_bar u.s.a a:b"),
    ("the 18\" men-women and/or dogs as is", "18 men women dog"),
    ("ponies running relational biologically sky", "poni run relat biolog sky"),
    ("\u65e5\u672c caf\u00e9s", "\u65e5 \u672c caf\u00e9"),
    ("\u05e6\u05d4\"\u05dc", "\u05e6\u05d4\"\u05dc"),
    ("\u2605wide\U0001f468\u200d\U0001f4bc", "\u2605 wide \U0001f468\u200d\U0001f4bc")])
def test_terms_are_those_of_lucene(text, expected):
    assert webshop_engine.terms(text) == expected.split()


def test_search_matches_bm25_by_a_loop_and_orders_ties_by_asin(tmp_path):
    assert [webshop_engine.rounded_length(n) for n in (1, 41, 57, 1000)] == [1, 40, 56, 984]
    rng = random.Random(0)
    words = [f"w{i}" for i in range(40)]
    names = [" ".join(rng.choices(words, k=rng.randrange(1, 30))) for _ in range(60)]
    products = [SHIRT | {"asin": f"B{n:09d}", "name": names[n % 60]} for n in range(120)]
    rng.shuffle(products)
    catalogue = Catalogue(write_catalogue(tmp_path / "shop", products))
    texts = [(p["name"] + " one bullet").split() for p in products]
    mean = sum(map(len, texts)) / len(texts)
    for _ in range(20):
        query = rng.choices(words, k=rng.randrange(1, 6))
        scores = [0.0] * len(texts)
        for term in query:  # a word that occurs twice counts twice
            df = sum(term in text for text in texts)
            idf = math.log(1 + (120 - df + 0.5) / (df + 0.5))
            for d, text in enumerate(texts):
                tf = text.count(term)
                scores[d] += idf * tf / (tf + 0.9 * (0.6 + 0.4 * len(text) / mean))
        best = sorted((d for d in range(120) if scores[d]),
                      key=lambda d: (-round(scores[d], 5), products[d]["asin"]))
        assert catalogue.search(" ".join(query)) == best[:50]


@pytest.mark.parametrize("nouns, query, path, score", [
    (["shoe"], "boots", "Shoes", 1.0), (["hat"], "shoes", "Clothing \u203a Shoes", 0.0),
    (["shoe", *"abcdef"], "boots", "Home", 0.5), (["shoe", *"abcdef"], "shoes", "Home", 1.0),
    (["shoe", *"abcdefghijkl"], "shoes", "Shoes", 0.1)])
def test_purchase_score_matches_the_original(nouns, query, path, score):
    product = {"title": "A Soft Shoe", "description": "", "bullets": ["Slip-On"], "query": "shoes",
               "attributes": ["machine washable"], "nouns": ["shoe"],
               "product_category": "Clothing \u203a Shoes"}
    goal = {"attributes": ["machine wash", "slip-on", "warm"], "query": query, "nouns": nouns,
            "options": {"size": "7", "color": "light red"}, "price_upper": 50.0,
            "product_category": path}
    # Of 6 points: two attributes and, by its colour, an option; then also an option and the price.
    for price, options, got in ((60.0, {"size": "8", "color": "red/white"}, 3),
                                (50.0, {"size": "7", "color": "red"}, 5)):
        points = webshop_engine.purchase_score(product, price, options, goal) * 6
        assert points == pytest.approx(score * got)


def test_goals_are_the_originals_and_splits_share_no_product(tmp_path):
    pricing = ["$5.00", "$12.00$80.00", None, "$985.00", "$1200.00"]
    products = [DRESS | {"asin": f"B{n:09d}", "pricing": pricing[n % 5]} for n in range(50)]
    about = {p["asin"]: attributes_entry() for p in products[::2]}
    found = Shop(write_catalogue(tmp_path / "shop", products, about)).goals
    random.seed(0)  # the original uses the global stream, products in order
    prices = [p for _ in range(10) for p in (5.0, random.uniform(12.0, 80.0), 100.0, 985.0, 1200.0)]
    goals = []
    for n in range(0, 50, 2):
        above = [10.0 * i for i in range(1, 100) if 10.0 * i > prices[n]][:4]
        cap = max(random.sample(above, 2)) if len(above) >= 2 else None
        end = f", and price lower than {cap:.2f} dollars" if cap else ""
        goals += [(f"B{n:09d}", f"Find me x with color: {color}, and size: {size}{end}")
                  for color in ("red | white", "rectangular \"x\"") for size in ("s", "l")]
    random.seed(233)
    random.shuffle(goals)
    assert [(found[i]["asin"], found[i]["text"]) for i in range(100)] == goals
    assert list(found.prices) == prices
    splits = [found.split(name) for name in ("train", "valid", "test")]
    assert sorted(sum(splits, [])) == list(range(100)) == found.split("test_500")
    bought = [{goals[i][0] for i in numbers} for numbers in splits]
    assert sum(map(len, bought)) == 25 and len(bought[0]) > 12


def test_nouns_come_from_the_table_or_spacy_or_a_guess_with_a_warning(monkeypatch):
    product = {"title": "The Red Shoes for 2 Men's feet", "nouns": None}
    webshop_engine.spacy_model.cache_clear()
    with pytest.warns(UserWarning, match="counts as a noun"):
        assert webshop_engine.nouns_of(product) == ["red", "shoes", "men", "s", "feet"]
    tokens = [Mock(text="Feet", pos_="NOUN"), Mock(text="the", pos_="DET")]
    monkeypatch.setattr(webshop_engine, "spacy_model", lambda: lambda title: tokens)
    assert webshop_engine.nouns_of(product | {"title": "the Feet"}) == ["feet"]
    assert webshop_engine.nouns_of(product | {"nouns": ["shoes"]}) == ["shoes"]


@pytest.mark.skipif(not os.environ.get("WEBSHOP_DATA"),
                    reason="needs WEBSHOP_DATA, the folder of WebShop's catalogue")
def test_the_thousand_products():
    shop = Shop()
    hits = shop.catalogue.search("organic hair growth serum\u2122 \u2605 rollers")[:10]
    assert [shop.catalogue.product(n)["asin"] for n in hits] == [  # as by Anserini 1.7.1
        "B09PY89B1S", "B09MDQ4HBT", "B08Q42DTN1", "B09RFDP1C3", "B008QA6YOC",
        "B09SHRV5JW", "B082WKKPDH", "B07CKTXS1J", "B09FYBZNQL", "B07K6TCDR9"]
    splits = "train", "valid", "test", "test_500", "eval_1000", "train_rest"
    assert [len(shop.goals.split(s)) for s in splits] == [4963, 966, 981, 500, 1000, 5410]


def test_broken_and_missing_files_are_named(tmp_path):
    data = write_catalogue(tmp_path / "shop")
    file = tmp_path / "shop" / "items_shuffle.json"
    whole = file.read_text()
    for chunk in (1, 7, 1 << 22):
        assert list(webshop_engine.json_items(str(file), chunk)) == [DRESS, SHIRT, *GADGETS]
    for broken, message in ((whole[:-30], "ends too early"), ("[{}]", "is not WebShop's"),
                         (whole.replace("$", "$x $", 1), "product B")):
        file.write_text(broken)
        with pytest.raises(ValueError, match=message):
            Shop(data)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="does not exist.*WEBSHOP_DATA"):
        Shop(data)


def test_index_is_built_once_for_all_processes(tmp_path, monkeypatch):
    data = write_catalogue(tmp_path / "shop")
    folder = webshop_engine.index_folder(webshop_engine.data_files(data))
    os.makedirs(folder + ".new")  # as a killed build leaves it
    build = Mock(wraps=webshop_engine.build_index)
    monkeypatch.setattr(webshop_engine, "build_index", build)
    with ThreadPoolExecutor(3) as pool:
        catalogues = list(pool.map(Catalogue, [data] * 3))
    assert [len(catalogue.search("gadget")) for catalogue in catalogues] == [30] * 3
    assert build.call_count == 1 and not os.path.exists(folder + ".new")
    (tmp_path / "shop" / "items_human_ins.json").write_text("{}")
    assert webshop_engine.index_folder(webshop_engine.data_files(data)) != folder


def test_the_shop_follows_the_protocol(shop_data):
    env = make_env("webshop", data=shop_data)
    obs, info = env.reset(goal_of(env.shop, TASK))
    assert {k: type(v) for k, v in info.items()} == INFO and info["category"] == "fashion"
    assert (info["won"], info["score"]) == (False, 0.0) and info["task"].startswith(TASK)
    assert info["admissible"] == ["search[<your query>]", "click[search]"]
    assert env.advice(True) == env.advice() == ("find it", env.expert()[0])
    for command in ("search[summer dresses]", "click[b00dress01]", "click[red | white]",
                    "click[s]"):
        obs, *outcome, info = env.step(command)
        assert outcome == [0.0, False, False] and (info["won"], info["score"]) == (False, 0.0)
        assert obs == env.shop.observation() and info["admissible"] == env.shop.actions()
        if command == "click[b00dress01]":
            assert env.advice() == ("choose color", "click[red | white]")
            assert env.advice(forgetful=True) == ("buy it", "click[buy now]")
    assert env.advice() == ("buy it", "click[buy now]") and env.expert() == ["click[buy now]"]
    obs, reward, terminated, truncated, info = env.step("click[buy now]")
    assert (reward, terminated, truncated) == (10.0, True, False)
    assert (info["won"], info["score"], info["admissible"]) == (True, 1.0, [])
    assert env.expert() is None and env.advice() is None


def test_shop_prompts(shop_data):
    env = make_env("webshop", data=shop_data)
    episode = ShopPrompts(*env.reset(goal_of(env.shop, TASK)))
    task = episode.info["task"]
    commands = "Commands on this page: ['search[<your query>]', 'click[search]']"
    for text in (episode.window_prompt(), episode.window_prompt(0), episode.full_prompt()):
        assert text.count(task) == 1
        assert all(part in text for part in ("What you see: 'Search'\n", commands, envs.ANSWER))
    for action in ("search[dress]", "click[b00dress01]", "click[s]"):
        obs, *_, info = env.step(action)
        episode.record(action, obs, info)
    text, full = episode.window_prompt(2), episode.full_prompt()
    assert text.count(task) == 1 and "Steps taken so far: 3." in text
    assert "What you did: click[s]" in text and "What you did: search" not in text
    page = "'Back to Search' [SEP] '< Prev' [SEP] 'color' [SEP] 'red | white' [SEP]"
    assert f"What you see: {page}" in text
    assert task not in full and envs.ANSWER not in full and "'click[buy now]'" in full


def test_shop_rewards_only_a_score_of_one(shop_data):
    env = make_env("webshop", data=shop_data)
    env.reset(goal_of(env.shop, TASK))
    for command in ("search[summer dresses]", "click[b00dress01]", "click[l]", "click[buy now]"):
        _, reward, terminated, _, info = env.step(command)
    assert 0 < info["score"] < 1 and (reward, terminated, info["won"]) == (0.0, True, False)


def test_webshop_human_has_goals_by_people(shop_data):
    env = make_env("webshop-human", data=shop_data)
    assert env.reset("0000000")[1]["task"].startswith("i want a shirt")


def test_index_of_a_changed_catalogue_is_made_anew(tmp_path):
    files = webshop_engine.data_files(write_catalogue(tmp_path / "shop"))
    before = webshop_engine.index_folder(files)
    os.utime(files[0], ns=(1, 1))
    assert webshop_engine.index_folder(files) != before


def test_back_from_an_item_leads_to_its_page_of_results(shop_data):
    shop = Shop(shop_data)
    shop.enter(0)
    for command in ("search[gadget]", "click[next >]", "click[b000000015]", "click[< prev]"):
        shop.act(command)
    assert "Page 2 (" in shop.observation()
    shop.enter(goal_of(shop, TASK))
    for command in ("search[summer dresses]", "click[b00dress01]", "click[buy now]"):
        shop.act(command)
    assert shop.score > 0
    shop.act("search[gadget]")
    assert shop.score == 0


def test_reward_for_the_type_of_a_product():
    product = {"title": "", "query": "shoes", "nouns": ["shoe"], "product_category": "A \u203a B"}
    goal = product | {"query": "boots", "nouns": ["shoe", *"abcdef"], "product_category": "B"}
    assert webshop_engine.type_reward(product, goal) == 0.5
    assert webshop_engine.type_reward(product, goal | {"product_category": "B \u203a A"}) == 1
