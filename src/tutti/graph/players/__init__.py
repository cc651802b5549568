"""Players: they carry out the collectives, loops and messages of a program."""
