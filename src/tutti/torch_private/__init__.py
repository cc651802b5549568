"""The private names of PyTorch that tutti needs: every one is reached through here, and has a contract test.

Each entry says why tutti needs it, and after "public:" which public API could replace it.
"""
