"""The layouts of a step on a cluster, ranked by predicted time."""
