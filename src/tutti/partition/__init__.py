"""Partition: a graph for one device becomes one program for every rank."""
