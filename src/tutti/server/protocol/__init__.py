"""The protocol of workers and servers: messages, sessions and machines without sockets, files or a clock."""
