"""The protocol between processes: frames, connections, secrets, and the files of a server."""
