# SPDX-License-Identifier: Apache-2.0
"""A table as Markdown and HTML, and how its numbers look. Pure."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LIMITS = ("15", "25")


@dataclass(frozen=True)
class Table:
    """Cells as text. `flagged` are the rows that do not count."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    flagged: frozenset[int] = frozenset()

    def markdown(self) -> str:
        """Columns also line up on a terminal."""
        widths = [max(len(row[i]) for row in (self.head, *self.rows)) for i in range(len(self.head))]
        lines = [self.head, ["-" * width for width in widths], *self.rows]
        return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

    def html(self) -> str:
        """In a frame that scrolls where the screen is narrow; the first column names the row."""
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in self.head)
        body = []
        for index, (first, *rest) in enumerate(self.rows):
            cells = "".join(
                f'<td data-label="{html.escape(name)}">{html.escape(cell)}</td>'
                for name, cell in zip(self.head[1:], rest, strict=True)
            )
            flag = ' class="flagged"' if index in self.flagged else ""
            body.append(f'<tr{flag}><th scope="row">{html.escape(first)}</th>{cells}</tr>')
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )


def number_text(value: float | None, form: str, factor: float = 1.0, unit: str = "") -> str:
    """A number in its form, or a dash."""
    return "-" if value is None else format(factor * value, form) + unit


def between_text(interval: Mapping[str, float | None], form: str) -> str:
    """An interval; an end that the sample does not bound lies on the failures."""
    low, high = interval["low"], interval["high"]
    return f"{'-inf' if low is None else format(low, form)} to {'failures' if high is None else format(high, form)}"
