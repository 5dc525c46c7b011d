"""Decides and writes the number of replicas, and the order in which pods leave.

service_scaler   the task: reads the demand of every service with `autoscaling` and writes `/scale`
autoscaler       the decision for one service; pure
demand           how many requests are in flight, from the texts of /metrics; pure
idleness         how long a service has had no request; pure
gateways         finds the gateway's replicas and reads what they count
hpas             which objects HorizontalPodAutoscalers scale
ranking          sets the deletion cost of pods before a service shrinks
"""

__all__: list[str] = []
