"""A chat template that would make gigabytes, or never end, is stopped: at load if it always does it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from leadline.protocol.errors import RequestError, UnsupportedModel
from leadline.protocol.text import template_sandbox
from leadline.protocol.text.chat import ChatRenderer

HELLO = [{"role": "user", "content": "Hello there"}]

HUGE = {
    "text times number": "{{ 'a' * 10**10 }}",
    "number times text": "{{ 10**10 * 'a' }}",
    "list times number": "{% set x = [1] * 10**9 %}",
    "tuple times number": "{% set x = (1, n) * 10**9 %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "product of products": "{% set ns = namespace(x=3) %}"
    "{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled by ~": "{% set a = 'ab' ~ n %}" + "{% set a = a ~ a %}" * 40,
    "doubled by +": "{% set a = 'ab' ~ n %}" + "{% set a = a + a %}" * 40,
    "doubled lists": "{% set a = [n, n] %}" + "{% set a = a + a %}" * 40,
    "nested lists": "{% set a = [n, n] %}" + "{% set a = [a, a] %}" * 60 + "{{ a }}",
    "nested tuples": "{% set a = (n, n) %}" + "{% set a = (a, a) %}" * 60 + "{{ a ~ '' }}",
    "nested objects": "{% set a = {'x': n} %}" + "{% set a = {'x': a, 'y': a} %}" * 60 + "{{ a | tojson }}",
    "nested by dict()": "{% set a = dict(x=n) %}" + "{% set a = dict(x=a, y=a) %}" * 60 + "{{ a }}",
    "nested namespaces": "{% set a = namespace(x=n) %}"
    + "{% set a = namespace(x=a, y=a) %}" * 60
    + "{{ a }}",
    "nested by arguments": "{% macro m(k) %}{% if k %}{{ m(k - 1, varargs, varargs) }}{% else %}{{ varargs }}"
    "{% endif %}{% endmacro %}{{ m(60, [n, n]) }}",
    "compared towers": "{% set a = [n, n] %}{% set b = [n, n] %}"
    + "{% set a = [a, a] %}{% set b = [b, b] %}" * 60
    + "{{ a == b }}",
    "width of %": "{{ '%1000000000d' % n }}",
    "precision of %": "{{ '%.1000000000f' % n }}",
    "width of % as a value": "{{ '%*d' % (10**9, n) }}",
    "width of the filter format": "{{ '%1000000000d' | format(n) }}",
    "many fields of %": "{% set s = 'a' * 10**7 %}{{ ('%(s)s' * 1000) % {'s': s} }}",
    "width of format()": "{{ '{:>1000000000}'.format(n) }}",
    "width of format() as a value": "{{ '{:>{w}}'.format(n, w=10**9) }}",
    "many fields of format()": "{% set s = 'a' * 10**7 %}{{ ('{0}' * 1000).format(s) }}",
    "format_map()": "{{ '{a:>1000000000}'.format_map({'a': n}) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "mapped center": "{{ range(100000) | map('string') | map('center', 10**6) | list | length }}",
    "ljust()": "{{ 'a'.ljust(10**9) }}",
    "zfill()": "{{ 'a'.zfill(10**9) }}",
    "expandtabs()": "{{ '\t\t'.expandtabs(10**9) }}",
    "indent": "{{ ('a\n' * 10**6) | indent(10**6) }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "replace()": "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "translate()": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "join": "{{ range(100000) | join('b' * 10**6) }}",
    "join()": "{{ ('b' * 10**6).join(range(100000) | map('string')) }}",
    "split()": "{{ ('a ' * 10**7).split() | length }}",
    "list of a text": "{{ ('a' * 10**7) | list | length }}",
    "batch": "{{ [n] | batch(10**9, 0) | list | length }}",
    "slice": "{{ [n] | slice(10**9) | list | length }}",
    "round": "{{ n | round(-10**9) }}",
    "to_bytes()": "{{ n.to_bytes(10**9) }}",
    "sum of lists": "{{ [[n]] | sum(start=[]) }}",
    "indented JSON": "{% set ns = namespace(x=[n] * 100000) %}{% for i in range(900) %}"
    "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson(indent=60) }}",
    "wrapped words": "{{ ('a ' * 10**6) | wordwrap(1) }}",
    "tags": "{{ ('<a>' * 10**6) | striptags }}",
    "output of a loop": "{% set s = 'a' * 10**6 %}{% for i in range(100000) %}{{ s }}{% endfor %}",
    "output of a block": "{% set s = 'a' * 10**6 %}{% set x %}{% for i in range(100000) %}{{ s }}{% endfor %}"
    "{% endset %}",
    "output of a macro": "{% set s = 'a' * 10**6 %}{% macro m() %}{% for i in range(100000) %}{{ s }}-"
    "{% endfor %}{% endmacro %}{% set x = m() %}",
    "output of a filter block": "{% set s = 'a' * 10**6 %}{% filter upper %}{% for i in range(100000) %}"
    "{{ s }}{% endfor %}{% endfilter %}",
    "appended texts": "{% set ns = namespace(l=[], s='a' * 10**6) %}{% for i in range(100000) %}"
    "{% set ns.l = ns.l + [ns.s ~ i] %}{% endfor %}",
    "a long range": "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "format of the time": "{{ strftime_now('%9999d' * 10**5) }}",
    "lorem ipsum": "{{ lipsum(10**9) }}",
}
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}"
    "{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "loops that know their place": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{{ loop.last and 0 or '' }}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}"
    "{% endmacro %}{{ m(99) }}",
    "a recursive loop": "{% set x = [1, 2] %}{% set ns = namespace(x=x) %}{% for a in [1, 2] recursive %}"
    "{{ loop([1, 2]) if loop.depth < 90 }}{% endfor %}",
}


def only_on_demand(source: str) -> str:
    """A template that does it only when it is asked to, so that it loads."""
    return "{% if go is defined %}{% set n = 7 %}" + source + "{% endif %}ok"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(template_sandbox, "_SECONDS", 0.3)


@pytest.mark.parametrize("source", [*HUGE.values(), *ENDLESS.values()], ids=[*HUGE, *ENDLESS])
def test_a_rendering_without_end_or_measure_is_a_400(source):
    chat = ChatRenderer({"default": only_on_demand(source)}, {})
    assert chat.render(HELLO) == "ok"
    if source is HUGE["nested namespaces"]:  # one says nothing of what it holds
        assert chat.render(HELLO, template_kwargs={"go": 1}) == "<Namespace>ok"
        return
    with pytest.raises(RequestError, match="chat template") as caught:
        chat.render(HELLO, template_kwargs={"go": 1})
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("name", ["text times number", "nested lists", "loops in loops", "center"])
def test_a_template_that_always_does_it_is_refused_at_load(name):
    source = {**HUGE, **ENDLESS}[name].replace("{{ n", "{{ 7")
    with pytest.raises(UnsupportedModel, match=r"'default' was stopped: it "):
        ChatRenderer({"default": "{% set n = 7 %}" + source}, {})


def test_probes_stop_at_the_first_that_takes_too_long():
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    chat = ChatRenderer(
        {"default": "{% if tools or messages | length > 1 %}" + endless + "{% endif %}ok"}, {}
    )
    assert chat.render(HELLO) == "ok"


def test_a_template_of_any_length_is_not_compiled():
    with pytest.raises(UnsupportedModel, match="'default' has 2,000,000 characters"):
        ChatRenderer({"default": "a" * 2_000_000}, {})
    with pytest.raises(UnsupportedModel, match="'default' is not valid Jinja"):
        ChatRenderer({"default": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"}, {})


MEASURED = """
import sys
sys.path.insert(0, sys.argv[1])
import test_template_bounds as cases
from leadline.protocol.errors import RequestError
from leadline.protocol.text.chat import ChatRenderer
for source in cases.HUGE.values():
    try:
        chat = ChatRenderer({"default": cases.only_on_demand(source)}, {})
        chat.render(cases.HELLO, template_kwargs={"go": 1})
    except RequestError:
        pass
