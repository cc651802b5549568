"""The programs, one family a file: code as its users write it, without types that fit to the last."""
