"""What an engine tells gateways through Redis: its cache, block by block, and its load.

    core process                    API process
    BlockPool ─▶ CacheChanges ──wire.CacheChange──▶ CacheLog ─▶ Publisher ──▶ Redis
                 changes.py                         log.py      publisher.py

changes    net change of the prefix index since it was last taken; fed by the pool, one message a step
log        mirror of the index, and the numbered batches and snapshots made of it; pure
report     the heartbeat's load report
settings   where to publish and as whom
publisher  the asyncio task that talks to Redis, and outlives its failures

Redis is on nobody's path: the step loop only appends to a dict, and an engine serves the same whether Redis
answers or not. Import the modules, not this package; only `publisher` imports redis.
"""
