"""A training loop without a framework: ``python examples/plain_loop.py``.

The lines that concern dspark_ext: the loss on the drafter's outputs, and a meter that adds up its
terms over a log window.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import Optional

import torch
from synthetic import BLOCK_SIZE, SETTINGS, Windows, make_drafter, to_device
from torch.utils.data import DataLoader

from dspark_ext import AcceptanceMeter, DSparkLoss


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Trains, prints a line a window, and draws the picture if one is wanted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160, help="(default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--plot", metavar="FILE.png", help="needs the extra `metrics`")
    args = parser.parse_args(arguments)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    drafter = make_drafter().to(device)
    loss_fn = DSparkLoss(**SETTINGS)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    loader = DataLoader(Windows(256), batch_size=8, shuffle=True)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    held_out = DataLoader(Windows(32, first=1), batch_size=8)

    training, evaluation = AcceptanceMeter(BLOCK_SIZE), AcceptanceMeter(BLOCK_SIZE)
    for step in range(1, args.steps + 1):
        loss, terms = loss_fn(drafter(to_device(next(batches), device)), return_terms=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        training.update(terms)

        if step % args.log_every == 0 or step == args.steps:
            with torch.no_grad():
                for items in held_out:
                    outputs = drafter(to_device(items, device))
                    evaluation.update(loss_fn(outputs, return_terms=True)[1], outputs=outputs)
            mine, theirs = training.compute(), evaluation.compute()
            print(
                f"step {step:4d}  loss {mine['loss']:.3f}  held out: loss {theirs['loss']:.3f}  "
                f"accept rate {theirs['accept_rate']:.3f}  tau {theirs['tau']:.2f}",
                flush=True,
            )
            training.reset()
            evaluation.reset()
    if args.plot is not None:
        evaluation.plot(args.plot)
        print(f"wrote {args.plot}")


if __name__ == "__main__":
    main()
