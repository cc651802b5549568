"""Connections between workers and servers: addresses, secrets, sockets, limits."""
