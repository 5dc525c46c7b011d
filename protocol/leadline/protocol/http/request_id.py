"""The id of a request: the client's own `X-Request-ID`, or one made here. It stands in the answer (where
OpenAI's clients look for it), in the access log, and in what pods are sent."""

import itertools
import re
import secrets

__all__ = ["NAME", "request_id"]

Headers = list[tuple[bytes, bytes]]

NAME = b"x-request-id"
_FIT = re.compile(rb"[!-~]{1,128}").fullmatch
"""Visible ASCII, so that it can stand in any header and any log."""
_PREFIX = secrets.token_hex(8).encode()
_numbers = itertools.count(1)


def request_id(headers: Headers) -> tuple[bytes, Headers]:
    """(the id, the headers with it). One that does not fit is replaced."""
    given = next((value for name, value in headers if name == NAME), None)
    if given is not None and _FIT(given):
        return given, headers
    made = b"%s-%x" % (_PREFIX, next(_numbers))
    return made, [*(pair for pair in headers if pair[0] != NAME), (NAME, made)]
