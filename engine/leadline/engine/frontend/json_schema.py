"""JSON Schemas as clients send them → schemas that llguidance takes, with the same meaning.

`portable` drops what says nothing (`$schema`, `uniqueItems: false`, unknown formats …), says otherwise what
llguidance has no word for, resolves every reference to a pointer from the root, and refuses by name what
cannot be kept: numbers that would come out changed, and schemas that no finite text satisfies.

Keywords differ from the names and values beside them: a property may be called `format`, and
`{"const": {"$ref": "x"}}` asks for an object with that key.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from leadline.engine.frontend.schema_words import (
    NOTES,
    SchemaError,
    children,
    demand,
    same,
    say_otherwise,
    type_of,
)

__all__ = ["SchemaError", "portable"]

_FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"}
)
"""Those that llguidance holds a text to; it refuses any other, which JSON Schema says to ignore (2020-12,
validation, 7.2.3). Types of pydantic bring them: Path, SecretStr, bytes."""
_SAYS_NOTHING: tuple[tuple[str, Any], ...] = (
    ("uniqueItems", False),
    ("minProperties", 0),
    ("not", False),
    ("dependentRequired", {}),
    ("dependentSchemas", {}),
    ("dependencies", {}),
    ("unevaluatedProperties", True),
    ("unevaluatedProperties", {}),
    ("unevaluatedItems", True),
    ("unevaluatedItems", {}),
)
_LARGEST = 9_223_372_036_854_774_784
"""The largest double below 2**63. Bounds beyond it are tightened to it: llguidance has no range for them."""
_MAX_ROUNDS = 64


def portable(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that means the same and that llguidance takes. Raises SchemaError."""
    root = copy.deepcopy(dict(schema))
    say_otherwise(root)
    _Rewriter(root).run()
    return root


@dataclass(slots=True)
class _Resource:
    """A schema with an `$id`, or the whole."""

    uri: str
    root: dict[str, Any]
    anchors: dict[str, Any] = field(default_factory=dict)


