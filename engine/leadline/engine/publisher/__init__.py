"""What an engine tells gateways through Redis: its cache, block by block, and its load.

    core process                    API process
    BlockPool ─▶ CacheChanges ──wire.CacheChange──▶ CacheLog ─▶ Publisher ──▶ Redis
                 log.py                             log.py      publisher.py

log        net changes of the prefix index, one message a step; its mirror, batches and snapshots; pure
settings   where to publish, and with which names
publisher  the asyncio task that talks to Redis and survives its failures; the load report of a heartbeat

No request waits for Redis: the step loop only appends to a dict, and an engine serves the same whether Redis
answers or not. Import the modules, not this package; only `publisher` imports redis.
"""
