"""The README says what is true: its table of layouts, its commands, its Python."""

from __future__ import annotations

import re
from pathlib import Path

from lmcache_ref import LAYOUTS

README = Path(__file__).parent.parent / "README.md"


def layout_rows() -> list[str]:
    rows = ["| layout | lists | one tensor | engines | upstream's id |", "|---|---|---|---|---|"]
    for row in LAYOUTS.values():
        lists = " of ".join(f"`{level}`" for level in row.nesting) or "one tensor"
        engines = ", ".join(engine.value for engine in row.engines) or "by `layout` hint"
        number = "" if row.upstream_id is None else str(row.upstream_id)
        rows.append(f"| `{row.name}` | {lists} | `{row.pattern}` | {engines} | {number} |")
    return rows


def test_the_table_of_layouts_is_the_table() -> None:
    found = re.search(r"<!-- layouts:.*?-->\n(.*?)\n<!-- /layouts -->", README.read_text(), re.DOTALL)
    assert found and found.group(1).splitlines() == layout_rows()


def test_the_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 2
    before = dict(LAYOUTS)
    try:
        for block in blocks:
            exec(compile(block, str(README), "exec"), {})
        assert set(LAYOUTS) - set(before) == {"NL_X_NB_BS_TWO_NH_HS"}
    finally:
        LAYOUTS.clear()
        LAYOUTS.update(before)


if __name__ == "__main__":  # python tests/test_readme.py writes the table
    text = README.read_text()
    table = "\n".join(layout_rows())
    README.write_text(
        re.sub(r"(<!-- layouts:.*?-->\n).*?<!-- /layouts -->", rf"\1{table}\n<!-- /layouts -->", text, flags=re.DOTALL)
    )
