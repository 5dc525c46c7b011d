"""Reasoning in a model's output: what it thinks before it answers.

parser   the base of all formats, and the parser of a whole output: reasoning, content, calls
tags     a thought between two tags
harmony  the channels of gpt-oss
formats  one row a format
tokens   a format's markup in a model's tokens, for the engine core

A new format is a `ReasoningParser`, if none fits, and a row in FORMATS.
"""

from leadline.engine.core.sequence import Thought
from leadline.engine.frontend.reasoning.formats import FORMATS, Begins, ReasoningFormat, detect_format
from leadline.engine.frontend.reasoning.parser import Field, OutputParser, ReasoningParser
from leadline.engine.frontend.reasoning.tokens import ModelReasoning, thought_spec

__all__ = [
    "FORMATS",
    "Begins",
    "Field",
    "ModelReasoning",
    "OutputParser",
    "ReasoningFormat",
    "ReasoningParser",
    "Thought",
    "detect_format",
    "thought_spec",
]
