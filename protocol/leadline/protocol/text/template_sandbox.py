"""The Jinja environment of chat templates: transformers' helpers in a sandbox with bounds.

Templates come from model repositories and are untrusted. jinja2's immutable sandbox keeps them from the
process; it bounds neither time nor memory. Here a rendering has a `Budget`:

    time      a step is counted for each turn of a loop, each call, filter and operator; every few steps look
              at the clock, and once it is late at the thread's CPU time: a busy machine stops no rendering
    memory    what may make much of little (operators, filters, methods of texts) is asked beforehand how much
              it would make; what was made is counted; a list or an object weighs what its text would, however
              often it holds the same value
    output    is counted as it is made, that of macros and blocks too

The compiler emits those counts (`_Compiler`): nothing is traced, and a usual template takes a few
percent longer.
"""

from __future__ import annotations

import json
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import update_wrapper
from typing import Any

import jinja2
from jinja2 import compiler, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["MAX_CHARACTERS", "MAX_SOURCE", "Budget", "TooMuch", "make_environment", "render"]

MAX_SOURCE = 1 << 20
"""Characters of a template; the longest in use have some 40,000."""
MAX_CHARACTERS = 64 << 20
"""Of a prompt, and of one value: twice what a request may hold."""
_MAX_MADE = 4 * MAX_CHARACTERS
"""Of all values of a rendering."""
_SECONDS, _SECONDS_PER_MESSAGE = 2.0, 0.001
"""CPU time of a rendering; a usual message takes 10 µs to 50 µs."""
_MAX_BITS = 1 << 16
_MAX_PIECES = 1 << 22
"""Of a text that is split, and so on."""
_SHORT = 1 << 16
_STEPS_PER_LOOK = 16
_LITTLE = 256
"""Values no longer than this are not counted: only loops and lists make many of them, which are."""
_FEW_TERMS = 8
_CONTAINERS = (list, tuple, dict)


class TooMuch(Exception):
    """A rendering went beyond its budget."""


def _clock(half: float) -> Iterator[None]:
    """Raises TooMuch when a thread that steps through it has used its time, which is twice `half`. Reading
    the thread's CPU time takes some microseconds: it begins when half of the time is over on the wall."""
    deadline = time.monotonic() + half
    while time.monotonic() < deadline:
        for _ in range(_STEPS_PER_LOOK):
            yield
    deadline = time.thread_time() + half
    while time.thread_time() < deadline:
        for _ in range(_STEPS_PER_LOOK):
            yield
    raise TooMuch("it takes too long")


class Budget:
    """What one rendering may take, and has taken."""

    __slots__ = ("_known", "_made", "spend")

    def __init__(self, messages: int, seconds: float | None = None) -> None:
        """`messages`: how many it renders. `seconds` of CPU time in this thread; None: by `messages`."""
        limit = _SECONDS + _SECONDS_PER_MESSAGE * messages if seconds is None else seconds
        self.spend = _clock(limit / 2).__next__
        """Counts a step. Raises TooMuch when the time is over."""
        self._made = 0
        self._known: dict[int, tuple[object, int]] = {}
        """Containers that were weighed, by id; they are kept so that no other gets it."""

    def make(self, characters: int) -> None:
        """Count characters. Raises TooMuch for too many."""
        self._made += characters
        if characters > MAX_CHARACTERS or self._made > _MAX_MADE:
            self.allow(characters)
            raise TooMuch(f"it makes more than {_MAX_MADE:,} characters")

    def allow(self, characters: float) -> None:
        """Raise TooMuch if one value must not have so many."""
        if characters > MAX_CHARACTERS:
            raise TooMuch(f"it makes a value of more than {MAX_CHARACTERS:,} characters")

    def weight(self, value: object) -> int:
        """About how long the text of a value is."""
        if isinstance(value, str | bytes):
            return len(value) + 2
        if not isinstance(value, _CONTAINERS):
            return 8
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        total = 0
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            # Written out, since lists may be long.
            kind = type(item)
            if kind is str:
                total += len(item) + 2
            elif kind is int or kind is bool or item is None:
                total += 8
            else:
                total += self.weight(item)
        total += 2 + 2 * len(value)
        self._known[id(value)] = (value, total)
        return total

    def kept(self, value: Any) -> Any:
        """`value`, which was just made."""
        if type(value) is str:
            if len(value) > _LITTLE:
                self.make(len(value))
            return value
        if isinstance(value, _CONTAINERS):
            self.make(32 * len(value))  # weighing takes time, too
            self.allow(self.weight(value))
        elif isinstance(value, str | bytes):
            self.make(len(value))
        return value


