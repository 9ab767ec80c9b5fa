"""Generators of several requests driven by an engine that announces one layer after another, by name.

How a generator moves its layer is the cache engine's business; here it is only decided when it takes its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Steps = Generator[Any, None, None]


class LayerOrder:
    """Which layers an announced one brings up: itself and those before it that were not announced.

    A name that is not among the layers stands for the next one. Layers announced before, or after the last: none.
    """

    def __init__(self, layer_names: Sequence[str]) -> None:
        self._places = {name: place for place, name in enumerate(layer_names)}
        self._done = 0

    @property
    def complete(self) -> bool:
        return self._done == len(self._places)

    def advance(self, layer_name: str) -> int:
        """How many layers are new."""
        last = min(self._places.get(layer_name, self._done), len(self._places) - 1)
        new = max(0, last + 1 - self._done)
        self._done += new
        return new


@dataclass(eq=False)
class Load:
    """One request's load. `ended(mask, None)` or `ended(None, error)` is called once, unless it is dropped."""

    generator: Steps
    ended: Callable[[torch.Tensor | None, Exception | None], None]


class LayerLoads:
    """The loads of one step, by the protocol of `CacheEngine.retrieve_layer`.

    one_at_a_time: run each load to its end at its start, for connectors with one buffer for all.
    """

    def __init__(self, layer_names: Sequence[str], one_at_a_time: bool = False) -> None:
        self._order = LayerOrder(layer_names)
        self._first_steps = len(layer_names) + 2 if one_at_a_time else 2
        self._running: list[Load] = []

    def start(self, load: Load) -> None:
        """Check the call and start the first layer."""
        self._running.append(load)
        for _ in range(self._first_steps):
            if load in self._running:
                self._step([load])

    def advance(self, layer_name: str) -> None:
        """Later work on the current stream sees the layer, and the one behind it is under way."""
        for _ in range(self._order.advance(layer_name)):
            self._step(self._running)

    def finish(self) -> None:
        """The engine has computed. A load that is not over then was not waited for: it ends with an error."""
        late = RuntimeError("vLLM computed without announcing its layers; turn use_layerwise off")
        self._end([(load, None, late) for load in self._running])

    def _step(self, loads: Sequence[Load]) -> None:
        """One `next` for each; those that end, or fail, leave."""
        over: list[tuple[Load, torch.Tensor | None, Exception | None]] = []
        for load in loads:
            try:
                answer = next(load.generator)
            except Exception as error:
                over.append((load, None, error))
            else:
                if isinstance(answer, torch.Tensor):
                    over.append((load, answer, None))
        self._end(over)

    def _end(self, over: Sequence[tuple[Load, torch.Tensor | None, Exception | None]]) -> None:
        """Every load is told of its end before the first error of telling is raised."""
        failure = None
        for load, mask, cause in over:
            self._running.remove(load)
            load.generator.close()
            try:
                load.ended(mask, cause)
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Drop the loads that are under way; they report nothing."""
        for load in self._running:
            load.generator.close()
        self._running.clear()


@dataclass(eq=False)
class Save:
    """One request's store. `wanted(at_end)` is asked before each layer and before the end; False drops the store."""

    generator: Steps
    wanted: Callable[[bool], bool]


class LayerSaves:
    """The stores of one step, by the protocol of `CacheEngine.store_layer`."""

    def __init__(self, layer_names: Sequence[str], saves: Sequence[Save]) -> None:
        self._order = LayerOrder(layer_names)
        self._running = list(saves)

    def advance(self, layer_name: str) -> None:
        """The layer's slots are written, and those of all layers before it: their copies start."""
        for _ in range(self._order.advance(layer_name)):
            self._step(at_end=False)

    def finish(self) -> None:
        """Publish the stores, unless layers are missing."""
        if self._order.complete:
            self._step(at_end=True)
        self.close()

    def _step(self, *, at_end: bool) -> None:
        for save in list(self._running):
            if save.wanted(at_end):
                next(save.generator)
            else:
                self._running.remove(save)
                save.generator.close()

    def close(self) -> None:
        """Drop what is under way."""
        for save in self._running:
            save.generator.close()
        self._running.clear()
