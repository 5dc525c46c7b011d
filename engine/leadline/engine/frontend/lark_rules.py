"""Whether a Lark grammar has a finite text at all.

`start: start` and `start: "a" start` have none, and a model that follows one never ends.

Reads rules just far enough to see which of them can come to an end. Whatever it does not understand counts as
"can": llguidance, which compiles the grammar, has the last word on its syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["has_finite_text"]

_TOKEN = re.compile(
    r"""
    (?P<space>   [ \t\r]+ | //[^\n]* | \#[^\n]* )
  | (?P<newline> \n )
  | (?P<literal> "(?:[^"\\\n]|\\.)*"i? | /(?![/*])(?:[^/\\\n]|\\.)+/[a-z]* | <[^<>\n]+> )
  | (?P<name>    [?!]?[a-zA-Z_][a-zA-Z0-9_-]* )
  | (?P<repeat>  \{\s*(?P<least>\d*)\s*(?:,\s*\d*\s*)?\} | ~\s*(?P<least_of_tilde>\d+)(?:\s*\.\.\s*\d+)? )
  | (?P<range>   \.\. )
  | (?P<mark>    -> | [:|()\[\]?*+,.=] )
  | (?P<number>  \d+ )
    """,
    re.VERBOSE,
)


@dataclass(slots=True)
class _Rule:
    alternatives: list[list[str]] = field(default_factory=list)
    """Each: the rules that all must come to an end for it to do so."""


class _NotUnderstood(Exception):
    pass


def has_finite_text(grammar: str) -> bool:
    """False only where `start` provably never comes to an end."""
    try:
        rules = _Reader(grammar).rules()
    except _NotUnderstood:
        return True
    if "start" not in rules:
        return True
    ending: set[str] = set()
    changed = True
    while changed:
        changed = False
        for name, rule in rules.items():
            if name not in ending and any(
                all(each in ending or each not in rules for each in needed) for needed in rule.alternatives
            ):
                ending.add(name)
                changed = True
    return "start" in ending


class _Reader:
    def __init__(self, grammar: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        """(kind, text, least repetitions)"""
        at = 0
        while at < len(grammar):
            if grammar[at] == "%":
                at = self._directive(grammar, at)
                continue
            found = _TOKEN.match(grammar, at)
            if found is None:
                raise _NotUnderstood
            at = found.end()
            kind = str(found.lastgroup) if found["repeat"] is None else "repeat"
            if kind != "space":
                least = found["least"] or found["least_of_tilde"] or "0"
                self._tokens.append((kind, found[0], int(least[:9])))
        self._at = 0
        self._helpers = 0
        self._rules: dict[str, _Rule] = {}

    def _directive(self, grammar: str, at: int) -> int:
        """`%json {...}` and its like are literals; others stand on a line of their own and name no rules."""
        if (found := re.compile(r"%(ignore|import)\b[^\n]*").match(grammar, at)) is not None:
            return found.end()
        found = re.compile(r"%(json|regex|llguidance)\s*(?=\{)").match(grammar, at)
        if found is None:
            raise _NotUnderstood
        depth, at, quoted = 0, found.end(), False
        while at < len(grammar):
            char = grammar[at]
            at += 1
            if quoted:
                at += char == "\\"
                quoted = char != '"'
            elif char == '"':
                quoted = True
            elif char in "{}":
                depth += 1 if char == "{" else -1
                if not depth:
                    if found[1] != "llguidance":
                        self._tokens.append(("literal", "", 0))
                    return at
        raise _NotUnderstood

    def rules(self) -> dict[str, _Rule]:
        while (token := self._next()) is not None:
            kind, name, _ = token
            if kind != "name":
                raise _NotUnderstood
            if self._peek() == "[":
                while self._take()[1] != "]":
                    pass
            elif self._peek() == ".":
                self._take(), self._take()
            if self._take()[1] != ":":
                raise _NotUnderstood
            rule = self._rules.setdefault(name.lstrip("?!"), _Rule())
            rule.alternatives += self._alternatives(top=True)
        return self._rules

    def _alternatives(self, *, top: bool) -> list[list[str]]:
        alternatives: list[list[str]] = [[]]
        while True:
            token = self._next()
            if token is None or (top and self._begins_rule(token)):
                if token is not None:
                    self._at -= 1
                if not top:
                    raise _NotUnderstood
                return alternatives
            kind, text, _ = token
            if text == "|":
                alternatives.append([])
            elif text in (")", "]") and not top and kind == "mark":
                return alternatives
            elif text == "->":
                self._take()
            elif text in ("(", "["):
                inner = self._group(self._alternatives(top=False))
                if not self._may_be_absent() and text == "(":
                    alternatives[-1].append(inner)
            elif kind == "name":
                if not self._may_be_absent():
                    alternatives[-1].append(text.lstrip("?!"))
            elif kind in ("literal", "range"):
                self._may_be_absent()
            else:
                raise _NotUnderstood

    def _group(self, alternatives: list[list[str]]) -> str:
        self._helpers += 1
        name = f"({self._helpers})"
        self._rules[name] = _Rule(alternatives)
        return name

    def _may_be_absent(self) -> bool:
        """Take what stands behind an item: ? * + {n,m} ~n."""
        absent = False
        while self._at < len(self._tokens):
            kind, text, least = self._tokens[self._at]
            if text not in ("?", "*", "+") and kind != "repeat":
                break
            absent = absent or text in ("?", "*") or (kind == "repeat" and least == 0)
            self._at += 1
        return absent

    def _begins_rule(self, token: tuple[str, str, int]) -> bool:
        before = self._tokens[self._at - 2][0] if self._at >= 2 else "newline"
        return token[0] == "name" and before == "newline" and self._peek() in (":", "[", ".")

    def _next(self) -> tuple[str, str, int] | None:
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token[0] != "newline":
                return token
        return None

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self) -> tuple[str, str, int]:
        if self._at >= len(self._tokens):
            raise _NotUnderstood
        self._at += 1
        return self._tokens[self._at - 1]
