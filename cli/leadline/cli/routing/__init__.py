"""`leadline bench routing`: what prefix routing is worth, with real engines on this machine.

conversations.py  the workload, and the clients that hold it
measure.py        engines once; for each policy empty caches, a gateway, the same conversations
own_time.py       the gateway's and the engines' own measurements of the time to first token
ceiling.py        the hit rate of one cache that all engines share and that forgets nothing
table.py          numbers of a policy, and all of them as a table
command.py        options
"""

from __future__ import annotations

from leadline.cli.routing.command import add_arguments, run

__all__ = ["add_arguments", "run"]
