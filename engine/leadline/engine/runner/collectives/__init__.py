"""Sums and gathers over the ranks of a tensor-parallel group.

    group.py        the group, and its collectives: gloo on CPU, NCCL on CUDA
    fabric.py       the same over memory that all GPUs of a host can address, where there is such memory
    triton_join.py  its kernels

Import the modules, not this package.
"""
