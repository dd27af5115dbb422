"""Names of the form module:attribute, by which configs and task rows name what other packages bring."""

import importlib
from typing import Any


def attribute(name: str) -> Any:
    """Import what ``name`` names. Raises ValueError, whose text is what is wrong with it: "cannot be imported: ..."."""
    module, _, inner = name.partition(":")
    if not module or not inner:
        raise ValueError("is not of the form module:attribute")
    try:
        found: Any = importlib.import_module(module)
        for part in inner.split("."):
            found = getattr(found, part)
    except Exception as error:  # importing another package's module may raise anything
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}") from error
    return found
