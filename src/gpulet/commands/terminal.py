"""What others wrote - a container, an image, a file of the node - shown on a terminal."""

from __future__ import annotations

from rich.markup import escape

from gpulet.errors import visible


def shown(text: str) -> str:
    """The text for one of rich's own: in it neither markup nor control characters act."""
    return escape(visible(text))
