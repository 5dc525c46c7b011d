"""Check the language of pages, docstrings and comments: words and constructions that may not come back.

    python scripts/prose.py              no part has more findings than scripts/prose_baseline.json allows
    python scripts/prose.py --update     lower the baseline to what is there now
    python scripts/prose.py FILE...      print every finding in these files

The baseline counts pages (`*.md`) together, and the docstrings and comments of each package. Its numbers may
only fall. Code in backticks, code blocks and link targets do not count. The rule is in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASELINE = Path(__file__).parent / "prose_baseline.json"
SKIPPED = {".venv", ".git", ".cache", "build", "dist", "node_modules", "shared", "__pycache__", ".clients"}

# Pattern → what to write instead.
AVOID = {
    r"rooms?": "package; capacity, space",
    r"books": "accounting, records",
    r"doors?": "admission, entry",
    r"patience": "timeout, hang detection",
    r"outlets?|outbox": "output sender",
    r"takers?": "consumer, callback",
    r"desks?|keepers?": "name what it holds",
    r"echoes": "copies",
    r"troubles?": "failures, problems",
    r"wish(es|ed)?": "desired state, request",
    r"enlist(s|ed)?|dismiss(es|ed)?": "register, remove",
    r"(old|new|second|whole) li(fe|ves)|(life|lives) of": "epoch, process, lifetime",
    r"news": "update, change",
    r"whoever|whomever|who(se)? is who(se)?": "name the noun: the client, the process",
    r"nobody('s)?|somebody('s)?|everybody('s)?": "name the noun: no client, another owner, all",
    r"for ever": "forever, without end",
    r"as ever": "as before, as usual",
    r"(say|says|said|told|tells|known|heard|asked|think) of": "about; report",
    r"(is|are|was|were|be) said": "is reported, is logged",
    r"(is|are|was|were) told": "is notified, learns",
    r"what of": "which",
    r"to be had|is had": "available",
    r"and nothing else|and not else": "only",
    r"the (word|words) of": "name the message",
    r"(?<=\. )Whose|^Whose": "name the noun",
}
PATTERN = re.compile(r"\b(" + "|".join(f"(?:{pattern})" for pattern in AVOID) + r")\b", re.IGNORECASE)


def instead(words: str) -> str:
    return next((text for key, text in AVOID.items() if re.fullmatch(key, words, re.IGNORECASE)), "")


def findings(text: str) -> list[tuple[int, str]]:
    """Line number (from 0) and words of each finding in `text`."""
    found = []
    for number, line in enumerate(text.splitlines()):
        plain = re.sub(r"``.*?``|`[^`]*`|\]\([^)]*\)|https?://\S+", " ", line)
        found += [(number, match[0]) for match in PATTERN.finditer(plain)]
    return found


def of_page(text: str) -> list[tuple[int, str]]:
    prose = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
    return [(number + 1, words) for number, words in findings(prose)]


def of_python(source: str) -> list[tuple[int, str]]:
    """Findings in docstrings and comments."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found += [(node.lineno + number, words) for number, words in findings(str(node.value.value))]
    if any("#" in line and PATTERN.search(line) for line in source.splitlines()):  # tokenizing is slow
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                found += [(token.start[0], words) for _, words in findings(token.string)]
    return sorted(found)


def of_file(path: Path) -> list[tuple[int, str]]:
    text = path.read_text()
    if not PATTERN.search(text):
        return []
    return of_page(text) if path.suffix == ".md" else of_python(text)


def files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith((".md", ".py")))


def part(path: Path) -> str:
    """What a file counts for: pages, or its package."""
    return "pages" if path.suffix == ".md" else path.relative_to(ROOT).parts[0]


def show(path: Path) -> None:
    for number, words in of_file(path):
        print(f"{path.relative_to(ROOT)}:{number}: “{words}”; instead: {instead(words)}")


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] != "--update":
        for name in arguments:
            show(Path(name).absolute())
        return 0
    counts: Counter[str] = Counter()
    with_findings: dict[str, list[Path]] = {}
    for path in files():
        if found := len(of_file(path)):
            counts[part(path)] += found
            with_findings.setdefault(part(path), []).append(path)
    allowed = json.loads(BASELINE.read_text()) if BASELINE.exists() else dict(counts)
    above = {name: count for name, count in counts.items() if count > allowed.get(name, 0)}
    for name, count in above.items():
        print(f"{name}: {count} findings, {allowed.get(name, 0)} allowed.", end=" ")
        see = f"See: python scripts/prose.py $(git ls-files '{name}/*.py')"
        print("Remove these:" if name == "pages" else see)
        for path in with_findings[name] if name == "pages" else []:
            show(path)
    if arguments:
        lowered = {name: min(counts[name], allowed[name]) for name in sorted(allowed)}
        BASELINE.write_text(json.dumps(lowered, indent=2) + "\n")
    return int(bool(above))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
