"""Daemon, protocol and client. The only package that uses ZMQ."""
