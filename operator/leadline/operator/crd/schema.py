"""From msgspec types to a structural OpenAPI v3 schema, as apiextensions.k8s.io/v1 wants it.

Pure. Supports what isvc_types.py uses and raises TypeError for anything else, so that a field
never ends up in the CRD without its limits. Rules of structural schemas that matter here: no $ref, a type on
every node (or int-or-string), defaults that the schema itself accepts.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
from msgspec import inspect as types

from leadline.protocol.isvc_types import Rule

__all__ = ["object_schema"]

Schema = dict[str, Any]


def object_schema(struct: type[msgspec.Struct], *, defaults: bool = True) -> Schema:
    """The schema of one struct. `defaults=False` leaves defaults out: status has none."""
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    properties: dict[str, Schema] = {}
    for field in info.fields:
        schema = _schema(field.type, defaults)
        default = _default(field)
        if defaults and default is not None:
            schema["default"] = default
        properties[field.encode_name] = schema
    result: Schema = {"type": "object", "properties": properties}
    doc = struct.__dict__.get("__doc__")
    if doc and not doc.startswith(struct.__name__ + "("):
        result["description"] = inspect.cleandoc(doc)
    required = [field.encode_name for field in info.fields if field.required]
    if required:
        result["required"] = required
    rules: tuple[Rule, ...] = getattr(struct, "RULES", ())
    if rules:
        result["x-kubernetes-validations"] = [_rule(rule) for rule in rules]
    return result


def _rule(rule: Rule) -> Schema:
    result: Schema = {"rule": rule.rule, "message": rule.message}
    if rule.optional_old_self:
        result["optionalOldSelf"] = True
    return result


def _default(field: types.Field) -> Any:
    """The JSON default, or None. Empty lists and maps are left out. A struct's default names the defaults of
    its fields: the API server would fill them into `{}` too, but only after it has run the rules on the
    default."""
    if field.default_factory is not msgspec.NODEFAULT:
        made = field.default_factory()
        if not isinstance(made, msgspec.Struct):
            return None
        built: dict[str, Any] = msgspec.to_builtins(made)
        return {name: value for name, value in built.items() if value not in (None, [], {})}
    return None if field.default is msgspec.NODEFAULT else field.default


def _schema(kind: types.Type, defaults: bool) -> Schema:
    match kind:
        case types.Metadata():
            return {**_schema(kind.type, defaults), **(kind.extra_json_schema or {})}
        case types.UnionType():
            members = [member for member in kind.types if not isinstance(member, types.NoneType)]
            if len(members) == 1:
                return _schema(members[0], defaults)
            if {type(member) for member in members} == {types.IntType, types.StrType}:
                return {"x-kubernetes-int-or-string": True}
        case types.StructType():
            return object_schema(kind.cls, defaults=defaults)
        case types.StrType():
            return _limits("string", kind, min_length="minLength", max_length="maxLength", pattern="pattern")
        case types.IntType():
            return {**_limits("integer", kind, ge="minimum", le="maximum"), "format": "int64"}
        case types.FloatType():
            schema = _limits("number", kind, ge="minimum", le="maximum")
            if kind.gt is not None:
                schema |= {"minimum": kind.gt, "exclusiveMinimum": True}
            return schema
        case types.BoolType():
            return {"type": "boolean"}
        case types.LiteralType():
            name = "string" if all(isinstance(value, str) for value in kind.values) else "integer"
            return {"type": name, "enum": list(kind.values)}
        case types.ListType():
            schema = _limits("array", kind, min_length="minItems", max_length="maxItems")
            return {**schema, "items": _schema(kind.item_type, defaults)}
        case types.DictType():
            if isinstance(kind.value_type, types.AnyType):
                return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            schema = _limits("object", kind, min_length="minProperties", max_length="maxProperties")
            return {**schema, "additionalProperties": _schema(kind.value_type, defaults)}
    raise TypeError(f"{kind} has no structural schema here")


def _limits(name: str, kind: types.Type, **keywords: str) -> Schema:
    schema: Schema = {"type": name}
    for attribute, keyword in keywords.items():
        value = getattr(kind, attribute)
        if value is not None:
            schema[keyword] = value
    return schema
