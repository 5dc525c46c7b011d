"""Which pod holds which prefix: the gateway's in-memory index of the pods' KV caches.

service_index   ServiceIndex: the one class routing, the event reader and metrics talk to
prefix_index    PrefixIndex: hash → pods, by snapshot and by event, exact
pod_sets        interned sets of pods, so that a block held by a thousand pods costs no more than by one
table           the compact hash table under both
speculative     SpeculativeIndex: what pods will hold soon, until their events arrive
stream          EventStream: order, gaps, duplicates and epochs of event batches

Pure and without I/O. Import the modules, not this package.
"""