class _Rewriter:
    """Rewrites one schema in place, and judges it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._seen: dict[int, tuple[dict[str, Any], _Resource]] = {}
        """By identity: each schema met, and the resource it belongs to."""
        self._resources: dict[str, _Resource] = {}
        self._pointers: dict[int, str] = {}
        self._targets: dict[int, Any] = {}
        """By identity of a schema: what its `$ref` names."""

    def run(self) -> None:
        self._index(self._root, _Resource("", self._root))
        self._locate(self._root, "")
        queue: list[Any] = [schema for schema, _ in self._seen.values()]
        for schema in queue:  # grows: a reference may name a place that no keyword makes a schema
            target = self._resolve(schema)
            if isinstance(target, dict) and id(target) not in self._seen:
                known = len(self._seen)
                self._index(target, self._seen[id(schema)][1])
                queue += [each for each, _ in list(self._seen.values())[known:]]
        for schema in queue:
            self._rewrite(schema)
        self._drop_what_has_no_instance(queue)
        self._pointers.clear()
        self._locate(self._root, "")
        for schema in queue:
            if (target := self._targets.get(id(schema))) is None:
                continue
            if id(target) in self._pointers:
                schema["$ref"] = f"#{self._pointers[id(target)]}"
            else:  # it was forbidden where it stood
                del schema["$ref"]
                schema["anyOf"] = []

    # -- references ------------------------------------------------------------------------------------------

    def _index(self, schema: Any, resource: _Resource) -> None:
        """Note every schema below `schema`, with ids and anchors."""
        self._resources.setdefault(resource.uri, resource)
        stack = [(schema, resource)]
        while stack:
            part, resource = stack.pop()
            if not isinstance(part, dict) or id(part) in self._seen:
                continue
            if isinstance(name := part.pop("$id", None), str):
                resource = _Resource(urldefrag(urljoin(resource.uri, name)).url, part)
                self._resources.setdefault(resource.uri, resource)
            for key in ("$anchor", "$dynamicAnchor"):
                if isinstance(name := part.pop(key, None), str):
                    resource.anchors[name] = part
            self._seen[id(part)] = part, resource
            stack += [(child, resource) for _, child in children(part)]

    def _locate(self, value: Any, pointer: str) -> None:
        """JSON pointers of everything that a reference can name."""
        stack = [(value, pointer)]
        while stack:
            part, pointer = stack.pop()
            if isinstance(part, dict):
                self._pointers[id(part)] = pointer
                stack += [(child, f"{pointer}/{_escaped(str(key))}") for key, child in part.items()]
            elif isinstance(part, list):
                stack += [(child, f"{pointer}/{i}") for i, child in enumerate(part)]

    def _resolve(self, schema: dict[str, Any]) -> Any:
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return None
        own = self._seen[id(schema)][1]
        there, fragment = urldefrag(urljoin(own.uri, reference))
        if reference.startswith("#"):
            there, fragment = own.uri, reference[1:]
        resource = own if there == own.uri else self._resources.get(there)
        fragment = unquote(fragment)
        target: Any = None
        if resource is not None and (not fragment or fragment.startswith("/")):
            target = _at(resource.root, fragment)
        elif resource is not None:
            target = resource.anchors.get(fragment)
        if isinstance(target, bool):
            # `true` and `false` have no place of their own in `_pointers`.
            del schema["$ref"]
            demand(schema, target)
            return None
        if not isinstance(target, dict):
            raise SchemaError(
                f"$ref {reference!r} names nothing in the schema; references to elsewhere are not fetched"
            )
        self._targets[id(schema)] = target
        return target

    # -- keywords --------------------------------------------------------------------------------------------

    def _rewrite(self, schema: dict[str, Any]) -> None:
        for key in ("$schema", "$vocabulary"):
            schema.pop(key, None)
        for key, nothing in _SAYS_NOTHING:
            if key in schema and type(schema[key]) is type(nothing) and schema[key] == nothing:
                del schema[key]
        if "then" not in schema and "else" not in schema:
            schema.pop("if", None)
        if isinstance(schema.get("format"), str) and schema["format"] not in _FORMATS:
            del schema["format"]
        if "contains" not in schema:
            schema.pop("minContains", None)
            schema.pop("maxContains", None)
        _bound(schema)
        _tuple_items(schema)
        _names(schema)
        _unevaluated(schema)
        for key in ("const", "enum"):
            if key in schema:
                _check_numbers(schema[key], key)
        options = schema.get("oneOf")
        if isinstance(options, list) and "anyOf" not in schema and self._disjoint(options):
            schema["anyOf"] = schema.pop("oneOf")

    def _target(self, schema: Any) -> Any:
        """What a schema that is nothing but a reference stands for."""
        for _ in range(_MAX_ROUNDS):
            if not isinstance(schema, dict) or id(schema) not in self._targets:
                break
            if schema.keys() - NOTES - {"$ref"}:
                break
            schema = self._targets[id(schema)]
        return schema

    def _disjoint(self, options: list[Any]) -> bool:
        """Whether no text can match two of them, as far as types and one property with constants tell."""
        if len(options) > 200:
            return False
        known = [self._target(option) for option in options]
        return all(
            self._differ(one, other) for i, one in enumerate(known) for other in known[i + 1 :]
        ) and all(isinstance(option, dict) for option in known)

    def _differ(self, one: Any, other: Any) -> bool:
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        values, others = _values(one), _values(other)
        if values is not None and others is not None:
            return not any(same(a, b) for a in values for b in others)
        types, types_of_other = _types(one), _types(other)
        if not types & types_of_other:
            return True
        if types & types_of_other != {"object"}:
            return False
        shared = set(_names_of(one.get("required"))) & set(_names_of(other.get("required")))
        for name in shared:
            a = self._target(_mapping(one.get("properties")).get(name))
            b = self._target(_mapping(other.get("properties")).get(name))
            if isinstance(a, dict) and isinstance(b, dict):
                values, others = _values(a), _values(b)
                if values is None or others is None:
                    continue
                if not any(same(x, y) for x in values for y in others):
                    return True
        return False

    # -- instances -------------------------------------------------------------------------------------------

    def _drop_what_has_no_instance(self, schemas: list[dict[str, Any]]) -> None:
        """Refuse a schema that no finite text satisfies, and forbid the parts of it that are so: a grammar
        would let the model into them, with no way out. Judges by structure and references; what types and
        bounds exclude, llguidance finds itself."""
        possible: set[int] = set()
        for _ in range(_MAX_ROUNDS):
            before = len(possible)
            for schema in reversed(schemas):
                if id(schema) not in possible and self._has_instance(schema, possible):
                    possible.add(id(schema))
            if len(possible) in (before, len(schemas)):
                break
        else:
            return
        if id(self._root) not in possible:
            raise SchemaError(
                "no finite text satisfies it: a part that is required contains itself, or nothing is allowed"
            )
        for schema in schemas:
            for key in ("anyOf", "oneOf"):
                if isinstance(options := schema.get(key), list):
                    schema[key] = [each for each in options if _is_possible(each, possible)]
            for key in ("properties", "patternProperties"):
                for name, child in _mapping(schema.get(key)).items():
                    if not _is_possible(child, possible):
                        schema[key][name] = False
            for key in ("items", "additionalProperties"):
                if key in schema and not _is_possible(schema[key], possible):
                    schema[key] = False

    def _has_instance(self, schema: dict[str, Any], possible: set[int]) -> bool:
        """Whether `schema` can have a finite instance, given those that surely can."""

        def can(part: Any) -> bool:
            return _is_possible(part, possible)

        if id(schema) in self._targets and not can(self._targets[id(schema)]):
            return False
        if isinstance(options := schema.get("allOf"), list) and not all(map(can, options)):
            return False
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list) and not any(map(can, options)):
                return False
        if schema.get("enum") == []:
            return False
        if "const" in schema or "enum" in schema:
            return True
        return any(self._can_be(kind, schema, can) for kind in _types(schema))

    def _can_be(self, kind: str, schema: dict[str, Any], can: Any) -> bool:
        if kind == "object":
            properties = _mapping(schema.get("properties"))
            patterns = _mapping(schema.get("patternProperties"))
            others = schema.get("additionalProperties", True)
            return all(
                can(properties[name]) if name in properties else bool(patterns) or can(others)
                for name in _names_of(schema.get("required"))
            )
        if kind == "array":
            least = schema.get("minItems", 0)
            first = schema.get("prefixItems")
            first = first if isinstance(first, list) else []
            if not isinstance(least, int) or least <= 0:
                return True
            return all(map(can, first[:least])) and (least <= len(first) or can(schema.get("items", True)))
        return True


# -- one schema ----------------------------------------------------------------------------------------------


def _bound(schema: dict[str, Any]) -> None:
    """Draft 4's exclusive bounds are flags; bounds too large for llguidance are tightened."""
    for key, flag in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(flag), bool) and schema.pop(flag) and key in schema:
            schema[flag] = schema.pop(key)
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        value = schema.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        lower = key.endswith("inimum")
        if (value < -_LARGEST) if lower else (value > _LARGEST):
            del schema[key]
            schema["minimum" if lower else "maximum"] = -_LARGEST if lower else _LARGEST
        elif isinstance(value, int) and abs(value) <= _LARGEST and float(value) != value:
            # Read as a double; none of the numbers that it adds may be allowed.
            near = float(value)
            if lower and near < value:
                near = math.nextafter(near, math.inf)
            elif not lower and near > value:
                near = math.nextafter(near, -math.inf)
            schema[key] = int(near)


