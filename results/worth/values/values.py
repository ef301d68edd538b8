"""SAPO whose values are learned in ways that train.py has no flags for.

    python results/worth/values/values.py --value_epochs 1                               whole model
    python results/worth/values/values.py --value_epochs 3 --rows_only --value_lr 1e-2   two rows
    python results/worth/values/values.py --apart 0.02                                   rows apart

After the steps of Eq. 12, an iteration makes more passes over its turns for the losses of V and Q
alone, with an optimizer of their own. The policy is held where it is by a KL term, as in PPG
(arXiv 2009.04416), or by training nothing but the rows of w+ and w-, which the policy never reads
(where the head is not tied to the embeddings). What was asked for is kept in RUN/values.json.
Such a run cannot be resumed.
"""
import signal
if __name__ == "__main__":  # Ctrl-C while this imports leaves without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import json
import os
import sys

import torch

sys.path.insert(0, os.path.abspath(f"{os.path.dirname(__file__)}/../../.."))

import train
from sapo import kl_loss, value_loss
from worlds.machine import AdamW, Count, Parser, Positive, Weight, one_line_errors


class ValuePhase(train.Learner):
    """SAPO with rows that start apart, and with epochs for the values alone."""

    asked = None  # the flags of this file

    def __init__(self, lm, config):
        asked, weight = self.asked, lm.head.weight
        if asked.apart:  # w- is minus w+, so that the readouts spread around 0
            with torch.no_grad():
                row = torch.randn(weight.shape[1],
                                  generator=torch.Generator().manual_seed(config.seed))
                weight[list(lm.value_ids)] = asked.apart * torch.stack([row, -row]).to(weight)
        super().__init__(lm, config)
        params = [weight] if asked.rows_only else lm.model.parameters()
        self.own = AdamW(params, asked.value_lr or config.lr, weight_decay=0.0)

    def targets(self, played, batches, old):
        self.batches = batches
        return super().targets(played, batches, old)

    def step(self, mini, old, ref, targets, iteration):
        info = super().step(mini, old, ref, targets, iteration)
        if mini is self.batches[-1]:
            self.value_phase(old, targets, iteration)
        return info

    def value_phase(self, old, targets, iteration):
        c, asked = self.config, self.asked
        self.own.param_groups[0]["lr"] = (asked.value_lr or c.lr) * self.rate("", iteration) / c.lr
        now = train.score_all(self.lm, self.batches).logp if asked.value_epochs else None

        def loss(micro):
            m, n = micro.tokens, micro.turns
            logp, _, p_v, p_q = self.lm.score(micro.batch)
            v = value_loss(p_v, old.p_v[n], targets.y_v[n], clip=c.clip_v, denom=turns)[0]
            q = value_loss(p_q, old.p_q[n], targets.y_q[n], clip=c.clip_q, denom=turns)[0]
            return c.c_v * v + c.c_q * q + asked.clone * kl_loss(logp, now[m], denom=tokens), {}

        for _ in range(asked.value_epochs):
            for mini in self.batches:
                tokens, turns = (sum(getattr(x, axis).stop - getattr(x, axis).start for x in mini)
                                 for axis in ("tokens", "turns"))
                train.take_step(self.lm.model, self.own, mini, c, loss)


def main():
    parser = Parser(description="SAPO with other ways to learn V and Q, and train.py's flags.")
    parser.add_argument("--value_epochs", type=Count, default=0, help="passes for V and Q alone")
    parser.add_argument("--value_lr", type=Positive, help="their learning rate [--lr]")
    parser.add_argument("--rows_only", action="store_true", help="they train the rows of w+ and w-")
    parser.add_argument("--clone", type=Weight, default=1.0, help="their weight of the KL")
    parser.add_argument("--apart", type=Weight, default=0.0, help="spread of the rows at the start")
    with one_line_errors("values.py"):
        asked, rest = parser.parse_known_args()
        config = train.parse_config(rest)
        if config.resume or config.algo != "sapo":
            raise ValueError("--resume and other methods are not for this script")
        ValuePhase.asked, train.LEARNERS["sapo"] = asked, ValuePhase
        train.run(config)
        with open(f"{config.out}/values.json", "w") as file:
            json.dump(vars(asked), file)


if __name__ == "__main__":
    main()
