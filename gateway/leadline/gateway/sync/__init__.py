"""Redis → index and pods: how a gateway learns what each pod holds in its cache and how busy it is.

    …:pods       heartbeats  ──▶ heartbeats.py ─┐
    …:snapshot:  snapshots   ──▶ snapshots.py  ─┼─▶ redis_sync.py ──▶ ServiceIndex, Pod.heartbeat
    …:events     batches     ───────────────────┘

redis_sync   RedisSync: one task per service that reads without end, also after failures of Redis
heartbeats   which reports are new, which pods have gone silent, and which pod a report belongs to; pure
snapshots    what the index asks for, loaded when Redis has it; positions in the event stream
counts       what has been read so far, as numbers and as metrics

Never on a request's path: routing asks the index, whatever its age.
"""
