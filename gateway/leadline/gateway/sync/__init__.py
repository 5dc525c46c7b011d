"""Redis → index and pods: how a gateway learns what each pod holds in its cache and how busy it is.

    …:pods       heartbeats  ──▶ heartbeats.py ─┐
    …:snapshot:  snapshots   ───────────────────┼─▶ redis_sync.py ──▶ ServiceIndex, Pod.heartbeat
    …:events     batches     ───────────────────┘

redis_sync   RedisSync: one task a service that reads for ever, and outlives Redis's failures
heartbeats   which reports are new and which pods have gone silent; pure
counts       what metrics show of it
client       the Redis client as we use it

Never on a request's path: routing asks the index, whatever its age.
"""
