"""What a group found, as a table: the same rows for people (rich) and as data (JSON)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

Cell = str | int | float | None


@dataclass(frozen=True)
class Goal:
    """A limit that the project has set itself, and what came out; seen is None where it could not be measured here."""

    text: str
    limit: float
    seen: float | None

    @property
    def met(self) -> bool | None:
        """None where there is nothing to judge by."""
        return None if self.seen is None else self.seen <= self.limit

    def line(self) -> str:
        """One line for people."""
        if self.seen is None:
            return f"goal: {self.text} at most {self.limit:g}: not measured here"
        return f"goal: {self.text} at most {self.limit:g}: {self.seen:.3g}, {'met' if self.met else 'MISSED'}"


@dataclass
class Table:
    """A group's result. rows: one mapping of column to cell each; a column that a row lacks stays empty."""

    group: str
    title: str
    columns: tuple[str, ...]
    rows: list[dict[str, Cell]] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """A row, its cells in the columns' order."""
        self.rows.append(dict(zip(self.columns, cells, strict=True)))

    def to_data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        goals = [{"text": goal.text, "limit": goal.limit, "seen": goal.seen, "met": goal.met} for goal in self.goals]
        return {"group": self.group, "title": self.title, "rows": self.rows, "goals": goals, "notes": self.notes}


def shown(cell: Cell) -> str:
    """A cell as text: three digits that count, no more."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"
    return str(cell)


def render(tables: Iterable[Table], console: Console) -> None:
    """Prints tables, their goals and notes."""
    for table in tables:
        console.print(Text(table.title, style="bold"))
        drawn = RichTable()
        for number, column in enumerate(table.columns):
            drawn.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(shown(row.get(column))) for column in table.columns))
        console.print(drawn)
        for goal in table.goals:
            style = {None: "dim", True: "green", False: "red"}[goal.met]
            console.print(Text(goal.line(), style=style))
        for note in table.notes:
            console.print(Text(note, style="dim"))
        console.print()
