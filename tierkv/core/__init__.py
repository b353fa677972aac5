"""The core decides and returns the work as values.

It has no clock, thread, socket, file, tensor or configuration object, so every state change can be
replayed from a list of calls.
"""
