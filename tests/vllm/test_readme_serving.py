"""The README's table of settings is the settings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from lmcache_ref.engine import LMCacheEngineConfig

README = Path(__file__).parents[2] / "README.md"


def test_the_table_of_settings_names_every_key_and_its_default():
    table = re.search(r"<!-- config:.*?-->\n(.*?)\n<!-- /config -->", README.read_text(), re.DOTALL)
    rows = [line.strip("| ").split(" | ") for line in table.group(1).splitlines()[2:]]
    written = {bool: lambda value: str(value).lower(), type(None): lambda value: "none"}
    settings = [
        [f"`{field.name}`", written.get(type(field.default), str)(field.default)]
        for field in dataclasses.fields(LMCacheEngineConfig)
    ]
    assert [row[:2] for row in rows] == settings
    assert all(len(row) == 3 and row[2] for row in rows)