# Not ru_maxrss: a process that was just started has that of the one that started it.
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(int(peak.split()[1]) // 1024)
"""


def test_all_of_them_together_take_little_memory():
    folder = __file__.rpartition("/")[0]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1000, "MiB"


def test_long_conversations_are_rendered():
    source = (
        "{% set ns = namespace(all='', kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + [m] %}"
        "{% set ns.all = ns.all ~ '<' + m.role + '>' ~ m.content | trim ~ loop.index %}{% endfor %}"
        "{{ ns.all }}"
    )
    messages = [{"role": "user", "content": "word " * 100} for _ in range(300)]
    assert len(ChatRenderer({"default": source}, {}).render(messages)) > 150_000
    one = [{"role": "user", "content": "x" * (32 << 20)}]
    assert len(ChatRenderer({"default": "{{ '<' ~ messages[0].content + '>' }}"}, {}).render(one)) > 32 << 20


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("'a' * 3 ~ 'b' + 'c'", "aaabc"),
        ("[1, 2] + [3] * 2", "[1, 2, 3, 3]"),
        ("1 + 2 + 3.5 - 2 ** 3 % 5", "3.5"),
        ("'%s is %5.2f%%' % ('x', 1.5)", "x is  1.50%"),
        ("'%(a)s' % {'a': 1}", "1"),
        ("'%d' | format(3)", "3"),
        ("'{:>5}{a}'.format('x', a=2)", "    x2"),
        ("'a,b'.split(',')", "['a', 'b']"),
        ("'a-b'.split('-', 1)[-1].rjust(3)", "  b"),
        ("['a', 'b'] | join('-')", "a-b"),
        ("messages | map(attribute='role') | join(', ')", "user"),
        ("messages | join('+', attribute='role')", "user"),
        ("['x', 'y'] | map('upper') | list", "['X', 'Y']"),
        ("'x\\ny' | indent(2)", "x\n  y"),
        ("'x\\ny' | indent('> ', first=true)", "> x\n> y"),
        ("'aXbX' | replace('X', '') | center(4)", " ab "),
        ("'ab' | list", "['a', 'b']"),
        ("[1, 2, 3] | batch(2, 0) | list", "[[1, 2], [3, 0]]"),
        ("[1, 2, 3] | slice(2) | list", "[[1, 2], [3]]"),
        ("[1, 2] | sum + 3.14159 | round(2)", "6.140000000000001"),
        ("{'a': [1, {'b': none}]} | tojson", '{"a": [1, {"b": null}]}'),
        ("{'a': [1]} | tojson(indent=1)", '{\n "a": [\n  1\n ]\n}'),
        ("[1, 2] | tojson(separators=(',', ':'))", "[1,2]"),
        ("('<b>x</b>' | striptags) ~ ('a b' | wordwrap(1))", "xa\nb"),
        ("('<' | escape) + '<' ~ '>'", "&lt;&lt;&gt;"),
        ("dict(a=1, b=[2])", "{'a': 1, 'b': [2]}"),
        ("range(3) | list", "[0, 1, 2]"),
    ],
)
def test_what_templates_do_all_day_comes_out_as_before(expression, text):
    assert ChatRenderer({"default": "{{ " + expression + " }}"}, {}).render(HELLO) == text
