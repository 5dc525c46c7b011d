"""Answers that the gateway gives by its own tokenizer, without a pod: counts, token ids, and texts of ids.

Each function returns the answer, or None where only a pod can give it: the service is matched by text, the
prompt is far longer than the context, or no pod has reported the context's length.
"""

from leadline.gateway.request.body import Incoming
from leadline.gateway.request.prompt import RoutedPrompt, reported_namespaces
from leadline.gateway.services import Service
from leadline.gateway.tokens.service import TokenService
from leadline.protocol.anthropic.answers import MessageTokensCount
from leadline.protocol.openai.body import encode_body
from leadline.protocol.openai.service import DetokenizeRequest, DetokenizeResponse, TokenizeResponse
from leadline.protocol.text.prompts import check_token_ids

__all__ = ["counted", "detokenized", "tokenized"]


async def counted(service: Service, incoming: Incoming, prompt: RoutedPrompt) -> bytes | None:
    """Answer `/v1/messages/count_tokens`."""
    return encode_body(MessageTokensCount(input_tokens=prompt.tokens)) if prompt.exact else None


async def tokenized(service: Service, incoming: Incoming, prompt: RoutedPrompt) -> bytes | None:
    """Answer `/tokenize`."""
    tokens, context = service.tokens, _context(service)
    if prompt.ids is None or not context or not isinstance(tokens, TokenService):
        return None
    answer = TokenizeResponse(tokens=prompt.ids.tolist(), count=len(prompt.ids), max_model_len=context)
    if getattr(incoming.full, "return_token_strs", None):
        answer.token_strs = await tokens.entries(answer.tokens)
    return encode_body(answer)


async def detokenized(service: Service, incoming: Incoming, prompt: RoutedPrompt) -> bytes | None:
    """Answer `/detokenize`. Raises RequestError for ids beyond the vocabulary."""
    tokens, request = service.tokens, incoming.request
    if not isinstance(tokens, TokenService) or not isinstance(request, DetokenizeRequest):
        return None
    check_token_ids(request.tokens, tokens.tokenizer.vocab_size, "tokens")
    return encode_body(DetokenizeResponse(prompt=await tokens.text(request.tokens)))


def _context(service: Service) -> int:
    """The least of what the pods' engines take, as in the model's card; 0: not known."""
    lengths = [report.max_model_len for report in reported_namespaces(service)]
    return min(lengths, default=0)
