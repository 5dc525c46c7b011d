"""HTTP/1.1 to pods.

settings        timeouts and limits of the proxy
connection      connections to pods, and the pool of those that are idle
breaker         the circuit breaker of a pod
hang_detector   waits for a pod, and leaves one that hangs
capability      whether the streams of a pod can move

Import the modules, not this package.
"""
