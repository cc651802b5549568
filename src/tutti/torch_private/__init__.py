"""The private names of PyTorch that tutti needs: all imports go through here, with a contract test each.

Each entry gives tutti's reason, and after "public:" the public API that could replace it.
"""