def _tuple_items(schema: dict[str, Any]) -> None:
    """`items` as a list is `prefixItems` since 2020-12."""
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if "additionalItems" in schema:
            schema["items"] = schema["additionalItems"]
    schema.pop("additionalItems", None)


def _names(schema: dict[str, Any]) -> None:
    """`propertyNames`: dropped where any name is one, else said by the properties."""
    rule = schema.get("propertyNames")
    if rule is True or (
        isinstance(rule, dict)
        and (not rule.keys() - NOTES - {"type"})
        and rule.get("type", "string") == "string"
    ):
        del schema["propertyNames"]
        return
    properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(rule, dict) or not isinstance(properties, dict) or "patternProperties" in schema:
        return
    pattern, names = _name_rule(rule)
    if names is not None:
        kept = {name: properties.get(name, others) for name in names}
    elif pattern is not None and (others is False or others in (True, {}) or not properties):
        # A pattern holds for listed names too; where others may be anything, it says no more than that.
        kept = {name: part for name, part in properties.items() if re.search(pattern, name)}
        if others is not False:
            schema["patternProperties"] = {pattern: others}
    else:
        return
    # Names that are not allowed are listed still, so that the library does not take them as required.
    schema["properties"] = dict.fromkeys(properties, False) | kept
    schema["additionalProperties"] = False
    del schema["propertyNames"]


