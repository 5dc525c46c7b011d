"""Plug-ins that constrain the answers of a service: the protocol and its loading.

A provider sees each chat, Responses or Messages request and may return a grammar for the answer: to hold all
answers of a service to one form, to add a house rule to some of them, or to script the answers of a test.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from leadline.engine.core.plugins import load_plugin
from leadline.engine.sampling_params import StructuredSpec
from leadline.protocol.openai.chat import ChatCompletionRequest

__all__ = ["CONSTRAINT_GROUP", "ConstraintProvider", "load_constraint_provider"]

CONSTRAINT_GROUP = "leadline.constraint_providers"


@runtime_checkable
class ConstraintProvider(Protocol):
    """An object of the entry point that `--constraint-provider` names, built without arguments.

    `constrain` runs in the server's event loop, so it must be quick. For the same request it must return the
    same on every pod: a stream that moves to another pod continues under the grammar that it gets there.
    """

    def constrain(self, request: ChatCompletionRequest) -> StructuredSpec | None:
        """Return what the answer must match, None to leave the request as it is.

        A constraint takes the place of the request's own (`response_format`, a forced or a strict tool); the
        output is still parsed for calls in the form that the request asks for. It applies to the answer, not
        to the thought before it. Requests of Responses and Messages come as the chats that they mean. A
        RequestError refuses the request."""


def load_constraint_provider(name: str | None) -> ConstraintProvider | None:
    """Return a new provider, None where `name` is. Raises ConfigError."""
    if name is None:
        return None
    provider: ConstraintProvider = load_plugin(
        CONSTRAINT_GROUP, "constraint_provider", name, ConstraintProvider, {}
    )
    return provider
