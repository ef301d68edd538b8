"""A scripted expert for household tasks, which searches the places one after another: the expert of
`house`, and the demonstrator of tools/imitate.py. It is not needed to understand SAPO."""

APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}  # one of each per house
LAMP = "desklamp 1"


def type_of(name):  # "cabinet 2" -> "cabinet"
    return name.rsplit(" ", 1)[0]


def verb_of(category):  # what its tasks want done: clean, heat, cool or None
    return next((verb for verb in APPLIANCES if f"_{verb}_" in category), None)


class HouseholdExpert:
    """Solves household tasks. It searches the places in order and uses only what the agent has
    seen, so that a model can learn to do the same.

    A subclass has goal: the types (object, place); category; verb: clean, heat, cool or None;
    places: all names, in order; begin: the first place to search; at, holding: names or None;
    closed(place) and inside(place), for the place where the agent is; treated(thing): whether the
    verb was applied; placed(any_state): how many of the objects are at the destination."""

    def advice(self, forgetful=False):
        """-> (thought, next command). The forgetful expert skips washing, heating, cooling, the
        lamp and the second object, and then does nothing useful."""
        (obj, dest), here, thing = self.goal, self.at, self.holding
        if forgetful and (self.in_hand() if self.needs_lamp() else self.placed(any_state=True)):
            return "done", f"examine {thing}" if self.needs_lamp() else "look"
        if thing is None:
            return f"find {obj}", self.find(obj)
        if not self.in_hand():
            return f"drop {type_of(thing)}", self.put()
        if self.needs_lamp():
            lamp_is_here = here and LAMP in self.inside(here)
            return f"use {type_of(LAMP)}", f"use {LAMP}" if lamp_is_here else self.onward()
        if self.verb and not self.treated(thing) and not forgetful:
            tool = f"{APPLIANCES[self.verb]} 1"
            ready = f"{self.verb} {thing} with {tool}"
            return f"{self.verb} {obj}", ready if here == tool else f"go to {tool}"
        if here and type_of(here) == dest:
            return f"put {obj} in {dest}", self.put()
        return f"put {obj} in {dest}", f"go to {next(p for p in self.places if type_of(p) == dest)}"

    def needs_lamp(self):
        return self.category == "look_at_obj_in_light"

    def in_hand(self):
        return self.holding is not None and type_of(self.holding) == self.goal[0]

    def stores(self, place):
        """Whether objects in this place are done, so that they are left there."""
        return type_of(place) == self.goal[1] and self.verb is None and not self.needs_lamp()

    def find(self, obj):
        here = self.at
        found = [thing for thing in self.inside(here) if type_of(thing) == obj] if here else []
        return self.onward() if not found or self.stores(here) else f"take {found[0]} from {here}"

    def onward(self):
        """Opens the current place, or goes to the next one."""
        if self.at is None:
            return f"go to {self.begin}"
        if self.closed(self.at):
            return f"open {self.at}"
        return f"go to {self.places[(self.places.index(self.at) + 1) % len(self.places)]}"

    def put(self):
        return f"open {self.at}" if self.closed(self.at) else f"move {self.holding} to {self.at}"
