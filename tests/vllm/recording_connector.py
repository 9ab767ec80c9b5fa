"""The connector under test, which also writes down what it promised and, in a worker, how its cache stands.

`RECORD_BASE` = module:class is the connector; lines of JSON go to `RECORD_FILE`, whatever process they come from.
"""

from __future__ import annotations

import importlib
import json
import os

module, _, name = os.environ["RECORD_BASE"].partition(":")
Base = getattr(importlib.import_module(module), name)


def record(**what) -> None:
    with open(os.environ["RECORD_FILE"], "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


class RecordingConnector(Base):
    load = True  # False: hits are promised and nothing is loaded, the control that must differ

    lose_a_chunk = False  # True: the next load finds its second chunk gone, though it was promised and pinned

    def update_state_after_alloc(self, request, *rest) -> None:
        record(request=request.request_id, tokens=request.num_tokens, hit=rest[-1], process=os.getpid())
        super().update_state_after_alloc(request, *rest)

    def start_load_kv(self, *args, **kwargs) -> None:
        if not self.load:
            return
        if type(self).lose_a_chunk:
            self.drop_a_chunk()
        super().start_load_kv(*args, **kwargs)

    def drop_a_chunk(self) -> None:
        """Of the first load of the step, if there is one."""
        loads = [work for work in getattr(self._get_connector_metadata(), "requests", []) if work.load]
        if loads:
            type(self).lose_a_chunk = False
            engine = self._lmcache_engine.lmcache_engine
            engine.storage.drop(engine.names.spans(loads[0].token_ids)[1].key)

    def wait_for_layer_load(self, layer_name) -> None:
        if self.load:
            super().wait_for_layer_load(layer_name)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        engine = getattr(self._lmcache_engine, "lmcache_engine", None)
        if hasattr(engine, "stats"):
            connector = type(engine.connector).__name__
            record(stats=vars(engine.stats()), connector=connector, process=os.getpid())
