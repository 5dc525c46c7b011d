"""Parameters of tools as agents and common MCP servers send them: their shape, in words of our own.

Each: the schema, arguments that match it, and arguments that do not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SCHEMAS"]

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
_TEXT = {"type": "string", "description": "A text"}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Claude Code: run a command": (
        {
            "$schema": _DRAFT_7,
            **_object(
                ["command"],
                command=_TEXT,
                timeout={"type": "number", "description": "Milliseconds (max 600000)"},
                description=_TEXT,
                run_in_background={"type": "boolean"},
            ),
        },
        {"command": "git status\n&& ls", "timeout": 60000, "run_in_background": True},
        {"command": "ls", "timeout": "long"},
    ),
    "Claude Code: change a file": (
        {
            "$schema": _DRAFT_7,
            **_object(
                ["file_path", "old_string", "new_string"],
                file_path=_TEXT,
                old_string=_TEXT,
                new_string=_TEXT,
                replace_all={"type": "boolean", "default": False},
            ),
        },
        {"file_path": "/a.py", "old_string": "x = 1", "new_string": 'x = "2"\n'},
        {"file_path": "/a.py", "old_string": "x = 1"},
    ),
    "Claude Code: several changes": (
        {
            "$schema": _DRAFT_7,
            **_object(
                ["file_path", "edits"],
                file_path=_TEXT,
                edits={
                    "type": "array",
                    "items": _object(["old_string", "new_string"], old_string=_TEXT, new_string=_TEXT),
                    "minItems": 1,
                    "description": "In order",
                },
            ),
        },
        {"file_path": "/a", "edits": [{"old_string": "a", "new_string": "b"}]},
        {"file_path": "/a", "edits": []},
    ),
    "Claude Code: a list of tasks": (
        {
            "$schema": _DRAFT_2020,
            **_object(
                ["todos"],
                todos={
                    "type": "array",
                    "items": _object(
                        ["content", "status", "activeForm"],
                        content={"type": "string", "minLength": 1},
                        status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
                        activeForm={"type": "string", "minLength": 1},
                    ),
                },
            ),
        },
        {"todos": [{"content": "Test", "status": "pending", "activeForm": "Testing"}]},
        {"todos": [{"content": "Test", "status": "done", "activeForm": "Testing"}]},
    ),
    "Claude Code: search": (
        {
            "$schema": _DRAFT_7,
            **_object(
                ["pattern"],
                pattern=_TEXT,
                path=_TEXT,
                output_mode={"type": "string", "enum": ["content", "files_with_matches", "count"]},
                **{"-A": {"type": "number"}, "-i": {"type": "boolean"}, "multiline": {"type": "boolean"}},
            ),
        },
        {"pattern": "def .*\\(", "output_mode": "content", "-A": 3, "-i": True},
        {"pattern": "def", "-i": "yes"},
    ),
    "Claude Code: fetch a page": (
        {
            "$schema": _DRAFT_7,
            **_object(["url", "prompt"], url={"type": "string", "format": "uri"}, prompt=_TEXT),
        },
        {"url": "https://example.com/a?b=c", "prompt": "Sum up"},
        {"url": "no address", "prompt": "Sum up"},
    ),
    "Claude Code: ask the user": (
        {
            "$schema": _DRAFT_2020,
            **_object(
                ["questions"],
                questions={
                    "type": "array",
                    "minItems": 1,
                    "maxItems": 4,
                    "items": _object(
                        ["question", "options", "multiSelect"],
                        question=_TEXT,
                        options={
                            "type": "array",
                            "minItems": 2,
                            "maxItems": 4,
                            "items": _object(["label"], label=_TEXT),
                        },
                        multiSelect={"type": "boolean", "default": False},
                    ),
                },
                answers={
                    "type": "object",
                    "propertyNames": {"type": "string"},
                    "additionalProperties": {"type": "string"},
                },
            ),
        },
        {
            "questions": [
                {"question": "Which?", "options": [{"label": "a"}, {"label": "b"}], "multiSelect": False}
            ],
            "answers": {"Which?": "a"},
        },
        {"questions": [{"question": "Which?", "options": [{"label": "a"}], "multiSelect": False}]},
    ),
    "Codex: run a command": (
        _object(
            ["command"],
            command={"type": "array", "items": {"type": "string"}, "description": "Program and arguments"},
            workdir=_TEXT,
            timeout_ms={"type": "number"},
            with_escalated_permissions={"type": "boolean"},
        ),
        {"command": ["bash", "-lc", "ls"], "workdir": "/", "timeout_ms": 1000},
        {"command": "bash -lc ls"},
    ),
    "Codex: a plan": (
        _object(
            ["plan"],
            explanation=_TEXT,
            plan={"type": "array", "items": _object(["step", "status"], step=_TEXT, status=_TEXT)},
        ),
        {"plan": [{"step": "Read", "status": "pending"}]},
        {"plan": [{"step": "Read", "status": "pending", "by": "me"}]},
    ),
    "opencode: read a file": (
        {
            "$schema": _DRAFT_2020,
            **_object(
                ["filePath"],
                filePath=_TEXT,
                offset={"type": "integer", "minimum": 0, "maximum": 9007199254740991},
                limit={"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
            ),
        },
        {"filePath": "/a", "offset": 0, "limit": 20},
        {"filePath": "/a", "limit": 0},
    ),
    "opencode: fetch a page": (
        {
            "$schema": _DRAFT_2020,
            **_object(
                ["url", "format"],
                url=_TEXT,
                format={"default": "markdown", "type": "string", "enum": ["text", "markdown", "html"]},
                timeout={"type": "number"},
            ),
        },
        {"url": "https://example.com", "format": "html"},
        {"url": "https://example.com", "format": "pdf"},
    ),
    "MCP: file system": (
        {
            "$schema": _DRAFT_7,
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "edits": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"oldText": _TEXT, "newText": _TEXT},
                        "required": ["oldText", "newText"],
                        "additionalProperties": False,
                    },
                },
                "dryRun": {"type": "boolean", "default": False},
            },
            "required": ["path", "edits"],
        },
        {"path": "/a", "edits": [{"oldText": "a", "newText": "b"}], "dryRun": True},
        {"path": "/a", "edits": [{"oldText": "a"}]},
    ),
    "MCP: knowledge graph": (
        {
            "type": "object",
            "properties": {
                "entities": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "name": _TEXT,
                            "observations": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["name", "observations"],
                    },
                }
            },
            "required": ["entities"],
        },
        {"entities": [{"name": "a", "observations": ["b"]}]},
        {"entities": [{"name": "a", "observations": [1]}]},
    ),
    "MCP: a code host": (
        {
            "type": "object",
            "properties": {
                "owner": _TEXT,
                "state": {"type": "string", "enum": ["open", "closed", "all"]},
                "labels": {"type": "array", "items": {"type": "string"}},
                "perPage": {"type": "number", "minimum": 1, "maximum": 100},
            },
            "required": ["owner"],
        },
        {"owner": "a", "state": "all", "labels": ["bug"], "perPage": 100},
        {"owner": "a", "perPage": 101},
    ),
    "MCP: a browser": (
        {
            "$schema": _DRAFT_2020,
            **_object(
                ["fields"],
                fields={
                    "type": "array",
                    "items": _object(
                        ["ref", "type", "value"],
                        ref=_TEXT,
                        type={"type": "string", "enum": ["textbox", "checkbox"]},
                        value={"anyOf": [{"type": "string"}, {"type": "boolean"}]},
                    ),
                },
                button={"enum": ["left", "right"]},
            ),
        },
        {"fields": [{"ref": "e1", "type": "checkbox", "value": True}], "button": "left"},
        {"fields": [{"ref": "e1", "type": "checkbox", "value": 1}]},
    ),
    "MCP: thoughts in sequence": (
        {
            "type": "object",
            "properties": {
                "thought": _TEXT,
                "nextThoughtNeeded": {"type": "boolean"},
                "thoughtNumber": {"type": "integer", "minimum": 1},
            },
            "required": ["thought", "nextThoughtNeeded", "thoughtNumber"],
        },
        {"thought": "Hm", "nextThoughtNeeded": False, "thoughtNumber": 1},
        {"thought": "Hm", "nextThoughtNeeded": False, "thoughtNumber": 0},
    ),
    "MCP in Python: optional and nested models": (
        {
            "title": "searchArguments",
            "type": "object",
            "properties": {
                "query": {"title": "Query", "type": "string", "minLength": 1},
                "since": {
                    "anyOf": [{"type": "string", "format": "date"}, {"type": "null"}],
                    "default": None,
                    "title": "Since",
                },
                "order": {"$ref": "#/$defs/Order", "default": "asc"},
                "filters": {
                    "anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Filter"}}, {"type": "null"}],
                    "default": None,
                },
            },
            "required": ["query"],
            "$defs": {
                "Order": {"enum": ["asc", "desc"], "title": "Order", "type": "string"},
                "Filter": {
                    "type": "object",
                    "properties": {"field": {"type": "string"}, "value": {"title": "Value"}},
                    "required": ["field", "value"],
                    "title": "Filter",
                },
            },
        },
        {
            "query": "a",
            "since": "2026-12-01",
            "order": "desc",
            "filters": [{"field": "f", "value": {"any": 1}}],
        },
        {"query": "a", "since": "yesterday"},
    ),
    "MCP in Python: fetch": (
        {
            "type": "object",
            "properties": {
                "url": {"format": "uri", "minLength": 1, "title": "Url", "type": "string"},
                "max_length": {
                    "default": 5000,
                    "exclusiveMaximum": 1000000,
                    "exclusiveMinimum": 0,
                    "type": "integer",
                },
                "raw": {"default": False, "type": "boolean"},
            },
            "required": ["url"],
            "title": "Fetch",
        },
        {"url": "https://example.com/", "max_length": 999999},
        {"url": "https://example.com/", "max_length": 1000000},
    ),
    "MCP from OpenAPI: one of several, and a page of results": (
        {
            "$defs": {
                "page": {
                    "type": "object",
                    "properties": {
                        "kind": {"const": "page"},
                        "page_id": {"type": "string", "format": "uuid"},
                    },
                    "required": ["kind", "page_id"],
                    "additionalProperties": False,
                },
                "root": {
                    "type": "object",
                    "properties": {"kind": {"const": "root"}},
                    "required": ["kind"],
                    "additionalProperties": False,
                },
            },
            "type": "object",
            "properties": {
                "parent": {"oneOf": [{"$ref": "#/$defs/page"}, {"$ref": "#/$defs/root"}]},
                "size": {"type": "integer", "format": "int32", "default": 100, "maximum": 100},
            },
            "required": ["parent"],
            "additionalProperties": True,
        },
        {"parent": {"kind": "page", "page_id": "00000000-0000-4000-8000-000000000000"}, "size": 5},
        {"parent": {"kind": "root", "page_id": "00000000-0000-4000-8000-000000000000"}},
    ),
    "MCP with Zod 3: a union with nothing": (
        {
            "$schema": _DRAFT_7,
            **_object([], tags={"anyOf": [{"not": {}}, {"type": "array", "items": {"type": "string"}}]}),
        },
        {"tags": ["a"]},
        {"tags": "a"},
    ),
}
