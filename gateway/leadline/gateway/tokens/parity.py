"""Whether an engine tokenizes as this gateway does (row P21).

A gateway with another tokenizer or template than its engines routes by hashes that no pod has. No request
fails, and none hits a prefix. So the gateway compares its tokens with the engine's `POST /tokenize` for a few
prompts that show the usual differences: special tokens, the template, white space, digits, scripts, tools.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from leadline.gateway.tokens.service import TokenService
from leadline.protocol.chain import ChainNamespace
from leadline.protocol.errors import RequestError
from leadline.protocol.openai.chat import (
    AssistantMessage,
    ChatMessage,
    Function,
    SystemMessage,
    TextPart,
    Tool,
    UserMessage,
)
from leadline.protocol.openai.service import TokenizeRequest, TokenizeResponse

__all__ = ["PROBES", "ParityReport", "ProbeResult", "check_parity"]

_TEXT = "It's 3.14 o'clock:  naïve café, 東京 🙂\n\n\tdef f(x): return x**2  # 1234567\r\nWHAT'S UP "
_TALK: list[ChatMessage] = [
    SystemMessage(content="  Answer in one word. "),
    UserMessage(content=[TextPart(text="What is"), TextPart(text="the capital of France?")]),
    AssistantMessage(content="Paris\n"),
    UserMessage(content=" Und von Österreich? "),
]
_TOOL = Tool(
    function=Function(
        name="weather",
        description="Wetter für <Ort> & 'Zeit'",
        parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    ),
)
PROBES: dict[str, TokenizeRequest] = {
    "text": TokenizeRequest(prompt=_TEXT),
    "text without special tokens": TokenizeRequest(prompt=_TEXT, add_special_tokens=False),
    "chat": TokenizeRequest(messages=[UserMessage(content="Hi")]),
    "conversation": TokenizeRequest(messages=_TALK),
    "conversation to continue": TokenizeRequest(
        messages=[*_TALK, AssistantMessage(content="The answer is ")], continue_final_message=True
    ),
    "chat with tools": TokenizeRequest(messages=_TALK, tools=[_TOOL]),
}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe showed."""

    probe: str
    agrees: bool | None
    """None: the engine could not be asked."""
    detail: str = ""
    """Where the two differ, or why the engine could not be asked."""


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Whether one engine arrives at the gateway's token ids."""

    engine: str
    results: list[ProbeResult] = field(default_factory=list)

    @property
    def agrees(self) -> bool | None:
        """False if any probe differs; None if none differs but not all could be asked."""
        answers = {result.agrees for result in self.results}
        if False in answers:
            return False
        return None if None in answers or not answers else True

    def __str__(self) -> str:
        word = {True: "agrees", False: "DIFFERS", None: "could not be compared"}[self.agrees]
        notes = [f"{result.probe}: {result.detail}" for result in self.results if result.agrees is not True]
        return f"tokenization of {self.engine} {word}" + "".join(f"; {note}" for note in notes)


async def check_parity(
    session: aiohttp.ClientSession,
    engine: str,
    tokens: TokenService,
    *,
    headers: dict[str, str] | None = None,
    seconds: float = 10.0,
) -> ParityReport:
    """Ask the engine at the base URL `engine` (`http://10.0.0.7:8000`) for every probe, each at most
    `seconds` long. Does not raise for what the engine does: a failure to answer is in the report."""
    report = ParityReport(engine)
    for name, probe in PROBES.items():
        report.results.append(await _compare(session, engine, tokens, name, probe, headers, seconds))
    return report


async def _compare(
    session: aiohttp.ClientSession,
    engine: str,
    tokens: TokenService,
    name: str,
    probe: TokenizeRequest,
    headers: dict[str, str] | None,
    seconds: float,
) -> ProbeResult:
    try:
        (prompt,) = await tokens.prompts(probe, _NoChain())
        ours = None if prompt.ids is None else prompt.ids.tolist()
        refusal = ""
    except RequestError as error:  # no template, or one that refuses the probe: then the engine must, too
        ours, refusal = None, error.message
    try:
        async with session.post(
            engine.rstrip("/") + "/tokenize",
            data=msgspec.json.encode(probe),
            headers={"Content-Type": "application/json", **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=seconds),
        ) as response:
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return ProbeResult(name, None, f"no answer: {str(error) or type(error).__name__}")
    if status == 400:
        same = ours is None
        return ProbeResult(name, same, "" if same else "the engine refuses it, the gateway does not")
    if status != 200:
        return ProbeResult(name, None, f"the engine answered with status {status}")
    try:
        theirs = msgspec.json.decode(body, type=TokenizeResponse).tokens
    except msgspec.DecodeError as error:
        return ProbeResult(name, None, f"the engine's answer is not that of /tokenize: {error}")
    if ours is None:
        return ProbeResult(name, False, f"the gateway refuses it, the engine does not: {refusal}")
    return _difference(name, ours, theirs)


def _difference(name: str, ours: Sequence[int], theirs: Sequence[int]) -> ProbeResult:
    if ours == theirs:
        return ProbeResult(name, True)
    shared = min(len(ours), len(theirs))
    at = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    return ProbeResult(
        name,
        False,
        f"differs from token {at} on: {list(ours[at : at + 4])} here, {list(theirs[at : at + 4])} there "
        f"({len(ours)} and {len(theirs)} tokens)",
    )


class _NoChain:
    """Parity is about ids; their chain is not used."""

    def namespace(self, *, cache_salt: str = "", adapter: str = "") -> ChainNamespace:
        return ChainNamespace(model="", adapter=adapter, cache_salt=cache_salt)