def _name_rule(rule: dict[str, Any]) -> tuple[str | None, list[str] | None]:
    """(pattern, names): what a schema for names allows, if it says so by one of both."""
    said = rule.keys() - NOTES - {"type"}
    names = [rule["const"]] if said == {"const"} else rule.get("enum") if said == {"enum"} else None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return None, names
    pattern = rule.get("pattern")
    if said <= {"minLength", "maxLength"} and said:
        least, most = rule.get("minLength", 0), rule.get("maxLength", "")
        pattern = f"^(?s:.{{{least},{most}}})$"
    elif said != {"pattern"}:
        return None, None
    try:
        re.compile(pattern)
    except (re.error, TypeError, OverflowError):
        return None, None
    return pattern, None


def _unevaluated(schema: dict[str, Any]) -> None:
    """Where nothing else looks at an object's properties, those unevaluated are the additional ones."""
    applied = {"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "additionalProperties"}
    if "unevaluatedProperties" in schema and not schema.keys() & applied:
        schema["additionalProperties"] = schema.pop("unevaluatedProperties")


def _check_numbers(value: Any, where: str) -> None:
    """llguidance reads numbers as doubles and writes the shortest decimal: refuse any that this changes."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += part.values()
        elif isinstance(part, list):
            stack += part
        elif isinstance(part, int | float) and not isinstance(part, bool):
            try:
                exact = Decimal(repr(float(part))) == Decimal(str(part))
            except (OverflowError, ValueError, InvalidOperation):
                exact = False
            if not exact or not math.isfinite(part):
                shown = str(part) if isinstance(part, float) or abs(part) < 10**40 else "beyond 40 digits"
                raise SchemaError(
                    f"{where} holds a number that cannot be kept exact, {shown}: only those that a double "
                    "holds exactly can; use a string"
                )


def _is_possible(schema: Any, possible: set[int]) -> bool:
    return id(schema) in possible if isinstance(schema, dict) else schema is not False


def _types(schema: dict[str, Any]) -> set[str]:
    """JSON's types that an instance can have; integers are numbers."""
    given = schema.get("type")
    everything = {"object", "array", "string", "number", "boolean", "null"}
    values = _values(schema)
    if given is None:
        return everything if values is None else {type_of(value) for value in values}
    return {
        "number" if name == "integer" else str(name)
        for name in (given if isinstance(given, list) else [given])
    }


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """The only instances there can be, if the schema lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _names_of(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _escaped(key: str) -> str:
    # A pointer in a URI fragment: what a URI cannot hold is percent-encoded.
    key = key.replace("~", "~0").replace("/", "~1")
    return re.sub(r"[%\"<>\\^`{|}#?\[\]\s]|[^\x00-\x7f]", lambda found: _percent(found[0]), key)


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def _at(value: Any, pointer: str) -> Any:
    """What a JSON pointer names, or None."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return value