class _Context(Context):
    """A template's context with the budget; the methods are called by compiled templates."""

    budget: Budget
    spend: Callable[[], None]
    kept: Callable[[Any], Any]

    def take(self, budget: Budget) -> None:
        self.budget, self.spend, self.kept = budget, budget.spend, budget.kept

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, _Context)
        context.take(self.budget)
        return context

    def joined(self, terms: tuple[Any, ...]) -> str:
        """a ~ b ~ c …"""
        texts = [term if type(term) is str else self.kept(str(term)) for term in terms]
        total = sum(map(len, texts))
        if total > _LITTLE:
            self.budget.make(total)
        return "".join(texts)

    def buffer(self) -> _Buffer:
        return _Buffer(self.budget)


class _Buffer(list[str]):
    """Output of a macro or block, until it is joined."""

    __slots__ = ("_budget",)

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def append(self, text: str) -> None:
        self._budget.make(len(text))
        super().append(text)

    def extend(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        self._budget.make(sum(map(len, texts)))
        super().extend(texts)


class _Compiler(compiler.CodeGenerator):
    """Emits counts into the code of a template."""

    def buffer(self, frame: compiler.Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = context.buffer()")

    def visit_For(self, node: nodes.For, frame: compiler.Frame) -> None:
        # Nodes of own types are not allowed; nothing else has the context itself for a statement.
        node.body.insert(0, nodes.ExprStmt(nodes.ContextReference()))
        super().visit_For(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: compiler.Frame) -> None:
        if isinstance(node.node, nodes.ContextReference):
            self.writeline("context.spend()")
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Add(self, node: nodes.BinExpr, frame: compiler.Frame) -> None:
        # Once for a few sums in a row: each of them makes no more than its terms.
        terms: list[nodes.Expr] = [node.right]
        while isinstance(node.left, nodes.Add) and len(terms) < _FEW_TERMS:
            node = node.left
            terms.append(node.right)
        self.write("context.kept(")
        self.visit(node.left, frame)
        for term in reversed(terms):
            self.write(" + (")
            self.visit(term, frame)
            self.write(")")
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: compiler.Frame) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            self.write("context.kept(")
            super().visit_Concat(node, frame)
            self.write(")")
        else:
            self.write("context.joined((")
            for term in node.nodes:
                self.visit(term, frame)
                self.write(", ")
            self.write("))")

    def visit_Filter(self, node: nodes.Filter, frame: compiler.Frame) -> None:
        self.write("context.kept(")
        super().visit_Filter(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: compiler.Frame) -> None:
        self._weigh(super().visit_List, node, node.items, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: compiler.Frame) -> None:
        self._weigh(super().visit_Tuple, node, node.items if node.ctx == "load" else [], frame)

    def visit_Dict(self, node: nodes.Dict, frame: compiler.Frame) -> None:
        self._weigh(super().visit_Dict, node, [pair.value for pair in node.items], frame)

    def _weigh(
        self, visit: Callable[..., None], node: nodes.Node, items: list[nodes.Expr], frame: compiler.Frame
    ) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
            return
        self.write("context.kept(")
        visit(node, frame)
        self.write(")")


_OF_DICTS = frozenset(dir(dict))
_OF_LOOPS = frozenset({"first", "last", "index", "index0", "length", "previtem", "nextitem"})


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without its questions where their answers are known: most of a template's attributes are
    keys of messages and facts about the loop, and each question takes about a microsecond."""

    code_generator_class = _Compiler
    context_class = _Context
    intercepted_binops = frozenset({"*", "**", "%"})

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind is LoopContext and attribute in _OF_LOOPS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = __context.budget
        budget.spend()
        if isinstance(__obj, types.BuiltinMethodType):
            args = _checked_method(budget, __obj, args, kwargs)
        for value in args:
            if isinstance(value, _CONTAINERS):
                budget.kept(args)  # a macro sees them as one value
                break
        if kwargs:
            budget.kept(kwargs)
        return budget.kept(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context.budget
        if operator == "*":
            _check_product(budget, left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
                _check_bits(left.bit_length() * right)
        elif isinstance(left, str | bytes):
            _check_percent(budget, str(left), right)
        return budget.kept(super().call_binop(context, operator, left, right))

    def call_filter(
        self,
        name: str,
        value: Any,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        context: Any = None,
        eval_ctx: Any = None,
    ) -> Any:
        """Called by filters that apply another one to each item."""
        result = super().call_filter(name, value, args, kwargs, context, eval_ctx)
        return result if context is None else context.budget.kept(result)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @pass_context
        def bounded(context: Any, *args: Any, **kwargs: Any) -> str:
            pattern = str(value.__self__)
            if re.search(r":[^{}]*\d{5}|:[^{}]*{", pattern):
                raise TooMuch("it formats to a width that is very large or not written out")
            budget: Budget = context.budget
            fields = pattern.count("{")
            budget.allow(len(pattern) + fields * (10_000 + budget.weight(args) + budget.weight(kwargs)))
            return wrapped(*args, **kwargs)

        return update_wrapper(bounded, wrapped)


def _check_bits(bits: float) -> None:
    if bits > _MAX_BITS:
        raise TooMuch(f"it makes a number of more than {_MAX_BITS:,} bits")


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    if isinstance(left, int):
        left, right = right, left
    if isinstance(right, int) and isinstance(left, str | bytes | list | tuple):
        budget.allow(budget.weight(left) * max(right, 0))


def _check_percent(budget: Budget, pattern: str, values: Any) -> None:
    if re.search(r"%(\([^)]*\))?[-+ #0]*(\d*\.?\d{5}|\d*\.?\*)", pattern):
        raise TooMuch("it formats to a width that is very large or not written out")
    fields = pattern.count("%")
    weight = budget.weight(values)
    padding = 10_000 * fields if re.search(r"%[^%a-zA-Z]*\d{3}", pattern) else 400 * fields
    each = weight if isinstance(values, tuple) else weight * fields
    budget.allow(len(pattern) + padding + 4 * each)


_WIDTHS = frozenset({"ljust", "rjust", "center", "zfill", "to_bytes"})


def _checked_method(
    budget: Budget, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """The arguments, after a look at what a method of Python's own would make of them."""
    name, this = method.__name__, method.__self__
    given = (*args, *kwargs.values())
    if name in _WIDTHS:
        budget.allow(max([value for value in given if isinstance(value, int)], default=0))
    if not isinstance(this, str | bytes):
        return args
    if name == "expandtabs":
        budget.allow(len(this) * max([8, *(n for n in given if isinstance(n, int))]))
    elif name == "replace" and isinstance(this, str) and len(args) >= 2:
        _check_replace(budget, this, args[0], args[1])
    elif name == "translate" and args and isinstance(args[0], dict):
        budget.allow(len(this) * max(map(budget.weight, args[0].values()), default=1))
    elif name == "join" and len(args) == 1:
        values = list(args[0])
        budget.allow(budget.weight(values) + len(this) * len(values))
        return (values,)
    elif name in ("split", "rsplit", "splitlines"):
        _check_pieces(_pieces(this, given))
    return args


def _pieces(text: Any, separators: tuple[Any, ...]) -> int:
    """How many pieces a text is cut into at most."""
    separator = next((one for one in separators if isinstance(one, type(text)) and one), None)
    return len(text) // 2 if separator is None else int(text.count(separator))


def _check_replace(budget: Budget, text: str, old: Any, new: Any) -> None:
    old, new = str(old), str(new)
    if len(new) > len(old):
        budget.allow(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_pieces(pieces: int) -> None:
    if pieces > _MAX_PIECES:
        raise TooMuch(f"it cuts a text into more than {_MAX_PIECES:,} pieces")


# -- filters -------------------------------------------------------------------------------------------------


def _applied(own: Callable[..., Any], context: _Context, *args: Any, **kwargs: Any) -> Any:
    """A filter's result; some take what they work in before their arguments."""
    passed = getattr(own, "jinja_pass_arg", None)
    if passed is None:
        return own(*args, **kwargs)
    first = {"eval_context": context.eval_ctx, "environment": context.environment}.get(passed.name, context)
    return own(first, *args, **kwargs)


def _bounded_filters(own: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Of jinja2's filters those that make much of little, with a look at their arguments before."""

    @pass_context
    def center(context: Any, value: Any, width: int = 80) -> Any:
        context.budget.allow(width)
        return _applied(own["center"], context, value, width)

    @pass_context
    def indent(context: Any, s: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        size = width if isinstance(width, int) else len(width)
        context.budget.allow(len(s) + (s.count("\n") + 1) * size)
        return _applied(own["indent"], context, s, width, first, blank)

    @pass_context
    def replace(context: Any, s: Any, old: str, new: str, count: int | None = None) -> Any:
        _check_replace(context.budget, str(s), old, new)
        return _applied(own["replace"], context, s, old, new, count)

    @pass_context
    def join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        values, budget = list(value), context.budget
        if attribute is not None:
            values = list(_applied(own["map"], context, values, attribute=attribute))
        budget.allow(budget.weight(values) + len(str(d)) * len(values))
        return _applied(own["join"], context, values, d)

    @pass_context
    def format(context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_percent(context.budget, str(value), kwargs or args)
        return _applied(own["format"], context, value, *args, **kwargs)

    @pass_context
    def make_list(context: Any, value: Any) -> Any:
        if isinstance(value, str):
            _check_pieces(len(value))
        return _applied(own["list"], context, value)

    @pass_context
    def batch(context: Any, value: Any, linecount: int, fill_with: Any = None) -> Any:
        _check_pieces(linecount)
        return _applied(own["batch"], context, value, linecount, fill_with)

    @pass_context
    def slice(context: Any, value: Any, slices: int, fill_with: Any = None) -> Any:
        _check_pieces(slices)
        return _applied(own["slice"], context, value, slices, fill_with)

    @pass_context
    def round(context: Any, value: Any, precision: int = 0, method: Any = "common") -> Any:
        _check_bits(abs(precision) * 100)
        return _applied(own["round"], context, value, precision, method)

    @pass_context
    def sum(context: Any, iterable: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
        if not isinstance(start, int | float):
            raise TypeError("sum adds numbers")
        return _applied(own["sum"], context, iterable, attribute, start)

    bounded = (center, indent, replace, join, format, batch, slice, round, sum)
    return {**{filter.__name__: filter for filter in bounded}, "list": make_list}


def _short_only(own: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that takes long for a long text and that no template needs for one."""

    @pass_context
    def bounded(context: Any, *args: Any, **kwargs: Any) -> Any:
        if context.budget.weight((args, kwargs)) > _SHORT:
            raise TooMuch(f"it applies a slow filter to more than {_SHORT:,} characters")
        return _applied(own, context, *args, **kwargs)

    return bounded


@pass_context
def _tojson(
    context: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML, which no model was trained on."""
    if indent is None and separators is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)
    budget: Budget = context.budget
    for setting in (indent, *(separators or ())):
        budget.allow(setting * _SHORT if isinstance(setting, int) else len(setting or "") * _SHORT)
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # A list deep inside of others is indented far: count while it is written.
    pieces = _Buffer(budget)
    for piece in encoder.iterencode(value):
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    if len(format) > 1000:
        raise TooMuch("it writes the time in a format of more than 1,000 characters")
    return datetime.now().strftime(format)


class _Namespace(Namespace):
    """jinja2's own shows all its values, and they may be such objects again."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; for rendering it is only its
    body."""

    tags = {"generation"}  # noqa: RUF012  (the attribute jinja2 reads)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> ImmutableSandboxedEnvironment:
    """The helpers and settings that templates written for transformers rely on."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    own = dict(environment.filters)
    environment.filters.update(_bounded_filters(own))
    for name in ("striptags", "urlize", "wordwrap", "xmlattr", "pprint"):
        environment.filters[name] = _short_only(own[name])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    del environment.globals["lipsum"]
    return environment


def render(
    template: jinja2.Template, known: dict[str, Any], variables: dict[str, Any], budget: Budget
) -> str:
    """`template.render(variables)` within the budget, without the copy that it makes of all `known` globals
    one by one, which takes as long as a short chat. `known` is `template.globals` as a plain dict.

    Raises TooMuch, and whatever the template does.
    """
    environment = template.environment
    context = _Context(environment, {**known, **variables}, template.name, template.blocks, known)
    context.take(budget)
    pieces: list[str] = []
    length = 0
    for piece in template.root_render_func(context):
        length += len(piece)
        if length > MAX_CHARACTERS:
            raise TooMuch(f"it makes a text of more than {MAX_CHARACTERS:,} characters")
        pieces.append(piece)
    return "".join(pieces)
