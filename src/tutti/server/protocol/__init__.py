"""What workers and servers agree on: messages, sessions and machines without sockets, files or a clock."""
