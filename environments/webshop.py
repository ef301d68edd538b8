"""WebShop: the original's text environment, with the catalogue in $WEBSHOP_DATA.

    python envs.py --env webshop --data webshop          shop in it

webshop_engine.py has the pages, the search and the reward; this file has the prompts, and WebShop,
the environment.
"""
from environments.webshop_engine import Shop, shop_command
from envs import REWARD, Env, PromptBuilder, tagged_action

SHELVES = {"beauty": "Beauty", "electronics": "Electronics", "fashion": "Fashion",
           "garden": "Garden", "grocery": "Grocery"}
SEP = " [SEP] "  # between the pieces of the shop's pages


class ShopPrompts(PromptBuilder):
    """Prompts of the shop, whose pages repeat the task; it is removed from them."""

    first = "{role} Your task is to: {task}\nWhat you see: {obs}"
    listing = "Commands on this page: [{commands}]."

    def format_obs(self, obs):
        page = obs.split(f"{SEP}{self.info['task'].strip()}{SEP}", 1)[-1]
        return SEP.join(f"'{piece}'" for piece in page.split(SEP))

    def accepts(self, action, valid):
        """Any search is admissible, and clicks on what the page lists."""
        name, argument = shop_command(action)
        # a click on the search page's own button does nothing
        offered = argument != "search" and f"click[{argument}]" in self.info["admissible"]
        return name == "search" or name == "click" and offered


class WebShop(Env):
    """The shop of webshop_engine.py, with the original's pages. A task id is the number of a goal,
    in the original's order. score is the original's reward; the step that buys with a score of
    exactly 1 gets REWARD. results/NOTES.md lists the differences from the original."""

    flags = ("data",)
    horizon = 15
    held_out, validation = ("test", 500), ("valid", 200)
    categories = SHELVES
    role = ("You shop in an online store by typing commands: search[words of your own] looks "
            "through its catalogue, click[...] follows a link or a button or chooses an option. "
            "Find a product that is all that is asked for, choose its options, and buy it.")
    prompt_builder_class = ShopPrompts
    max_prompt = 4096  # pages are long
    fallback = 20
    graded = True
    recommended = {"mini_batch": 64}  # episodes are short
    patience = 3600  # loading the whole catalogue, 5 GB, takes long
    goals = "synthetic"  # which of WebShop's two sets of goals

    def __init__(self, data=None):
        self.shop = Shop(data, self.goals)

    @classmethod
    def parse_action(cls, text):
        return tagged_action(text.lower(), cls.fallback)

    def tasks(self, split):
        return [f"{i:07d}" for i in self.shop.goals.split(split)]

    def reset(self, task):
        self.shop.enter(int(task))
        self.steps = 0
        return self.shop.observation(), self.info()

    def info(self):
        shop = self.shop
        return {"admissible": shop.actions(), "task": shop.goal["text"],
                "category": shop.goal["category"], "won": shop.score == 1.0, "score": shop.score}

    def step(self, action):
        bought = self.shop.act(action)
        info = self.info()
        self.steps += 1
        truncated = self.steps >= self.horizon and not bought
        reward = REWARD if info["won"] else 0.0
        return self.shop.observation(), reward, bought, truncated, info

    def expert(self):
        return self.shop.expert()

    def advice(self, forgetful=False):
        """Searches with the goal's words, takes the first product, whatever it is, chooses those of
        the goal's options that it has, each once, and buys: nothing that cannot be read. (expert()
        knows which product is meant.) A thought leaves out an option's value, so that it is copied
        once. The forgetful demonstrator buys without options."""
        shop = self.shop
        if shop.page == "search":
            return "find it", f"search[{shop.as_query(shop.goal_without_price())}]"
        if shop.page == "results" and shop.on_page:
            return "find it", shop.link_to(shop.on_page[0])
        if shop.page != "item":
            return None
        wanted = shop.goal["options"]
        wanted = [] if forgetful else wanted.values() if isinstance(wanted, dict) else wanted
        for value, name in shop.option_names(shop.item).items():
            if value in wanted and name not in shop.options and "[" not in value:
                return f"choose {name}", f"click[{value}]"
        return "buy it", "click[buy now]"


class WebShopHuman(WebShop):
    """WebShop with its goals written by people."""

    goals = "human"
