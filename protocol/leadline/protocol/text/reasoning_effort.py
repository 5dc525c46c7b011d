"""A request's `reasoning_effort` → the variables by which a chat template learns of it.

enable_thinking    Qwen3, GLM, SmolLM3, Gemma 4: a switch
thinking           DeepSeek V3.1, Granite: a switch by another name
reasoning_effort   gpt-oss and others: the effort itself
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import jinja2
from jinja2 import meta

__all__ = ["EFFORT", "effort_variables", "variables_of"]

EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
_NEAREST = {"minimal": "low", "xhigh": "high"}
"""For templates that know only the efforts which all models have."""


def variables_of(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """Return those of the variables above that a template reads."""
    if not any(name in source for name in (EFFORT, *_SWITCHES)):
        return frozenset()
    try:
        read = meta.find_undeclared_variables(environment.parse(source))
    except Exception:  # what does not compile is refused elsewhere
        return frozenset()
    return frozenset(read & {EFFORT, *_SWITCHES})


def effort_variables(effort: str, read: Set[str], source: str) -> dict[str, Any]:
    """Return the variables that tell a template of `effort`. `read`: those that the template reads."""
    variables: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in read}
    if EFFORT in read:
        named = f'"{effort}"' in source or f"'{effort}'" in source
        if named or effort in ("low", "medium", "high"):
            variables[EFFORT] = effort
        elif effort in _NEAREST:
            variables[EFFORT] = _NEAREST[effort]
    return variables
