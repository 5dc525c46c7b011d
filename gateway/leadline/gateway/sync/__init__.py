"""Redis → index and pods: how a gateway learns what each pod holds in its cache and how busy it is.

    …:pods       heartbeats  ──▶ heartbeats.py ─┐
    …:snapshot:  snapshots   ──▶ snapshots.py  ─┼─▶ redis_sync.py ──▶ ServiceIndex, Pod.heartbeat
    …:events     batches     ───────────────────┘

redis_sync   RedisSync: one task a service that reads for ever, and outlives Redis's failures
heartbeats   which reports are new and which pods have gone silent; pure
find         which pod a report is of
snapshots    what the index asks for, loaded when Redis has it
counts       what it has done so far
client       the Redis client as we use it
timing       SyncTiming: how often, and for how long
stream_ids   positions in the event stream

Never on a request's path: routing asks the index, whatever its age.
"""
