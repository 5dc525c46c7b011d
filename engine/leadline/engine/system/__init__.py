"""The machine that an engine runs on.

cgroups     the limits of this process' container
cpu_limit   cores that this process may use
numa        binds a process to the memory near its GPU
garbage     the garbage collector while an engine runs in another program's process
pulse       whether the core process is frozen or hung, by shared memory
progress    reports of a start: stages and bytes

Import the modules, not this package. No torch.
"""
