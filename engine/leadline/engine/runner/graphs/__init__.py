"""Steps as CUDA graphs.

decode    steps of decode rows, and the whole set of graphs
prefill   steps of one chunk
context   what both share: the model, static outputs, the memory pool
buffers   static inputs of a decode step, filled by one kernel from one upload

Import the modules, not this package.
"""
