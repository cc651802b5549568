"""A worker of pytest-xdist that has imported already; see shared_server.py."""

import sys

import shared_server

if __name__ == "__main__":
    sys.exit(shared_server.be_copied(sys.argv[1:]))
