"""Reading JSON files that may come from elsewhere and be invalid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["read_json", "shown"]


def read_json(file: Path) -> Any:
    """Returns the value in a JSON file, or None if the file is empty.

    Raises:
        OSError: the file cannot be read.
        ValueError: "must be JSON, but ..."; the caller adds the name of the file.
    """
    try:
        text = file.read_text(encoding="utf-8")
        return json.loads(text) if text else None
    except RecursionError:
        raise ValueError("must be JSON, but it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"must be JSON, but {error}") from None


def shown(value: Any) -> str:
    """Returns a value as at most 80 characters for a message, however large or deep it is."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."
