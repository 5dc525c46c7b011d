"""Who may send a request on now, who waits, and who is refused.

admission     Admission: admits requests to a service, queues or refuses them; deadlines, Retry-After
fair_queue    weighted fair order by class and tenant, and how fast a queue moves
capacity      how many more requests a pod should be given

Import the modules, not this package.
"""
