"""What a notebook shows of a variant: its formula, its captures, and a picture of its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from .analysis.picture import TileMap


@dataclass(frozen=True)
class Card:
    """A variant at a glance."""

    name: str
    score: str
    mask: str  # "" where every pair attends
    captures: tuple[str, ...]  # declarations
    tiles: TileMap | None  # None without a mask, or where a value is missing
    waiting: tuple[str, ...] = ()  # the captures without which there is no picture

    @property
    def formula(self) -> str:
        """Score and mask, a line each."""
        mask = f"mask  {self.mask}" if self.mask else "every pair attends"
        return f"score {self.score}\n{mask}"

    @property
    def caption(self) -> str:
        """What stands under the picture, or in its place."""
        if self.tiles is not None:
            return f"{self.tiles.q_len} queries by {self.tiles.kv_len} keys: {self.tiles.legend}"
        names = " and ".join(self.waiting)
        return f"which tiles are visited depends on {names}: .tiles(...) shows it" if names else ""

    def html(self) -> str:
        """For Jupyter."""
        parts = [f"<b>{escape(self.name)}</b>", f"<pre>{escape(self.formula)}</pre>"]
        if self.captures:
            items = "".join(f"<li><code>{escape(x)}</code></li>" for x in self.captures)
            parts.append(f"captures<ul>{items}</ul>")
        if self.tiles is not None:
            parts.append(self.tiles._repr_svg_())
        if self.caption:
            parts.append(f"<br/><small>{escape(self.caption)}</small>")
        return f"<div>{''.join(parts)}</div>"

    def markdown(self) -> str:
        """For what shows Markdown instead."""
        parts = [f"**{self.name}**", f"```\n{self.formula}\n```"]
        if self.captures:
            parts.append("\n".join(["captures", "", *(f"- `{x}`" for x in self.captures)]))
        if self.tiles is not None:
            parts.append(f"```\n{self.tiles}\n```")
        elif self.caption:
            parts.append(self.caption)
        return "\n\n".join(parts)
