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

import dataclasses
import json
import os
import sys

import torch

sys.path.insert(0, os.path.abspath(f"{os.path.dirname(__file__)}/../../.."))

import train
from worlds.machine import AdamW, Count, Parser, Positive, Weight, one_line_errors


class Values(train.Learner):
    """Steps for V and Q alone: nothing is an advantage, and a KL holds the policy where it is."""

    def __init__(self, lm, config, asked):
        super().__init__(lm, dataclasses.replace(config, beta=0.0))  # beta 0: no copy of the model
        self.config = dataclasses.replace(config, lr=asked.value_lr or config.lr, beta=1.0, c_h=0.0)
        params = [lm.head.weight] if asked.rows_only else lm.model.parameters()
        self.optimizers[""] = AdamW(params, self.config.lr, weight_decay=0.0)


class SapoAndValues(train.Learner):
    """SAPO with rows that start apart, and with epochs for the values alone."""

    asked = None  # the flags of this file

    def __init__(self, lm, config):
        weight = lm.head.weight
        if self.asked.apart:  # w- is minus w+, so that the readouts spread around 0
            with torch.no_grad():
                row = torch.randn(weight.shape[1],
                                  generator=torch.Generator().manual_seed(config.seed))
                rows = self.asked.apart * torch.stack([row, -row])
                weight[list(lm.value_ids)] = rows.to(weight)
        super().__init__(lm, config)
        self.values = Values(lm, config, self.asked)

    def targets(self, played, batches, old):
        self.batches = batches
        return super().targets(played, batches, old)

    def step(self, mini, old, ref, targets, iteration):
        info = super().step(mini, old, ref, targets, iteration)
        if self.asked.value_epochs and mini is self.batches[-1]:
            now = train.score_all(self.lm, self.batches).logp
            alone = targets._replace(adv=torch.zeros_like(now))
            for part in self.batches * self.asked.value_epochs:
                self.values.steps = self.steps  # the learning rate warms up with SAPO's
                self.values.step(part, old._replace(logp=now), now, alone, iteration)
        return info


def main():
    parser = Parser(description="SAPO with other ways to learn V and Q, and train.py's flags.")
    parser.add_argument("--value_epochs", type=Count, default=0, help="passes for V and Q alone")
    parser.add_argument("--value_lr", type=Positive, help="their learning rate [--lr]")
    parser.add_argument("--rows_only", action="store_true", help="they train the rows of w+ and w-")
    parser.add_argument("--apart", type=Weight, default=0.0, help="spread of the rows at the start")
    with one_line_errors("values.py"):
        asked, rest = parser.parse_known_args()
        config = train.parse_config(rest)
        if config.resume or config.algo != "sapo":
            raise ValueError("--resume and other methods are not for this script")
        SapoAndValues.asked, train.LEARNERS["sapo"] = asked, SapoAndValues
        train.run(config)
        with open(f"{config.out}/values.json", "w") as file:
            json.dump(vars(asked), file)


if __name__ == "__main__":
    main()
