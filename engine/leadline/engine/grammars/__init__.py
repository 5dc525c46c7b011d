"""Masks of structured output.

pool    the grammars of running requests: one process each, with limits of time and memory
host    that process

Import the modules, not this package.
"""
