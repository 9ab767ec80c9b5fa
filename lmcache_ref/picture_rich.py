"""How a terminal shows a `Picture`: the cells, wording and colours are those of `picture.py`, only the lines are made here.

Needs rich, and is imported by `cli.py` alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from .picture import CELLS_PER_LINE, Picture, colour


def render(picture: Picture, width: int) -> Iterator[Text]:
    """Lines of at most `width` columns: memory order, read like text, one panel for each allocation."""
    cell_width = 1 + max(len(picture.label(cell)) for cell in picture.cells)
    # beside the cells: the offset, and at worst one blank for every second cell
    most = max(1, min(CELLS_PER_LINE, 2 * (width - 10) // (2 * cell_width + 1)))
    yield Text(f"\n{picture.subtitle}", "bold")
    for tensor, name in enumerate(picture.tensors):
        cells = picture.of_tensor(tensor)
        what = picture.shared(cells, picture.cells)
        yield Text.assemble((f"\n{name}", "bold"), (f"  {what}" if what else "", "dim"))
        # a label names no layer, so a line holds one
        cuts = (picture.lines(cells, at_most) for at_most in range(most, 0, -1))
        for line in next(lines for lines in cuts if all(len({cell.layer for cell in line}) == 1 for line in lines)):
            offset = f"+{line[0].offset_bytes} B"
            text = Text.assemble((f"{offset:>8}  ", "dim"))
            for cell, step in zip(line, picture.steps(line), strict=True):
                fill, ink = colour(picture, cell)
                text.append(" " if step > 1 else "").append(picture.label(cell).center(cell_width), f"{ink} on {fill}")
            what = picture.shared(line, cells)
            if text.cell_len + 2 + len(what) <= width:
                yield text.append(f"  {what}", "dim")
            else:
                yield Text(f"{'':10}{what}", "dim")
                yield text
    yield Text(
        f"\nAddresses rise from left to right, then down; a cell is HS={picture.cells[0].hs[1]} elements "
        f"({picture.cell_bytes} bytes), t counts through blocks.",
        "dim",
    )
