"""Who may send a request on now, who waits, and who is refused.

admission     Admission: the door of every service; waits, deadlines, refusals with Retry-After
door          what it keeps: the ticket of a request, the queue of a service
fair_queue    weighted fair order by class and tenant
capacity      how many more requests a pod should be given
drain_rate    how fast the queue moves, for Retry-After

Import the modules, not this package.
"""
