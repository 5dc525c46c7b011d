"""What models write when they call tools: the same calls in each format, as templates show them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TEXTS", "TOOLS", "Texts"]

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
        "hours": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
PING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}
    for name, parameters in (("weather", WEATHER), ("note", NOTE), ("ping", PING))
]


@dataclass(frozen=True)
class Texts:
    """Outputs of a model. All call `weather` with the city Paris and 3 days first."""

    one: str
    """The call alone."""
    several: str
    """A text, then `weather` with metric true and hours 9 and 12 as well, and `ping`."""
    note: str
    """`note` with a text of two lines, a quote, a brace and an accent."""
    broken: str
    """Markup around what is no call, which is content as it is."""
    cut: str
    """The call, cut within its city after `Par`."""
    wrong_type: str
    """The call with a text for its days, which the schema forbids."""


def _json(
    arguments: str = '{"city": "Paris", "days": 3}', name: str = "weather", key: str = "arguments"
) -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


_MORE = '{"city": "Paris", "days": 3, "metric": true, "hours": [9, 12]}'
_NOTE = '{"text": "line 1\\n\\"é\\" {2}"}'
_WRONG = '{"city": "Paris", "days": "three"}'
_CUT = '{"city": "Par'

TEXTS = {
    "hermes": Texts(
        one=f"<tool_call>\n{_json()}\n</tool_call>",
        several=f"I will look.\n<tool_call>\n{_json(_MORE)}\n</tool_call>\n"
        f"<tool_call>\n{_json('{}', 'ping')}\n</tool_call>",
        note=f"<tool_call>\n{_json(_NOTE, 'note')}\n</tool_call>",
        broken="<tool_call>\nweather in Paris\n</tool_call>",
        cut=f"<tool_call>\n{_json(_CUT)[:-1]}",
        wrong_type=f"<tool_call>\n{_json(_WRONG)}\n</tool_call>",
    ),
    "llama3_json": Texts(
        one=_json(key="parameters"),
        several=f"I will look.<|python_tag|>{_json(_MORE, key='parameters')}; "
        f"{_json('{}', 'ping', 'parameters')}",
        note=_json(_NOTE, "note", "parameters"),
        broken='{"name": "Bob", "age": 3}',
        cut=_json(_CUT, key="parameters")[:-1],
        wrong_type=_json(_WRONG, key="parameters"),
    ),
    "pythonic": Texts(
        one='[weather(city="Paris", days=3)]',
        several="I will look.<|python_start|>[weather(city='Paris', days=3, metric=True, hours=[9, 12]), "
        "ping()]<|python_end|>",
        note="[note(text='line 1\\n\"é\" {2}')]",
        broken="[1] A list, [2] no call.",
        cut='[weather(city="Par',
        wrong_type='[weather(city="Paris", days="three")]',
    ),
    "qwen3_coder": Texts(
        one="<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        several="I will look.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=metric>\ntrue\n</parameter>\n<parameter=hours>\n"
        "[9, 12]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=ping>\n</function>\n"
        "</tool_call>",
        note='<tool_call>\n<function=note>\n<parameter=text>\nline 1\n"é" {2}\n</parameter>\n</function>\n'
        "</tool_call>",
        broken="<tool_call>\n<function weather>\n</tool_call>",
        cut="<tool_call>\n<function=weather>\n<parameter=city>\nPar",
        wrong_type="<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n"
        "three\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm45": Texts(
        one="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        several="I will look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>metric</arg_key>\n<arg_value>true"
        "</arg_value>\n<arg_key>hours</arg_key>\n<arg_value>[9, 12]</arg_value>\n</tool_call>\n"
        "<tool_call>ping\n</tool_call>",
        note='<tool_call>note<arg_key>text</arg_key><arg_value>line 1\n"é" {2}</arg_value></tool_call>',
        broken="<tool_call>weather in Paris</tool_call>",
        cut="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        wrong_type="<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days"
        "</arg_key>\n<arg_value>three</arg_value>\n</tool_call>",
    ),
    "minimax_m2": Texts(
        one='<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
        several='I will look.\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">3</parameter>\n<parameter name="metric">true</parameter>\n'
        '<parameter name="hours">[9, 12]</parameter>\n</invoke>\n<invoke name="ping">\n</invoke>\n'
        "</minimax:tool_call>",
        note='<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">line 1\n"é" {2}</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        broken="<minimax:tool_call>\n<invoke>weather</invoke>\n</minimax:tool_call>",
        cut='<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Par',
        wrong_type='<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">three</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "mistral": Texts(
        one='[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 3}',
        several=f"I will look.[TOOL_CALLS] [{_json(_MORE)}, {_json('{}', 'ping')}]",
        note=f"[TOOL_CALLS]note[CALL_ID]VvvODy9mT[ARGS]{_NOTE}",
        broken="[TOOL_CALLS]weather in Paris",
        cut=f"[TOOL_CALLS]weather{_CUT}",
        wrong_type=f"[TOOL_CALLS]weather[ARGS]{_WRONG}",
    ),
    "deepseek_v3": Texts(
        one="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        several="I will look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{_MORE}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>ping\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        note=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>note<｜tool▁sep｜>{_NOTE}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        broken="<｜tool▁calls▁begin｜>weather<｜tool▁calls▁end｜>",
        cut=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_CUT}",
        wrong_type=f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_WRONG}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": Texts(
        one="<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        several="I will look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{_MORE}<|tool_call_end|><|tool_call_begin|>functions.ping:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        note="<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.note:0\n<|tool_call_argument_begin|>\n"
        f"{_NOTE}\n<|tool_call_end|>\n<|tool_calls_section_end|>",
        broken="<|tool_call_begin|>functions.weather:0 Paris<|tool_call_end|>",
        cut=f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{_CUT}",
        wrong_type="<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{_WRONG}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "phi4_mini": Texts(
        one=f"<|tool_call|>[{_json()}]<|/tool_call|>",
        several=f"I will look.<|tool_call|>[{_json(_MORE)}, {_json('{}', 'ping')}]<|/tool_call|>",
        note=f"<|tool_call|>[{_json(_NOTE, 'note')}]<|/tool_call|>",
        broken="<|tool_call|>[weather]<|/tool_call|>",
        cut=f"<|tool_call|>[{_json(_CUT)[:-1]}",
        wrong_type=f"<|tool_call|>[{_json(_WRONG)}]<|/tool_call|>",
    ),
    "granite3": Texts(
        one=f"<|tool_call|>[{_json()}]",
        several=f"I will look.\n<|tool_call|>[{_json(_MORE)}, {_json('{}', 'ping')}]",
        note=f"<|tool_call|> [{_json(_NOTE, 'note')}]",
        broken="<|tool_call|>weather",
        cut=f"<|tool_call|>[{_json(_CUT)[:-1]}",
        wrong_type=f"<|tool_call|>[{_json(_WRONG)}]",
    ),
    "harmony": Texts(
        one="<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 3}<|call|>',
        several="I will look.<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
        f"<|message|>{_MORE}<|call|><|start|>assistant to=functions.ping<|channel|>commentary json"
        "<|message|>{}<|call|>",
        note=f"<|channel|>commentary to=functions.note<|message|>{_NOTE}<|call|>",
        broken="<|channel|>commentary to=functions.weather <|constrain|>json<|message|>Paris<|call|>",
        cut=f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_CUT}",
        wrong_type=f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{_WRONG}<|call|>",
    ),
    "gemma4": Texts(
        one='<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        several='I will look.<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3,metric:true,hours:[9,12]}'
        "<tool_call|><|tool_call>call:ping{}<tool_call|>",
        note='<|tool_call>call:note{text:<|"|>line 1\n"é" {2}<|"|>}<tool_call|>',
        broken="<|tool_call>weather{}<tool_call|>",
        cut='<|tool_call>call:weather{city:<|"|>Par',
        wrong_type='<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:<|"|>three<|"|>}<tool_call|>',
    ),
    "functiongemma": Texts(
        one="<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        several="I will look.<start_function_call>call:weather{city:<escape>Paris<escape>,days:3,metric:true,"
        "hours:[9,12]}<end_function_call><start_function_call>call:ping{}<end_function_call>",
        note='<start_function_call>call:note{text:<escape>line 1\n"é" {2}<escape>}<end_function_call>',
        broken="<start_function_call>weather{}<end_function_call>",
        cut="<start_function_call>call:weather{city:<escape>Par",
        wrong_type="<start_function_call>call:weather{city:<escape>Paris<escape>,days:<escape>three<escape>}"
        "<end_function_call>",
    ),
    "lfm2": Texts(
        one='<|tool_call_start|>[weather(city="Paris", days=3)]<|tool_call_end|>',
        several="I will look.<|tool_call_start|>[weather(city='Paris', days=3, metric=True, hours=[9, 12]), "
        "ping()]<|tool_call_end|>",
        note="<|tool_call_start|>[note(text='line 1\\n\"é\" {2}')]<|tool_call_end|>",
        broken="<|tool_call_start|>[weather]<|tool_call_end|>",
        cut='<|tool_call_start|>[weather(city="Par',
        wrong_type='<|tool_call_start|>[weather(city="Paris", days="three")]<|tool_call_end|>',
    ),
}
