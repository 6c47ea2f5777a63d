"""Train with unequal shards of every global batch, as if one device had taken all of it.

    import smaragdine.hetero

    with smaragdine.hetero.split("allocation.json") as shards:      # or split([1874, 2222]): samples per rank
        loader = shards.loader(dataset, num_workers=4)
        model = shards.wrap(model)                                  # DistributedDataParallel
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                shards.weight(loss_function(model(x), y)).backward()
                optimizer.step()

docs/hetero.md says what equals what.
"""

from __future__ import annotations

from smaragdine.hetero.shards import Shards, split

__all__ = ["Shards", "split"]
