"""Logits to tokens: penalties, bias, masks, truncation, counter-based noise, log-probabilities.

noise.py       uniform and Gumbel noise as a pure function of (seed, position, vocabulary entry)
state.py       per-slot sampling parameters on the device, written once when a sequence enters
penalties.py   token counts of the slots that need them, and the three penalties
slot_rows.py   rows of tables for the slots that need one
allowed_tokens.py, bad_words.py   the ids and the sequences of ids that a request allows and bans
adjust.py      additive bias, banned ids before min_tokens, grammar bitmasks
truncate.py    top-k, top-p and min-p as one threshold a row
logprobs.py    log-probabilities of the model's own distribution
sampler.py     puts them in order; the only thing the runner calls
"""

from __future__ import annotations

from leadline.engine.sampling.logprobs import LogprobRows, gather_logprobs
from leadline.engine.sampling.sampler import Sampler
from leadline.engine.sampling.state import SamplingState

__all__ = ["LogprobRows", "Sampler", "SamplingState", "gather_logprobs"]
