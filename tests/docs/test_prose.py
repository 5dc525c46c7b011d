"""scripts/prose.py finds words that may not come back, and the numbers of its baseline may only fall."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prose.py"
SPEC = importlib.util.spec_from_file_location("prose", SCRIPT)
assert SPEC
assert SPEC.loader
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)


def test_words_are_found_in_text_and_not_in_code_or_links() -> None:
    page = "Each room is free.\n\n```\nroom = 1\n```\n\n`room` and [a page](room.md).\nWhoever asks."
    assert prose.of_page(page) == [(1, "room"), (8, "Whoever")]


def test_words_are_found_in_docstrings_and_comments_only() -> None:
    source = '"""A room."""\nroom = "the room"  # nobody\n\ndef books():\n    """\n    The books.\n    """\n'
    assert prose.of_python(source) == [(1, "room"), (2, "nobody"), (6, "books")]


def test_every_word_has_a_better_one() -> None:
    assert all(prose.instead(words) for words in ("rooms", "Whoever", "is said", "for ever"))


def test_more_findings_than_the_baseline_fail_and_fewer_lower_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gateway").mkdir()
    code, baseline = tmp_path / "gateway" / "code.py", tmp_path / "baseline.json"
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "BASELINE", baseline)
    baseline.write_text('{"gateway": 1, "pages": 0}')
    code.write_text("# a room\n# a door\n")
    assert prose.main([]) == 1
    assert "gateway: 2 findings, 1 allowed." in capsys.readouterr().out
    code.write_text("# a package\n")
    assert prose.main(["--update"]) == 0
    assert json.loads(baseline.read_text()) == {"gateway": 0, "pages": 0}
    (tmp_path / "page.md").write_text("A room.\n")
    assert prose.main(["--update"]) == 1
    assert "page.md:1: “room”" in capsys.readouterr().out
    assert json.loads(baseline.read_text()) == {"gateway": 0, "pages": 0}
